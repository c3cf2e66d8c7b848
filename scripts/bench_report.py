"""What a report weighs and how soon it answers in a browser, at several lengths of the text; and its pictures.

    python scripts/bench_report.py

The bundled model writes one text under preset `adaptive` with a target entropy; longer texts are that one several times
over, its clock running on. For each length: the weight of the page; milliseconds from asking for it to the first frame
after it is read; from a key to the frame that shows its token, the median and the longest of 40; and from the button to
a frame in the other colours with all charts drawn anew. Needs a Chromium, see `--browser`. The pictures are of the
first length.
"""

import argparse
import dataclasses
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import et_jax
from et_jax.evidence import serving_tables
from et_jax.report.page import write_report
from et_jax.serve.completions import Completion
from scripts.measuring import arguments
from scripts.measuring.results import REPOSITORY, RESULTS, write

FRAME = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))))"
PRESS = (
    "async (key) => { const began = performance.now(), text = document.querySelector('.text');"
    " text.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));"
    " await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));"
    " return performance.now() - began; }"
)
SCROLL = (
    "async () => { for (const chart of document.querySelectorAll('.chart')) { chart.scrollIntoView();"
    " while (!chart.querySelector('canvas')) await new Promise((done) => setTimeout(done, 20)); } scrollTo(0, 0); }"
)
DRAWN = "() => [...document.querySelectorAll('.chart')].every((chart) => chart.querySelector('canvas'))"
KEYS = ["ArrowRight", "ArrowDown", "PageDown", "End", "Home"] * 8


def times_over(completion: Completion, tokens: int) -> Completion:
    """Return a text of so many tokens: the same ones again and again, with a clock that runs on."""
    rows, time = [], 0.0
    while len(rows) < tokens:
        rows += [dataclasses.replace(row, entropic_time=time + row.entropic_time) for row in completion.trace]
        time = rows[-1].entropic_time
    rows = rows[:tokens]
    ids, text = tuple(row.token for row in rows), "".join(row.text for row in rows)
    return dataclasses.replace(completion, trace=tuple(rows), token_ids=ids, text=text)


def measured(browser: Any, path: Path) -> dict[str, float]:
    """Return what opening a page, a key and the other colours take, in milliseconds."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    began = time.perf_counter()
    page.goto(path.as_uri())
    page.evaluate(FRAME)
    opened = 1e3 * (time.perf_counter() - began)
    page.evaluate(SCROLL)
    page.wait_for_function(DRAWN)
    keys = [page.evaluate(PRESS, key) for key in KEYS]
    began = time.perf_counter()
    page.locator("#theme").click()
    page.wait_for_function(DRAWN)
    page.evaluate(FRAME)
    colours = 1e3 * (time.perf_counter() - began)
    page.close()
    return {
        "open (ms)": opened,
        "key (ms)": statistics.median(keys),
        "longest key (ms)": max(keys),
        "other colours (ms)": colours,
    }


def pictures(browser: Any, path: Path, folder: Path) -> None:
    """Take pictures of a page as a desktop and a phone show it, in light and dark."""
    for name, size, scheme in (("desktop", (1280, 900), "light"), ("phone", (390, 844), "dark")):
        page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        page.goto(path.as_uri())
        page.evaluate(SCROLL)
        page.wait_for_function(DRAWN)
        page.evaluate(FRAME)
        page.screenshot(path=folder / f"report-{name}.png", full_page=True)
        page.close()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=arguments.count(), nargs="+", default=[500, 2000, 10_000])
    p.add_argument("--rounds", type=arguments.count(), default=5)
    p.add_argument("--browser", default=shutil.which("chromium"), help="a Chromium (default: the one on the path)")
    p.add_argument("--pictures", type=Path, default=REPOSITORY / "docs/figures")
    p.add_argument("--output", type=arguments.output, default=RESULTS / "report.json")
    args = p.parse_args()
    if args.browser is None:
        p.error("there is no chromium on the path; name a browser with --browser")

    from playwright.sync_api import sync_playwright

    model = et_jax.load(control=et_jax.preset("adaptive", target_entropy=2.5), tell_reads=True)
    [text] = model.generate("It was", temperature=0.8, seed=4, max_tokens=min(min(args.tokens), 2000), logprobs=5)
    facts = {"model": "bundled", "control": "adaptive", "target entropy": "2.5", "temperature": "0.8", "seed": "4"}
    rows = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
        for tokens in args.tokens:
            path = Path(folder) / f"{tokens}.html"
            write_report(times_over(text, tokens), path, facts=facts, decode=model.tokenizer.decode)
            rounds = [measured(browser, path) for _ in range(args.rounds)]
            middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
            rows.append({"tokens": tokens, "MB": path.stat().st_size / 1e6} | middle)
        pictures(browser, Path(folder) / f"{args.tokens[0]}.html", args.pictures)
        version = browser.version
        browser.close()
    print(serving_tables.rows(rows))
    settings = {"rounds": args.rounds, "browser": f"Chromium {version}"}
    write(args.output, "scripts/bench_report.py", settings, rows=rows)


if __name__ == "__main__":
    main()
