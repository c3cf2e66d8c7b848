"""What a compiled program copies is read from its text."""

from types import SimpleNamespace

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


def test_large_and_small_collectives_are_counted():
    assert script("aot_check").collectives(TALK) == ("1 all-gather, 1 all-reduce", 1)
    assert script("aot_check").collectives(TEXT) == ("", 0)


def test_other_talk_than_is_recorded_fails_and_what_passed_is_compiled_again_once_it_changes(monkeypatch, tmp_path):
    monkeypatch.setenv("ET_JAX_TEST_CACHE", str(tmp_path))
    aot_check, compiled = script("aot_check"), []
    sizes = SimpleNamespace(**{f"{one}_size_in_bytes": 0 for one in ("temp", "argument", "output", "alias")})

    def checked(text: str, recorded: str) -> tuple[int, str, bool]:
        """How often the compiler ran for a program of this lowered text, the line of the report, whether it passed."""
        compiled.clear()
        program = SimpleNamespace(memory_analysis=lambda: sizes, as_text=lambda: TALK)
        lowered = SimpleNamespace(compile=lambda: compiled.append(text) or program, as_text=lambda: text)
        asked = {"pool_bytes": 0, "pool": {}, "temporary_bound": 1, "in_place": True, "collectives": recorded}
        lowering = Lowering(lower=lambda: lowered, **asked)
        line, passed = aot_check.check(Program(name="", chip="", build=lambda: lowering))
        return len(compiled), line, passed

    right = "1 all-gather, 1 all-reduce"
    for text, runs in (("a", 1), ("a", 0), ("b", 1)):
        assert checked(text, right)[::2] == (runs, True)
    for _ in range(2):  # one that failed is compiled always
        runs, line, passed = checked("a", "2 all-reduce")
        assert runs == 1 and not passed and f"{right}, not 2 all-reduce" in line


def test_a_copy_of_a_whole_array_is_found_and_named():
    """Merged axes hide none. What a fusion only passes through is not written, and `ALLOWED` is let through."""
    assert script("aot_check").whole_copies(TEXT, POOL) == [
        "transpose of .mean as f32[9,2,128]",
        "copy of pages as s8[2,9,16,128]",
        "copy of .summary.key_box as bf16[2,9,64]",
        "copy-start of pages as bf16[18,16,128]",
    ]
