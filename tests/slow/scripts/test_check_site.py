"""What the script that checks the built documentation would notice."""

from pathlib import Path

import pytest
from scripts_here import script

PAGE = """<html><head><link rel="stylesheet" href="assets/main.css"><script>var where = "https://example.org/"</script>
</head><body><h1 id="top">One</h1><a name="old"></a><a href="two.html#end">two</a> <a href="#top">up</a> <a href="#old">
old</a> <a href="folder/">folder</a> <a href="/two.html">from the root</a> <a href="https://example.org/x.js">away</a>
<a href="mailto:someone@example.org">write</a> <img src="data:image/png;base64,AA=="> <img src="a%20b.png">{}</body>"""


def site(folder: Path, more: str = "", style: str = "body { color: black }") -> Path:
    """Return a site of three pages, the first with `more` in it; beside it lies a file that is none of its own."""
    (folder / "outside.html").write_text("")
    files = {
        "index.html": PAGE.replace("{}", more),
        "two.html": '<p id="end">End</p>',
        "folder/index.html": '<a href="../index.html">back</a>',
        "assets/main.css": style,
        "a b.png": "",
    }
    for name, text in files.items():
        path = folder / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "site"


def test_a_sound_site_has_no_faults(tmp_path):
    assert script("check_site").faults(site(tmp_path)) == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('<a href="three.html">', "three.html is not there"),
        ('<a href="../outside.html">', "../outside.html is not there"),
        ('<a href="two.html#start">', "two.html#start has no such anchor"),
        ('<link href="//fonts.example/css?family=R">', "loads //fonts.example/css?family=R from a network"),
        ('<script>load("https://cdn.example/y.js")</script>', "loads https://cdn.example/y.js from a network"),
        (
            '<script data-settings="{&quot;url&quot;: &quot;https://cdn.example/z.js&quot;}"></script>',
            "loads https://cdn.example/z.js from a network",
        ),
        ('<style>@import "https://cdn.example/a.css"</style>', "loads https://cdn.example/a.css from a network"),
    ],
)
def test_a_fault_is_found_and_told(tmp_path, more, said):
    assert script("check_site").faults(site(tmp_path, more)) == [f"index.html: {said}"]
