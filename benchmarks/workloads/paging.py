"""The page in a real Chromium before the real service: how soon it can be used with long runs behind it. Run by control.py.

One run has 1 M points; fifty have 100,000 each. The service has read none of it before. Times are from the first request of a
fresh tab, with nothing cached: until the page answers its user, and until the curves that are looked at first are drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright

from steppe.core.config.run import RunConfig
from steppe.core.contracts.reports import TrainingReport
from steppe.core.contracts.transport import TRAINING
from steppe.records.run_directory import SUMMARY, RunDirectory

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.browser import FLAGS, chromium  # found by the line above
from tests.support.service import Served

CURVES = 50
COMPARED = 8
# The page can be used when its heading is there and a key is answered: the list of keys comes, and goes again. It is looked at
# with every frame that is drawn, since whoever asks from outside the browser asks late; the clock began with the navigation.
CLOCK = """(() => {
  const whole = %(whole)s;
  const root = () => document.documentElement;
  const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const look = () => {
    const shown = document.querySelector("h1")?.textContent === %(heading)s;
    const dialog = document.querySelector("dialog[open]");
    if (!root()?.dataset.usable && shown) {
      if (dialog) {
        dialog.close();
        root().dataset.usable = performance.now();
      } else press("?");
    }
    if (root()?.dataset.usable && whole()) root().dataset.whole = performance.now();
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})()"""
DRAWN = "() => [...document.querySelectorAll('[role=img]')].some((one) => /%s/.test(one.getAttribute('aria-label')))"
CHOSEN = """() => {
    const choice = [...document.querySelectorAll("select")].find((one) => [...one.options].some((o) => o.value === "loss/s01"));
    if (choice && choice.value !== "loss/s01") {
      choice.value = "loss/s01";
      choice.dispatchEvent(new Event("change", { bubbles: true }));
    }
    return (%s)();
  }"""


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


def took_ms(browser: Browser, state: dict, address: str, heading: str, whole: str) -> tuple[float, float]:
    """Until a fresh tab at that address can be used, and until what it is opened for is there, by the tab's own clock."""
    context = browser.new_context(storage_state=state, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.add_init_script(CLOCK % {"heading": json.dumps(heading), "whole": whole})
    page.goto(address, wait_until="commit")
    root, found = page.locator("html"), list[float]()
    for name in ("data-usable", "data-whole"):
        expect(root).to_have_attribute(name, re.compile("."))
        found.append(float(root.get_attribute(name) or "nan"))
    context.close()
    return found[0], found[1]


def measure(service: Served, compared: list[str]) -> dict[str, float]:
    run = ("/#/run/million", "million", DRAWN % "Steps per second: .* now")
    views = {
        "list": ("/#/", "Runs", "() => document.querySelectorAll('tr[data-run]').length === 51"),
        "run": run,
        "again": run,
        "compare": (f"/#/compare?runs={','.join(compared)}", "Compare", CHOSEN % (DRAWN % "loss.s01: .* now")),
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
        for name, (path, heading, whole) in views.items():
            times = took_ms(browser, state, service.address + path, heading, whole)
            found[f"{name}_ms"], found[f"{name}_whole_ms"] = times
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
