"""What the site shows beside docs/: pages of the repository's root, notebooks, and a reference page for each module.

Each has one source. A link to a file leads to the page that shows it, the name of a module's file to its reference,
and a link to a file that no page shows becomes plain text.
"""

import json
import posixpath
import re
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

# Files outside docs/, and the pages that show them.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "et_jax/models/bundled/README.md": "models/bundled.md",
    "et_jax/models/bundled_small/README.md": "models/bundled_small.md",
}
# The modules that have a reference page, in the order of the site.
MODULES = (
    "et_jax/control/*.py",
    "et_jax/decode/decoder.py",
    "et_jax/decode/config.py",
    "et_jax/decode/output.py",
    "et_jax/decode/state.py",
    "et_jax/decode/request.py",
    "et_jax/decode/cache/snapshots.py",
    "et_jax/serve/chunks.py",
    "et_jax/pallas/*/api.py",
    "et_jax/softmax.py",
    "et_jax/types.py",
)

MARKDOWN_LINK = re.compile(r"!?\[(?P<text>[^\]]*)\]\((?P<path>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")
HTML_LINK = re.compile(r'<a [^>]*?href="(?P<path>[^":#]+)(?P<anchor>#[^"]*)?"[^>]*>(?P<text>.*?)</a>', re.DOTALL)
MODULE = re.compile(r"(?<!\[)`(?P<text>(?P<path>et_jax/[\w/]+\.py))`")


@cache
def modules() -> dict[str, str]:
    """Return the reference page of every module that has one, by the module's file."""
    paths = (path.relative_to(ROOT) for pattern in MODULES for path in sorted(ROOT.glob(pattern)))
    shown = (path for path in paths if path.name != "__init__.py")
    return {path.as_posix(): "reference/" + ".".join(path.with_suffix("").parts[1:]) + ".md" for path in shown}


@cache
def notebooks() -> dict[str, Path]:
    """Return what is shown of every notebook, by its file: the copy that ran, where it has the same cells."""
    found = {}
    for path in sorted(ROOT.glob("notebooks/*.ipynb"), key=lambda path: (path.stem != "quickstart", path.stem)):
        ran = ROOT / "build" / "notebooks" / path.name
        found[f"notebooks/{path.name}"] = ran if ran.exists() and cells(ran) == cells(path) else path
    return found


def cells(notebook: Path) -> list[str]:
    """Return what was written in each cell of a notebook."""
    return ["".join(cell["source"]) for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]]


def on_config(config: MkDocsConfig) -> None:
    """Add the notebooks and the reference pages to the navigation."""
    assert config.nav is not None
    [reference] = [entry["Reference"] for entry in config.nav if isinstance(entry, dict) and "Reference" in entry]
    folders: dict[str, list] = {}
    for page in modules().values():
        folder, _, name = page.removeprefix("reference/").removesuffix(".md").partition(".")
        folders.setdefault(folder if name else "", []).append({name or folder: page})
    reference += [{folder: pages} for folder, pages in folders.items() if folder] + folders.get("", [])
    if found := notebooks():
        config.nav.insert(1, {"Notebooks": list(found)})


@event_priority(100)  # before the plugin that looks for notebooks among the files
def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that do not lie in docs/."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    for path, source in notebooks().items():
        files.append(File.generated(config, path, abs_src_path=str(source)))
    for path, page in modules().items():
        name = path.removesuffix(".py").replace("/", ".")
        files.append(File.generated(config, page, content=f"::: {name}\n    options: {{heading_level: 1}}\n"))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page with its links as the site has them, and names of modules as links."""
    here = posixpath.dirname(page.file.src_uri) or "."

    def link(found: re.Match[str]) -> str:
        file = named(page, found["path"])
        if (there := page_of(file)) is None:
            return found["text"] if (ROOT / file).exists() else found[0]
        before = found[0].removesuffix(f"({found['path']}{found['anchor'] or ''})")
        return f"{before}({posixpath.relpath(there, here)}{found['anchor'] or ''})"

    def module(found: re.Match[str]) -> str:
        there = page_of(found["path"])
        return f"[{found[0]}]({posixpath.relpath(there, here)})" if there else found[0]

    return markdown if page.file.src_uri.endswith(".ipynb") else MODULE.sub(module, MARKDOWN_LINK.sub(link, markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a notebook with its links as the site has them; the text of other pages had them before it was HTML."""

    def link(found: re.Match[str]) -> str:
        file = named(page, found["path"])
        there = files.get_file_from_path(page_of(file) or "")
        if there is None:
            return found["text"] if (ROOT / file).exists() else found[0]
        return f'<a href="{there.url_relative_to(page.file)}{found["anchor"] or ""}">{found["text"]}</a>'

    return HTML_LINK.sub(link, html) if page.file.src_uri.endswith(".ipynb") else html


def named(page: Page, path: str) -> str:
    """Return the file of the repository that a link on a page names."""
    of_pages = {shown: file for file, shown in PAGES.items()}
    uri = page.file.src_uri
    source = uri if uri in notebooks() else of_pages.get(uri, f"docs/{uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def page_of(file: str) -> str | None:
    """Return the page, or the picture, that shows a file of the repository; None where none does."""
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    return (PAGES | modules() | {name: name for name in notebooks()}).get(file)
