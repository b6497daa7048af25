"""Accessibility (axe), themes, small screens, videos, logs and comparisons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.browser import opened
from tests.support.cases import rest_slow
from tests.support.service import Served

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
AXE = Path(__file__).parent / "vendor" / "axe.js"
VIEWS = ("/", "/new", "/run/done-1", "/compare?runs=done-1,done-2")
# No frame is drawn, and short timeouts become an hour.
NO_FRAMES = """
  window.requestAnimationFrame = () => 0;
  const later = window.setTimeout;
  window.setTimeout = (act, ms, ...more) => later(act, ms > 0 && ms <= 100 ? 3600000 : ms, ...more);
"""
SIZES = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}


def show(page: Page, page_service: Served, view: str) -> None:
    """Open a view, wait until it has loaded, and expand all sections."""
    page.goto(f"{page_service.address}/#{view}")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    if view.startswith(("/run", "/compare")):
        expect(page.locator(".uplot").first).to_be_visible()
    folded = page.locator("details:not([open]):not(.menu) > summary")
    while folded.count():
        folded.first.click()


@pytest.mark.parametrize("scheme", rest_slow("light", "dark"))
def test_axe_finds_no_violations(
    page_service: Served, browser: Browser, signed_in: dict, ended: list[str], scheme: str
):
    context = browser.new_context(storage_state=signed_in, color_scheme=scheme, bypass_csp=True)
    page = opened(context, page_service)
    for size in SIZES.values():
        page.set_viewport_size(size)
        for view in VIEWS:
            show(page, page_service, view)
            page.add_script_tag(path=AXE)
            found = page.evaluate("async () => (await axe.run()).violations")
            violations = [(one["id"], node["html"][:200]) for one in found for node in one["nodes"]]
            assert violations == [], (view, size)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    assert page.evaluate("async () => (await axe.run()).violations.map((one) => one.id)") == []
    context.close()


@pytest.mark.regression
@pytest.mark.usefixtures("ended")
def test_keys_work_before_a_frame_is_drawn(page_service: Served, browser: Browser, signed_in: dict):
    """On a busy machine the first frame is late, and keys typed before it must not be lost."""
    context = browser.new_context(storage_state=signed_in)
    context.add_init_script(NO_FRAMES)
    page = opened(context, page_service)
    search = page.get_by_label("Search runs")
    expect(search).to_be_visible()
    page.keyboard.press("/")
    expect(search).to_be_focused()
    context.close()


def test_every_view_fits_a_phone(page: Page, page_service: Served, ended: list[str]):
    page.set_viewport_size(SIZES["phone"])
    for view in VIEWS:
        show(page, page_service, view)
        expect(page.locator("html")).to_have_js_property("scrollWidth", SIZES["phone"]["width"])
    page.goto(page_service.address)
    row = page.get_by_role("row").filter(has_text="done-1")
    for text in ("done-1", "CartPole-v1 · ppo", "Succeeded"):
        expect(row.get_by_text(text)).to_be_in_viewport()
    expect(page.get_by_role("link", name="Start a run").last).to_be_in_viewport()


def test_the_theme_follows_the_system_until_it_is_changed(page: Page, page_service: Served):
    dark, light = re.compile(r"rgb\(\d\d, \d\d, \d\d\)"), re.compile(r"rgb\(2\d\d, 2\d\d, 2\d\d\)")
    ground = page.locator("body")
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    expect(ground).to_have_css("background-color", dark)
    page.emulate_media(color_scheme="light")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    expect(ground).to_have_css("background-color", light)
    page.get_by_role("button", name="Dark or light theme").click()
    page.reload()  # the choice is saved and overrides the system's theme
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    expect(ground).to_have_css("background-color", dark)


def test_videos_logs_and_tables(page: Page, page_service: Served, ended: list[str]):
    show(page, page_service, "/run/done-1")
    page.get_by_role("button", name=re.compile("Play the video")).first.click()
    video = page.get_by_role("img", name=re.compile("One episode of evaluation"))
    expect(video).to_be_visible()
    expect(video).to_have_js_property("complete", True)
    expect(video).not_to_have_js_property("naturalWidth", 0)
    page.get_by_role("button", name="Close the video").click()
    expect(video).to_have_count(0)
    expect(page.get_by_role("log")).to_contain_text("done-1 ended SUCCEEDED")
    rows = page.locator("figure", has_text="Return").get_by_role("row")
    expect(rows.first).to_contain_text("training")
    expect(rows.nth(1)).to_contain_text(re.compile(r"\d"))


def test_selected_runs_are_compared(page: Page, ended: list[str]):
    for run in ended:
        page.get_by_role("checkbox", name=f"Compare {run}").check()
    page.get_by_role("button", name="Compare 2").click()
    plot = page.get_by_role("img", name=re.compile("^train.return_mean: done-1 now .*; done-2 now"))
    expect(plot).to_be_visible()
    expect(page.locator(".uplot canvas")).to_be_visible()
    page.get_by_label("curve").select_option("loss/entropy")
    expect(page.get_by_role("img", name=re.compile("^loss.entropy: done-1 now .*; done-2 now"))).to_be_visible()
    page.get_by_label("over").select_option("s")
    expect(page.get_by_role("link", name="done-2")).to_be_visible()


def test_without_a_session_the_page_explains_how_to_sign_in(page_service: Served, browser: Browser):
    context = browser.new_context()
    page = context.new_page()
    for path in ("/", "/sign-in?code=used"):
        answer = page.goto(page_service.address + path)
        assert answer is not None
        assert answer.status == 401
        expect(page.get_by_role("heading")).to_have_text("You are not signed in")
    context.close()
