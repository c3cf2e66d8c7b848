"""What a person sees of a run: in a terminal, in a notebook, as a picture, as a page.

`display` shows text as it comes, trace rows and a summary, `notebook` text as it comes in a notebook, `conversation` a
chat on a terminal; `plot` draws a picture. `page` writes a report, one page that needs nothing else, of what `figures`
draws of a continuation and `batch` of the rows of a batch, with the tools of `drawing`; `__main__` is `python -m
et_jax.report`, which writes it of what a run left: the output of a batch, or the file that `trace` reads and writes.
"""
