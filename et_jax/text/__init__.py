"""Text to ids and back.

    loading -> tokenizer -> backends: tokenizer.json or tokenizer.model
            -> gguf: that of a GGUF file

`chat` renders conversations, and `masked` keeps special tokens that a message spells as text. `detokenizer` and
`stop_strings` are for ids that come one by one. `expressions` tries out a tokenizer's regular expressions. What
strangers wrote runs in a process of its own, a `worker`: the programs are `render` and `probe`, and
`watched` ends them with the process that started them.

Special tokens are added as the tokenizer's own files say. Decoding leaves special tokens out, and keeps
every space: the option `clean_up_tokenization_spaces`, which deletes some, is not followed.
"""

from et_jax.text.backends import Backend
from et_jax.text.detokenizer import Detokenizer
from et_jax.text.loading import as_tokenizer, load_tokenizer
from et_jax.text.tokenizer import Tokenizer

__all__ = ["Backend", "Detokenizer", "Tokenizer", "as_tokenizer", "load_tokenizer"]
