"""The page's server over real HTTP: what it tells of a run, whom it refuses, and what its buttons do."""

import io
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import requests
from PIL import Image
from watching import PROMPTS, add_episodes, add_live, add_rows, add_validation, make_run, serving

from gerl.run.checkpoint import RunLock
from gerl.run.session import asked
from gerl.utils.serving import listen
from gerl.web import server as http_server
from gerl.web.site import Folders, build_site

RUN = "signs/one"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work") / "outputs"
    make_run(folder / "signs" / "one")
    make_run(folder / "signs" / "two", 10)
    text = (folder / "signs" / "two" / "config.yaml").read_text()
    (folder / "signs" / "two" / "config.yaml").write_text(text.replace("lora_rank: 8", "lora_rank: 16"))
    (folder / "secret.txt").write_text("not for the page")
    return folder


@pytest.fixture(scope="module")
def url(outputs: Path) -> Iterator[str]:
    with serving(outputs) as (address, _):
        yield address


def get(url: str, path: str, **query: object) -> requests.Response:
    return requests.get(f"{url}/{path}", params={"run": RUN, **query}, timeout=10)  # type: ignore[arg-type]


def test_the_page_has_its_own_files_and_loads_nothing_from_elsewhere(url: str) -> None:
    page = requests.get(url, timeout=10)
    assert (
        page.headers["content-type"].startswith("text/html")
        and "default-src 'none'" in page.headers["content-security-policy"]
    )
    for path, media in (("page.js", "text/javascript"), ("page.css", "text/css")):
        found = get(url, path)
        assert found.status_code == 200 and found.headers["content-type"].startswith(media)
        assert "http://" not in found.text and "https://" not in found.text
    assert "innerHTML" not in get(url, "page.js").text and "insertAdjacent" not in get(url, "page.js").text


def test_runs_and_what_is_known_of_one(url: str) -> None:
    runs = get(url, "api/runs").json()
    assert {run["name"]: run["step"] for run in runs["runs"]} == {RUN: 20, "signs/two": 10} and runs["chosen"] == RUN
    run = get(url, "api/run").json()
    assert (run["step"], run["steps"], run["alive"], run["writable"], run["images"]) == (20, 40, False, False, 4)
    assert ["LoRA rank", "8"] in run["facts"] and run["scorers"] == ["ocr"] and "val/ocr/mean" in run["names"]
    timeline = get(url, "api/timeline", steps=1).json()
    assert timeline["lanes"] == ["run", "worker 0", "scorer ocr, process 0"] and len(timeline["spans"]) == 3
    assert get(url, "api/log").json()[0].endswith("run folder: x")


def test_curves_come_whole_and_then_only_what_is_new(url: str) -> None:
    whole = get(url, "api/series", names="reward/mean,val/reward/mean,nothing").json()
    assert whole["reset"] and set(whole["series"]) == {"reward/mean", "val/reward/mean"}
    assert whole["series"]["val/reward/mean"] == {"x": [0, 10, 20], "y": [0.4, 0.5, 0.6]}
    shape = {name: whole[name] for name in ("width", "generation")}
    new = get(url, "api/series", names="reward/mean", since=19, **shape).json()
    assert not new["reset"] and new["series"]["reward/mean"]["x"] == [19, 20]


def test_held_out_episodes_and_their_sheets(tmp_path: Path) -> None:
    run = make_run(tmp_path / "outputs" / "signs" / "one")
    for step in (0, 10, 20):
        add_episodes(run, step)
    with serving(tmp_path / "outputs") as (address, _):
        found = get(address, "api/episodes").json()
        assert found["now"]["step"] == 20 and found["steps"] == [10, 20] and found["first"]["columns"] == 2
        assert get(address, "api/episodes", step=10).json()["now"]["step"] == 10
        sheet = get(address, "episodes", step=10)
        assert Image.open(io.BytesIO(sheet.content)).size == (64, 32) and "immutable" in sheet.headers["cache-control"]
        for query in ({"step": 11}, {}, {"step": "../step_000010"}):
            assert get(address, "episodes", **query).status_code == 404
        assert get(address, "api/episodes", run="signs/two").status_code == 404


