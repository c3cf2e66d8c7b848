"""Plain values as HTML: nothing gets out of its place."""

import re
from html.parser import HTMLParser

from et_jax.io import html

HOSTILE = ["<script>alert(1)</script>", '" onmouseover="x', "&lt;", "a\x00\x1b[31m\r\ud83d", "\n\n", "", "中 \t"]


class Read(HTMLParser):
    """What a browser makes of a piece: its texts, tags, and the attributes of its spans."""

    def __init__(self, piece: str) -> None:
        super().__init__()
        self.text, self.tags, self.spans, self.open = "", [], [], []
        self.feed(piece)
        self.close()
        assert not self.open, "a tag is left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        if tag == "span":
            self.spans.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def clean(text: str) -> str:
    return re.sub("[\x00\x1b\r\ud83d]", "\ufffd", text)


def test_the_text_of_the_tokens_is_the_text_that_is_read():
    read = Read(html.coloured(HOSTILE, [0.5] * len(HOSTILE), HOSTILE, before="<b>It"))
    assert read.text == "<b>It" + clean("".join(HOSTILE))
    assert set(read.tags) == {"div", "span"}
    assert [span["title"] for span in read.spans[1:]] == [clean(title) for title in HOSTILE]
    assert all(set(span) <= {"class", "title"} for span in read.spans)
    read = Read(html.boxed(html.paragraph("a < b")))
    assert read.tags == ["div", "style", "p"] and read.text == html.STYLE + "a < b"


def test_a_cell_of_a_table_holds_what_it_was_given_and_numbers_stand_to_the_right():
    read = Read(html.table(["<i>", "b"], [[text, 1.23456789] for text in HOSTILE], caption="<u>"))
    assert set(read.tags) == {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert read.text == "<u><i>b" + "".join(clean(text) + "1.235" for text in HOSTILE)

    drawn = html.table(["name", "value"], [["a", 1], ["b", None], ["c", 2.5]])
    assert drawn.count('class="number"') == 4  # the name of the column, and three cells
    assert '<td class="number">-</td>' in drawn
    assert '<progress value="3" max="8"></progress> 3/8 &lt;b&gt;' in html.progress(3, 8, "3/8 <b>")


def test_no_rule_of_the_style_reaches_outside_its_class():
    flat = re.sub(r"@media \(prefers-color-scheme:dark\)\{(.*?\})\}", r"\1", html.STYLE)
    selectors = [one for group in re.findall(r"([^{}]+)\{[^{}]*\}", flat) for one in group.strip().split(",")]
    assert selectors and not [one for one in selectors if f".{html.SCOPE}" not in one]
