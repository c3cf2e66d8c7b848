"""Families of models: each is complete, and its name stands in its own file alone."""

import ast
import dataclasses
import re
from pathlib import Path

import jax
import pytest
from places import ROOT

from et_jax.errors import UsageError
from et_jax.models.checkpoint import sources_of
from et_jax.models.config import ClampedSwish
from et_jax.models.families.registry import FAMILIES, config_to_hugging_face, family_of, from_hugging_face
from et_jax.models.params import describe
from et_jax.models.sources import tensor_shapes
from scripts.measuring.shapes import SMALL

PACKAGE = ROOT / "et_jax"
DESCRIBING = ("models/families/", "training/")  # where models are described, or written about

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
MIXTURE = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 12,
}


def shaped(name: str, **changes):
    """A small configuration of a family, as its config.json would be read."""
    values = config_to_hugging_face(SMALL) | {"architectures": [FAMILIES[name].class_name]}
    return from_hugging_face(values | (MIXTURE if name in MIXTURES else {}) | changes)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_names_a_tensor_for_each_of_its_weights(name):
    config = shaped(name)
    sources = sources_of(config)
    # q, k and v are one tensor, gate and up another; or gate and up, and their biases, with a piece for every expert
    joined = {"phi3": 3 * config.num_layers, "gpt_oss": (5 * 4 - 3) * config.num_layers}
    assert len(sources) == len(jax.tree.leaves(describe(config)))
    pieces = sum(len(source.pieces) for source in sources.values())
    assert len(tensor_shapes(sources)) + joined.get(name, 0) == pieces
    assert any(source.stacked for source in sources.values()) == (name in MIXTURES and name != "gpt_oss")
    assert sources["head"].pieces[0].tensor == family_of(config).head


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_found_by_its_own_names(name):
    assert FAMILIES[name].name == name == shaped(name).architecture
    module = PACKAGE / "models/families" / f"{name}.py"
    assert FAMILIES[name].class_name in module.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("llama", {"sliding_window": 8}, (None, None)),
        ("mistral", {"sliding_window": 8}, (8, 8)),
        ("mistral", {"sliding_window": None}, (None, None)),
        ("mistral", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, (None, 8)),
        ("qwen2", {"sliding_window": 8, "max_window_layers": 0}, (None, None)),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8)),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True}, (None, None)),  # from layer 28 on
        ("gemma2", {"sliding_window": 8}, (8, None)),
        ("gemma2", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, (None, 8)),
        ("gemma3", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, None)),
        ("gemma3_text", {"sliding_window": 8}, (8, 8)),  # layer 6 is the first without
        ("phi3", {"sliding_window": 8}, (8, 8)),
        ("smollm3", {"sliding_window": 8, "use_sliding_window": False}, (None, None)),
        ("mixtral", {"sliding_window": 8}, (8, 8)),
        ("qwen2_moe", {"sliding_window": 0, "max_window_layers": 28}, (None, None)),  # as transformers writes it
        ("gpt_oss", {}, (128, None)),
        ("gpt_oss", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}, (None, None)),
    ],
)
def test_windows_are_what_the_family_means_by_them(name, changes, windows):
    assert shaped(name, **changes).windows == windows


def test_the_parts_that_config_json_does_not_say_are_those_of_the_family():
    parts = {name: (shaped(name).qkv_bias, shaped(name).qk_norm) for name in FAMILIES}
    assert parts == {
        "llama": (False, False),
        "mistral": (False, False),
        "qwen2": (True, False),
        "qwen3": (False, True),
        "gemma2": (False, False),
        "gemma3_text": (False, True),
        "gemma3": (False, True),
        "phi3": (False, False),
        "olmo2": (False, True),
        "smollm3": (False, False),
        "granite": (False, False),
        "mixtral": (False, False),
        "qwen2_moe": (True, False),
        "qwen3_moe": (False, True),
        "gpt_oss": (True, False),
    }
    assert {name for name in FAMILIES if shaped(name).sinks} == {"gpt_oss"}


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gemma3"])
def test_gemmas_keep_their_norms_weights_less_one_and_tie_their_head_unless_told(name):
    config = shaped(name, query_pre_attn_scalar=168, tie_word_embeddings=None)
    assert (config.norm_offset, config.norms, config.tie_embeddings) == (1.0, "around", True)
    assert config.embedding_scale == SMALL.hidden_size**0.5 and config.softmax(0).scale == 168**-0.5
    assert config_to_hugging_face(config)["query_pre_attn_scalar"] == 168


def test_layers_turn_by_their_kind():
    gemma = shaped("gemma3_text", rope_theta=1e6, num_hidden_layers=6, sliding_window=8)
    assert [one.theta for one in map(gemma.rope, range(6)) if one] == [1e4] * 5 + [1e6]
    smol = shaped("smollm3", num_hidden_layers=5)
    assert [smol.rope(layer) is None for layer in range(5)] == [False, False, False, True, False]
    assert shaped("smollm3", no_rope_layer_interval=2).unrotated == (1,)
    assert shaped("smollm3", no_rope_layers=[0, 1]).unrotated == (0,)
    assert shaped("phi3", head_dim=16, partial_rotary_factor=0.75).rope_dim == 12


