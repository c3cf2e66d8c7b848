"""What a compiler made of a program for an absent chip is read from its text: copies, collectives, kernels."""

from types import SimpleNamespace

import pytest
from aot.launches import Launches, launches
from aot.programs import Lowering, Program
from scripts_here import script

POOL = {
    "pages": SimpleNamespace(shape=(2, 9, 16, 128)),
    ".mean": SimpleNamespace(shape=(2, 9, 128)),
    ".value_radius": SimpleNamespace(shape=(2, 9)),
    ".summary.key_box": SimpleNamespace(shape=(2, 9, 64)),
}
TEXT = """
%fused_computation.1 (param_0.1: bf16[18,16,128]) -> f32[4] {
  %convert.1 = f32[18,16,128]{2,1,0} convert(%param_0.1)
  ROOT %reduce.1 = f32[4]{0} reduce(%convert.1, %zero)
}

%fused_computation.2 (param_0.2: f32[2,9,128]) -> f32[9,2,128] {
  ROOT %transpose.1 = f32[9,2,128]{2,1,0:T(8,128)} transpose(%param_0.2), dimensions={1,0,2}
}

%copy_fusion (input: s8[2,9,16,128]) -> s8[2,9,16,128] {
  ROOT %copy.6 = s8[2,9,16,128]{3,2,1,0:T(8,128)(4,1)} copy(%input)
}

%fused_computation.3 (param_0.3: s8[2,9,16,128]) -> s8[2,9,16,128] {
  %fusion.1 = s8[2,9,16,128]{3,2,1,0} fusion(%param_0.3), output_to_operand_aliasing={{}: (0, {})}, calls=%copy_fusion
  ROOT %dynamic_update_slice.1 = s8[2,9,16,128]{3,2,1,0} dynamic-update-slice(%fusion.1, %new, %at)
}

%moved (input.1: s8[2,9,16,128]) -> s8[2,9,16,128] {
  ROOT %copy.7 = s8[2,9,16,128]{2,3,1,0} copy(%input.1)
}

ENTRY %main (pages: bf16[2,9,16,128]) -> f32[4] {
  %copy.3 = f32[2,9]{1,0} copy(%radius)
  %copy-start.2 = (bf16[2,9,64]{2,1,0:S(1)}, bf16[2,9,64]{2,1,0}, u32[]) copy-start(%boxes)
  %copy.5 = bf16[2,9,64]{2,1,0} copy(%boxes)
  %copy.4 = s32[16,128]{1,0} copy(%table)
  %add.1 = bf16[2,9,16,128]{3,2,1,0} add(%pages, %pages)
  %copy-start.1 = (bf16[18,16,128]{2,1,0}, bf16[18,16,128]{2,1,0}, u32[]) copy-start(%pages)
}
"""


TALK = """
%all-reduce.1 = f32[16,4096]{1,0} all-reduce(%x), channel_id=1, to_apply=%add
%start = (f32[200]{0}, bf16[2,800]{1,0:T(8,128)(2,1)}) all-gather-start(%y), dimensions={0}
%done = bf16[2,800]{1,0} all-gather-done(%start)
ROOT %all-reduce.2 = (s32[16]{0}, f32[16]{0}) all-reduce(%all-reduce.1, %z), channel_id=2
"""


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """Check a program by its text: the line of the report, whether it passed, and how often the compiler ran."""
    monkeypatch.setenv("ET_JAX_TEST_CACHE", str(tmp_path))
    aot_check, compiled = script("aot_check"), []
    sizes = SimpleNamespace(**{f"{one}_size_in_bytes": 0 for one in ("temp", "argument", "output", "alias")})

    def check(text: str, before: str = "", **recorded) -> tuple[str, bool, int]:
        compiled.clear()
        program = SimpleNamespace(memory_analysis=lambda: sizes, as_text=lambda: text)
        lowered = SimpleNamespace(compile=lambda: compiled.append(text) or program, as_text=lambda: before + text)
        asked = {"pool_bytes": 0, "pool": {}, "temporary_bound": 1, "in_place": True} | recorded
        lowering = Lowering(lower=lambda: lowered, **asked)
        line, passed = aot_check.check(Program(name="", chip="H200", build=lambda: lowering))
        return line, passed, len(compiled)

    return check


