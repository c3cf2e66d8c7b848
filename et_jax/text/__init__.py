"""Text to ids and back.

    loading -> tokenizer -> backends: tokenizer.json or tokenizer.model
            -> gguf: that of a GGUF file

`chat` renders conversations, and `masked` keeps special tokens in messages as plain text. `detokenizer` and
`stop_strings` process streams of ids, `grammar` says which ids may follow. `expressions` tests a tokenizer's regular
expressions. Untrusted templates and expressions run in a separate process, a `worker`: its programs are `render` and
`probe`, and `watched` ends them with the process that started them.

Special tokens are added as the tokenizer's own files specify. Decoding omits special tokens, and keeps
every space: the option `clean_up_tokenization_spaces`, which deletes some, is ignored.
"""

from et_jax.text.backends import Backend
from et_jax.text.detokenizer import Detokenizer
from et_jax.text.grammar import Grammar, Grammars
from et_jax.text.loading import as_tokenizer, load_tokenizer
from et_jax.text.tokenizer import Tokenizer

__all__ = ["Backend", "Detokenizer", "Grammar", "Grammars", "Tokenizer", "as_tokenizer", "load_tokenizer"]
