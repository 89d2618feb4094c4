"""What tests of pages share: a real headless Chromium, and what it says of a page that it opens from the disk."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1440, "height": 900}
_FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_IS_DEMANDED = os.environ.get("BENCHCTL_DEMANDED_BROWSER") == "1"
needs_browser = pytest.mark.skipif(
    _FOUND is None and not _IS_DEMANDED, reason="no Chromium is installed; scripts/browser.sh does it"
)


@contextmanager
def chromium() -> Iterator[Browser]:
    assert _FOUND is not None, "BENCHCTL_DEMANDED_BROWSER=1 and no Chromium found; run scripts/browser.sh"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_FOUND, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, path: Path, size: dict[str, int] = DESKTOP, **options: Any) -> Iterator[Page]:
    """A page from the disk. When it is closed again it must have said nothing and asked nobody for anything."""
    context = browser.new_context(viewport=size, **options)
    said: list[str] = []
    try:
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: said.append(request.url) if _is_foreign(request.url) else None)
        page.goto(path.as_uri())
        yield page
        page.wait_for_timeout(50)
    finally:
        context.close()
    assert said == []


def _is_foreign(url: str) -> bool:
    return not url.startswith(("file:", "data:", "blob:"))


def look_at_all(page: Page) -> None:
    """Scroll through the page, so that everything in it has been in view."""
    page.evaluate(
        """async () => {
            for (let y = 0; y < document.body.scrollHeight; y += 300) {
                scrollTo(0, y);
                await new Promise((done) => setTimeout(done, 30));
            }
            scrollTo(0, 0);
        }"""
    )


CONTRAST = """(selector) => {
    const luminance = (rgb) => {
        const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = rgb.map((v) => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const behind = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const colour = parts(getComputedStyle(at).backgroundColor);
            if (colour.length < 4 || colour[3] > 0) return colour.slice(0, 3);
        }
        return [255, 255, 255];
    };
    return Array.from(document.querySelectorAll(selector), (element) => {
        const [a, b] = [parts(getComputedStyle(element).color).slice(0, 3), behind(element)].map(luminance);
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    });
}"""
"""WCAG contrast ratio of the text of every element of a selector to what is behind it."""
