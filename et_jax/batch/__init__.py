"""Batch files: a prompt per line in, an answer per line out, and no line lost or done twice.

    source -> lines -> tasks -> Model.as_completed -> answers -> journal

`lines` reads the input one line at a time (`parquet`, `strict` JSON), `tasks` turns a line, by the `fields` of its
body, into a request or a reason to refuse it, `answers` makes the rows that are written, `journal` keeps them through
crashes, `job` runs it all. `serving` is the part between, which `ray` has too: many machines for datasets and folders
of such files. `table` writes the answers of a finished job as a Parquet file. `manifest` records the settings that
answers depend on; `hub` downloads an input; `rescue` finds rows whose file was removed; `progress` reports how far
the job is.
"""
