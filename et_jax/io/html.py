"""Plain values as HTML, for notebooks and pages: escaped text, tables, text coloured by entropy.

Every piece is safe between tags whatever text it contains, and `boxed` combines pieces under `STYLE`,
whose rules apply only within. Colour is never the only cue: tooltips and scales show the numbers.
"""

import html
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

SCOPE = "et-jax"
"""The class that scopes every rule of `STYLE`."""

MOST_TOKENS = 2000  # coloured tokens per text: some 250 kB
_MOST_BEFORE = 2000  # characters of the text before it
_HALF = re.compile("[\ud800-\udfff]")
_FLOOR = 1.0  # nats: texts of lower entropy are not stretched to the full scale

# One hue in steps of lightness only, so that colour-blind readers see the same order. Equal steps in OKLab.
LIGHT_STEPS = (
    *("#fffaf0", "#ffeedb", "#fee2c7", "#fdd7b2", "#fbcb9d"),
    *("#fabe87", "#f8b270", "#f5a658", "#f3993a", "#f08c00"),
)
DARK_STEPS = (
    *("#211d18", "#2c2219", "#382719", "#442c19", "#503118"),
    *("#5c3617", "#683b14", "#754010", "#82450a", "#8f4a00"),
)
STEPS = len(LIGHT_STEPS)

_LIGHT = {"ink": "#1b1b1b", "faint": "#595959", "paper": "#ffffff", "line": "#d0d0d0", "scheme": "light"}
_DARK = {"ink": "#f2f2f2", "faint": "#b3b3b3", "paper": "#161616", "line": "#484848", "scheme": "dark"}
_THEMES = {  # how Jupyter, Colab, VS Code, documentation pages and other pages mark their theme
    "light": (
        *('[data-theme="light"]', 'body[data-jp-theme-light="true"]', 'html[theme="light"]'),
        *("body.vscode-light", '[data-md-color-scheme="default"]'),
    ),
    "dark": (
        *('[data-theme="dark"]', 'body[data-jp-theme-light="false"]', 'html[theme="dark"]'),
        *("body.vscode-dark", '[data-md-color-scheme="slate"]'),
    ),
}


def _rule(where: str, colours: Mapping[str, str], steps: Sequence[str]) -> str:
    """Return the rule that sets the colours of a theme."""
    named = [f"--et-{name}:{colour}" for name, colour in colours.items() if name != "scheme"]
    named += [f"--et-{i}:{colour}" for i, colour in enumerate(steps)]
    return f"{where}{{color-scheme:{colours['scheme']};{';'.join(named)}}}"


def _style() -> str:
    here = f".{SCOPE}"
    themes = {"light": (_LIGHT, LIGHT_STEPS), "dark": (_DARK, DARK_STEPS)}
    asked = [_rule(",".join(f"{one} {here}" for one in _THEMES[name]), *themes[name]) for name in themes]
    return "\n".join(
        [
            _rule(here, *themes["light"]),
            f"@media (prefers-color-scheme:dark){{{_rule(here, *themes['dark'])}}}",
            *asked,
            f"{here}{{color:var(--et-ink);background:var(--et-paper);padding:.6em .8em;font:14px/1.5 sans-serif}}",
            f"{here} .text{{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;font-family:monospace}}",
            f"{here} .faint,{here} caption{{color:var(--et-faint)}}",
            *(f"{here} .s{i}{{background:var(--et-{i})}}" for i in range(STEPS)),
            f"{here} .mark{{padding-left:.4em}}",
            f"{here} .scale span{{padding:.1em .35em;font-size:12px}}",
            f"{here} p{{margin:.5em 0 0}}",
            f"{here} table{{border-collapse:collapse;margin:.3em 0;font-size:13px}}",
            f"{here} caption{{text-align:left;padding:.2em 0}}",
            f"{here} table tr:nth-child(n){{background:none}}",
            f"{here} th,{here} td{{text-align:left;vertical-align:top;padding:.15em .7em .15em 0;"
            "border-bottom:1px solid var(--et-line);white-space:normal}",
            f"{here} .number{{text-align:right;font-variant-numeric:tabular-nums}}",
        ]
    )


STYLE = _style()
"""Rules for light and dark: the system's preference, unless the notebook or the page around sets a theme."""


def escaped(text: str) -> str:
    """Return `text` escaped for tags and quoted attributes; unprintable characters become U+FFFD, newlines stay."""
    return html.escape("".join(map(_shown, text)))


def valid_text(text: str) -> str:
    """Return `text` with each half of a surrogate pair replaced by U+FFFD, so that it can be encoded."""
    return text if text.isascii() else _HALF.sub("\N{REPLACEMENT CHARACTER}", text)


