"""A browser that looks at pages: what they ask of a network, what they complain of, what a reader could not use."""

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DESKTOP, PHONE = (1280, 900), (390, 844)


@contextlib.contextmanager
def browsing() -> Iterator[Any]:
    """Yield a headless browser; skip where there is none, unless ET_JAX_BROWSER says that there has to be one."""
    wanted = os.environ.get("ET_JAX_BROWSER")
    found = shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None and wanted:
        pytest.fail(f"ET_JAX_BROWSER names {wanted}, which is not there")
    if found is None:
        pytest.skip("no Chromium here: install Debian's chromium, or Chrome")
    if importlib.util.find_spec("playwright") is None and not wanted:
        pytest.skip("no playwright here: pip install -e '.[check]'")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


class Look:
    """A page that is open: `said` is what it complained of, `asked` what it asked of a network."""

    def __init__(self, browser: Any, path: Path, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self._ask(request.url, path.as_uri()))
        self.page.goto(path.as_uri())

    def _ask(self, url: str, own: str) -> None:
        if url.split("#")[0] != own and not url.startswith("data:"):
            self.asked.append(url)

    def scroll(self) -> None:
        """Bring every chart onto the screen, and wait until it is drawn."""
        for chart in self.page.locator(".chart").all():
            chart.scroll_into_view_if_needed(timeout=60_000)
            chart.locator("canvas").wait_for(timeout=60_000)
        self.page.evaluate("() => scrollTo(0, 0)")

    def faults(self) -> list[str]:
        """Return what axe finds that keeps readers from using the page: serious and critical faults."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [
            f"{one['id']}: {one['help']} ({node['target']})"
            for one in found
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]

    def close(self) -> None:
        self.page.close()
