"""A real Chromium and a real service, shared by all tests here; each test has its own signed-in page."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.browser import FLAGS, PATIENCE_MS, ROOT, chromium, opened
from tests.support.service import SHORT, Served, bring_down, in_state, make


@pytest.fixture(scope="module")  # while it is open, no test can run an event loop in this thread
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def third_party_files() -> None:
    """Fetch the third-party files of the page; `make test` has done it already."""
    subprocess.run([sys.executable, ROOT / "scripts" / "fetch_page_parts.py", "--tests"], check=True, timeout=300)


@pytest.fixture(scope="session")
def page_service(third_party_files: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The service that all tests here share."""
    service = Served(tmp_path_factory.mktemp("page-service"))
    service.start()
    yield service
    bring_down(service)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """Replace the check for leftovers: browser and service are shared, and `page_service` stops what they started."""


@pytest.fixture
def api(page_service: Served) -> Iterator[httpx.Client]:
    with page_service.client() as client:
        yield client


@pytest.fixture(scope="session")
def cookies() -> dict:
    """The cookies of a signed-in browser; empty before the first sign-in."""
    return {}


@pytest.fixture
def signed_in(page_service: Served, browser: Browser, cookies: dict) -> dict:
    """Sign in with the link, which works once, and return the cookies."""
    if not cookies:
        context = browser.new_context()
        page = context.new_page()
        page.goto(page_service.link)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        cookies |= context.storage_state()
        context.close()
    return cookies


@pytest.fixture
def page(page_service: Served, browser: Browser, signed_in: dict) -> Iterator[Page]:
    """A page with the list of runs; fails on JavaScript errors and violations of the content security policy."""
    context = browser.new_context(storage_state=signed_in, viewport={"width": 1280, "height": 900})
    errors: list[str] = []
    context.on("weberror", lambda error: errors.append(str(error.error)))
    context.on("console", lambda message: errors.append(message.text) if "Security Policy" in message.text else None)
    yield opened(context, page_service)
    context.close()
    assert errors == []


@pytest.fixture(scope="session")
def ended(page_service: Served) -> list[str]:
    """Two runs that have ended, with a video of their evaluation."""
    request = {**SHORT, "runtime": "inline", "evaluation": {"episodes": 1, "record": True}}
    with page_service.client() as client:
        runs = [make(client, request, name=f"done-{seed}", seed=seed) for seed in (1, 2)]
        for run in runs:
            in_state(client, run, "SUCCEEDED")
    return runs
