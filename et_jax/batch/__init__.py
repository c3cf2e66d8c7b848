"""Batch files: a prompt per line in, an answer per line out, and no line lost or done twice.

    lines -> tasks -> Model.as_completed -> answers -> journal

`lines` reads the input one line at a time, `tasks` turns a line into a request or a reason to refuse
it, `answers` makes the rows that are written, `journal` keeps them through crashes, `job` runs it all.
"""