def _shown(letter: str) -> str:
    shapeless = letter not in "\n\t" and unicodedata.category(letter) in ("Cc", "Cs")
    return "\N{REPLACEMENT CHARACTER}" if shapeless else letter


def shown(value: Any) -> str:
    """Return a value as text: a float to four significant digits, None as a dash, other values as they print."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def boxed(*pieces: str) -> str:
    """Return pieces of HTML combined under the rules of `STYLE`."""
    return f'<div class="{SCOPE}"><style>{STYLE}</style>{"".join(pieces)}</div>'


def progress(done: int, total: int, said: str) -> str:
    """Return a bar of which `done` of `total` is filled, with the text `said` beside it."""
    return f'<label><progress value="{done}" max="{total}"></progress> {escaped(said)}</label>'


def paragraph(text: str) -> str:
    """Return a separate line of text."""
    return f"<p>{escaped(text)}</p>"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """Return a table of plain values as `shown`; columns of only numbers are right-aligned.

    Raises ValueError if a row and the header differ in length.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"rows: got one of {len(row)} cells, wanted {len(header)} as in the header")
    columns = [[row[i] for row in rows] for i in range(len(header))]
    places = [' class="number"' if column and all(map(_is_number, column)) else "" for column in columns]

    def line(tag: str, cells: Sequence[Any]) -> str:
        drawn = (f"<{tag}{at}>{escaped(shown(one))}</{tag[:2]}>" for at, one in zip(places, cells, strict=True))
        return f"<tr>{''.join(drawn)}</tr>"

    title = f"<caption>{escaped(caption)}</caption>" if caption else ""
    head = f"<thead>{line('th scope="col"', header)}</thead>"
    return f"<table>{title}{head}<tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def top_of(entropies: Sequence[float]) -> float:
    """Return the entropy that the scale ends at, in nats: the greatest of them, at least 1."""
    return max(_FLOOR, max(filter(math.isfinite, entropies), default=0.0))


def step_of(entropy: float, top: float) -> int | None:
    """Return the step of an entropy on a scale up to `top`, both in nats; None for NaN.

    Step i begins at top (i / STEPS)^2: most tokens have a low entropy, where small differences matter.
    """
    if math.isnan(entropy):
        return None
    return int(min(STEPS * math.sqrt(max(entropy, 0.0) / top), STEPS - 1))


def starts(top: float) -> list[float]:
    """Return the entropy at which each step of a scale up to `top` begins, in nats."""
    return [top * (i / STEPS) ** 2 for i in range(STEPS)]


def coloured(
    texts: Sequence[str],
    entropies: Sequence[float],
    titles: Sequence[str] | None = None,
    *,
    before: str = "",
    top: float | None = None,
) -> str:
    """Return texts of tokens one after another, each on the colour of its entropy (nats), after a faint text `before`.

    Only the end of a long text `before` is shown. `titles` are the tooltips of tokens, by default the entropies.
    The scale ends at `top`, by default at `top_of(entropies)`. A token without text is shown as a mark. Of many tokens
    the first `MOST_TOKENS` are shown, with a note.

    Raises ValueError if the lists differ in length.
    """
    titles = [f"entropy {entropy:.3f} nats" for entropy in entropies] if titles is None else titles
    if not len(texts) == len(entropies) == len(titles):
        raise ValueError(f"texts: got {len(texts)}, with {len(entropies)} entropies and {len(titles)} titles")
    top = top_of(entropies) if top is None else top
    tokens = list(zip(texts, entropies, titles, strict=True))[:MOST_TOKENS]
    drawn = "".join(_token(text, step_of(entropy, top), title) for text, entropy, title in tokens)
    cut = len(before) - _MOST_BEFORE
    before = f"[{cut:,} characters] …{before[cut:]}" if cut > 0 else before
    prompt = f'<span class="faint">{escaped(before)}</span>' if before else ""
    left = len(texts) - len(tokens)
    rest = (
        paragraph(f"The first {len(tokens):,} of {len(texts):,} tokens; {left:,} more are not shown.") if left else ""
    )
    return f'<div class="text">{prompt}{drawn}</div>{rest}'


def _token(text: str, step: int | None, title: str) -> str:
    """Return one token; a mark if its text is invisible, so that it can be pointed at."""
    named = [*([] if step is None else [f"s{step}"]), *([] if text.strip("\n") else ["mark"])]
    kind = f' class="{" ".join(named)}"' if named else ""
    return f'<span{kind} title="{escaped(title)}">{escaped(text)}</span>'


def scale(top: float) -> str:
    """Return the scale of colours, each step with the entropy at which it begins, in nats."""
    steps = (f'<span class="s{i}">{start:.2f}</span>' for i, start in enumerate(starts(top)))
    return f'<p class="scale">entropy, nats: {"".join(steps)} to {top:.2f}</p>'
