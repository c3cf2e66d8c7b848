"""Hatchling behind one sentence for an older Python: pip by itself names whichever dependency it meets first."""

import sys

if sys.version_info < (3, 12):  # noqa: UP036
    sys.exit("et_jax needs Python 3.12 or later; this is %s." % sys.version.split()[0])  # noqa: UP031

from hatchling.build import *  # noqa: F403
