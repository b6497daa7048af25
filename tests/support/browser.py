"""Debian's Chromium, and how it is opened."""

from __future__ import annotations

import shutil
from pathlib import Path

from playwright.sync_api import BrowserContext, Page

from tests.support.debian import from_debian
from tests.support.service import Served

ROOT = Path(__file__).parents[2]
PATIENCE_MS = 180_000  # only bounds how long a failure takes
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


def chromium() -> str:
    """The path of Debian's browser."""
    return from_debian("chromium", lambda: shutil.which("chromium"))


def opened(context: BrowserContext, house: Served) -> Page:
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(house.address)
    return page
