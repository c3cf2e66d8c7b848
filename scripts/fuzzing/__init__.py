"""What `scripts/fuzz.py` runs: how cases are drawn, run in a worker, watched and judged, and one module per surface."""

SURFACES = {
    "config": "fuzzing.config_file",
    "weights": "fuzzing.weight_files",
    "tokenizer": "fuzzing.tokenizer_files",
    "templates": "fuzzing.templates",
    "lines": "fuzzing.batch_lines",
    "requests": "fuzzing.api_requests",
    "snapshots": "fuzzing.snapshot_folders",
}
