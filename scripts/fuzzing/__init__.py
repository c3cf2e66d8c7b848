"""What `scripts/fuzz.py` runs: edits of valid input, a watched worker, and one module for each target.

A target module has `draw(random)`, which returns a case as a dictionary of printable values, and `prepare(folder)`,
which writes valid input into the folder and returns the function that runs a case, `run(**case)`. That function returns
"accepted" or "refused", or raises: `UsageError` for a refusal, `Fault` for a failure that it found itself. A case may
have its own limit of time, `seconds`.
"""

TARGETS = {
    "config": "scripts.fuzzing.config_file",
    "weights": "scripts.fuzzing.weight_files",
    "tokenizer": "scripts.fuzzing.tokenizer_files",
    "templates": "scripts.fuzzing.templates",
    "lines": "scripts.fuzzing.batch_lines",
    "requests": "scripts.fuzzing.api_requests",
    "snapshots": "scripts.fuzzing.snapshot_folders",
}
