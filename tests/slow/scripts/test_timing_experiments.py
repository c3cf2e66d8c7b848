"""Every experiment that times runs in quick size; what its figures must satisfy whatever the machine takes."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import ROOT

from et_jax.models.checkpoint import write_hugging_face
from et_jax.models.layers import rotate
from et_jax.models.transformer import initialise
from et_jax.serve.min_context import MEASURED, NEVER
from scripts import measure
from scripts.measuring.experiment import load_experiment
from scripts.measuring.shapes import SMALL
from scripts.peers import gguf_file

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def kernels(arms):
    """Milliseconds times GB/s are the bytes of the listed keys and values, of 8 KV heads in float32."""
    for name, share in (("xla, 1", 1.0), ("xla, 0.5", 0.5), ("in order, einsum", 1.0)):
        found = np.multiply(arms[name]["milliseconds"], arms[name]["gb_per_s"])
        np.testing.assert_allclose(found, share * 8 * 256 * 2 * 128 * 4 / 1e6)


def steps(arms):
    assert set(arms["off"]["share_read"]) == {1.0}
    assert 0 < max(arms["certified"]["share_read"]) < 1
    # 4 blocks of 64 tokens: an eighth rounds to none, of which the guard keeps the first and the last
    assert max(arms["quest"]["share_read"]) <= 0.5


def selection_cost(arms):
    listed = {name: figures["share_listed"][0] for name, figures in arms.items()}
    assert listed["dense"] == 1.0
    assert 0 < listed["quest"] == listed["choose quest"] < 1
    assert 0 < listed["choose int8"] <= listed["by entropy"] <= 1.0  # no head passes the tolerance of all


def drafts(arms):
    assert set(arms["plain"]["drafted"]) == {0.0}
    assert 0 < arms["lookup"]["accepted"][0] <= arms["lookup"]["drafted"][0]


def self_drafts(arms):
    """A text of 8 tokens at most 13 a step takes drafts; of those that hold nine in ten most are accepted."""
    found = arms.get("drafts hold at 0.9")
    if found is not None:
        assert 0 < sum(found["accepted"]) <= sum(found["drafted"])


def throughput(arms):
    assert set(arms["2 at once, no cached prefixes"]["share_cached"]) == {0.0}
    assert all(set(figures["programs_compiled_late"]) == {0.0} for figures in arms.values())


def formats_quality(arms):
    """A cached token in 8 bits: a byte for each number of 16 bits, and two scales of 32 bits for each KV head."""
    byte = {name: figures["token_bytes"] for name, figures in arms.items()}
    assert byte["int8 cache"] == byte["fp8 cache"] < byte["bfloat16"] == byte["int8 weights"]
    assert arms["int8 weights"]["weight_bytes"] < 0.6 * arms["bfloat16"]["weight_bytes"]


RELATIONS = {
    each.__name__: each for each in (kernels, steps, selection_cost, drafts, self_drafts, throughput, formats_quality)
}
OTHERS = ("formats", "peers", "prefill_cost", "sampling", "step_parts", "versions")


@pytest.mark.parametrize("name", [*RELATIONS, *OTHERS])
def test_an_experiment_measures_every_arm(name, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "README.md").read_text(encoding="utf-8"))
    given = {"versions": ["--checkout", str(ROOT)], "formats_quality": ["--text", str(text)]}
    assert measure.main([name, "--quick", "--output", str(tmp_path / "out.json"), *given.get(name, ())]) == 0
    [run] = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert run["groups"]
    for group in run["groups"]:
        assert not [arm for arm in group["arms"].values() if "missed" in arm]
        arms = {arm: found["rows"] for arm, found in group["arms"].items()}
        rounds = run["settings"].get("rounds", run["settings"].get("rows"))
        first = next(iter(load_experiment(name).figures))
        assert all(len(rows[first]) == rounds and min(rows[first]) > 0 for rows in arms.values())
        RELATIONS.get(name, lambda arms: None)(arms)


def test_versions_names_a_folder_that_has_no_package(tmp_path, capsys):
    assert measure.main(["versions", "--checkout", str(tmp_path)]) == 2
    assert "which has no et_jax; name a checkout of it." in capsys.readouterr().err


@pytest.mark.parametrize(("python", "said"), [("nowhere", "cannot be run"), (sys.executable, "lacks llama.cpp")])
def test_a_python_without_an_engine_is_refused(python, said, capsys):
    assert measure.main(["peers", "--quick", "--llama-python", python]) == 2
    assert said in capsys.readouterr().err


def test_weights_are_read_as_they_were_written(tmp_path):
    params = initialise(SMALL, jax.random.key(0), jnp.bfloat16)
    write_hugging_face(tmp_path, SMALL, params)
    found = gguf_file.stored(tmp_path / "model.safetensors")
    up = params.layers[1].up
    assert up is not None
    np.testing.assert_array_equal(found["model.layers.1.mlp.up_proj.weight"], np.asarray(up.array, np.float32))
    names = [gguf_file.named(name) for name in found]
    assert len(set(names)) == len(names) == 3 + 9 * SMALL.num_layers
    expected = "token_embd.weight output_norm.weight output.weight blk.0.attn_q.weight blk.1.ffn_down.weight"
    assert set(expected.split()) <= set(names)


def test_scores_are_those_of_weights_whose_pairs_are_side_by_side():
    """Su et al. 2021: channels 2i and 2i + 1 turn by one angle."""
    rng, heads, head_dim, width = np.random.default_rng(0), 3, 8, 5
    weights = rng.normal(size=(2, heads * head_dim, width)).astype(np.float32)
    x, angles = rng.normal(size=(4, width)).astype(np.float32), rng.normal(size=(4, head_dim // 2)).astype(np.float32)
    cosine, sine = np.cos(angles), np.sin(angles)

    def side_by_side(weight):
        y = (x @ gguf_file.interleaved(weight, head_dim).T).reshape(4, heads, head_dim // 2, 2)
        turned = (y[..., 0] + 1j * y[..., 1]) * np.exp(1j * angles)[:, None]
        return np.stack([turned.real, turned.imag], axis=-1).reshape(4, heads, head_dim)

    def here(weight):
        y = jnp.asarray(x @ weight.T).reshape(1, 4, heads, head_dim)
        return np.asarray(rotate(y, jnp.asarray(cosine[None]), jnp.asarray(sine[None])))[0]

    (q, k), (own_q, own_k) = map(side_by_side, weights), map(here, weights)
    np.testing.assert_allclose(np.einsum("ahd,bhd->hab", q, k), np.einsum("ahd,bhd->hab", own_q, own_k), atol=1e-4)


def test_presets_choose_from_the_length_recorded_after_which_they_are_never_slower():
    recorded = json.loads((ROOT / "benchmarks/results/steps.json").read_text(encoding="utf-8"))
    assert recorded["machine"]["device"] == "cpu"
    for name, least in MEASURED["cpu"].items():
        ratios = {}  # of each length the slowest case
        for case in recorded["cases"]:
            [ratio] = [way["over_off"] for way in case["ways"] if way["control"] == name]
            ratios[case["length"]] = max(ratio, ratios.get(case["length"], 0.0))
        slower = [length for length, ratio in ratios.items() if ratio > 1.03]
        assert least == min((length for length in ratios if length > max(slower, default=0)), default=NEVER)
