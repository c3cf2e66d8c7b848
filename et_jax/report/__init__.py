"""What a person sees of a run.

`display` (text as it comes, trace rows, a summary), `plot` (a picture), `notebook` (text as it comes in a notebook).
"""
