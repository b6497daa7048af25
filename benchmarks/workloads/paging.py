"""The page in a real Chromium before the real service: how soon it can be used with long runs behind it. Run by control.py.

One run has 1 M points; fifty have 100,000 each. The service has read none of it before. Times are from the first request of a
fresh tab: until the page answers its user, and until the curves that are looked at first are drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from steppe.core.config import RunConfig
from steppe.core.links import TRAINING
from steppe.core.reports import TrainingReport
from steppe.records.directory import SUMMARY, RunDirectory

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "control"), str(TESTS / "control" / "page")]

from browser_kit import FLAGS, chromium  # noqa: E402 (found by the line above)
from control_kit import Served  # noqa: E402

CURVES = 50
COMPARED = 8


def write(root: Path, name: str, points: int, *copies: str) -> None:
    """A run that has ended with so many points, and others that have the same history."""
    directory = RunDirectory.create(RunConfig(env="CartPole-v1", run_dir=root / name), {})
    for step in range(1, points // CURVES + 1):
        stats = {f"s{number:02}": step * number % 97 / 7 for number in range(CURVES - 3)}  # three come by themselves
        report = TrainingReport(
            run=name, version=step, updates=step, env_steps=100 * step, train_s=step / 2, stats=stats
        )
        directory.store.post(TRAINING, report.record())
    directory.store.set_status("SUCCEEDED", "steps_done")
    directory.release()
    directory.store.close()
    # Every run that came to its end has a summary.
    (directory.path / SUMMARY).write_text(json.dumps({"env_steps": 2 * points, "updates": points // CURVES}))
    for copy in copies:
        shutil.copytree(directory.path, root / copy)


def usable(page: Page) -> None:
    """Its keys are heard: the list of them comes and goes."""
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()


def drawn(page: Page, words: str) -> None:
    expect(page.get_by_role("img", name=re.compile(words)).first).to_be_visible()


def took_ms(
    browser: Browser, state: dict, address: str, heading: str, then: Callable[[Page], None]
) -> tuple[float, float]:
    """Until a fresh tab at that address can be used, and until what it is opened for is there."""
    context = browser.new_context(storage_state=state, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    begin = time.perf_counter()
    page.goto(address, wait_until="commit")
    expect(page.get_by_role("heading", level=1, name=heading)).to_be_visible()
    usable(page)
    ready = time.perf_counter()
    then(page)
    whole = time.perf_counter()
    context.close()
    return 1e3 * (ready - begin), 1e3 * (whole - begin)


def measure(service: Served, compared: list[str]) -> dict[str, float]:
    views: dict[str, tuple[str, str, Callable[[Page], None]]] = {
        "list": ("/#/", "Runs", lambda page: expect(page.locator("tr[data-run]")).to_have_count(51)),
        "run": ("/#/run/million", "million", lambda page: drawn(page, "Steps per second: .* now")),
        "again": ("/#/run/million", "million", lambda page: drawn(page, "Steps per second: .* now")),
        "compare": (
            f"/#/compare?runs={','.join(compared)}",
            "Compare",
            lambda page: (page.get_by_label("curve").select_option("loss/s01"), drawn(page, "loss.s01: .* now")),
        ),
    }
    found: dict[str, float] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        context = browser.new_context()
        page = context.new_page()
        page.goto(service.link)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        state = context.storage_state()
        context.close()
        for name, (path, heading, then) in views.items():
            found[f"{name}_ms"], found[f"{name}_whole_ms"] = took_ms(
                browser, state, service.address + path, heading, then
            )
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--each", type=int, default=100_000)
    given = parser.parse_args()
    expect.set_options(timeout=60_000)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    root = Path(os.environ["STEPPE_RUNS"])
    crowd = [f"crowd-{number:02}" for number in range(50)]
    write(root, "million", given.points)
    write(root, crowd[0], given.each, *crowd[1:])
    service = Served(root.parent)
    service.start()
    try:
        found = measure(service, crowd[:COMPARED])
    finally:
        service.stop()
    settings = {"points": given.points, "runs": 51, "points_each": given.each, "compared": COMPARED}
    print(json.dumps({"value": found.pop("run_ms"), **found, "settings": settings}))


if __name__ == "__main__":
    main()
