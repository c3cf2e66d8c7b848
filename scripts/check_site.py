"""Check the built documentation: every link, anchor and picture of its pages is there, and none comes from a network.

    mkdocs build --strict && python scripts/check_site.py [SITE]

Each fault is one line, with the page it is on; there being any is exit code 1. Links to other sites are not followed,
but what a page loads by itself (scripts, styles, pictures, frames, fonts) has to lie in the site.
"""

import argparse
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FOLLOWED = {"a": "href", "area": "href"}
LOADED = {"link": "href"} | dict.fromkeys(("script", "img", "iframe", "source", "video", "audio"), "src")
NETWORK = re.compile(r"(?:https?:)?//")
STYLED = re.compile(r"(?:url\(|@import)\s*[\"']?(https?:[^\"')\s]+)")  # in a style sheet, or between the tags of a page
SCRIPTED = re.compile(r"https?://[^\s\"'`&]+\.m?js\b")  # what a script fetches, where it names it whole


class Reader(HTMLParser):
    """Reads one page: its anchors, the links that are followed, and what is loaded with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.followed: list[str] = []
        self.loaded: list[str] = []
        self._scripted = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self._scripted = tag == "script"
        if FOLLOWED.get(tag) in given:
            self.followed.append(given[FOLLOWED[tag]])
        if LOADED.get(tag) in given:
            self.loaded.append(given[LOADED[tag]])
        if self._scripted:
            self.loaded += SCRIPTED.findall(" ".join(value for name, value in given.items() if name != "src"))

    def handle_endtag(self, tag: str) -> None:
        self._scripted = False

    def handle_data(self, data: str) -> None:
        if self._scripted:
            self.loaded += SCRIPTED.findall(data)


def faults(site: Path) -> list[str]:
    """Return a sentence for every link that leads nowhere in the site, and for all that comes from a network."""
    pages = {path: Reader(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.followed + page.loaded):
            if NETWORK.match(link):
                wrong = f"loads {link} from a network" if link in page.loaded else None
            else:
                wrong = nowhere(site, path, link, pages)
            if wrong:
                found.append(f"{path.relative_to(site)}: {wrong}")
    for path in sorted([*pages, *site.rglob("*.css")]):
        links = STYLED.findall(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(site)}: loads {link} from a network" for link in links]
    return found


def nowhere(site: Path, page: Path, link: str, pages: dict[Path, Reader]) -> str | None:
    """Return what is wrong with a link within the site, or None."""
    parts = urlsplit(link)
    if parts.scheme:  # mailto, data
        return None
    path = unquote(parts.path)
    target = page if not path else (site / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve()
    if target.is_dir():
        target = target / "index.html"
    if not target.is_relative_to(site) or not target.is_file():
        return f"{link} is not there"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return f"{link} has no such anchor"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", nargs="?", type=Path, default=Path("site"), help="the folder that mkdocs wrote")
    site = parser.parse_args().site.resolve()
    if not (site / "index.html").is_file():
        print(f"{site} has no index.html; build the site first, by mkdocs build --strict.", file=sys.stderr)
        return 1
    found = faults(site)
    print("\n".join(found) or f"Every link of {len(list(site.rglob('*.html')))} pages leads somewhere in the site.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