def test_held_out_prompts_through_time_with_their_pictures(url: str) -> None:
    found = get(url, "api/held_out").json()
    assert found["prompts"] == PROMPTS and found["steps"] == [0, 10, 20] and found["shown"] == [0, 1, 2]
    assert [rewards[0] for rewards in found["rewards"]] == [0, 0.25, 0.5] and found["errors"] == [0.2887, 0.1443, 0]
    assert get(url, "api/prompt", row=2).json()["scores"] == {"ocr": [1, 0.75, 0.5]}
    picture = get(url, "held_out", step=10, row=1)
    assert (
        np.asarray(Image.open(io.BytesIO(picture.content))).mean() == 50
        and "immutable" in picture.headers["cache-control"]
    )
    for query in ({"step": 11, "row": 1}, {"step": 10, "row": 3}, {"step": 10}, {"step": "../../x", "row": 1}):
        assert get(url, "held_out", **query).status_code == 404
    assert get(url, "api/prompt", row=9).status_code == 404


def test_the_images_of_the_step_have_groups_scores_and_advantages(url: str) -> None:
    live = get(url, "api/live").json()
    assert live["prompts"] == PROMPTS[:2] and live["step"] == 20 and len(live["images"]) == 4
    assert live["images"][1] == [0, 1, 0.6, 1.0, {"ocr": 0.6}]
    sheet = Image.open(io.BytesIO(get(url, "sheet", step=20).content))
    assert sheet.size == (live["columns"] * live["width"], -(-4 // live["columns"]) * live["height"])
    assert get(url, "sheet", step=19).status_code == 404


def test_the_timeline_is_exported_as_a_chrome_trace(url: str) -> None:
    answer = get(url, "trace.json")
    assert "attachment" in answer.headers["content-disposition"]
    events = answer.json()["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in spans] == [
        ("sample", 0, 1e6),
        ("sample", 0, 9e5),
        ("score", 5e5, 5e5),
    ]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[spans[2]["tid"]] == "scorer ocr, process 0"


def test_a_configuration_is_compared_with_the_defaults_and_with_another_run(url: str) -> None:
    found = get(url, "api/settings", other="signs/two").json()
    assert found["difference"] == [["model.lora_rank", "8", "16"]]
    assert ["model.lora_rank", "8", "32"] in found["changes"] and "path: signs" in found["text"]
    assert get(url, "api/settings", other="nowhere").status_code == 404


def test_only_run_folders_are_served(url: str, outputs: Path) -> None:
    for name in (
        "..",
        "../outputs",
        "signs",
        "",
        str(outputs / "signs" / "one"),
        "signs/one/..",
        "signs/one/validation",
    ):
        for path in ("api/run", "api/log", "trace.json", "api/events"):
            assert requests.get(f"{url}/{path}", params={"run": name}, timeout=10).status_code == 404, name
    for path in ("secret.txt", "../secret.txt", "%2e%2e/secret.txt", "page.css/../secret.txt", "signs/one/config.yaml"):
        assert requests.get(f"{url}/{path}", timeout=10).status_code == 404


def test_a_link_out_of_the_folder_is_not_followed(outputs: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "outputs" / "x" / "linked")
    sheet = run / "live" / "step_000020.jpg"
    sheet.unlink()
    sheet.symlink_to(outputs / "secret.txt")
    with serving(tmp_path / "outputs") as (url, _):
        answer = requests.get(f"{url}/sheet", params={"run": "x/linked", "step": 20}, timeout=10)
        assert answer.status_code == 404 and "not for" not in answer.text
        (tmp_path / "row").write_text(
            '{"step": 1, "kind": "not for you", "signal": "not for you", "text": "not for you"}\n'
        )
        for name in ("log.txt", "metrics.jsonl", "guard.jsonl", "timeline.jsonl", "config.yaml"):
            (run / name).unlink(missing_ok=True)
            (run / name).symlink_to(tmp_path / "row")
        for path in ("runs", "run", "log", "warnings", "settings", "timeline", "live", "held_out"):
            answer = requests.get(f"{url}/api/{path}", params={"run": "x/linked", "step": 20}, timeout=10)
            assert answer.status_code < 500 and "not for" not in answer.text, path


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example"},
    ],
)
def test_other_sites_cannot_press_buttons(url: str, outputs: Path, headers: dict[str, str]) -> None:
    folder = outputs / "signs" / "one"
    lock = RunLock(folder)
    lock.acquire()
    try:
        answer = requests.post(f"{url}/api/control", json={"run": RUN, "command": "stop"}, headers=headers, timeout=10)
        assert answer.status_code == 403 and asked(folder) == []
    finally:
        lock.release()


