"""A real Chromium before the real service: one of each for all tests, and a page of its own, signed in, for each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.browser import FLAGS, PATIENCE_MS, ROOT, chromium, opened
from tests.support.service import SHORT, Served, bring_down, in_state, make


@pytest.fixture(scope="module")  # while it is there, no test can run a loop of its own in this thread
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def parts() -> None:
    """What `make test` has fetched already."""
    subprocess.run([sys.executable, ROOT / "scripts" / "fetch_page_parts.py", "--tests"], check=True, timeout=300)


@pytest.fixture(scope="session")
def house(parts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The service of all tests here."""
    service = Served(tmp_path_factory.mktemp("house"))
    service.start()
    yield service
    bring_down(service)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """Browser and service stay until the last of these tests, and `house` ends what they started."""


@pytest.fixture
def api(house: Served) -> Iterator[httpx.Client]:
    with house.client() as client:
        yield client


@pytest.fixture(scope="session")
def cookies() -> dict:
    """Empty until somebody has signed in."""
    return {}


@pytest.fixture
def signed_in(house: Served, browser: Browser, cookies: dict) -> dict:
    """The cookie that the link left, which works once."""
    if not cookies:
        context = browser.new_context()
        page = context.new_page()
        page.goto(house.link)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        cookies |= context.storage_state()
        context.close()
    return cookies


@pytest.fixture
def page(house: Served, browser: Browser, signed_in: dict) -> Iterator[Page]:
    """On the list of runs. Nothing that it does may break or pass the content security policy."""
    context = browser.new_context(storage_state=signed_in, viewport={"width": 1280, "height": 900})
    wrong: list[str] = []
    context.on("weberror", lambda error: wrong.append(str(error.error)))
    context.on("console", lambda message: wrong.append(message.text) if "Security Policy" in message.text else None)
    yield opened(context, house)
    context.close()
    assert wrong == []


@pytest.fixture(scope="session")
def ended(house: Served) -> list[str]:
    """Two runs that have ended, with a film of their evaluation."""
    request = {**SHORT, "runtime": "inline", "evaluation": {"episodes": 1, "record": True}}
    with house.client() as client:
        runs = [make(client, request, name=f"done-{seed}", seed=seed) for seed in (1, 2)]
        for run in runs:
            in_state(client, run, "SUCCEEDED")
    return runs
