"""A report in a real browser: whole without a network, readable by everybody, with its figures in it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import DESKTOP, PHONE, Look, browsing
from samples import sample

from et_jax.errors import UsageError
from et_jax.report.page import check_place, write_report
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


def test_two_thousand_tokens_are_under_three_megabytes(path: Path) -> None:
    assert path.stat().st_size < 3e6


def test_it_asks_nothing_of_a_network_and_complains_of_nothing(look: Look) -> None:
    look.scroll()
    assert look.page.locator(".chart canvas").count() == look.page.locator(".chart").count() == 9
    assert (look.said, look.asked) == ([], [])


def test_its_policy_forbids_what_it_does_not_hold(look: Look) -> None:
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


def test_the_text_is_that_of_the_run_whatever_it_says(look: Look) -> None:
    assert look.page.locator(".text").text_content() == long().text
    assert look.page.locator("b").count() == 0


def test_the_token_that_is_pointed_at_is_told(look: Look) -> None:
    row = long().trace[0]
    look.page.locator(".text > span").first.hover()
    told = look.page.locator(".token").inner_text()
    assert f"{row.entropy:.4g}" in told and f"{row.surprisal:.4g}" in told and f"{row.temperature:.4g}" in told
    assert f"{row.blocks_read} of {row.blocks_held}" in told and "accepted" in told and "small model" in told
    assert f'"</script >{row.top[0][0]}"' in told and "50.0%" in told


def test_keys_move_through_the_text(look: Look) -> None:
    def at() -> str:
        return look.page.locator(".token p").first.inner_text().split(" token ")[1]

    look.page.locator(".text").focus()
    for key, wanted in (("ArrowRight", 2), ("ArrowDown", 12), ("PageDown", 112), ("ArrowLeft", 111), ("End", 2000)):
        look.page.keyboard.press(key)
        assert at() == f"{wanted} of 2000", key
    look.page.keyboard.press("Home")
    assert at() == "1 of 2000"
    assert look.page.locator(".text .at").count() == 1


def test_a_click_in_a_chart_shows_its_token(look: Look) -> None:
    look.scroll()
    chart = look.page.locator(".chart canvas").first
    chart.scroll_into_view_if_needed()
    size = chart.bounding_box()
    chart.click(position={"x": size["width"] * 0.5, "y": size["height"] * 0.5})
    told = look.page.locator(".token p").first.inner_text()
    assert abs(int(told.split(" token ")[1].split(" of ")[0]) - 1000) < 100


def test_the_button_turns_light_to_dark(look: Look) -> None:
    look.scroll()
    button = look.page.get_by_role("button", name="Dark")
    back = "() => getComputedStyle(document.body).backgroundColor"
    light = look.page.evaluate(back)
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert look.page.evaluate(back) != light
    assert look.said == []


def test_ten_thousand_tokens_open_and_answer(browser: Any, tmp_path: Path) -> None:
    place = tmp_path / "long.html"
    write_report(sample(10_000, drafts=True), place)
    look = Look(browser, place)
    look.scroll()
    look.page.locator(".text").focus()
    look.page.keyboard.press("End")
    assert "10000 of 10000" in look.page.locator(".token").inner_text()
    assert (look.said, look.asked) == ([], [])
    look.close()


def test_several_continuations_have_a_section_each(browser: Any, tmp_path: Path) -> None:
    write_report([sample(20), sample(30, seed=1, index=1)], tmp_path / "two.html")
    look = Look(browser, tmp_path / "two.html")
    assert look.page.locator("section h2").all_inner_texts() == ["Text 1 of 2", "Text 2 of 2"]
    look.page.get_by_role("link", name="Text 2 of 2").click()
    assert look.page.url.endswith("#text-2")
    look.close()


def test_the_data_cannot_end_the_script_they_stand_in(look: Look) -> None:
    data = json.loads(look.page.evaluate("() => document.getElementById('report').textContent"))
    assert set(data) == {"figures", "tokens"}
    assert all("</script >" in word for word in data["tokens"]["text-1"]["words"])


class TestRefusals:
    def test_an_empty_run(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"produced no token, so there is nothing to report"):
            write_report([replace(sample(1), trace=(), token_ids=())], tmp_path / "empty.html")
        assert not (tmp_path / "empty.html").exists()

    @pytest.mark.parametrize(
        "odd",
        [
            {"blocks_held": 0},
            {"blocks_read": 61},
            {"cost": 0.0},
            {"top": ((1, 1e4),)},
            {"reads": ((1, 2), (3,))},
            {"reads": ((1, 2, 3),)},
        ],
    )
    def test_figures_that_no_run_has(self, odd: dict[str, Any], tmp_path: Path) -> None:
        first, *others = sample(3).trace
        rows = (first, replace(others[0], **odd), *others[1:])
        with pytest.raises(UsageError, match="figures that no run has; write its trace anew"):
            write_report(replace(sample(3), trace=rows), tmp_path / "report.html")

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"cannot be written \(No such file or directory\); choose another file"):
            write_report(sample(3), tmp_path / "absent" / "report.html")

    def test_another_ending(self) -> None:
        with pytest.raises(UsageError, match=r"run\.pdf should end in \.html"):
            check_place("run.pdf")

    def test_without_the_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(UsageError, match=r"pip install 'et_jax\[report\]'"):
            write_report(sample(3), tmp_path / "report.html")
