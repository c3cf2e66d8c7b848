"""A report as one self-contained page: texts coloured by entropy, with figures of the control.

The page includes everything, Vega-Lite too, and its content policy forbids all requests.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from et_jax.errors import UsageError
from et_jax.io import html, values
from et_jax.io.files import check_writable, replace_file
from et_jax.io.known import formatted, known_or_none
from et_jax.report.drawing import Figure
from et_jax.report.figures import of_completion
from et_jax.serve.completions import Completion, TokenTrace, checked_completion
from et_jax.serve.loading.min_context import described as described_least
from et_jax.serve.totals import Totals

_LARGEST_EXP = 700.0  # the largest argument whose exponential is a float
_PROMPT = 20_000  # characters of a prompt that are shown: its beginning and its end

Decode = Callable[[Sequence[int]], str]
"""Returns the text of ids, like a tokenizer's `decode`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTable:
    """Rows of cells under heads; a cell is text, or markup."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a report: `facts` with figures, a text if there is a `completion`, and drawings.

    `plain` is a text without measured tokens.
    """

    id: str
    title: str
    notes: Sequence[str] = ()
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    completion: Completion | None = None
    plain: str | None = None
    figures: Sequence[Figure] = ()
    tables: Sequence[TextTable] = ()


def check_library() -> None:
    """Raise UsageError if the library that draws the charts is not installed."""
    if importlib.util.find_spec("vl_convert") is None:
        raise UsageError("A report needs vl-convert-python; install it with: pip install 'et_jax[report]'.")


def check_place(path: str) -> None:
    """Check before any work that a page can be made, and written to `path`. Raises UsageError."""
    check_library()
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"A report is a page; {path} should end in .html.")
    check_writable(path)


def write_report(
    completions: Completion | Sequence[Completion],
    path: str | Path,
    *,
    facts: Mapping[str, str] | None = None,
    decode: Decode | None = None,
) -> None:
    """Write a page on `completions`, those of one prompt or of several, to `path`; see `docs/serving.md`.

    `facts` are listed at its top by their names, such as the model and the control. `decode` returns the text of
    alternatives, like `model.tokenizer.decode`; without it they are shown by their ids. Raises UsageError without
    tokens, for invalid figures, if the file cannot be written, and if the library that
    draws charts is not installed.
    """
    if not isinstance(completions, Completion | Iterable):
        raise UsageError(f"completions is {values.shown(completions)}; give what generate or read_trace returned.")
    given = [completions] if isinstance(completions, Completion) else completions
    given = [checked_completion(one) for one in given]
    if not any(completion.trace for completion in given):
        raise UsageError(f"The run produced no token, so there is nothing to report and {path} is not written.")
    write_page("Entropy report", facts or {}, sections_of(given), Path(path), decode)


def sections_of(completions: Sequence[Completion]) -> list[Section]:
    """Return a section for each continuation."""
    several = len(completions) > 1
    return [
        Section(
            id=f"text-{number}",
            title=f"Text {number} of {len(completions)}" if several else "The text",
            notes=[] if completion.error is None else [completion.error],
            facts=facts_of(completion),
            completion=completion,
            figures=of_completion(completion) if completion.trace else [],
        )
        for number, completion in enumerate(completions, 1)
    ]


def write_page(
    title: str, facts: Mapping[str, str], sections: Sequence[Section], path: Path, decode: Decode | None
) -> None:
    """Write a page of sections. Raises UsageError if the file cannot be written, or the library is missing."""
    check_library()
    import jinja2
    import vl_convert
    from markupsafe import Markup

    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    data: dict[str, Any] = {"figures": {}, "tokens": {}}
    shown = []
    for section in sections:
        figures = []
        for number, figure in enumerate(section.figures, 1):
            name = f"{section.id}-figure-{number}"
            figures.append({"id": name, "title": figure.title, "caption": figure.caption, "words": figure.words})
            data["figures"][name] = {name: getattr(figure, name) for name in ("spec", "columns", "words", "by_token")}
        if section.completion is not None and section.completion.trace:
            data["tokens"][section.id] = _tokens(section.completion.trace, decode)
        shown.append(_shown(section) | {"figures": figures})
    page = environment.get_template("page.html").render(
        title=title,
        facts=facts,
        sections=shown,
        version=importlib.metadata.version("et_jax"),
        style=Markup((folder / "page.css").read_text() + _shades()),
        data=Markup(_json(data)),
        vega=Markup(vl_convert.javascript_bundle(snippet=None).replace("</script", "<\\/script")),
        script=Markup((folder / "page.js").read_text()),
    )
    replace_file(path, html.valid_text(page))


def _shown(section: Section) -> dict[str, Any]:
    """Return the template's fields of a section, without its figures."""
    from markupsafe import Markup

    shown: dict[str, Any] = {
        name: getattr(section, name) for name in ("id", "title", "notes", "facts", "plain", "tables")
    }
    shown |= {"prompt": None, "tokens": None}
    completion = section.completion
    if completion is None:
        return shown
    cut = completion.prompt
    if len(cut) > _PROMPT:
        cut = f"{cut[: _PROMPT // 2]}\n… {len(cut) - _PROMPT} characters …\n{cut[-_PROMPT // 2 :]}"
    shown |= {"prompt": cut, "prompt_size": f", {completion.prompt_tokens} tokens"}
    rows = completion.trace
    if not rows:
        return shown
    top = html.top_of([row.entropy for row in rows])
    marks = [("a", "accepted draft")] if any(row.accepted for row in rows) else []
    marks += [("s", "by the small model")] if any(row.by_small for row in rows) else []
    return shown | {
        "tokens": Markup("".join(_span(row, top) for row in rows)),
        "top": f"{top:.3g}",
        "scale": [f"{start:.2g}" for start in html.starts(top)],
        "marks": marks,
        "label": f"Text, {len(rows)} tokens; the arrow keys move through them",
    }


