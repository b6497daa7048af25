"""Fifty runs of 100,000 points each: what is sent and drawn stays bounded, and everything on the page can be used."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Response, expect

from steppe.core.config.run import RunConfig
from steppe.core.contracts.reports import TrainingReport
from steppe.core.contracts.transport import TRAINING
from steppe.records.run_directory import RunDirectory
from tests.support.browser import opened
from tests.support.service import Served, bring_down

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
RUNS, REPORTS, CURVES = 50, 2_000, 50
PEAK_AT, PEAK = 777, 123_456.0
WIDTH = 1280
ANSWER_BYTES = 1 << 20  # of any answer, whatever the run has behind it


@pytest.fixture(scope="module")
def crowded(parts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    service = Served(tmp_path_factory.mktemp("crowded"))
    root = service.root / "runs"
    first = RunDirectory.create(RunConfig(env="CartPole-v1", run_dir=root / name(0)), {})
    for step in range(1, REPORTS + 1):
        stats = {f"s{number:02}": step * number % 97 / 7 for number in range(CURVES - 3)}  # three come by themselves
        stats["s01"] = PEAK if step == PEAK_AT else 1.0
        report = TrainingReport(
            run=first.id, version=step, updates=step, env_steps=100 * step, train_s=step / 2, stats=stats
        )
        first.store.post(TRAINING, report.record())
    first.store.set_status("SUCCEEDED", "steps_done")
    first.release()
    first.store.close()
    for number in range(1, RUNS):
        shutil.copytree(first.path, root / name(number))
    service.start()
    yield service
    bring_down(service)


def name(number: int) -> str:
    return f"crowd-{number:02}"


@pytest.fixture
def crowd(crowded: Served, browser: Browser) -> Iterator[tuple[Page, list[Response]]]:
    """The page, signed in, and every answer of the API that it has got."""
    context = browser.new_context(viewport={"width": WIDTH, "height": 900})
    answers: list[Response] = []
    context.on("response", lambda answer: answers.append(answer) if "/api/v1/" in answer.url else None)
    page = opened(context, crowded)
    page.goto(crowded.link)
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    yield page, answers
    context.close()


@pytest.mark.slow
def test_fifty_long_runs(crowded: Served, crowd: tuple[Page, list[Response]]):
    page, answers = crowd
    expect(page.locator("tr[data-run]")).to_have_count(RUNS)
    assert not [answer.url for answer in answers if "/metrics" in answer.url], "a list needs no curve"
    page.get_by_role("searchbox").fill("crowd-4")
    expect(page.locator("tr[data-run]")).to_have_count(10)
    page.get_by_role("searchbox").fill("")

    page.get_by_role("link", name=name(7)).click()
    peaked = page.get_by_role("img", name=re.compile("s01.*between 1 and 123.5K"))
    expect(peaked).to_be_visible()  # thinned out, and its peak still there
    compared = ",".join(map(name, range(8)))
    page.goto(f"{crowded.address}/#/compare?runs={compared}")
    page.get_by_label("curve").select_option("loss/s01")
    together = page.get_by_role("img", name=re.compile("loss.s01: " + ".*".join(f"{name(n)} now" for n in range(8))))
    expect(together).to_be_visible()
    page.get_by_label("over").select_option("s")
    expect(page.locator(".uplot")).to_be_visible()

    curves = [json.loads(answer.body()) for answer in answers if "/metrics" in answer.url and answer.ok]
    series = [one for answer in curves for one in answer["series"] if one["total"] == REPORTS]
    assert len(series) > CURVES
    assert max(len(one["points"]) for one in series) <= WIDTH / 2, "no more points than can be told apart"
    assert max(len(answer.body()) for answer in answers) <= ANSWER_BYTES
