"""What a person sees of a run.

`display` (text as it comes, a summary), `plot` (a picture), `notebook` (text as it comes in a notebook); `trace` keeps
a run as a file.
"""
