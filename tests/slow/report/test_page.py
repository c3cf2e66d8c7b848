"""A report in a real browser: whole without a network, readable by everybody, with its figures in it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import DESKTOP, PHONE, Look, browsing
from samples import sample

from et_jax.errors import UsageError
from et_jax.report.page import write_report
from et_jax.types import replace


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of 2,000 tokens with all that there may be to tell."""
    place = tmp_path_factory.mktemp("report") / "report.html"
    write_report(long(), place, facts={"model": "<sample>"}, decode=lambda ids: f"</script >{ids[0]}")
    return place


def long() -> Any:
    return sample(2000, drafts=True, switched=True)


@pytest.fixture
def look(browser: Any, path: Path) -> Iterator[Look]:
    found = Look(browser, path)
    yield found
    found.close()


def test_it_asks_nothing_of_a_network_and_its_policy_forbids_it(look: Look) -> None:
    look.scroll()
    assert look.page.locator(".chart canvas").count() == look.page.locator(".chart").count() == 9
    assert (look.said, look.asked) == ([], [])
    look.page.evaluate("() => fetch('https://example.org').catch(() => 0)")
    assert any("Content Security Policy" in said for said in look.said)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_everybody_can_use_it(browser: Any, path: Path, size: tuple[int, int], scheme: str) -> None:
    look = Look(browser, path, size, scheme)
    look.scroll()
    assert look.faults() == []
    assert look.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")  # nothing hangs over
    look.close()


def test_the_token_that_is_pointed_at_is_shown(look: Look) -> None:
    row = long().trace[0]
    look.page.locator(".text > span").first.hover()
    shown = look.page.locator(".token").inner_text()
    assert f"{row.entropy:.4g}" in shown and f"{row.surprisal:.4g}" in shown and f"{row.temperature:.4g}" in shown
    assert f"{row.blocks_read} of {row.blocks_held}" in shown and "accepted" in shown and "small model" in shown
    assert f'"</script >{row.top[0][0]}"' in shown and "50.0%" in shown


def test_keys_and_clicks_move_through_the_text_and_the_button_turns_light_to_dark(look: Look) -> None:
    def at() -> int:
        said = look.page.locator(".token p").first.inner_text().split(" token ")[1]
        assert said.endswith(" of 2000")
        return int(said.split(" of ")[0])

    look.scroll()
    look.page.locator(".text").focus()
    moves = (("ArrowRight", 2), ("ArrowDown", 12), ("PageDown", 112), ("ArrowLeft", 111), ("End", 2000), ("Home", 1))
    for key, wanted in moves:
        look.page.keyboard.press(key)
        assert at() == wanted, key
    assert look.page.locator(".text .at").count() == 1
    chart = look.page.locator(".chart canvas").first
    chart.scroll_into_view_if_needed()
    size = chart.bounding_box()
    chart.click(position={"x": size["width"] * 0.5, "y": size["height"] * 0.5})
    assert abs(at() - 1000) < 100
    button, back = look.page.get_by_role("button", name="Dark"), "() => getComputedStyle(document.body).backgroundColor"
    light = look.page.evaluate(back)
    button.click()
    assert button.get_attribute("aria-pressed") == "true" and look.page.evaluate(back) != light
    assert look.said == []


def test_several_continuations_have_a_section_each(browser: Any, tmp_path: Path) -> None:
    write_report([sample(20), sample(30, seed=1, index=1)], tmp_path / "two.html")
    look = Look(browser, tmp_path / "two.html")
    assert look.page.locator("section h2").all_inner_texts() == ["Text 1 of 2", "Text 2 of 2"]
    look.page.get_by_role("link", name="Text 2 of 2").click()
    assert look.page.url.endswith("#text-2")
    look.close()


ODD: list[dict[str, Any]] = [
    {"blocks_held": 0},
    {"blocks_read": 61},
    {"cost": 0.0},
    {"top": ((1, 1e4),)},
    {"reads": ((1, 2), (3,))},
    {"reads": ((1, 2, 3),)},
]


def test_what_cannot_be_reported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "report.html"
    for odd in ODD:
        first, second, third = sample(3).trace
        with pytest.raises(UsageError, match="figures that no run has; write its trace again"):
            write_report(replace(sample(3), trace=(first, replace(second, **odd), third)), place)
    assert not place.exists()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'et_jax\[report\]'"):
        write_report(sample(3), place)
