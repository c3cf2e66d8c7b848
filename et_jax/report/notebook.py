"""A stream in a notebook: text as it is produced, each token on the colour of its entropy."""

import contextlib
from collections.abc import Generator, Iterator

from et_jax.errors import UsageError
from et_jax.io import html, values
from et_jax.io.cell import Area, in_notebook
from et_jax.serve.completions import Completion, TokenEvent, TokenTrace, checked_rows, drawn


class Shown(list[Completion]):
    """Completions that were shown already: as the value of a cell they are not displayed again."""

    def _ipython_display_(self) -> None:
        pass


def show(events: Iterator[TokenEvent]) -> Shown:
    """Show the events of `Model.stream` in the output of this cell as they arrive, and return the completions in order.

    An interrupt of the kernel closes the stream, leaves the text so far and propagates.

    Raises UsageError outside a notebook, and for anything but a stream of a model.
    """
    if not in_notebook():
        raise UsageError(
            "show draws in a notebook, and none runs this; start one (pip install 'et_jax[notebook]'), or print the "
            "text of each event."
        )
    if not isinstance(events, Generator):
        raise UsageError(f"events is {values.shown(events)}; give what model.stream(...) returns.")
    page, area = _Page(), Area()
    with contextlib.closing(events):
        try:
            for event in events:
                if not isinstance(event, TokenEvent):
                    raise UsageError(f"events yields {values.shown(event)}; give what model.stream(...) returns.")
                page.take(event)
                area.draw(page.drawn)
        except KeyboardInterrupt:
            page.said = "interrupted"
            raise
        finally:
            area.draw(page.drawn, last=True)
    return Shown(page.ended[key] for key in sorted(page.ended))


class _Page:
    """The text so far of every continuation, by prompt and index; `said` is shown at the end."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], list[TokenTrace]] = {}
        self.ended: dict[tuple[int, int], Completion] = {}
        self.said = ""

    def take(self, event: TokenEvent) -> None:
        key = event.prompt_index, event.index
        rows = self.rows.setdefault(key, [])
        if event.trace is not None:
            rows.append(event.trace)
        if event.completion is not None:
            self.ended[key] = event.completion

    def drawn(self) -> tuple[str, str]:
        """Return everything as HTML, and as text."""
        pieces, texts = [], []
        for key in sorted(self.rows):
            done, name = self.ended.get(key), f"prompt {key[0] + 1}, continuation {key[1] + 1}"
            pieces += [html.paragraph(name)] if len(self.rows) > 1 else []
            if done is None:
                rows = checked_rows(self.rows[key])
                pieces.append(drawn(rows))
                texts.append("".join(row.text for row in rows))
            else:
                pieces.append(done.drawn())
                texts.append(html.valid_text(done.prompt + done.text))
        said = [self.said] if self.said else []
        return html.boxed(*pieces, *map(html.paragraph, said)), "\n\n".join(texts + said)
