"""What is exported loads back."""

import jax
import jax.numpy as jnp

from et_jax.models import checkpoint
from et_jax.training import corpus, export, loop, loss


def test_export_loads_back_as_the_rounded_weights(settings, data, tmp_path):
    tokenizer, *_ = data
    params = loop.initial_state(settings).params
    size = export.export(params, settings.model, tokenizer, tmp_path)
    assert size == sum(file.stat().st_size for file in tmp_path.iterdir())
    config, loaded = checkpoint.load(tmp_path)
    assert config == settings.model
    wanted = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), loss.unstack(params))
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), wanted, loaded))
    again = corpus.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert again.decode(again.encode("the ship sailed").ids) == "the ship sailed"
