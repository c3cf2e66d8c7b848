"""Refuses an older Python in one sentence; pip, left to itself, complains about whichever package it meets first."""

import sys

from hatchling.metadata.plugin.interface import MetadataHookInterface


class PythonCheck(MetadataHookInterface):
    """Runs when the package's metadata is asked for, before any dependency is looked up."""

    def update(self, metadata: dict) -> None:
        if sys.version_info < (3, 12):
            version = sys.version.split()[0]
            sys.exit(f"et_jax needs Python 3.12 or later, and this is {version}: make the environment with python3.12.")
