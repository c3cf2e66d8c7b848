"""A decoder in somebody's program: whatever that sets of JAX, texts and programs stay, and so do its own settings."""

import contextlib
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from flax import nnx
from own_modules import LENGTH, Plain

import et_jax
from et_jax.decode.decoder import snapshot
from et_jax.decode.request import request
from et_jax.errors import UsageError
from et_jax.models.bundled import bundled_folder
from et_jax.models.module import ModuleConfig
from et_jax.scope import own_settings, platform
from et_jax.serve.chunks import calls
from et_jax.serve.programs.compilation import made

pytestmark = pytest.mark.usefixtures("hardly_optimised")

SWITCHES = {
    "jax_enable_x64": True,
    "jax_default_matmul_precision": "bfloat16",
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_softmax_custom_jvp": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_allow_f16_reductions": False,
    "jax_legacy_prng_key": "error",
    "jax_debug_key_reuse": True,
    "jax_transfer_guard": "disallow_explicit",
    "jax_array_garbage_collection_guard": "fatal",
    "jax_no_tracing": True,
    "jax_no_execution": True,
    "jax_disable_jit": True,
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_check_tracer_leaks": True,
    "jax_enable_checks": True,
    "jax_log_compiles": True,
}
"""Of every one a value that is not JAX's own."""


@contextlib.contextmanager
def switched(switches):
    """Set what a program can, for all of its threads."""
    before = {name: getattr(jax.config, name) for name in switches}
    try:
        for name, value in switches.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def loaded(module: nnx.Module) -> et_jax.Model:
    config = ModuleConfig(max_positions=LENGTH, eos_token_ids=())
    sizes = {"max_num_seqs": 2, "page_size": 8, "prefill_batch": 32, "compilation_cache": None}
    return et_jax.load(module, config=config, tokenizer=bundled_folder(), **sizes)


def text(model) -> tuple:
    [done] = model.generate("It was in the spring", max_tokens=6, seed=3)
    return done.token_ids, done.entropic_time


def tokens(model) -> list[int]:
    """The tokens of the same text, by the pure functions."""
    d, prompt = model.decoder(), model.tokenizer.encode("It was in the spring")
    state = d.empty()
    for rows in calls(d.config, 0, prompt[:-1]):
        state, _ = d.prefill(model.weights, state, *rows)
    state = d.insert(state, 0, request(d.config, prompt, limit=6, seed=3))
    state, outputs, ran = d.decode(model.weights, snapshot(state), 8)
    with own_settings():
        assert int(ran) == 6
        return np.asarray(outputs.token)[:6, 0, 0].tolist()


@pytest.fixture(scope="module")
def module():
    return Plain(4096, rngs=nnx.Rngs(3))


@pytest.fixture(scope="module")
def model(module):
    return loaded(module)


@pytest.fixture(scope="module")
def expected(model):
    return text(model), tokens(model)


@pytest.mark.parametrize("name", SWITCHES)
def test_no_switch_changes_a_text_or_compiles_anything_anew(model, expected, name):
    before = made().programs
    with switched({name: SWITCHES[name]}):
        assert (text(model), tokens(model)) == expected
    assert made().programs == before


def test_a_model_loads_and_compiles_under_all_of_them_and_a_mesh(module, expected):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with switched(SWITCHES), jax.set_mesh(mesh):
        assert text(loaded(module)) == expected[0]


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("Unable to initialize backend 'foo'\nand more")])
def test_a_platform_that_is_not_here_is_refused_in_a_sentence(monkeypatch, error):
    monkeypatch.setattr(jax, "default_backend", Mock(side_effect=error))
    with pytest.raises(UsageError, match=r"no device \((Ass|Unable).*JAX_PLATFORMS"):
        platform()
    said = r"^JAX finds no device of the platform that JAX_PLATFORMS asks for, foo; unset"
    with switched({"jax_platforms": "foo"}), pytest.raises(UsageError, match=said):
        et_jax.load()
