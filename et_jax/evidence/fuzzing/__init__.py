"""What `scripts/fuzz.py` runs: how cases are drawn, run in a worker, watched and judged, and one module per surface."""

SURFACES = {
    "config": "et_jax.evidence.fuzzing.config_file",
    "weights": "et_jax.evidence.fuzzing.weight_files",
    "tokenizer": "et_jax.evidence.fuzzing.tokenizer_files",
    "templates": "et_jax.evidence.fuzzing.templates",
    "lines": "et_jax.evidence.fuzzing.batch_lines",
    "requests": "et_jax.evidence.fuzzing.api_requests",
    "snapshots": "et_jax.evidence.fuzzing.snapshot_folders",
}
