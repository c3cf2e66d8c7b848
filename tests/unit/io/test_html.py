"""Plain values as HTML: nothing gets out of its place."""

import re
from xml.etree import ElementTree

from et_jax.io import html

HOSTILE = ["<script>alert(1)</script>", '" onmouseover="x', "&lt;", "a\x00\x1b[31m\r\ud83d", "\n\n", "", "中 \t"]


def read(piece: str) -> tuple[str, list[str], list[dict[str, str]]]:
    """The text of a piece, its tags, and the attributes of its spans; raises ParseError where a tag is left open."""
    tree = ElementTree.fromstring(f"<body>{piece}</body>")
    return "".join(tree.itertext()), [one.tag for one in tree.iter()][1:], [one.attrib for one in tree.iter("span")]


def clean(text: str) -> str:
    return re.sub("[\x00\x1b\r\ud83d]", "\ufffd", text)


def test_the_text_of_the_tokens_is_the_text_that_is_read():
    text, tags, spans = read(html.coloured(HOSTILE, [0.5] * len(HOSTILE), HOSTILE, before="<b>It"))
    assert text == "<b>It" + clean("".join(HOSTILE))
    assert set(tags) == {"div", "span"}
    assert [span["title"] for span in spans[1:]] == [re.sub(r"\s", " ", clean(title)) for title in HOSTILE]
    assert all(set(span) <= {"class", "title"} for span in spans)
    assert read(html.boxed(html.paragraph("a < b"))) == (html.STYLE + "a < b", ["div", "style", "p"], [])


def test_a_cell_of_a_table_holds_what_it_was_given_and_numbers_stand_to_the_right():
    text, tags, _ = read(html.table(["<i>", "b"], [[text, 1.23456789] for text in HOSTILE], caption="<u>"))
    assert set(tags) == {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert text == "<u><i>b" + "".join(clean(text) + "1.235" for text in HOSTILE)

    drawn = html.table(["name", "value"], [["a", 1], ["b", None], ["c", 2.5]])
    assert drawn.count('class="number"') == 4  # the name of the column, and three cells
    assert '<td class="number">-</td>' in drawn
    assert '<progress value="3" max="8"></progress> 3/8 &lt;b&gt;' in html.progress(3, 8, "3/8 <b>")


def test_no_rule_of_the_style_reaches_outside_its_class():
    flat = re.sub(r"@media \(prefers-color-scheme:dark\)\{(.*?\})\}", r"\1", html.STYLE)
    selectors = [one for group in re.findall(r"([^{}]+)\{[^{}]*\}", flat) for one in group.strip().split(",")]
    assert selectors and not [one for one in selectors if f".{html.SCOPE}" not in one]
