"""The studio's server over real HTTP: drafts, the queue, notes; whom it refuses, and what wrong input is answered."""

import json
import shlex
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from watching import make_run

from gerl.commandline.composition import compose_run
from gerl.data.sources import hold_out
from gerl.preflight.sizing.hardware import GPUS
from gerl.protocol import Prompt
from gerl.run.checkpoint import save_checkpoint
from gerl.utils.serving import listen
from gerl.web.server import address, serving
from gerl.web.studio import drafts
from gerl.web.studio.app import Studio, build_studio

SLEEPS = ("sh", "-c", "sleep 60", "sh")


@contextmanager
def open_studio(root: Path, token: str | None = None) -> Iterator[tuple[str, Studio]]:
    app, studio = build_studio(root, token, True)
    studio.jobs.program, studio.jobs.devices = SLEEPS, ["cpu"]
    with listen("127.0.0.1", 0) as listener, serving(app, listener, 2.0):
        yield address(listener), studio
        studio.closing.set()
    for job in studio.jobs.all:
        studio.jobs.stop(job)
    studio.store.close()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Studio]]:
    root = tmp_path_factory.mktemp("work") / "outputs"
    make_run(root / "signs" / "one")
    with open_studio(root) as found:
        yield found


def post(url: str, name: str, body: Any, **headers: str) -> requests.Response:
    return requests.post(f"{url}/api/{name}", json=body, headers=headers, timeout=30)


def draft(name: str, scorers: dict[str, Any] | None = None, texts: dict[str, str] | None = None, **keys: str) -> Any:
    given = {"experiment": "signs", **{key.replace("__", "."): value for key, value in keys.items()}}
    return {"name": name, "keys": given, "scorers": scorers or {}, "texts": texts or {}}


def test_a_draft_is_the_command_that_it_shows(opened: tuple[str, Studio]) -> None:
    url, studio = opened
    texts = {
        "prompts.txt": 'a red sign that reads "A"\na red sign that reads "A"',
        "held_out.txt": 'a red sign that reads "B"',
        "mine.py": "def compute_score(images): ...",
    }
    found = post(url, "draft", draft("first", {"mine": {"weight": 0.5}}, texts, trainer__steps="3")).json()
    folder = studio.root / "studio" / "drafts" / "first"
    assert found["problems"] == [] and (folder / "mine.py").read_text() == texts["mine.py"] + "\n"
    scorers = f"reward.scorers={{mine: {{path: {folder / 'mine.py'}, weight: 0.5}}}}"
    prompts = [f"data.train={folder / 'prompts.txt'}", f"validation.data={folder / 'held_out.txt'}"]
    assert found["arguments"] == [
        "experiment=signs",
        "trainer.steps=3",
        *prompts,
        scorers,
        f"out={studio.root / 'first'}",
    ]
    assert found["facts"]["prompts"] | {"longest": 0} == {
        "count": 2, "repeated": 1, "twice": ['a red sign that reads "A"'], "longest": 0
    }  # fmt: skip
    assert found["facts"]["preset"] == "awm_fast"  # and not the name of its class
    assert found["changes"] == [  # what was typed, and not what follows from it
        ["data.train", "typed here", "signs_train"],
        ["validation.data", "typed here", "signs_val"],
        ["trainer.steps", "3", "76"],
        ["reward.scorers.mine", "0.5", ""],
        ["reward.scorers.ocr", "measured, not rewarded", "1.0"],
    ]
    kept = requests.get(f"{url}/api/draft", params={"name": "first"}, timeout=10).json()
    assert kept["texts"] == texts and kept["scorers"] == {"mine": {"weight": 0.5}}


WRONG = [
    (draft("a", rollout__n="x"), "rollout.n"),
    (draft("a", rollout__m="4"), "rollout.m"),
    (draft("a", data__train="nowhere.txt"), "data.train"),
    (draft("a", algorithm="grpo"), "algorithm"),
    (draft("a", {"mine": {}}, {"mine.py": "def compute_score(images:"}), "reward.scorers.mine"),
    (draft("a", sampling__height="33"), "sampling.height"),
    (draft("a", texts={"prompts.txt": "a fox"}), "prompts.txt"),
    (draft("a", texts={"held_out.txt": "a fox"}), "held_out.txt"),
    (draft("a", {"vlm_judge": {"kwargs": "no mapping"}}), "reward.scorers.vlm_judge.kwargs"),
    (draft("a", {"vlm_judge": {"kwargs": "day: 2024-13-45"}}), "reward.scorers.vlm_judge.kwargs"),
]


