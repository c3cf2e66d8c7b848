"""The kernels that a layer launches are counted in a compiled program's text, and judged by recorded numbers."""

from types import SimpleNamespace

import pytest
from aot.launches import Launches, launches
from aot.programs import Lowering, Program
from scripts_here import script

LOOP = "jit(decode)/while/body/jit(step)/extend/while"
KNOWN = 'backend_config={"known_trip_count":{"n":"32"}}'
# A layer: a product, an asynchronous slice, a copy and a kernel that another computation launches. Beside the loop over
# layers another one sums what they tell; the loop of steps has no known count, and one within a layer is the layer's.
TEXT = f"""
%fused_add (p: f32[4]) -> f32[4] {{
  ROOT %add.9 = f32[4]{{0}} add(%p, %p)
}}

%called (p.1: f32[4]) -> f32[4] {{
  %p.1 = f32[4]{{0}} parameter(0)
  ROOT %kernel = f32[4]{{0}} custom-call(%p.1), custom_call_target="mosaic_gpu_v2"
}}

%layers (carried: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %carried = (s32[], f32[4]{{0}}) parameter(0)
  %turn = s32[] get-tuple-element(%carried), index=0
  %x = f32[4]{{0}} get-tuple-element(%carried), index=1
  %zero = s32[] constant(0)
  %token = token[] after-all()
  %flat = f32[2,2]{{1,0}} bitcast(%x)
  %fusion-start = ((f32[4]{{0}}), f32[4]{{0}}, u32[]) fusion-start(%x), calls=%fused_add
  %copy-start = (f32[4]{{0}}, f32[4]{{0}}, u32[]) copy-start(%x)
  %y = f32[4]{{0}} fusion(%x), calls=%fused_add, metadata={{op_name="{LOOP}/body/layer_0/dot"}}
  %done = f32[4]{{0}} fusion-done(%fusion-start)
  %copied = f32[4]{{0}} copy-done(%copy-start)
  %z = f32[4]{{0}} call(%y), to_apply=%called
  ROOT %tuple = (s32[], f32[4]{{0}}) tuple(%turn, %z)
}}

%sums (carried.1: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %sum = f32[4]{{0}} fusion(%x.1), calls=%fused_add, metadata={{op_name="{LOOP}/body/add"}}
  ROOT %tuple.1 = (s32[], f32[4]{{0}}) tuple(%turn.1, %sum)
}}

%steps (carried.2: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %hoisted = f32[4]{{0}} fusion(%x.2), calls=%fused_add, metadata={{op_name="{LOOP}/body/layer_0/iota"}}
  %over = (s32[], f32[4]{{0}}) while(%hoisted), condition=%c, body=%layers, metadata={{op_name="{LOOP}"}}, {KNOWN}
  %summed = (s32[], f32[4]{{0}}) while(%over), condition=%c, body=%sums, metadata={{op_name="{LOOP}"}}, {KNOWN}
  ROOT %tuple.2 = (s32[], f32[4]{{0}}) tuple(%turn.2, %summed)
}}

ENTRY %main (p.3: f32[4]) -> f32[4] {{
  ROOT %all = (s32[], f32[4]{{0}}) while(%p.3), condition=%c, body=%steps, metadata={{op_name="jit(decode)/while"}}
}}
"""
PRODUCT = f'  %y = f32[4]{{0}} fusion(%x), calls=%fused_add, metadata={{op_name="{LOOP}/body/layer_0/dot"}}\n'


def with_more(line: str) -> str:
    return TEXT.replace(PRODUCT, PRODUCT + line)


def test_an_asynchronous_pair_is_one_launch_and_what_only_names_values_is_none():
    assert launches(TEXT) == Launches(kernels=4, beside=1)
    assert launches(TEXT.replace("layer_0", "step")) is None  # no layer is in a loop
    assert launches(TEXT.replace("known_trip_count", "other")) is None


@pytest.mark.parametrize("op", ["while(%x), condition=%c, body=%inner", "conditional(%x), branch_computations={%a}"])
def test_loops_and_conditionals_of_a_layer_are_counted(op):
    line = f'  %w = f32[4]{{0}} {op}, metadata={{op_name="{LOOP}/body/layer_0/{op[:5]}"}}, {KNOWN}\n'
    inner = "\n%inner (p.9: f32[4]) -> f32[4] {\n" + PRODUCT * 9 + "}\n"
    assert launches(inner + with_more(line)) == Launches(kernels=5, control=1, beside=1)


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """A check of a program of this text against a recorded number, with how often the compiler has run."""
    monkeypatch.setenv("ET_JAX_TEST_CACHE", str(tmp_path))
    aot_check, compiled = script("aot_check"), []
    sizes = SimpleNamespace(**{f"{one}_size_in_bytes": 0 for one in ("temp", "argument", "output", "alias")})

    def check(text: str, recorded: int | None, control: int = 0) -> tuple[str, bool, int]:
        compiled.clear()
        program = SimpleNamespace(memory_analysis=lambda: sizes, as_text=lambda: text)
        lowered = SimpleNamespace(compile=lambda: compiled.append(text) or program, as_text=lambda: text)
        asked = {"pool_bytes": 0, "pool": {}, "temporary_bound": 1, "in_place": True, "kernels": recorded}
        asked["control"] = control
        line, passed = aot_check.check(
            Program(name="a", chip="H200", build=lambda: Lowering(lower=lambda: lowered, **asked))
        )
        return line, passed, len(compiled)

    return check


def test_more_kernels_than_recorded_fail_and_fewer_pass(checked):
    line, passed, _ = checked(TEXT, 4)
    assert passed and line.endswith("compiled 4 kernels a layer, 1 more in a loop beside")
    assert checked(TEXT, 9)[1]
    line, passed, _ = checked(TEXT, 3)
    assert not passed and "FAILED a layer launches 4 kernels, more than the 3 recorded" in line


def test_a_condition_in_a_layer_fails_whatever_number_of_kernels_is_recorded(checked):
    condition = f'  %w = f32[4]{{0}} conditional(%x), metadata={{op_name="{LOOP}/body/layer_0/cond"}}\n'
    for again in range(2):  # compiled, and read again
        line, passed, compiled = checked(with_more(condition), 99)
        assert compiled == (again == 0)
        assert not passed and "of a layer's kernels 1 are loops or conditionals" in line


def test_a_condition_in_a_layer_passes_where_it_is_recorded(checked):
    condition = f'  %w = f32[4]{{0}} conditional(%x), metadata={{op_name="{LOOP}/body/layer_0/cond"}}\n'
    line, passed, _ = checked(with_more(condition), 5, 1)
    assert passed and "5 kernels a layer, 1 of them loops or conditionals" in line
    assert not checked(with_more(condition), 5, 0)[1]
