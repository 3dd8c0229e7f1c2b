"""A page in a real, headless Chromium, watched: it may ask nobody for anything, and must not complain."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    """A Chromium of the system, or the one that Playwright installed."""
    for name in _NAMES:
        if found := shutil.which(name):
            return found
    with sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
    return str(own) if own.is_file() else None


@contextmanager
def started(path: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser, page: Path, width: int = 1400, height: int = 900, folded: bool = False, **options: Any
) -> Iterator[Page]:
    """The page, ready and unfolded; afterwards, whatever it asked for or complained of fails the test."""
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    tab = context.new_page()
    asked: list[str] = []
    complaints: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    tab.goto(page.resolve().as_uri())
    for _ in range(600):  # slow machines get a minute; a page that has failed is not waited for
        if complaints or tab.locator("body[data-ready]").count():
            break
        tab.wait_for_timeout(100)
    assert not complaints, complaints
    assert tab.locator("body[data-ready]").count() == 1
    if not folded:
        tab.evaluate("document.querySelectorAll('details.fold').forEach((fold) => (fold.open = true))")
    try:
        yield tab
        tab.wait_for_timeout(300)
    finally:
        context.close()
    assert not complaints, complaints
    assert all(url.startswith(("data:", "blob:")) for url in asked[1:]), asked


if __name__ == "__main__":
    found = find()
    print(found or "none")
    raise SystemExit(found is None)
