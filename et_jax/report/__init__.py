"""Presentation of a run: in a terminal, in a notebook, as a picture, as a page.

`display` streams text, trace rows and a summary, `notebook` streams text in a notebook, `conversation` is a
chat on a terminal; `plot` draws a picture. `page` writes a report, one self-contained page, of what `figures`
draws of a continuation and `batch` of the `rows` of a batch, with the tools of `drawing`; `__main__` is `python -m
et_jax.report`, which writes it from the output of a batch, or from the file that `trace` reads and writes.
"""
