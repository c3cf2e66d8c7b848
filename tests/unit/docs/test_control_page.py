"""The page of control says of every knob what its preset says."""

from places import ROOT

from et_jax.cli import flags
from et_jax.control.presets import KNOBS, PRESETS

PAGE = (ROOT / "docs" / "control.md").read_text(encoding="utf-8")


def test_every_knob_stands_in_the_table_with_its_defaults():
    heading = "| knob | meaning, and the default under each preset that has it |\n| --- | --- |\n"
    rows = [f"| `--{name.replace('_', '-')}` | {flags.knob_help(name, PRESETS)} |\n" for name in KNOBS]
    assert f"\n{heading}{''.join(rows)}\n" in PAGE
