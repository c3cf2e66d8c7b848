"""Text to ids and back: tokenizer.json or tokenizer.model, chat templates, incremental detokenisation.

Special tokens are added as the tokenizer's own files say. Decoding leaves special tokens out, and keeps
every space: the option `clean_up_tokenization_spaces`, which deletes some, is not followed.
"""

from et_jax.text.backends import Backend
from et_jax.text.detokenizer import Detokenizer
from et_jax.text.loading import load_tokenizer
from et_jax.text.tokenizer import Tokenizer

__all__ = ["Backend", "Detokenizer", "Tokenizer", "load_tokenizer"]
