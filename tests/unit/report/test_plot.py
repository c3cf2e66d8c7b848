"""Pictures of a completion."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from samples import sample

from et_jax.report.plot import plot_trace
from et_jax.types import replace


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("texts", [(), (" a\x00\x1bb\x0b", "\ud83d", "$x$ \\$ 中\r\n")])
def test_any_text_is_drawn_without_a_word_and_attention_entropy_where_it_is_known(
    texts: tuple[str, ...], tmp_path: Path
) -> None:
    done = sample(len(texts))
    for level in (0.5, None):
        rows = [replace(row, text=text, attention_entropy=level) for row, text in zip(done.trace, texts, strict=True)]
        plot_trace(replace(done, trace=tuple(rows)), tmp_path / "picture.svg")
        ElementTree.parse(tmp_path / "picture.svg")
        drawn = "<!-- attention entropy -->" in (tmp_path / "picture.svg").read_text(encoding="utf-8")
        assert drawn == (level is not None and bool(texts))
    plot_trace(replace(done, trace=tuple(rows)), tmp_path / "picture.png")
