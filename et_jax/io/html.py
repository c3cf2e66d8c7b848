"""Plain values as HTML, for notebooks and pages: escaped text, tables, text coloured by entropy.

Every piece is safe to put between tags whatever text it is made of, and `boxed` puts pieces together under `STYLE`,
whose rules reach nothing outside. Colour is never all: a token tells its figures when pointed at, a scale its numbers.
"""

import html
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

SCOPE = "et-jax"
"""The class under which every rule of `STYLE` stands."""

MOST_TOKENS = 2000  # that are coloured of one text: some 250 kB
_MOST_BEFORE = 2000  # characters of what stands before it
_HALF = re.compile("[\ud800-\udfff]")
_FLOOR = 1.0  # nats: texts of less entropy than this throughout are not stretched to the full scale

# One hue, lightness alone tells the steps apart, so that colour-blind readers see the same order. Equal steps in OKLab.
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
_THEMES = {  # how Jupyter, Colab, VS Code, documentation pages and pages of one's own say which they are
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
    """The rule that sets the colours of a theme."""
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
"""Rules for light and dark: as the reader's system asks, unless the notebook or the page around says which it is."""


def escaped(text: str) -> str:
    """Return `text` for a place between tags or within quotes; what has no shape becomes U+FFFD, newlines stay."""
    return html.escape("".join(map(_shown, text)))


def whole(text: str) -> str:
    """Return `text` with U+FFFD for each half of a surrogate pair, of which no file can be made."""
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
    """Return pieces of HTML as one, under the rules of `STYLE`."""
    return f'<div class="{SCOPE}"><style>{STYLE}</style>{"".join(pieces)}</div>'


def progress(done: int, total: int, said: str) -> str:
    """Return a bar of which `done` of `total` is filled, and what is said beside it."""
    return f'<label><progress value="{done}" max="{total}"></progress> {escaped(said)}</label>'


def paragraph(text: str) -> str:
    """Return a line of text, set apart."""
    return f"<p>{escaped(text)}</p>"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """Return a table of plain values as `shown`; a column of nothing but numbers stands to the right.

    Raises ValueError where a row is not as long as the header.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"rows: got one of {len(row)} cells, wanted {len(header)} as the header has")
    columns = [[row[i] for row in rows] for i in range(len(header))]
    places = [' class="number"' if column and all(map(_is_number, column)) else "" for column in columns]

    def line(tag: str, cells: Sequence[Any]) -> str:
        drawn = (f"<{tag}{at}>{escaped(shown(one))}</{tag[:2]}>" for at, one in zip(places, cells, strict=True))
        return f"<tr>{''.join(drawn)}</tr>"

    told = f"<caption>{escaped(caption)}</caption>" if caption else ""
    head = f"<thead>{line('th scope="col"', header)}</thead>"
    return f"<table>{told}{head}<tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def top_of(entropies: Sequence[float]) -> float:
    """Return the entropy that the scale ends at, in nats: the greatest of them, at least 1."""
    return max(_FLOOR, max(filter(math.isfinite, entropies), default=0.0))


def step_of(entropy: float, top: float) -> int | None:
    """Return the step of an entropy on a scale up to `top`, both in nats; None where it is not a number.

    Step i begins at top (i / STEPS)^2: most tokens have little entropy, and differ in it.
    """
    if math.isnan(entropy):
        return None
    return int(min(STEPS * math.sqrt(max(entropy, 0.0) / top), STEPS - 1))


def starts(top: float) -> list[float]:
    """Return the entropy that each step of a scale up to `top` begins at, in nats."""
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

    Of a long text `before` the end is shown. `titles` are told when a token is pointed at, by default the entropies.
    The scale ends at `top`, by default at `top_of(entropies)`. A token without text leaves a mark. Of many tokens the
    first `MOST_TOKENS` are shown, and said.

    Raises ValueError where the lists are not of one length.
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
    """One token; a mark where there is nothing to see of it, so that it can be pointed at."""
    named = [*([] if step is None else [f"s{step}"]), *([] if text.strip("\n") else ["mark"])]
    kind = f' class="{" ".join(named)}"' if named else ""
    return f'<span{kind} title="{escaped(title)}">{escaped(text)}</span>'


def scale(top: float) -> str:
    """Return the scale of colours, each step with the entropy that it begins at, in nats."""
    steps = (f'<span class="s{i}">{start:.2f}</span>' for i, start in enumerate(starts(top)))
    return f'<p class="scale">entropy, nats: {"".join(steps)} to {top:.2f}</p>'
