"""The service over sockets: its two protocols, and whom it turns away."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import requests
from voting import Voter, group, pngs, service

HTML = '<img src=x onerror="alert(1)"> & "quotes"'


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A service on the loopback that asks nobody who he is."""
    with service(tmp_path) as (found, _, _):
        yield found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Such a service with a group to vote on, for requests that change nothing."""
    with service(tmp_path_factory.mktemp("votes")) as (found, _, _):
        score(found, body())
        yield found


def body(number: int = 1, images: bool = True, text: str = "a prompt", **more: Any) -> dict[str, Any]:
    files = [base64.b64encode(content).decode() for content in pngs()] if images else []
    described = {"scorer": "vote", "images": files, "prompts": [text], "metadata": [{}]}
    return {**described, "group": asdict(group(number, **more))}


def score(url: str, content: dict[str, Any], **headers: str) -> requests.Response:
    return requests.post(f"{url}/v1/score", json=content, headers=headers, timeout=10)


def test_the_run_waits_for_images_and_votes_and_gets_scores(url: str) -> None:
    first = score(url, body(images=False))
    assert (first.status_code, first.json()) == (202, {"waiting": "images", "version": "1"})
    assert score(url, body()).json() == {"waiting": "votes", "version": "1"}
    voter = Voter(f"{url}/")
    found = voter.state()["group"]
    assert found["prompt"] == "a prompt" and [image.size for image in voter.images(found)] == [(96, 64)] * 3
    answer = voter.post("vote", group=found["id"], ranks=[2, 3, 1])
    assert answer.json()["group"] is None and answer.json()["undo"] == {"step": 1, "late": False}
    last = score(url, body(images=False))
    assert (last.status_code, last.json()) == (200, {"scores": {"vote": [0.5, 0.0, 1.0]}, "version": "1"})
    late = voter.post("undo")
    assert late.status_code == 409 and "too late: step 1 has been trained" in late.json()["error"]


def test_the_page_hears_of_what_happens(url: str) -> None:
    states: list[dict[str, Any]] = []

    def listen() -> None:
        with requests.get(f"{url}/events", stream=True, timeout=10) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line.startswith(b"data: "):
                    states.append(json.loads(line[6:]))
                if len(states) == 3:
                    return

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    while not states:
        time.sleep(0.01)
    assert states[0]["group"] is None and states[0]["progress"]["step"] == 0
    score(url, body())
    while len(states) < 2:
        time.sleep(0.01)
    assert states[1]["group"]["prompt"] == "a prompt"
    Voter(f"{url}/").post("vote", group=states[1]["group"]["id"], ranks=[1, 1, 1])
    thread.join(5)
    assert states[2]["group"] is None and states[2]["progress"]["votes"] == 1


def test_html_in_a_prompt_stays_text(url: str) -> None:
    """It travels as JSON only, and no page may run what it was not shipped with."""
    score(url, body(text=HTML))
    assert Voter(f"{url}/").state()["group"]["prompt"] == HTML
    page = requests.get(f"{url}/", timeout=5)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert (
        "<script>" not in page.text
        and "onerror" not in page.text
        and "http" not in page.text.replace("http://www.w3.org", "")
    )


@pytest.mark.parametrize("name", ["", "vote.js", "vote.css", "order.js"])
def test_the_parts_of_the_page(shared: str, name: str) -> None:
    found = requests.get(f"{shared}/{name}", timeout=5)
    assert (
        found.ok
        and found.headers["x-content-type-options"] == "nosniff"
        and found.headers["referrer-policy"] == "no-referrer"
    )


@pytest.mark.parametrize(
    "path", ["other", "app.py", "images/../journal.jsonl", "images/0/0.png", "docs", "openapi.json"]
)
def test_there_is_no_other_file(shared: str, path: str) -> None:
    assert requests.get(f"{shared}/{path}", timeout=5).status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Length": "100000"}, 413),
    ],
)
@pytest.mark.parametrize("path", ["vote", "undo", "touch", "v1/score"])
def test_what_another_site_could_send_is_refused(shared: str, path: str, headers: dict[str, str], status: int) -> None:
    if path == "v1/score" and status == 413:
        headers = {"Content-Length": str(10**10)}
    given = {"Content-Type": "application/json", **headers}
    request = requests.Request("POST", f"{shared}/{path}", data=b"{}", headers=given).prepare()
    request.headers.update(headers)
    answer = requests.Session().send(request, timeout=10)
    assert answer.status_code == status and answer.json()["error"]


def test_the_page_itself_may_send(shared: str) -> None:
    given = {"Origin": shared, "Sec-Fetch-Site": "same-origin"}
    assert requests.post(f"{shared}/touch", json={}, headers=given, timeout=5).ok
    assert requests.get(f"{shared}/", headers={"Host": "evil.example"}, timeout=5).status_code == 403  # DNS rebinding
    assert requests.get(f"{shared}/", headers={"Host": "localhost:9"}, timeout=5).ok  # through a tunnel


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"images": ["%"] * 3}, "not base64"),
        ({"images": ["aGVsbG8="] * 3}, "not a PNG"),
        ({"images": [base64.b64encode(pngs()[0]).decode()]}, "got 1 images for 3 seeds"),
        ({"sources": ["%"]}, "source 0 of 1 is not base64"),
        ({"scorer": "ocr"}, "vote"),
        ({"group": {}}, "group"),
        ({"prompts": []}, "prompts"),
        ({"more": 1}, "more"),
    ],
)
def test_a_run_that_sends_nonsense_is_told(shared: str, content: dict[str, Any], said: str) -> None:
    answer = score(shared, {**body(), **content})
    assert answer.status_code == 422 and said in answer.json()["error"]


@pytest.mark.parametrize(
    "content",
    [
        {"ranks": [1]},
        {"ranks": [0, 1, 2]},
        {"ranks": "123"},
        {"group": "x"},
        {"group": "0" * 16},
        {"ranks": [1.5, 1, 1]},
    ],
)
def test_a_vote_that_is_none_is_refused(shared: str, content: dict[str, Any]) -> None:
    voter = Voter(f"{shared}/")
    answer = voter.post("vote", **{"group": voter.state()["group"]["id"], "ranks": [1, 2, 3], **content})
    assert answer.status_code in (409, 422) and answer.json()["error"]
    assert voter.state()["progress"]["votes"] == 0


def test_voters_and_run_need_their_tokens(tmp_path: Path) -> None:
    with service(tmp_path, ["anna", "ben"]) as (url, _, tokens):
        links = tokens.links(url)
        assert list(links) == ["anna", "ben"] and len(set(tokens.voters.values())) == 2
        assert score(url, body()).status_code == 401
        assert score(url, body(), Authorization="Bearer wrong").status_code == 401
        assert score(url, body(), Authorization=f"Basic {tokens.run}").status_code == 401
        assert score(url, body(), Authorization=f"Bearer {tokens.voters['anna']}").status_code == 401
        assert score(url, body(), Authorization=f"Bearer {tokens.run}").status_code == 202
        assert score(url, body(), Authorization=f"Bearer {tokens.run}x").status_code == 401
        assert score(url, body(), Authorization=f"Bearer {str(tokens.run)[:-1]}").status_code == 401
        assert score(url, body(), Authorization=str(tokens.run)).status_code == 401
        wrong = [
            f"{url}/",
            f"{url}/vote/anna/wrong/",
            links["anna"][:-2] + "/",
            links["anna"].replace("anna", "ben"),
            f"{url}/vote/eve/x/",
            f"{url}/%3F/vote/anna/",
        ]
        for link in wrong:
            assert requests.get(f"{link}events", timeout=5).status_code == 401
            assert requests.post(f"{link}undo", json={}, timeout=5).status_code == 401
        assert requests.get(links["anna"].removesuffix("/"), timeout=5).url == links["anna"]
        anna, ben = Voter(links["anna"]), Voter(links["ben"])
        found = anna.state()["group"]
        assert found is not None and ben.state()["group"] is None and anna.images(found)
        assert requests.get(f"{url}/{found['images'][0]}", timeout=5).status_code == 401
        assert anna.post("vote", group=found["id"], ranks=[1, 2, 3]).ok
        file = tmp_path / "tokens.json"
        assert file.stat().st_mode & 0o777 == 0o600
    with service(tmp_path, ["ben", "cleo"]) as (_, ballots, again):
        assert again.voters["ben"] == tokens.voters["ben"] and again.run == tokens.run and "anna" not in again.voters
        assert [row.voter for row in ballots.preferences()] == ["anna"]


def test_bound_wider_than_the_loopback_everybody_needs_a_token(tmp_path: Path) -> None:
    with service(tmp_path, host="0.0.0.0") as (url, _, tokens):
        assert requests.get(f"{url}/", timeout=5).status_code == 401 and score(url, body()).status_code == 401
        (link,) = tokens.links(url).values()
        assert requests.get(link, headers={"Host": "machine.example:8100"}, timeout=5).ok
        answer = requests.post(f"{link}undo", json={}, headers={"Origin": "http://evil.example"}, timeout=5)
        assert answer.status_code == 403


def test_a_service_that_is_restarted_in_the_middle_goes_on(tmp_path: Path) -> None:
    with service(tmp_path) as (url, _, _):
        port = int(url.rsplit(":", 1)[1])
        for number in (1, 2):
            score(url, {**body(number, together=[1, 2]), "sources": [base64.b64encode(pngs()[2]).decode()]})
        voter = Voter(f"{url}/")
        first = voter.state()["group"]
        assert voter.post("vote", group=first["id"], ranks=[1, 2, 3]).ok
    with service(tmp_path, port=port) as (url, _, _):
        voter = Voter(f"{url}/")
        second = voter.state()["group"]
        assert second["id"] != first["id"] and voter.images(second)
        (before,) = voter.images({"images": second["sources"]})
        assert before.getpixel((0, 0)) == (255, 20, 20)
        assert voter.post("vote", group=second["id"], ranks=[3, 2, 1]).ok
        found = [score(url, body(number, images=False, together=[1, 2])).json()["scores"]["vote"] for number in (1, 2)]
    assert found == [[1, 0.5, 0], [0, 0.5, 1]]


def test_fifty_pages_are_open_at_once(url: str) -> None:
    pages = [requests.get(f"{url}/events", stream=True, timeout=10) for _ in range(50)]
    lines = [page.iter_lines() for page in pages]
    assert all(next(each).startswith(b"data: ") for each in lines)
    score(url, body())
    found = [next(line for line in each if b"a prompt" in line) for each in lines]
    assert len(found) == 50
    for page in pages:
        page.close()
