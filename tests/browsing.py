"""The playground page in headless chromium: opening it, and what stands on it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def launched() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(CHROMIUM))
        yield browser
        browser.close()


def opened(browser: Browser, address: str, **options: Any) -> Iterator[Page]:
    """The page; at the end nothing may have gone wrong in it, and nothing may have been asked of anybody else."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(10_000)
    asked: list[str] = []
    failures: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.goto(address)
    yield page
    context.close()
    assert not failures
    assert asked
    assert all(url.startswith((f"{address.rstrip('/')}/", "data:")) for url in asked), asked


def figure(page: Page, name: str, pane: int = 0) -> str:
    return page.locator(f"[data-figure={name}]").nth(pane).inner_text()


def text_of(page: Page, pane: int = 0) -> str:
    return str(page.locator(".output").nth(pane).text_content())