def test_a_name_that_points_here_from_elsewhere_reads_nothing(url: str) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80"):
        assert requests.get(f"{url}/api/runs", headers={"Host": host}, timeout=10).status_code == 403
    for host in ("localhost:1234", "127.0.0.1", "[::1]:80"):
        assert requests.get(f"{url}/api/runs", headers={"Host": host}, timeout=10).status_code == 200


def test_buttons_leave_files_that_the_run_looks_for(url: str, outputs: Path) -> None:
    folder = outputs / "signs" / "one"

    def press(command: object, run: str = RUN) -> requests.Response:
        headers = {"Origin": url, "Sec-Fetch-Site": "same-origin"}
        return requests.post(f"{url}/api/control", json={"run": run, "command": command}, headers=headers, timeout=10)

    assert press("save").status_code == 409 and not (folder / "control").exists()  # it is not training
    lock = RunLock(folder)
    lock.acquire()
    try:
        for command in ("save", "validate", "stop"):
            assert press(command).json() == {"asked": command}
        assert asked(folder) == ["save", "validate", "stop"] == get(url, "api/run").json()["asked"]
        assert press("../../x").status_code == press(["save"]).status_code == 400
        assert press("save", "elsewhere").status_code == press("save", "signs/../..").status_code == 404
        for data, media, status in (
            (b"x" * 20000, "", 413),
            (b"{}", "text/plain", 415),
            (b"[", "application/json", 400),
            (b"[" * 4900 + b"]" * 4900, "application/json", 400),
        ):
            answer = requests.post(f"{url}/api/control", data=data, headers={"Content-Type": media}, timeout=10)
            assert answer.status_code == status and answer.json()["error"]
    finally:
        lock.release()
        for path in (folder / "control").iterdir():
            path.unlink()


def test_a_token_is_asked_for_everywhere(outputs: Path) -> None:
    with serving(outputs, token="right") as (url, _):
        for path in ("", "page.js", "api/runs", "api/events", "trace.json", "held_out"):
            for given in ({}, {"token": "wrong"}):
                answer = requests.get(f"{url}/{path}", params={"run": RUN, **given}, timeout=10)
                assert answer.status_code == 401 and not answer.cookies and "right" not in answer.text
        assert requests.get(f"{url}/api/runs?token=right", timeout=10).status_code == 401  # only where it is opened
        answer = requests.post(f"{url}/api/control", json={"run": RUN, "command": "stop"}, timeout=10)
        assert answer.status_code == 401
        session = requests.Session()
        opened = session.get(f"{url}/?token=right", timeout=10)
        assert opened.status_code == 200
        cookie = opened.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert session.get(f"{url}/api/runs", timeout=10).status_code == 200
        named = {"Host": "gpu.example:8765", "Cookie": "gerl_8765=right"}
        assert requests.get(f"{url}/api/runs", headers=named, timeout=10).status_code == 200
        bearer = {"Authorization": "Bearer right"}
        assert requests.get(f"{url}/api/runs", headers=bearer, timeout=10).status_code == 200
        foreign = named | {"Origin": "http://evil.example"}
        post = requests.post(f"{url}/api/control", json={"run": RUN, "command": "stop"}, headers=foreign, timeout=10)
        assert post.status_code == 403


def test_what_is_damaged_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "outputs" / "x" / "damaged")
    (run / "validation" / "step_000010.json").write_text("{")
    (run / "validation" / "step_000020.npz").write_bytes(b"PK")
    (run / "config.yaml").write_text("not: [valid")
    (run / "guard.jsonl").write_text('{"step": 10, "signal": "diversity", "text": "less", "shown": [0]}\n{"half')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('nonsense\n{"step": 21, "reward/mean": null, "x": NaN}\n{"step": 22, "rew')
    with serving(tmp_path / "outputs") as (url, _):

        def ask(path: str, **query: object) -> requests.Response:
            return requests.get(f"{url}/{path}", params={"run": "x/damaged", **query}, timeout=10)  # type: ignore[arg-type]

        assert ask("api/held_out").json()["steps"] == [0, 20]
        assert ask("held_out", step=20, row=0).status_code == 404 and ask("held_out", step=0, row=0).status_code == 200
        series = ask("api/series", names="reward/mean,x").json()["series"]
        assert (
            series["reward/mean"]["x"][-1] == 21
            and series["reward/mean"]["y"][-1] is None
            and series["x"]["y"] == [None]
        )
        assert [row["signal"] for row in ask("api/warnings").json()["guard"]] == ["diversity"]
        assert ask("api/run").json()["step"] == 21 and ask("api/settings").json()["changes"] == []


