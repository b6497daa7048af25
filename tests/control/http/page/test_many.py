"""Fifty runs with 100,000 points each: responses and charts have a limited size, and the page stays usable."""

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
ANSWER_BYTES = 1 << 20  # maximum size of a response


@pytest.fixture(scope="module")
def many_runs_service(third_party_files: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    service = Served(tmp_path_factory.mktemp("many_runs_service"))
    root = service.root / "runs"
    first = RunDirectory.create(RunConfig(env="CartPole-v1", run_dir=root / name(0)), {})
    for step in range(1, REPORTS + 1):
        stats = {f"s{number:02}": step * number % 97 / 7 for number in range(CURVES - 3)}  # every report has three more
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
    return f"page_with_responses-{number:02}"


@pytest.fixture
def page_with_responses(many_runs_service: Served, browser: Browser) -> Iterator[tuple[Page, list[Response]]]:
    """A signed-in page, and the list of its API responses."""
    context = browser.new_context(viewport={"width": WIDTH, "height": 900})
    answers: list[Response] = []
    context.on("response", lambda answer: answers.append(answer) if "/api/v1/" in answer.url else None)
    page = opened(context, many_runs_service)
    page.goto(many_runs_service.link)
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    yield page, answers
    context.close()


@pytest.mark.slow
def test_the_page_stays_usable_with_fifty_long_runs(
    many_runs_service: Served, page_with_responses: tuple[Page, list[Response]]
):
    page, answers = page_with_responses
    expect(page.locator("tr[data-run]")).to_have_count(RUNS)
    assert not [answer.url for answer in answers if "/metrics" in answer.url], "the list of runs loads no curves"
    page.get_by_role("searchbox").fill("page_with_responses-4")
    expect(page.locator("tr[data-run]")).to_have_count(10)
    page.get_by_role("searchbox").fill("")

    page.get_by_role("link", name=name(7)).click()
    peaked = page.get_by_role("img", name=re.compile("s01.*between 1 and 123.5K"))
    expect(peaked).to_be_visible()  # downsampled, with its peak
    compared = ",".join(map(name, range(8)))
    page.goto(f"{many_runs_service.address}/#/compare?runs={compared}")
    page.get_by_label("curve").select_option("loss/s01")
    together = page.get_by_role("img", name=re.compile("loss.s01: " + ".*".join(f"{name(n)} now" for n in range(8))))
    expect(together).to_be_visible()
    page.get_by_label("over").select_option("s")
    expect(page.locator(".uplot")).to_be_visible()

    curves = [json.loads(answer.body()) for answer in answers if "/metrics" in answer.url and answer.ok]
    series = [one for answer in curves for one in answer["series"] if one["total"] == REPORTS]
    assert len(series) > CURVES
    assert max(len(one["points"]) for one in series) <= WIDTH / 2, "no more points than can be distinguished"
    assert max(len(answer.body()) for answer in answers) <= ANSWER_BYTES
