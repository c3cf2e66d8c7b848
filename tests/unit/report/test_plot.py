"""Pictures of a completion."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from et_jax.report.plot import plot_trace
from et_jax.serve.completions import Completion, TokenTrace


def completion(*texts: str, **figures: float) -> Completion:
    rows = [
        TokenTrace(
            token=i,
            text=text,
            entropy=1.0,
            varentropy=1.0,
            temperature=1.0,
            surprisal=1.0,
            blocks_read=1,
            blocks_held=1,
            kept_mass=1.0,
            entropic_time=1.0,
            cost=1.0,
            flops=1.0,
            **figures,
        )
        for i, text in enumerate(texts)
    ]
    return Completion(
        prompt="",
        prompt_tokens=1,
        index=0,
        text="".join(texts),
        token_ids=tuple(range(len(rows))),
        finish_reason="length",
        trace=tuple(rows),
        error=None,
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("texts", [(), (" a\x00\x1bb\x0b", "\ud83d", "$x$ \\$ 中\r\n")])
def test_any_text_is_drawn_without_a_word(texts: tuple[str, ...], tmp_path: Path) -> None:
    plot_trace(completion(*texts), tmp_path / "picture.svg")
    ElementTree.parse(tmp_path / "picture.svg")
    plot_trace(completion(*texts), tmp_path / "picture.png")


def test_attention_entropy_is_drawn_where_it_is_known(tmp_path: Path) -> None:
    def drawn(**figures: float) -> str:
        plot_trace(completion("a", "b", **figures), tmp_path / "picture.svg")
        return (tmp_path / "picture.svg").read_text(encoding="utf-8")

    assert "<!-- attention entropy -->" in drawn(attention_entropy=0.5, least_attention_entropy=0.1)
    assert "attention entropy" not in drawn()
