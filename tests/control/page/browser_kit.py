"""Debian's Chromium, and how it is opened."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from control_kit import Served
from playwright.sync_api import BrowserContext, Page

ROOT = Path(__file__).parents[3]
PATIENCE_MS = 90_000
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


def chromium() -> str:
    """Debian's browser; installed where it is missing and we may."""
    if shutil.which("chromium") is None and os.getuid() == 0:
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]):
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL, timeout=600)
    found = shutil.which("chromium")
    assert found is not None, "these tests need Chromium: apt-get install chromium"
    return found


def opened(context: BrowserContext, house: Served) -> Page:
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(house.address)
    return page