def _span(row: TokenTrace, top: float) -> str:
    step = html.step_of(row.entropy, top)
    names = [*([] if step is None else [f"e{step}"]), *["a"] * row.accepted, *["s"] * bool(row.by_small)]
    return f'<span class="{" ".join(names)}">{html.escaped(row.text)}</span>'


def _shades() -> str:
    """Return the rules of the colours of entropy."""
    light, dark = (
        ";".join(f"--e{i}:{colour}" for i, colour in enumerate(steps)) for steps in (html.LIGHT_STEPS, html.DARK_STEPS)
    )
    rules = "".join(f".e{i}{{background:var(--e{i})}}" for i in range(html.STEPS))
    return f':root{{{light}}}:root[data-theme="dark"]{{{dark}}}{rules}'


def facts_of(completion: Completion) -> dict[str, str]:
    """Return the figures of a continuation in words, by their names."""
    rows = completion.trace
    facts = {"tokens": f"{len(rows)} ({completion.finish_reason})", "prompt": f"{completion.prompt_tokens} tokens"}
    if completion.min_context is not None:
        facts["blocks chosen"] = described_least(completion.min_context)
    if not rows:
        return facts
    totals = Totals.of([completion])
    facts |= {
        "mean entropy": f"{formatted(totals.entropy, '.3g')} nats a token",
        "perplexity": formatted(_perplexity(totals.surprisal), ".3g"),
        "entropic time": f"{formatted(totals.entropic_time, ',.1f')} nats",
        "cost": f"{formatted(totals.cost / 1e6, ',.1f')} MB moved, {formatted(totals.flops / 1e9, ',.2f')} GFLOP",
        "efficiency": f"{formatted(totals.efficiency * 1e6, '.3g')} nats a MB",
        "temperature": " to ".join(formatted(one, ".3g") for one in sorted({*(totals.temperatures or (math.nan,))})),
        "blocks read": f"{totals.share_read:.1%}",
    }
    if math.isfinite(totals.share_bytes):
        facts["bytes moved of the cache"] = f"{totals.share_bytes:.1%}"
    if totals.least_mass_kept < 1:
        facts["attention mass kept"] = f"{totals.least_mass_kept:.3f} at the worst token, an estimate unless certified"
    if totals.prompt_blocks_held:
        facts["prompt read"] = f"{totals.prompt_share_read:.1%} of blocks"
    if totals.tokens_left_out:
        facts["cache"] = f"{totals.tokens_cached} tokens cached, {totals.tokens_left_out} left out"
    if totals.drafted:
        facts["drafts"] = f"{totals.accepted} of {totals.drafted} accepted"
    if totals.by_turns:
        facts["by the small model"] = f"{totals.by_small} of {totals.tokens} tokens"
    for name, rate in totals.guard_rates.items():
        facts[f"guard: {name.replace('_', ' ')}"] = f"{formatted(100 * rate, '.0f')}% of tokens"
    return facts


def _perplexity(surprisal: float) -> float:
    return math.exp(surprisal) if surprisal < _LARGEST_EXP else math.nan


def _tokens(rows: Sequence[TokenTrace], decode: Decode | None) -> dict[str, Any]:
    """Return the page's data on each token, by columns; `top` has pairs of token text and probability."""
    columns: dict[str, list[Any]] = {
        "entropy (nats)": [_figure(row.entropy) for row in rows],
        "surprisal (nats)": [_figure(row.surprisal) for row in rows],
        "varentropy (nats²)": [_figure(row.varentropy) for row in rows],
        "temperature": [_figure(row.temperature) for row in rows],
        "blocks read": [f"{row.blocks_read} of {row.blocks_held}" for row in rows],
    }
    if any(row.kept_mass is not None and row.kept_mass < 1 for row in rows):
        columns["attention mass kept"] = [_figure(row.kept_mass) for row in rows]
    if any(row.attention_entropy is not None for row in rows):
        columns["attention entropy (0 to 1)"] = [_figure(row.attention_entropy) for row in rows]
    if any(row.drafted or row.accepted for row in rows):
        columns["draft"] = ["accepted" if row.accepted else None for row in rows]
    if any(row.by_small is not None for row in rows):
        columns["said by"] = ["small model" if row.by_small else "model" for row in rows]
    words: dict[int, int] = {}
    top = [
        [
            item
            for token, logprob in row.top
            for item in (words.setdefault(token, len(words)), _share(math.exp(logprob)))
        ]
        for row in rows
    ]
    spelled = [json.dumps(decode([token]), ensure_ascii=False) if decode else f"#{token}" for token in words]
    return {"columns": columns, "top": top, "words": spelled}


def _figure(value: float | None) -> float | None:
    return None if known_or_none(value) is None else float(f"{value:.4g}")


def _share(value: float) -> float:
    return round(value, 4)


def _json(value: Any) -> str:
    """Return JSON that is safe in a page: no text of it can close its element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