@pytest.mark.parametrize(("given", "key"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_input_is_answered_beside_its_field(opened: tuple[str, Studio], given: Any, key: str) -> None:
    url, _ = opened
    found = post(url, "draft", given)
    (problem,) = found.json()["problems"]
    assert found.status_code == 200 and problem["key"] == key and not problem["missing"]
    assert found.json()["values"]["trainer"]["steps"] == 76  # of what is left without it
    assert post(url, "start", {"name": "a"}).json()["error"] == problem["sentence"]


def test_all_problems_are_answered_at_once(opened: tuple[str, Studio]) -> None:
    url, _ = opened
    texts = {
        "prompts.txt": '\na sign that reads "A"\n\na fox',
        "held_out.txt": "a cat",
        "mine.py": "def compute_score(",
    }
    given = draft(
        "", {"ocr": {}, "mine": {}}, texts, trainer__steps="many", model__path="/nowhere", sampling__width="33"
    )
    found = post(url, "draft", given).json()
    problems = {problem["key"]: problem["sentence"] for problem in found["problems"]}
    assert set(problems) == {
        "name", "trainer.steps", "model.path", "sampling.width", "prompts.txt", "held_out.txt", "reward.scorers.mine",
    }  # fmt: skip
    assert problems["prompts.txt"].startswith("line 4: 'a fox'") and problems["held_out.txt"].startswith("line 1: ")
    assert not [sentence for sentence in problems.values() if "drafts" in sentence], "paths that nobody typed"
    assert "32 or 40" in problems["sampling.width"] and not found["saved"] and found["line"] == ""


def test_a_prompt_that_is_held_out_is_answered_where_it_was_typed(opened: tuple[str, Studio]) -> None:
    signs, by_side = [f'a sign that reads "{k}"' for k in range(12)], dict[bool, list[str]]()
    for k in range(40):
        lines = [*signs[:7], f"a fox {k}", *signs[7:]]
        _, held_out = hold_out([Prompt(i, line) for i, line in enumerate(lines)], 0.1)
        by_side[held_out[0].text == lines[7]] = lines
    assert set(by_side) == {True, False}
    for lines in by_side.values():
        given = draft("share", texts={"prompts.txt": "\n".join(lines)}) | {"keep": False}
        (problem,) = post(opened[0], "draft", given).json()["problems"]
        assert problem["key"] == "prompts.txt" and problem["sentence"].startswith("line 8: 'a fox ")


def test_a_run_of_ones_own_model_has_fields_to_fill_in(opened: tuple[str, Studio]) -> None:
    url, _ = opened
    found = post(url, "draft", draft("own", experiment="plain", rollout__n="x")).json()
    missing = {problem["key"]: problem["missing"] for problem in found["problems"]}
    assert missing == {"model.path": True, "prompts.txt": True, "reward.scorers": True, "rollout.n": False}
    (reward,) = [problem for problem in found["problems"] if problem["key"] == "reward.scorers"]
    assert all(word in reward["sentence"] for word in ("pickscore", "ocr", "function"))
    texts = {"prompts.txt": "a fox\na cat", "held_out.txt": "a fox", "mine.py": "def compute_score(images): ..."}
    filled = post(url, "draft", draft("own", {"mine": {}}, texts, experiment="plain", model__path="signs")).json()
    assert filled["problems"] == [] and filled["facts"]["scorers"] == {"mine": 1.0}
    assert (
        filled["facts"]["prompts"]["count"] == 2 and filled["facts"]["trained"] == 1
    )  # a held-out prompt is trained on


@pytest.mark.parametrize("name", ["mein Schild 猫", "a, b = 'c' \"d\" [e] {f} $g", "%", "run #2: 50 %"])
def test_a_run_may_have_any_name(opened: tuple[str, Studio], name: str) -> None:
    url, studio = opened
    texts = {"prompts.txt": 'a sign that reads "A"', "mine.py": "def compute_score(images): ..."}
    found = post(url, "draft", draft(name, {"mine": {}}, texts)).json()
    if name == "%":
        assert [problem["key"] for problem in found["problems"]] == ["name"]
        return
    assert found["problems"] == [] and found["saved"]
    composed = compose_run(shlex.split(found["line"])[2:])
    assert composed.run_dir == studio.root / found["name"] and not set(found["name"]) & set("/,='\"[]{}$#:%")
    assert found["name"] == name or "猫" not in name
    post(url, "remove", {"name": found["name"]})


def test_people_vote_beside_own_scorers(opened: tuple[str, Studio]) -> None:
    url, studio = opened
    code = {"mine.py": "def compute_score(images): ..."}
    given = draft("voted", {"mine": {"weight": 0.5}}, code, rollout__n="4") | {"votes": True}
    found = post(url, "draft", given).json()
    assert found["problems"] == [] and found["facts"]["scorers"] == {
        "vote": 1.0,
        "mine": 0.5,
        "ocr": 0.0,
        "colour": 0.0,
    }
    command = found["line"].split()
    assert command[:2] == ["gerl", "vote"] and f"out={studio.root / 'voted'}" in command
    one = post(url, "draft", given | {"keys": {"experiment": "signs", "rollout.n": "1"}}).json()
    assert one["problems"][0]["key"] == "rollout.n"


@pytest.mark.parametrize(
    "name", ["../a", "a/b", "/a", ".a", "..", "a\0b", "-" * 300, "a" * 300, "猫" * 300, "a" * 79 + "/b"]
)
def test_no_name_leads_out_of_the_folder(opened: tuple[str, Studio], name: str) -> None:
    url, studio = opened
    found = post(url, "draft", draft(name, texts={"prompts.txt": 'a sign that reads "A"'})).json()
    assert bool(found["name"]) == any(map(str.isalnum, name))
    if found["name"]:
        folder = studio.root / "studio" / "drafts" / found["name"]
        assert folder.resolve().parent == (studio.root / "studio" / "drafts").resolve() and folder.is_dir()
        post(url, "remove", {"name": found["name"]})
    assert post(url, "draft", draft("a", texts={name: "text"})).status_code == 409


def test_a_renamed_draft_is_one_draft(opened: tuple[str, Studio]) -> None:
    url, studio = opened
    post(url, "draft", draft("old", texts={"prompts.txt": "a fox"}))
    post(url, "draft", draft("new", texts={"prompts.txt": "a fox"}) | {"was": "old"})
    assert "old" not in studio.store.values["drafts"] and "new" in studio.store.values["drafts"]
    assert not (studio.root / "studio" / "drafts" / "old").exists()
    assert post(url, "remove", {"name": "new"}).ok and "new" not in studio.store.values["drafts"]


def test_a_renamed_draft_keeps_its_revision_and_its_files_until_it_is_saved(opened: tuple[str, Studio]) -> None:
    url, studio = opened
    given = draft("first-name", {"mine": {}}, {"mine.py": "def compute_score(images): ..."})
    saved = post(url, "draft", given | {"revision": 0}).json()
    taken = post(url, "draft", given | {"name": "signs", "was": "first-name", "revision": saved["revision"]}).json()
    assert taken["problems"][0]["key"] == "name" and not taken["saved"]  # there is a folder of this name
    assert studio.draft("first-name").texts == given["texts"]
    renamed = post(url, "draft", given | {"name": "second-name", "was": "first-name", "revision": taken["revision"]})
    assert renamed.json()["saved"] and "first-name" not in studio.store.values["drafts"]
    assert studio.draft("second-name").texts == given["texts"]


def test_a_key_of_a_scorer_is_set_after_the_scorers(opened: tuple[str, Studio]) -> None:
    url, _ = opened
    code = {"mine.py": "def compute_score(images): ..."}
    given = draft("keyed", {"mine": {"weight": 1}}, code, **{"reward.scorers.mine.weight": "0.25"})
    assert post(url, "draft", given).json()["facts"]["scorers"]["mine"] == 0.25


def test_a_draft_changed_elsewhere_is_not_replaced(opened: tuple[str, Studio]) -> None:
    url, studio = opened
    first = post(url, "draft", draft("shared", trainer__steps="3") | {"revision": 0}).json()["revision"]
    assert post(url, "draft", draft("shared", trainer__steps="4") | {"revision": first}).ok
    answer = post(url, "draft", draft("shared", trainer__steps="5") | {"revision": first})
    assert answer.status_code == 409 and "another window" in answer.json()["error"]
    for other in ({"revision": 0}, {"revision": 0, "was": "other"}):  # a new draft, or another, with its name
        found = post(url, "draft", draft("shared", trainer__steps="5") | other).json()
        assert found["problems"][0]["key"] == "name" and not found["saved"] and found["revision"] == 0
    assert studio.draft("shared").keys["trainer.steps"] == "4"


def test_the_files_of_a_run_in_the_queue_do_not_change(opened: tuple[str, Studio]) -> None:
    url, studio = opened
    first = draft("locked", {"mine": {}}, {"mine.py": "def compute_score(images): ..."})
    post(url, "draft", first)
    number = post(url, "start", {"name": "locked", "gpus": 1}).json()["job"]
    found = post(url, "draft", draft("locked", {"mine": {}}, {"mine.py": "changed"})).json()
    assert found["problems"][0]["key"] == "name" and studio.draft("locked").texts == first["texts"]
    assert post(url, "remove", {"name": "locked"}).status_code == 409
    (studio.root / "locked").mkdir()  # as the run does
    post(url, "job", {"job": number, "action": "stop"})
    post(url, "draft", draft("unlocked", {"mine": {}}, {"mine.py": "changed"}) | {"was": "locked"})
    folder = studio.root / "studio" / "drafts" / "locked"
    assert (folder / "mine.py").read_text() == first["texts"]["mine.py"] + "\n" and studio.draft("unlocked")


def test_two_pages_that_start_a_draft_at_once_start_one_run(tmp_path: Path) -> None:
    with open_studio(tmp_path) as (url, studio), ThreadPoolExecutor(4) as pages:
        post(url, "draft", draft("twice", trainer__steps="3"))
        answers = list(pages.map(lambda _: post(url, "start", {"name": "twice"}).ok, range(4)))
        assert sorted(answers) == [False, False, False, True] and [job.run for job in studio.jobs.all] == ["twice"]


def test_the_code_of_runs_that_the_studio_trains_is_trusted_and_no_other(tmp_path: Path) -> None:
    def arguments(*values: str) -> list[str]:
        number = post(url, "command", {"command": "evaluate", "arguments": list(values)}).json()["job"]
        return studio.jobs.get(number).arguments

    with open_studio(tmp_path) as (url, studio):
        texts = {"mine.py": "def compute_score(images, prompts):\n    return [0.0] * len(images)"}
        post(url, "draft", draft("ours", {"mine": {"weight": 1}}, texts))
        assert post(url, "start", {"name": "ours"}).ok
        code = tmp_path / "studio" / "drafts" / "ours" / "mine.py"
        for name in ("ours", "theirs"):
            (tmp_path / name).mkdir()
            composed = compose_run(["experiment=signs", f"reward.scorers={{mine: {{path: {code}}}}}"])
            (tmp_path / name / "config.yaml").write_text(composed.yaml())
            problems = studio.compose(drafts.from_run(tmp_path / name, "copy")).problems
            assert (not problems) == (name == "ours") and all("trust=true" in each.sentence for each in problems)
        ours = f"lora.a={tmp_path}/ours/checkpoints/step_1"
        assert arguments(ours, "images=1") == [ours, "images=1", "trust=true"]
        for others in (
            [f"lora.a={tmp_path}/theirs"],
            [ours, "lora.b=/tmp/other"],
            [ours, f"experiment={tmp_path}/ours/../theirs/config.yaml"],
            ["images=1"],
            [ours, "trust=false"],
        ):
            assert arguments(*others) == others


def test_of_a_run_whose_checkpoints_all_have_signals_of_the_guard_none_is_ticked(tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    make_run(root / "signs" / "one")
    folder = root / "signs" / "one" / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    for step, signals in ((2, ["looks/red"]), (4, ["watched/colour"])):
        save_checkpoint(folder, step, {}, {"val_reward": 0.1 * step, "signals": signals})
    with open_studio(root) as (url, _):
        found = requests.get(f"{url}/api/checkpoints", params={"run": "signs/one"}, timeout=30).json()
    assert [(row["step"], row["best"], row["flagged"]) for row in found["checkpoints"]] == [
        (2, False, True),
        (4, False, True),
    ]
    assert "base model" in found["none"] and "step=2" in found["none"]


def test_a_secret_that_is_typed_gets_the_offer_of_a_variable(opened: tuple[str, Studio]) -> None:
    url, _ = opened
    texts = {"judge.py": "def compute_score(images, prompts, api_key):\n    return [0.0] * len(images)"}
    for value, secret in (("sk-0123456789abcdef0123", ["reward.scorers"]), ("${oc.env:HOME}", [])):
        judge = {"judge": {"kwargs": f"api_key: {value}"}}
        assert post(url, "draft", draft("secret", judge, texts)).json()["facts"]["secrets"] == secret
    post(url, "remove", {"name": "secret"})


def test_a_run_is_queued_stopped_and_cannot_be_started_twice(opened: tuple[str, Studio]) -> None:
    url, studio = opened
    post(url, "draft", draft("run", trainer__steps="3"))
    number = post(url, "start", {"name": "run", "gpus": 1}).json()["job"]
    job = studio.jobs.get(number)
    assert job.state == "running" and job.run == "run" and job.arguments[-1] == f"out={studio.root / 'run'}"
    second = post(
        url, "command", {"command": "preflight", "arguments": ["experiment=signs", "out={out}/a.json"]}
    ).json()
    assert studio.jobs.get(second["job"]).arguments[-1] == f"out={studio.root / 'studio' / str(second['job'])}/a.json"
    assert requests.get(f"{url}/api/home", timeout=10).json()["jobs"][0]["state"] == "waiting"
    assert post(url, "job", {"job": second["job"], "action": "stop"}).json()["state"] == "stopped"
    (studio.root / "run").mkdir()
    assert "another name" in post(url, "start", {"name": "run", "gpus": 1}).json()["error"]
    assert post(url, "start", {"name": "run", "gpus": 9}).status_code == 409


def test_the_model_that_draws_is_no_job_of_the_queue(tmp_path: Path) -> None:
    with open_studio(tmp_path) as (url, studio):
        studio.jobs.add("serve", ["pipeline=signs"], "signs", gpus=0)
        studio.jobs.add("train", [], "a run")
        found = requests.get(f"{url}/api/home", timeout=10).json()
        assert [job["command"] for job in found["jobs"]] == ["train"] and found["sampler"]["title"] == "signs"


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("command", {"command": "sh", "arguments": []}),
        ("command", {"command": "train", "arguments": "x"}),
        ("command", {"command": "train", "arguments": ["a\0b"]}),
        ("job", {"job": 999, "action": "stop"}),
        ("job", {"job": 1, "action": "kill"}),
        ("note", {"run": "nowhere", "note": "", "star": True}),
        ("note", {"run": "signs/one", "note": 3, "star": True}),
        ("copy", {"run": "../.."}),
        ("sample", {"run": "signs/one", "prompts": "x"}),
        ("sample", {"run": "signs/one", "prompts": ["a fox"], "step": 5}),
        ("try", {"draft": "first", "folder": "/etc"}),
        ("draft", [1]),
        ("draft", {"name": "a", "keys": [1]}),
    ],
)
def test_a_wrong_request_is_refused_with_a_sentence(opened: tuple[str, Studio], name: str, body: Any) -> None:
    answer = post(opened[0], name, body)
    assert 400 <= answer.status_code < 500 and answer.json()["error"]


def test_notes_and_stars_are_kept_and_a_run_is_copied(opened: tuple[str, Studio]) -> None:
    url, studio = opened
    assert post(url, "note", {"run": "signs/one", "note": "good", "star": True}).ok
    (run,) = [run for run in requests.get(f"{url}/api/home", timeout=10).json()["runs"] if run["name"] == "signs/one"]
    assert (run["note"], run["star"]) == ("good", True)
    assert post(url, "note", {"run": "signs/one", "star": False}).ok
    assert studio.store.values["notes"]["signs/one"] == {"note": "good", "star": False}
    assert post(url, "copy", {"run": "signs/one", "name": "again"}).json() == {"name": "again"}
    copies = [post(url, "copy", {"run": "signs/one"}).json()["name"] for _ in range(2)]
    assert copies == ["one-2", "one-3"]
    make_run(studio.root / "élan 試")
    copied = post(url, "copy", {"run": "élan 試"}).json()["name"]
    assert copied == "élan 試-2" and post(url, "draft", draft(copied)).json()["problems"] == []
    assert studio.draft("again").keys == {"experiment": str(studio.root.resolve() / "signs" / "one" / "config.yaml")}


def test_the_live_page_is_below_it(opened: tuple[str, Studio]) -> None:
    url, _ = opened
    assert "page.js" in requests.get(f"{url}/watch/", timeout=10).text
    found = requests.get(f"{url}/watch/api/run", params={"run": "signs/one"}, timeout=10)
    assert found.ok and found.json()


def test_files_of_a_job_cannot_leave_its_folder(opened: tuple[str, Studio]) -> None:
    url, studio = opened
    job = studio.jobs.add("train", [], "a", gpus=0)
    (studio.jobs.folder(job) / "gallery.html").write_text("<script></script>")
    found = requests.get(f"{url}/result/{job.id}/gallery.html", timeout=10)
    assert found.ok and found.headers["content-security-policy"].startswith("sandbox")
    for path in ("..%2F..%2Fstudio.json", "log.txt", "nowhere.html"):
        assert requests.get(f"{url}/result/{job.id}/{path}", timeout=10).status_code == 404


def test_other_sites_and_other_hosts_are_refused(opened: tuple[str, Studio]) -> None:
    url, studio = opened
    body = draft("foreign")
    for origin in ("https://elsewhere.example", "http://[", "null", ""):
        assert post(url, "draft", body, Origin=origin).status_code == 403, origin
    for host in ("elsewhere.example", "[::1].elsewhere.example", "elsewhere.example\\@localhost", "localhost:1:2", "["):
        assert post(url, "draft", body, Host=host).status_code == 403, host
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:", "[::1]:80", "a.localhost:1"):
        assert post(url, "draft", body | {"keep": False}, Host=host).ok, host
    answer = requests.post(f"{url}/api/draft", data="{}", headers={"Content-Type": "text/plain"}, timeout=10)
    assert answer.status_code == 415 and "foreign" not in studio.store.values.get("drafts", {})


def test_a_token_is_asked_for_everywhere(tmp_path: Path) -> None:
    with open_studio(tmp_path, token="secret") as (url, _):
        for path in (
            "/",
            "/?token=wrong",
            "/api/home?token=secret",
            "/api/home",
            "/watch/",
            "/watch/api/runs",
            "/result/1/a.html",
        ):
            assert requests.get(url + path, timeout=10).status_code == 401
        assert post(url, "draft", draft("a")).status_code == 401
        assert post(url, "login", {"token": "wrong"}).status_code == 401 and post(url, "login", {}).status_code == 400
        session = requests.Session()
        assert session.get(f"{url}/?token=secret", timeout=10).ok and session.get(f"{url}/api/home", timeout=10).ok
        assert post(url, "login", {"token": "x" * 1000}).status_code == 413
        named = {"Host": "elsewhere.example", "Authorization": "Bearer secret"}
        assert requests.get(f"{url}/api/home", headers=named, timeout=10).status_code == 403
        session = requests.Session()
        answer = session.post(f"{url}/api/login", json={"token": "secret"}, timeout=10)
        assert answer.ok and "HttpOnly" in answer.headers["set-cookie"] and "secret" not in answer.text
        for path in ("/", "/api/home", "/watch/", "/watch/api/runs"):
            assert session.get(url + path, timeout=10).ok
        assert requests.get(f"{url}/api/home", headers={"Authorization": "Bearer secret"}, timeout=10).ok


def test_a_run_on_which_people_vote_is_another_command(opened: tuple[str, Studio]) -> None:
    found = post(opened[0], "draft", draft("votes") | {"votes": True}).json()
    assert found["problems"] == [] and found["line"].startswith("gerl vote experiment=signs ")


def test_the_menu_has_recipes_presets_and_situations(opened: tuple[str, Studio]) -> None:
    menu = requests.get(f"{opened[0]}/api/menu", timeout=60).json()
    assert {"signs", "plain"} <= {recipe["name"] for recipe in menu["recipes"]}
    advice = (Path(__file__).parents[4] / "docs" / "choose_an_algorithm.md").read_text(encoding="utf-8")
    for row in menu["situations"]:
        assert row["preset"] in menu["presets"] and f"`{row['preset']}`" in advice
    assert menu["keys"]["model.train"]["choices"] == [] or "lora" in menu["keys"]["model.train"]["choices"]
    assert set(menu["fitting"]) <= {recipe["name"] for recipe in menu["recipes"]}
    for fitting in menu["fitting"].values():
        assert set(fitting) == set(menu["cards"]) and all(card["hardware"] in GPUS for card in menu["cards"].values())
    assert menu["keys"]["trainer.steps"]["help"] and menu["keys"]["logger.level"]["choices"] == ["info", "debug"]


def test_pages_are_told_of_changes(opened: tuple[str, Studio]) -> None:
    url, _ = opened
    with requests.get(f"{url}/api/news", stream=True, timeout=10) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith(b"retry")
        timer = threading.Timer(0.2, lambda: post(url, "draft", draft("told")))
        timer.start()
        heard = [line for _, line in zip(range(5), lines, strict=False) if line.startswith(b"data")]
        timer.join()
    assert len(heard) >= 2


FIELDS: dict[str, dict[str, Any]] = {  # no service is started
    "draft": {"name": "odd", "keys": {}, "scorers": {}, "texts": {}, "votes": False, "revision": 5, "keep": True,
              "was": "x"},  # which is stale: what is composed is below
    "start": {"name": "first", "gpus": 9},
    "command": {"command": "sh", "arguments": [], "title": "t", "run": "signs/one"},
    "job": {"job": 999, "action": "stop"},
    "note": {"run": "signs/one", "note": "n", "star": False},
    "remove": {"name": "nothing"},
    "copy": {"run": "signs/one", "name": "-"},
    "lengths": {"draft": "nothing"},
    "sample": {"draft": "nothing", "run": "signs/one", "prompts": [], "seed": 0, "scale": 1.0, "step": 5},
    "try": {"draft": "first", "folder": "/etc"},
}  # fmt: skip
NESTED = '{"a":' * 300 + "1" + "}" * 300
VALUES = (
    "true", "3", "-1", "1e308", "1e999", "NaN", "9" * 400,
    '""', '"a\\u0000b"', '"\\ud800"', '["x"]', "[[1]]",
    '{"x": {}}',
    '{"x": {"kwargs": {"k": "\\udfff"}}}', '{"x": {"kwargs": "a: !!set {b}"}}', '{"x": {"kwargs": [[]]}}', NESTED,
    '{"x": {"kwargs": ' + NESTED + "}}",
)  # fmt: skip


def test_no_type_of_a_field_is_an_error_of_the_server(opened: tuple[str, Studio]) -> None:
    failed = []
    composed = {"keys": {}, "scorers": {}, "name": "odd", "keep": False}
    asked = [(name, fields, field) for name, fields in FIELDS.items() for field in fields]
    for name, fields, field in [*asked, ("draft", composed, "scorers")]:
        for value in VALUES:
            rest = "".join(f", {json.dumps(key)}: {json.dumps(fields[key])}" for key in fields if key != field)
            text = f'{{"{field}": {value}{rest}}}'
            answer = requests.post(
                f"{opened[0]}/api/{name}", data=text, headers={"Content-Type": "application/json"}, timeout=30
            )
            if answer.status_code >= 500:
                failed.append((name, text[:200]))
    assert failed == []
