"""Other weights in a model that serves: the texts are theirs, nothing is compiled, no page of the old ones is read."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_level import byte_level_folder

from et_jax.errors import UsageError
from et_jax.serve.engine import load
from et_jax.serve.memory.page_pool import PagePool
from et_jax.serve.saved_prefix import depends_on, enter, read
from et_jax.types import replace

pytestmark = pytest.mark.usefixtures("hardly_optimised")
PROMPT = "It was a bright cold day in April"  # of more than a page
ASKED = {"max_tokens": 8, "temperature": 0.0}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folders = (byte_level_folder(tmp_path_factory.mktemp(str(seed)), seed) for seed in range(2))
    return [load(str(folder), dtype="float32", max_num_seqs=2) for folder in folders]


def test_an_updated_model_writes_and_scores_what_its_new_weights_do(models):
    model, other = models
    before = [model.generate(PROMPT, **ASKED)[0].token_ids for _ in range(2)]
    assert model.metrics.cached_prompt_tokens > 0
    cached, late = model.metrics.cached_prompt_tokens, model.metrics.programs_compiled_late
    [expected] = other.generate(PROMPT, **ASKED)
    own = model.params
    model.update(other.params)
    try:
        [after] = model.generate(PROMPT, **ASKED)
        assert after.token_ids == expected.token_ids != before[0]
        [score], [scored] = model.score(PROMPT), other.score(PROMPT)
        np.testing.assert_array_equal(score.log_probs, scored.log_probs)
        assert model.metrics.cached_prompt_tokens == cached
        assert model.metrics.programs_compiled_late == late
    finally:
        model.update(own)
    assert model.generate(PROMPT, **ASKED)[0].token_ids == before[0]


def test_weights_that_could_not_be_served_are_refused(models):
    model, _ = models
    with pytest.raises(UsageError, match="another tree than that of the model"):
        model.update({"a": 1})
    wrong = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    with pytest.raises(UsageError, match=r"params\..* is bfloat16\[.*\]; the model has float32\["):
        model.update(wrong)
    with contextlib.closing(model.stream(PROMPT, max_tokens=20, n=6)) as events:
        next(events)
        with pytest.raises(UsageError, match=re.escape("serves requests; update it when they have ended.")):
            model.update(model.params)


def test_a_saved_prefix_is_of_the_weights_that_read_it_and_needs_room(models, tmp_path, monkeypatch):
    model, other = models
    file, size = tmp_path / "prefix", model.decoder_config.page_size
    assert model.save_prefix(PROMPT, file) == 2 * size
    kept = [replica.pool.num_cached for replica in model.replicas().replicas]
    assert model.load_prefix(file) == 2 * size
    assert [replica.pool.num_cached for replica in model.replicas().replicas] == kept
    with pytest.raises(UsageError, match="with another model, adapter or dtype"):
        other.load_prefix(file)
    with pytest.raises(UsageError, match="of which no chunk of 16 is cached; give a longer one"):
        model.save_prefix("It", tmp_path / "short")
    with contextlib.closing(model.stream(["It was"] * 2, max_tokens=64, ignore_eos=True)) as stream:
        next(stream)
        with pytest.raises(UsageError, match="before requests are served"):
            model.load_prefix(file)
    [replica] = model.replicas().replicas
    config, told = replica.config, depends_on(replica)["model"]
    replica.config = replace(config, model=replace(config.model, rope_theta=5.0))
    assert depends_on(replica)["model"] != told
    replica.config = replace(config, max_length=2 * size)
    with pytest.raises(UsageError, match="max_model_len is 32; raise that"):
        enter(replica, read(file, depends_on(replica)))
    replica.config = config
    monkeypatch.setattr(PagePool, "num_available", 1)
    with pytest.raises(UsageError, match="takes 2 pages of 1 that are free"):
        model.load_prefix(file)