def test_the_text_model_is_read_of_a_config_json_of_text_and_images():
    text = {name: value for name, value in config_to_hugging_face(SMALL).items() if name != "architectures"}
    written = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106]}
    config = from_hugging_face(written | {"text_config": text | {"head_dim": None}, "vision_config": {"layers": 3}})
    assert (config.architecture, config.hidden_size, config.head_dim) == ("gemma3", SMALL.hidden_size, 256)
    assert config.eos_token_ids == (1, 106) and config.bos_token_id == 2


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("Qwen3NextForCausalLM", "linear attention"),
        ("Qwen3_5ForCausalLM", "linear attention"),
        ("Gemma3nForConditionalGeneration", "layers that share one cache"),
        ("Gemma4ForConditionalGeneration", "layers that share one cache"),
        ("Gemma4ForCausalLM", "layers that share one cache"),
        ("Qwen3_5MoeForConditionalGeneration", "linear attention"),
        ("DeepseekV3ForCausalLM", "into a latent"),
        ("LlavaForConditionalGeneration", "more than text"),
    ],
)
def test_what_is_beyond_the_cache_is_refused_in_one_sentence(architecture, words):
    with pytest.raises(UsageError, match=f"{architecture} .*{words}.*; use one of .*$"):
        from_hugging_face({"architectures": [architecture]})


@pytest.mark.parametrize(
    ("name", "changes", "layers"),
    [
        ("mixtral", {}, (True, True, True, True)),
        ("gpt_oss", {}, (True, True, True, True)),
        ("qwen2_moe", {}, (True, True, True, True)),
        ("qwen3_moe", {"decoder_sparse_step": 2}, (False, True, False, True)),
        ("qwen3_moe", {"decoder_sparse_step": 0}, (False, False, False, False)),
        ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (False, True, False, False)),
    ],
)
def test_some_layers_of_a_mixture_are_dense(name, changes, layers):
    experts = shaped(name, num_hidden_layers=4, **changes).experts
    assert experts is not None and experts.layers == layers
    assert (experts.num_experts, experts.num_per_token) == (4, 2)
    assert experts.width == (SMALL.intermediate_size if name in ("mixtral", "gpt_oss") else 20)
    assert experts.shared_width == (12 if name == "qwen2_moe" else None)


def test_only_some_families_weigh_experts_by_their_shares():
    normalised = {name: shaped(name).experts for name in MIXTURES}
    assert {name: e.normalised for name, e in normalised.items() if e is not None} == {
        "mixtral": True,
        "qwen2_moe": False,
        "qwen3_moe": False,
        "gpt_oss": True,
    }
    experts = shaped("qwen3_moe", norm_topk_prob=True).experts
    assert experts is not None and experts.normalised


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_local_experts": None}, r"config.json: the field num_\w*experts is missing; take the file"),
        ({"num_experts_per_tok": None}, "config.json: the field num_experts_per_tok is missing; take the file"),
        ({"num_experts_per_tok": 5}, "config.json: num_experts_per_tok is 5 of 4 experts; take the file"),
        ({"num_local_experts": 0}, "the field num_local_experts is 0"),
        ({"num_local_experts": 4_000_000}, "config.json: there are 8000000 experts over all layers, more than 131072;"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_in_a_sentence(name, changes, said):
    with pytest.raises(UsageError, match=said):
        shaped(name, **changes)


def test_what_a_gpt_oss_leaves_unsaid_is_as_it_was_published():
    config = shaped("gpt_oss", rms_norm_eps=None, rope_theta=None, head_dim=None)
    assert (config.norm_eps, config.rope_theta, config.head_dim) == (1e-5, 150_000.0, 64)
    scaling, experts = config.rope_scaling, config.experts
    assert scaling is not None and (scaling.kind, scaling.factor, scaling.original_max_positions) == (
        "yarn",
        32.0,
        4096,
    )
    assert not scaling.truncate
    assert experts is not None and experts.activation == ClampedSwish(alpha=1.702, limit=7.0)
    config = shaped("gpt_oss", attention_bias=False, swiglu_limit=5.0)
    assert not config.qkv_bias and not config.o_bias and config.experts is not None
    assert config.experts.activation == ClampedSwish(alpha=1.702, limit=5.0)


def strings(file: Path) -> list[str]:
    """The strings of a module that are no docstrings."""
    nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    told = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in told]


def test_no_other_module_knows_a_family():
    names = [word for family in FAMILIES.values() for word in (family.name, family.class_name)]
    stems = {re.sub(r"\d+$", "", name) for name in FAMILIES}
    named = re.compile(rf"\b({'|'.join([*names, *stems])})\b")
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE).as_posix()
        if not inside.startswith(DESCRIBING):
            assert not [text for text in strings(path) if named.search(text)], f"et_jax/{inside} names a family"


def test_an_architecture_that_is_no_family_is_refused():
    with pytest.raises(ValueError, match="architecture is 'other'; it must be one of llama, mistral"):
        family_of(dataclasses.replace(SMALL, architecture="other"))
