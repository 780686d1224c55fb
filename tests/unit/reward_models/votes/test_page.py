"""The page in a real browser: clicks, keys, dragging, a phone, the dark. Skipped without chromium and Playwright."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from voting import group, pngs, service

from reward_models.votes.ballots import Ballots

api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
HTML = '<b>bold</b><img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[str, Ballots]]:
    """A service with four groups of four images."""
    with service(tmp_path) as (url, ballots, _):
        for number in range(1, 5):
            described = group(number, together=[1, 2, 3, 4], images=4)
            ballots.ask(described, HTML if number == 4 else f"prompt {number}", pngs(4))
        yield url, ballots


def opened(browser: Any, url: str, **options: Any) -> Any:
    """The page, with a group on it that can be voted on; anything the browser complains of is an error."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    page = context.new_page()
    page.set_default_timeout(5000)
    page.problems = []
    page.on("console", lambda message: message.type in ("error", "warning") and page.problems.append(message.text))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(url)
    settled(page, "prompt 1")
    return page


def settled(page: Any, prompt: str) -> None:
    page.wait_for_function("text => document.querySelector('#prompt').textContent === text", arg=prompt)
    page.wait_for_timeout(300)  # in which what was meant for the group before does nothing


def ranks(ballots: Ballots) -> list[list[int]]:
    return [row.ranks for row in ballots.preferences()]


def test_clicks_and_keys_pick_skip_and_take_back(browser: Any, place: tuple[str, Ballots]) -> None:
    url, ballots = place
    page = opened(browser, url)
    page.locator(".card").nth(1).click()
    settled(page, "prompt 2")
    assert ranks(ballots) == [[2, 1, 2, 2]]
    page.keyboard.press("4")
    settled(page, "prompt 3")
    assert ranks(ballots)[1] == [2, 2, 2, 1]
    page.keyboard.press("Control+z")
    settled(page, "prompt 2")
    page.keyboard.press("s")
    settled(page, "prompt 3")
    assert ranks(ballots)[1] == [1, 1, 1, 1]
    page.keyboard.press("1")
    settled(page, HTML)  # as text: there is no element of it
    assert page.locator("#prompt *").count() == 0 and page.title() == HTML
    page.locator("#undo").click()
    settled(page, "prompt 3")
    page.keyboard.press("1")
    settled(page, HTML)
    page.keyboard.press("2")
    page.wait_for_selector("#rest:not([hidden])")
    assert page.locator("#state").inner_text() == "Learning from the votes"
    for number in range(1, 5):  # the run has the scores
        ballots.ask(group(number, together=[1, 2, 3, 4], images=4), "", [])
    page.keyboard.press("u")
    page.wait_for_function("() => document.querySelector('#toast.on')?.textContent.includes('step 1 has been trained')")
    ballots.end("The run is finished. Thank you.")
    page.wait_for_function("() => document.querySelector('#state').textContent.startsWith('The run is finished')")
    assert len(ranks(ballots)) == 4
    assert [p for p in page.problems if "409" not in p] == []
    page.context.close()


def test_an_image_is_enlarged_without_a_vote(browser: Any, place: tuple[str, Ballots]) -> None:
    url, ballots = place
    page = opened(browser, url)
    assert "Click it" in page.locator("#question").inner_text()
    page.locator(".card").nth(2).hover()
    page.keyboard.press("z")
    page.wait_for_selector("#large[open]")
    large = page.locator("#large-image")
    assert large.get_attribute("alt") == "Image 3" and large.bounding_box()["width"] > 400
    page.keyboard.press("1")  # turns to that image
    assert large.get_attribute("alt") == "Image 1"
    page.keyboard.press("Escape")
    page.locator(".card").nth(1).locator(".enlarge").click()
    assert large.get_attribute("alt") == "Image 2"
    page.keyboard.press("z")
    assert ranks(ballots) == [] and page.locator("#large[open]").count() == 0
    page.keyboard.press("1")
    settled(page, "prompt 2")
    assert ranks(ballots) == [[1, 2, 2, 2]] and page.problems == []
    page.context.close()


def test_images_are_ranked_by_keys_and_by_dragging(browser: Any, place: tuple[str, Ballots]) -> None:
    url, ballots = place
    page = opened(browser, url)
    page.keyboard.press("r")
    for key in ("3", "1", "2", "Backspace"):
        page.keyboard.press(key)
    assert page.locator(".card.placed .place").all_inner_texts() == ["2", "1"]
    page.keyboard.press("Enter")
    settled(page, "prompt 2")
    assert ranks(ballots) == [[2, 3, 1, 3]]
    first, last = page.locator(".card").first.bounding_box(), page.locator(".card").last.bounding_box()
    page.mouse.move(last["x"] + 40, last["y"] + 40)
    page.mouse.down()
    page.mouse.move(first["x"] + 60, first["y"] + 60, steps=8)
    page.mouse.up()
    assert [c.get_attribute("data-image") for c in page.locator(".card").all()] == ["3", "0", "1", "2"]
    assert page.locator(".card .place").all_inner_texts() == ["1", "2", "3", "4"]
    assert len(ranks(ballots)) == 1  # dragging alone sends nothing
    page.locator("#confirm").click()
    settled(page, "prompt 3")
    assert ranks(ballots)[1] == [2, 3, 4, 1]
    assert page.problems == []
    page.context.close()


