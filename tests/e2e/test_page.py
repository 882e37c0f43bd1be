"""The page on the real server: a text is typed, its tokens show where they come from, and both ways of decoding give the same."""

from __future__ import annotations

from tests.browsing import figure, launched, opened, text_of


def test_demo_in_the_browser(served: str) -> None:
    for browser in launched():
        for page in opened(browser, served):
            page.set_default_timeout(120_000)
            page.fill("#prompt", "Write a Python function that adds two numbers.")
            page.fill("#max_tokens", "40")
            page.click("#generate")
            page.locator("#status", has_text="Complete").wait_for()
            assert sum(page.locator(f".output .{origin}").count() > 0 for origin in ("drafter", "refiner", "target")) >= 2
            assert 1 < float(figure(page, "tau")) <= 8
            assert page.locator("#ready[data-state=ready]").is_visible()
            page.check("#compare")
            page.click("#generate")
            page.locator("#status", has_text="Complete").wait_for()
            assert text_of(page, 0) == text_of(page, 1) != ""
            assert float(figure(page, "tau", 1)) == 1
            assert "Both texts are equal, token by token" in page.locator("#verdict").inner_text()
