"""The main workflows on the page: start, observe, scale, tune and stop a run; a restart of the service; keyboard only."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Page, Request, expect

from tests.support.service import LONG, Served, in_state, learning, make, run_of, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
SLEEP_ENV = "steppe/Sleep-v0"  # leaves the cores to the browser


def steps_shown(page: Page) -> str:
    return page.locator("[data-fact=steps]").inner_text()


def expect_progress(page: Page) -> None:
    """Require that curve and numbers change without interaction."""
    plot = page.get_by_role("img", name=re.compile("^Steps per second: steps.s now"))
    expect(plot).to_be_visible()
    before = (steps_shown(page), plot.get_attribute("aria-label"))
    expect(page.locator("[data-fact=steps]")).not_to_have_text(before[0])
    expect(plot).not_to_have_attribute("aria-label", before[1] or "")


def expect_actors(page: Page, count: int) -> None:
    expect(page.get_by_role("status").get_by_text(f"Scaling to {count} actor")).to_contain_text("done")
    expect(page.locator("[data-actors=desired]")).to_have_text(str(count))
    expect(page.locator("[data-actors=ready]")).to_have_text(str(count))


def record_requests(page: Page) -> list[tuple[str, str]]:
    """Record method and path of every change that the page requests from now on."""
    found: list[tuple[str, str]] = []

    def note(request: Request) -> None:
        if request.method != "GET":
            found.append((request.method, urlsplit(request.url).path.removeprefix("/api/v1")))

    page.on("request", note)
    return found


def fill_more(page: Page) -> None:
    """Arguments of the environment and the runtime: what the environment does not take is refused by name."""
    page.locator("summary", has_text="Environment").click()
    page.locator("summary", has_text="More").click()
    page.get_by_label("runtime").select_option("processes")
    arguments = page.get_by_label("kwargs")
    arguments.fill("delay_s")
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.get_by_text("Expected name=value pairs, separated by commas").first).to_be_visible()
    expect(arguments).to_be_focused()
    arguments.fill("no_such=1")
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.get_by_text("no_such").first).to_be_visible()
    arguments.fill("delay_s=0.002")


def test_start_observe_scale_tune_and_stop_a_run(page: Page, api: httpx.Client):
    """Every change goes by REST, so what is shown of commands by REST holds for the page."""
    requested = record_requests(page)
    page.get_by_role("link", name="Start a run").first.click()
    page.get_by_label("environment").fill(SLEEP_ENV)
    page.get_by_label("algorithm").select_option("ppo")
    page.get_by_label("actors", exact=True).fill("2")
    page.get_by_label("mode").select_option("async")
    page.get_by_label("steps", exact=True).fill("many")
    page.get_by_label("name").fill("story")
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.get_by_label("steps", exact=True)).to_be_focused()
    expect(page.get_by_text("A whole number, more than 0").first).to_be_visible()
    page.get_by_label("steps", exact=True).fill("500,000,000")
    page.get_by_text("Hyperparameters").click()
    page.get_by_label("learning rate").fill("0.001")
    page.get_by_label("segment steps").fill("8")
    fill_more(page)
    page.get_by_role("button", name="Start", exact=True).click()

    expect(page.get_by_role("heading", name="story")).to_be_visible()
    expect(page.locator(".head .state")).to_have_text(re.compile("Running"))
    config = run_of(api, "story")["config"]
    assert (config["agent.learning_rate"], config["actors"], config["steps"]) == (0.001, 2, 500_000_000)
    assert (config["environment.kwargs"], config["runtime"]) == ({"delay_s": 0.002}, "processes")
    expect_progress(page)
    expect(page.get_by_role("img", name=re.compile("^Return: training now"))).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^entropy"))).to_be_visible()
    expect(page.get_by_role("table", name="Number of learned segments by policy lag")).to_be_visible()
    expect(page.locator(".finding")).to_contain_text("%")
    expect(page.locator("tr[data-actor]")).to_have_count(2)
    expect(page.locator("tr[data-actor='0'] td").nth(1)).to_have_text("0")

    slider = page.get_by_role("slider", name="Number of actors")
    slider.fill("4")
    expect_actors(page, 4)
    slider.fill("1")
    expect_actors(page, 1)
    assert api.get("/api/v1/runs/story/actors").json()["ready"] == 1

    page.locator("#h-learning_rate").fill("0.00002")
    expect(page.get_by_text("0.001 → 0.00002, takes effect with the next update")).to_be_visible()
    page.get_by_role("button", name="Apply").click()
    marks = page.get_by_role("list", name="Marks on Return")
    expect(marks.get_by_text("learning_rate → 0.00002")).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^learning rate: learning_rate now 2.0e−5"))).to_be_visible()

    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator(".head .state")).to_have_text(re.compile("Paused"))
    page.get_by_role("button", name="Resume", exact=True).click()
    expect(page.locator(".head .state")).to_have_text(re.compile("Running"))
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert run_of(api, "story")["desired"] == "running"
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Stop").click()
    expect(page.locator(".head .state")).to_have_text(re.compile("Stopped"))
    assert run_of(api, "story")["state"] == "STOPPED"
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    expect(page.get_by_role("log")).to_contain_text("STOPPED")

    page.route("**/start", lambda route: route.fulfill(status=503, json={"detail": "only asked"}))
    page.locator(".buttons .primary").click()
    expect(page.get_by_text("only asked")).to_be_visible()
    paths = {("POST", "/runs")} | {("POST", f"/runs/story/{word}") for word in ("pause", "resume", "stop", "start")}
    changes = {one for one in requested if one[1].startswith("/runs")}
    assert changes == paths | {("PUT", "/runs/story/actors"), ("PATCH", "/runs/story/hyperparameters")}
    page.get_by_label("More").click()
    page.get_by_role("link", name="Start a similar run").click()
    expect(page.locator("#f-environment-kwargs")).to_have_value("delay_s=0.002")
    expect(page.locator("#f-runtime")).to_have_value("processes")


@pytest.mark.slow
def test_the_page_reconnects_to_a_restarted_service(page: Page, page_service: Served):
    with page_service.client() as api:
        run = make(api, LONG, name="steady", actors=1)
        learning(api, run)
    page.get_by_role("link", name="steady").click()
    expect_progress(page)
    port = page_service.address.rsplit(":", 1)[1]
    page_service.kill()
    expect(page.get_by_role("alert")).to_contain_text("Connection lost")
    page_service.start("--port", port)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect_progress(page)
    with page_service.client() as api:
        assert api.post(f"/api/v1/runs/{run}/stop").status_code == 202
        in_state(api, run, "STOPPED")
    expect(page.locator(".head .state")).to_have_text(re.compile("Stopped"))


LATE_CLOSE_EVENTS = """window.addEventListener("close", (event) => {
    if (!event.isTrusted) return;
    event.stopImmediatePropagation();
    setTimeout(() => event.target.dispatchEvent(new Event("close")), 500);
}, true)"""  # a busy browser sends the close event of a dialog late


@pytest.mark.slow
def test_the_page_works_with_the_keyboard_alone(page: Page, api: httpx.Client):
    page.evaluate(LATE_CLOSE_EVENTS)
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.keyboard.press("n")
    page.get_by_label("environment").focus()
    page.keyboard.press("Control+a")
    page.keyboard.type(SLEEP_ENV)
    for label, text in (
        ("actors", "1"),
        ("mode", None),
        ("steps", "500000000"),
        ("target return", None),
        ("seed", None),
    ):
        while not page.locator(f"#f-{label.replace(' ', '_')}:focus").count():
            page.keyboard.press("Tab")
        if text:
            page.keyboard.press("Control+a")
            page.keyboard.type(text)
    page.keyboard.press("Tab")
    page.keyboard.type("by-keys")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="by-keys")).to_be_visible()
    expect(page.locator("[data-actors=ready]")).to_have_text("1")
    expect(page.get_by_role("slider")).to_be_visible()
    page.keyboard.press("+")
    expect_actors(page, 2)
    page.keyboard.press("p")
    expect(page.locator(".head .state")).to_have_text(re.compile("Paused"))
    page.keyboard.press("p")
    expect(page.locator(".head .state")).to_have_text(re.compile("Running"))
    page.keyboard.press("s")
    expect(page.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    for key in ("?", "Escape", "?"):
        page.keyboard.press(key)
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("s")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".head .state")).to_have_text(re.compile("Stopped"))
    page.keyboard.press("r")
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_label("Search runs")).to_be_focused()
    page.keyboard.type("by-keys stopped")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.keyboard.press("Tab")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="by-keys")).to_be_visible()
    page.keyboard.press("?")
    page.get_by_role("checkbox", name="Enable keyboard shortcuts").press("Space")
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    expect(page.get_by_role("heading", name="by-keys")).to_be_visible()
    until(lambda: run_of(api, "by-keys")["state"] == "STOPPED", "it stays stopped")
