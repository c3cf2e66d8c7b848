"""One experiment a file: its question, its settings, its arms (`scripts/measuring/experiment.py` says how)."""