def test_a_long_run_is_thinned_and_loads_quickly(tmp_path: Path) -> None:
    run = make_run(tmp_path / "outputs" / "x" / "long", 0)
    add_rows(run, 1, 10_000)
    with serving(tmp_path / "outputs") as (url, _):
        start, size = time.perf_counter(), 0
        for path in ("runs", "run", "held_out", "live", "timeline", "warnings", "log"):
            size += len(requests.get(f"{url}/api/{path}", params={"run": "x/long"}, timeout=10).content)
        names = "reward/mean,val/reward/mean,reward/ocr/mean,actor/kl,actor/grad_norm,timing/step_s"
        answer = requests.get(f"{url}/api/series", params={"run": "x/long", "names": names}, timeout=10)
        assert time.perf_counter() - start < 2
        found = answer.json()
        assert found["width"] == 32 and size + len(answer.content) < 300_000
        curve = found["series"]["reward/mean"]
        assert curve["x"][1] == 32 and curve["low"][1] < curve["y"][1] < curve["high"][1] and len(curve["x"]) == 313
        add_rows(run, 10_001, 10_001)
        query = {"run": "x/long", "names": names, "since": 10_000, "width": 32, "generation": found["generation"]}
        new = requests.get(f"{url}/api/series", params=query, timeout=10)
        assert new.json()["series"]["reward/mean"]["x"] == [9984] and len(new.content) < 2000


def test_fifty_pages_are_told_what_changes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "outputs" / "x" / "live")
    with serving(tmp_path / "outputs") as (url, site):

        def listen(_: int) -> list[dict[str, str]]:
            found = []
            with requests.get(f"{url}/api/events", params={"run": "x/live"}, stream=True, timeout=20) as stream:
                for line in stream.iter_lines(chunk_size=1):
                    if line.startswith(b"data: "):
                        found.append(json.loads(line[6:]))
                        if len({each["live"] for each in found}) == 2:
                            return found
            return found

        with ThreadPoolExecutor(50) as pages:
            told = [pages.submit(listen, i) for i in range(50)]
            until = time.monotonic() + 10
            while site.streams < 50 and time.monotonic() < until:
                time.sleep(0.02)
            assert site.streams == 50
            time.sleep(0.5)  # until each has sent the first signatures
            add_live(run, 21)
            start = time.monotonic()
            answers = [page.result() for page in told]
            assert time.monotonic() - start < 5
        for answer in answers:
            first, last = answer[0], answer[-1]
            assert first["live"] != last["live"] and first["config"] == last["config"] and first["guard"] == ""
        until = time.monotonic() + 10
        while site.streams and time.monotonic() < until:
            time.sleep(0.02)
        assert not site.streams


def test_a_resumed_run_that_cuts_its_metrics_is_read_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path / "outputs" / "x" / "resumed")
    with serving(tmp_path / "outputs") as (url, _):

        def ask(**query: object) -> dict[str, object]:
            answer = requests.get(
                f"{url}/api/series", params={"run": "x/resumed", "names": "reward/mean", **query}, timeout=10
            )  # type: ignore[arg-type]
            return answer.json()  # type: ignore[no-any-return]

        before = ask()
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.part").write_text("".join(lines[:11]))
        os.replace(run / "metrics.part", run / "metrics.jsonl")
        add_validation(run, 5)
        after = ask(since=20, width=1, generation=before["generation"])
        assert after["reset"] and after["generation"] != before["generation"]
        assert after["series"]["reward/mean"]["x"] == list(range(1, 11))  # type: ignore[index]
        assert requests.get(f"{url}/api/held_out", params={"run": "x/resumed"}, timeout=10).json()["steps"] == [
            0,
            5,
            10,
            20,
        ]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_many_event_streams_lock_nobody_out(outputs: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "most", lambda: 20)
    app, site = build_site(Folders.of(outputs), None, True)
    opened = list[socket.socket]()
    with listen("127.0.0.1", 0) as listener, http_server.serving(app, listener, 2.0):
        host, port = listener.getsockname()
        try:
            for _ in range(60):
                opened.append(socket.create_connection((host, port), timeout=20))
                opened[-1].sendall(f"{method} /api/events?run={RUN} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                assert opened[-1].recv(100).startswith(b"HTTP/1.1 200")
            assert requests.get(f"http://{host}:{port}/api/runs", timeout=20).ok
        finally:
            site.closing.set()
            for one in opened:
                one.close()
