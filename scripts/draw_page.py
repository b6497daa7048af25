"""Take the screenshots of the page for docs/img, with a real service, real runs and Chromium. Run by `make pictures`."""

from __future__ import annotations

import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.browser import FLAGS, PATIENCE_MS, chromium  # noqa: E402 (the line above makes it importable)
from tests.support.service import Served, bring_down, finished, in_state, learning, make, until  # noqa: E402

IMAGES = ROOT / "docs" / "img"
DESK, PHONE = {"width": 1360, "height": 1180}, {"width": 390, "height": 844}
ENDED = (
    {"name": "cartpole-dqn", "algo": "dqn", "env": "CartPole-v1", "steps": 12_000},
    {"name": "acrobot-ppo", "algo": "ppo", "env": "Acrobot-v1", "steps": 40_000},
    {"name": "cartpole-seed-2", "algo": "ppo", "env": "CartPole-v1", "seed": 2, "steps": 60_000},
)
SHOWN = {
    "name": "cartpole-async", "env": "CartPole-v1", "mode": "async", "actors": 2, "envs": 8, "steps": 20_000_000,
    "agent": {"learning_rate": 3e-4},
    "evaluation": {"every_steps": 10_000, "max_share": 0.5, "episodes": 2},
}  # fmt: skip
REPLAYED = {
    "name": "cartpole-replay", "algo": "dqn", "env": "CartPole-v1", "mode": "async", "actors": 2, "envs": 4,
    "steps": 20_000_000, "evaluation": {"every_steps": 5_000, "max_share": 0.5, "episodes": 2},
}  # fmt: skip


def main() -> None:
    expect.set_options(timeout=PATIENCE_MS)
    with tempfile.TemporaryDirectory() as folder:
        service = Served(Path(folder))
        service.start()
        try:
            _make_runs(service)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
                _take_screenshots(service, browser)
                browser.close()
        finally:
            bring_down(service)


def _make_runs(service: Served) -> None:
    with service.client() as api:
        for request in ENDED:
            run = make(api, {"runtime": "inline", "evaluation": {"episodes": 3}, **request})
            in_state(api, run, "SUCCEEDED")
        make(api, {"name": "pendulum-waits", "env": "Pendulum-v1", "start": False})
        run = make(api, SHOWN)
        learning(api, run)
        path = f"/api/v1/runs/{run}"
        until(lambda: _steps(api, path) > 130_000, "the first half of the curves")
        change: dict[str, Any] = {"values": {"learning_rate": 1e-4, "clip": 0.1}}
        finished(api, api.patch(f"{path}/hyperparameters", json=change))
        until(lambda: _steps(api, path) > 260_000 and _evaluations(api, path) > 3, "the second half of the curves")
        run = make(api, REPLAYED)
        learning(api, run)
        until(lambda: _sample_points(api, f"/api/v1/runs/{run}") > 20, "points of the samples-per-insert curve")


def _steps(api: Any, path: str) -> int:
    return int(api.get(path).json()["progress"]["env_steps"])


def _evaluations(api: Any, path: str) -> int:
    return len(api.get(f"{path}/evaluations").json()["evaluations"])


def _sample_points(api: Any, path: str) -> int:
    """Return the number of points of the samples-per-insert curve."""
    found = api.get(f"{path}/metrics", params={"series": "memory/samples_per_insert"}).json()["series"]
    return len(found[0]["points"])


def _take_screenshots(service: Served, browser: Browser) -> None:
    first = browser.new_context()
    first.new_page().goto(service.link)
    state = first.storage_state()
    for scheme in ("light", "dark"):
        desk = browser.new_context(storage_state=state, color_scheme=scheme, viewport=DESK)
        page = desk.new_page()
        _save(_run(page, service), f"page-run-{scheme}")
        _save(_list(page, service), f"page-list-{scheme}")
        if scheme == "light":
            _save(_replay(page, service), "page-replay-light")
        desk.close()
        phone = browser.new_context(storage_state=state, color_scheme=scheme, viewport=PHONE, has_touch=True)
        page = phone.new_page()
        _save(_list(page, service) if scheme == "light" else _run(page, service), f"page-phone-{scheme}")
        phone.close()


def _run(page: Page, service: Served) -> Page:
    page.goto(f"{service.address}/#/run/{SHOWN['name']}")
    expect(page.get_by_role("list", name="Marks on Return")).to_be_visible()
    expect(page.locator(".smalls .uplot").first).to_be_visible()
    expect(page.locator(".finding")).to_be_visible()
    expect(page.locator("tr[data-actor]").first).to_be_visible()
    return page


def _replay(page: Page, service: Served) -> Page:
    page.goto(f"{service.address}/#/run/{REPLAYED['name']}")
    expect(page.get_by_role("region", name="Samples per insert").locator(".uplot")).to_be_visible()
    expect(page.locator(".smalls .uplot").first).to_be_visible()
    expect(page.locator(".finding")).to_be_visible()
    return page


def _list(page: Page, service: Served) -> Page:
    page.goto(f"{service.address}/#/")
    expect(page.get_by_role("link", name=str(SHOWN["name"]))).to_be_visible()
    return page


def _save(page: Page, name: str) -> None:
    """Save a screenshot with a palette of 128 colours, which makes the file small."""
    image = Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    image.save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
