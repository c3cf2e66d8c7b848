"""Where things are: the repository, golden files, scripts, and the folder of real weights and text beside it."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden"
HELPERS = ROOT / "tests/helpers"
SCRIPTS = ROOT / "scripts"
SHARED = Path(os.environ.get("ET_JAX_SHARED") or ROOT.parent / "shared")