def test_large_and_small_collectives_are_counted():
    assert script("aot_check").collectives(TALK) == ("1 all-gather, 1 all-reduce", 1)
    assert script("aot_check").collectives(TEXT) == ("", 0)


def test_other_talk_than_is_recorded_fails_and_what_passed_is_compiled_again_once_it_changes(checked):
    right = "1 all-gather, 1 all-reduce"
    for before, runs in (("a", 1), ("a", 0), ("b", 1)):
        assert checked(TALK, before, collectives=right)[1:] == (True, runs)
    for _ in range(2):  # one that failed is compiled always
        line, passed, runs = checked(TALK, "a", collectives="2 all-reduce")
        assert runs == 1 and not passed and f"{right}, not 2 all-reduce" in line


def test_a_copy_of_a_whole_array_is_found_and_named():
    """Merged axes hide none. What a fusion only passes through is not written, and `ALLOWED` is let through."""
    assert script("aot_check").whole_copies(TEXT, POOL) == [
        "transpose of .mean as f32[9,2,128]",
        "copy of pages as s8[2,9,16,128]",
        "copy-start of .summary.key_box as bf16[2,9,64]",
        "copy of .summary.key_box as bf16[2,9,64]",
        "copy-start of pages as bf16[18,16,128]",
    ]


# The kernels that a layer launches.

LOOP = "jit(decode)/while/body/jit(step)/extend/while"
KNOWN = 'backend_config={"known_trip_count":{"n":"32"}}'
# A layer: a product, an asynchronous slice, a copy and a kernel that another computation launches. Beside the loop over
# layers another one sums what they tell; the loop of steps has no known count, and one within a layer is the layer's.
LAYERS = f"""
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
    return LAYERS.replace(PRODUCT, PRODUCT + line)


def test_an_asynchronous_pair_is_one_launch_and_what_only_names_values_is_none():
    assert launches(LAYERS) == Launches(kernels=4, beside=1, step=1)
    assert launches(LAYERS.replace("layer_0", "step")) is None  # no layer is in a loop
    uncounted = LAYERS.replace("known_trip_count", "other")
    assert launches(uncounted) is None
    assert launches(uncounted, counted_loops=False) == Launches(kernels=4, beside=1, step=1)


@pytest.mark.parametrize("op", ["while(%x), condition=%c, body=%inner", "conditional(%x), branch_computations={%a}"])
def test_loops_and_conditionals_of_a_layer_are_counted(op):
    line = f'  %w = f32[4]{{0}} {op}, metadata={{op_name="{LOOP}/body/layer_0/{op[:5]}"}}, {KNOWN}\n'
    inner = "\n%inner (p.9: f32[4]) -> f32[4] {\n" + PRODUCT * 9 + "}\n"
    assert launches(inner + with_more(line)) == Launches(kernels=5, control=1, beside=1, step=1)


def test_more_kernels_than_recorded_fail_and_fewer_pass(checked):
    line, passed, _ = checked(LAYERS, kernels=4)
    assert passed and line.endswith("compiled 4 kernels a layer, 1 more in a loop beside, 1 a step")
    assert checked(LAYERS, kernels=9)[1]
    line, passed, _ = checked(LAYERS, kernels=3)
    assert not passed and "FAILED a layer launches 4 kernels, more than the 3 recorded" in line
    assert checked(LAYERS, kernels=4, step_kernels=1)[1]
    line, passed, _ = checked(LAYERS, kernels=4, step_kernels=0)
    assert not passed and "a step launches 1 kernels beside its layers, more than the 0 recorded" in line


def test_a_condition_in_a_layer_fails_unless_it_is_recorded(checked):
    condition = f'  %w = f32[4]{{0}} conditional(%x), metadata={{op_name="{LOOP}/body/layer_0/cond"}}\n'
    for again in range(2):  # compiled, and read again
        line, passed, compiled = checked(with_more(condition), kernels=99)
        assert compiled == (not again)
        assert not passed and "of a layer's kernels 1 are loops or conditionals" in line
    line, passed, _ = checked(with_more(condition), kernels=5, control=1)
    assert passed and "5 kernels a layer, 1 of them loops or conditionals" in line