@pytest.mark.parametrize("size", [(1280, 800), (360, 640)])
def test_the_picture_before_an_edit_is_shown_and_is_no_choice(
    browser: Any, tmp_path: Path, size: tuple[int, int]
) -> None:
    with service(tmp_path) as (url, ballots, _):
        ballots.ask(group(1, together=[1], images=4), "prompt 1", pngs(4), pngs(2)[1:])
        page = opened(browser, url, viewport={"width": size[0], "height": size[1]})
        before = page.get_by_role("figure", name="Before")
        boxes = [part.bounding_box() for part in [before, *page.locator(".card").all()]]
        sizes = [(box["width"], box["height"]) for box in boxes]
        assert all(each == pytest.approx(sizes[0], abs=2) for each in sizes)
        assert page.evaluate("document.querySelector('.source img').naturalWidth") == 96
        before.click()
        page.keyboard.press("5")
        page.mouse.move(boxes[4]["x"] + 40, boxes[4]["y"] + 40)
        page.mouse.down()
        page.mouse.move(boxes[1]["x"] + 50, boxes[1]["y"] + 45, steps=8)
        page.mouse.up()
        assert [c.get_attribute("data-image") for c in page.locator("#stage > *").all()] == [None, "3", "0", "1", "2"]
        assert ranks(ballots) == []
        page.locator("#confirm").click()
        page.wait_for_selector("#rest:not([hidden])")
        assert ranks(ballots) == [[2, 3, 4, 1]] and page.problems == []
        page.context.close()


def test_a_phone_and_a_finger(browser: Any, place: tuple[str, Ballots]) -> None:
    url, ballots = place
    page = opened(browser, url, viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    boxes = [card.bounding_box() for card in page.locator(".card").all()]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 360 and box["width"] >= 140 for box in boxes)
    buttons = [button.bounding_box() for button in page.locator("footer > button:visible").all()]
    assert all(box["height"] >= 40 and box["y"] + box["height"] <= 640 for box in buttons)
    page.locator(".card").nth(2).tap()
    settled(page, "prompt 2")
    assert ranks(ballots) == [[2, 2, 1, 2]]
    boxes = [card.bounding_box() for card in page.locator(".card").all()]
    touch = page.context.new_cdp_session(page)
    points = [(boxes[3]["x"] + 30, boxes[3]["y"] + 30), (boxes[1]["x"] + 40, boxes[1]["y"] + 40)]

    def finger(kind: str, at: tuple[float, float] | None) -> None:
        where = [] if at is None else [{"x": at[0], "y": at[1]}]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": where})

    finger("touchStart", points[0])
    page.wait_for_selector(".card.dragging")  # held long enough
    for part in range(1, 9):
        finger("touchMove", tuple(a + (b - a) * part / 8 for a, b in zip(*points, strict=True)))  # type: ignore[arg-type]
    finger("touchEnd", None)
    page.wait_for_selector(".card.placed")
    assert [c.get_attribute("data-image") for c in page.locator(".card").all()] == ["0", "3", "1", "2"]
    page.locator("#confirm").tap()
    settled(page, "prompt 3")
    assert ranks(ballots)[1] == [1, 3, 4, 2]
    assert page.problems == []
    page.context.close()


def test_the_dark_and_the_help(browser: Any, place: tuple[str, Ballots]) -> None:
    page = opened(browser, place[0], color_scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(colour)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(colour)
    level = {name: sum(map(int, value[4:-1].split(","))) for name, value in (("dark", dark), ("light", light))}
    assert level["dark"] < 150 and level["light"] > 600
    page.keyboard.press("?")
    page.wait_for_selector("#help[open]")
    page.keyboard.press("1")  # means nothing while the help is open
    page.keyboard.press("Escape")
    assert ranks(place[1]) == []
    page.context.close()


def test_two_voters_see_different_groups_and_a_lost_service_is_said(browser: Any, tmp_path: Path) -> None:
    with service(tmp_path, ["anna", "ben"]) as (url, ballots, tokens):
        for number in (1, 2):
            ballots.ask(group(number, together=[1, 2]), f"prompt {number}", pngs())
        anna = opened(browser, tokens.links(url)["anna"])
        ben = anna.context.new_page()
        ben.goto(tokens.links(url)["ben"])
        settled(ben, "prompt 2")
        anna.keyboard.press("1")
        anna.wait_for_selector("#rest:not([hidden])")
        assert anna.locator("#state").inner_text() == "Other voters have the rest"
        assert "2 voters" in ben.locator("#people").inner_text()
    ben.wait_for_function("() => document.querySelector('#state').textContent.includes('does not answer')")
    port = int(url.rsplit(":", 1)[1])
    with service(tmp_path, ["anna", "ben"], port):
        settled(ben, "prompt 2")  # by itself
        anna.context.close()
