"""A run folder that somebody else made: all that looks at it runs no file that its settings name, unless trusted."""

import contextlib
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml
from starlette.requests import Request

import gerl
from gerl.api.commands import evaluate, export
from gerl.config.registry import ALGORITHMS
from gerl.config.user_files import PREFIX
from gerl.errors import GerlError
from gerl.program.commands import main as command
from gerl.trainer.main_flowgrpo import main as train
from gerl.trainer.sweep import JOB, write_table
from gerl.trainer.tune import Trial, read_result
from gerl.web.site import Folders, Site, Unknown, build_routes
from gerl.web.studio.app import GETS, POSTS, Studio

MARK = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"
FILES = {
    "own_algorithm": "from gerl.algorithms.flow_grpo import FlowGRPO\nclass Mine(FlowGRPO):\n    pass\n",
    "own_scorer": "def compute_score(images, prompts, metadata):\n    return [len(p) / 9 for p in prompts]\n",
    "own_prompts": "rows = ['a red fox', 'blue', 'x y', 'seven']\n",
}
MADE = "checkpoint.every=1 trainer.steps=1 trainer.dump=1 validation.every=1 reward.trial=false".split()
QUERY = {"run": "run", "step": 1, "row": 0, "names": "reward/mean", "name": "copy", "job": 0}


@pytest.fixture(scope="module")
def stranger(arguments: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; each of the files that its settings name leaves a mark beside itself when it is imported."""
    root = tmp_path_factory.mktemp("stranger")
    for name, text in FILES.items():
        (root / f"{name}.py").write_text(MARK + text)
    with forgetting():
        prompts = f"{root / 'own_prompts.py'}:rows"
        keys = {"data.train": prompts, "validation.data": prompts, "algorithm.path": root / "own_algorithm.py"}
        given = [f"{key}={value}" for key, value in keys.items()]
        assert train(arguments(root / "run", *given, *MADE, scorer=root / "own_scorer.py")) == 0
    assert ran(root) == set(FILES)
    return root


@contextlib.contextmanager
def forgetting() -> Iterator[None]:
    """As in a process that has imported none of the files, before and after the block."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_own", "_by_path", "_sources"):
            patch.setattr(ALGORITHMS, name, {})
        for name in [name for name in sys.modules if name.startswith(PREFIX)]:
            patch.delitem(sys.modules, name)
        yield
        for name in [name for name in sys.modules if name.startswith(PREFIX)]:
            patch.delitem(sys.modules, name)


def ran(root: Path) -> set[str]:
    """The files that were imported since the last call."""
    marks = [*root.rglob("*.ran")]
    for mark in marks:
        mark.unlink()
    return {mark.stem for mark in marks}


def commands(run: Path, out: Path) -> list[list[str]]:
    dump, lora = f"dump={run}/dumps/step_1.json", f"lora={run}"
    config, images = f"experiment={run}/config.yaml", f"images={run}/dumps"
    return [
        ["verify", f"run={run}", "recompute=false"],
        ["verify", f"run={run}"],
        ["replay", dump],
        ["evaluate", lora, f"out={out}/evaluated"],
        ["evaluate", lora, f"out={out}/evaluated", "prompts=drawbench"],
        ["score", images, "prompt=x", config, f"out={out}/scored"],
        ["report", f"run={run}"],
        *(["export", f"run={run}", f"out={out}/{kind}", f"format={kind}"] for kind in ("diffusers", "hub", "merged")),
    ]


def pages(root: Path) -> dict[str, Callable[[], Any]]:
    """Every page and answer about the run, of the live page and of the studio."""
    site, studio = Site(Folders.of(root)), Studio(root)
    request = Request({"type": "http", "query_string": urlencode(QUERY).encode(), "headers": [], "path_params": {}})
    found: dict[str, Callable[[], Any]] = {"other": lambda: site.run("run").settings(site.run("run"))}
    for route in build_routes(site):
        if not inspect.iscoroutinefunction(route.endpoint) and route.methods and "GET" in route.methods:
            found[route.path] = lambda route=route: route.endpoint(request)  # type: ignore[misc]
    for name, get in GETS.items():
        found[f"studio {name}"] = lambda get=get: get(studio, request)  # type: ignore[misc]
    copy = {"name": "copy", "keys": {"experiment": str(root / "run" / "config.yaml")}}
    body = {**QUERY, **copy, "draft": "copy", "prompts": ["x"], "note": "", "star": False, "command": "-"}
    for name in ("copy", "draft", *POSTS):
        found[f"studio posted {name}"] = lambda name=name: POSTS[name](studio, dict(body))  # type: ignore[misc]
    return found


def test_nothing_that_looks_at_a_run_runs_its_files(
    stranger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, wrong, answered = stranger / "run", list[str](), set[str]()
    moved = tmp_path / "moved"
    moved.mkdir()
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["algorithm"]["path"] = "/gone/own_algorithm.py"  # only the copy beside the configuration is left
    (moved / "config.yaml").write_text(yaml.safe_dump(settings))
    (moved / "own_algorithm.py").write_text(MARK)
    looks: dict[str, Callable[[], Any]] = {" ".join(c): lambda c=c: command(c) for c in commands(run, tmp_path)}  # type: ignore[misc]
    looks |= {f"verify the copy {moved}": lambda: command(["verify", f"run={moved}"])}
    looks |= pages(stranger)
    looks |= {"gerl.evaluate": lambda: evaluate(lora=run, out=tmp_path / "e"), "gerl.export": lambda: export(run)}
    looks |= {"gerl.Run": lambda: (gerl.Run(run).config, gerl.Run(run)._repr_html_(), gerl.Run(run).report)}
    trial = Trial("flow_grpo", "1e-4", 1)
    (run / JOB).write_text(json.dumps({"number": 1, "code": 0, "overrides": [], "swept": [], "at": 0.0}))
    looks |= {"sweep": lambda: write_table(stranger), "tune": lambda: read_result(trial, run, 1, 1e-4, 0, None)}
    looks |= {"a resumed copy": lambda: command(["train", f"checkpoint.resume={moved}", f"out={tmp_path / 'new'}"])}
    for name, look in looks.items():
        with forgetting(), contextlib.suppress(GerlError, Unknown):
            look()
            answered.add(name)
        if names := ran(stranger) | ran(tmp_path):
            wrong.append(f"{name} imported {', '.join(sorted(names))}")
    assert not wrong, "\n".join(wrong)
    assert {
        "other",
        "/api/settings",
        "/api/run",
        "/api/held_out",
        "studio checkpoints",
        "gerl.Run",
        "sweep",
        "tune",
    } <= answered
    said = capsys.readouterr()
    assert "SHA-256" in said.err and "trust=true" in said.err and str(stranger / "own_algorithm.py") in said.err


def test_what_is_trusted_runs(stranger: Path, tmp_path: Path) -> None:
    run = stranger / "run"
    for arguments in (
        ["verify", f"run={run}", "trust=true"],
        ["replay", f"dump={run}/dumps/step_1.json", "trust=true"],
        ["evaluate", f"lora={run}", f"out={tmp_path / 'evaluated'}", "trust=true", "split=false"],
    ):
        with forgetting():
            assert command(arguments) == 0, arguments
        assert "own_algorithm" in ran(stranger), arguments


def test_a_file_that_is_typed_runs_and_no_other(stranger: Path, tmp_path: Path) -> None:
    out, own = tmp_path / "checks.json", stranger / "own_algorithm.py"
    with forgetting():
        assert command(["verify", f"run={stranger / 'run'}", f"algorithm.path={own}", f"out={out}"]) == 0
    assert ran(stranger) == {"own_algorithm"}
    status = {check["name"]: check["status"] for check in json.loads(out.read_text())}
    assert status["data"] == "not checked" and status["metrics"] == status["dumps"] == "ok"
    refused = {name: hashlib.sha256((stranger / f"{name}.py").read_bytes()).hexdigest() for name in FILES}
    assert refused["own_prompts"] in out.read_text() and refused["own_algorithm"] not in out.read_text()


def test_a_configuration_of_a_run_under_another_name_runs_nothing(stranger: Path, tmp_path: Path) -> None:
    config = stranger / "run" / "config.yaml"
    (tmp_path / "recipe.yaml").symlink_to(config)
    for name in ("config.yml", "config.step_1.yml"):
        (tmp_path / name).write_bytes(config.read_bytes())
    for path in sorted(tmp_path.iterdir()):
        with forgetting():
            assert command(["score", f"images={stranger}", f"experiment={path}", f"out={tmp_path / 'out'}"]) == 2
        assert not ran(stranger), path


def test_the_owner_resumes_where_the_run_was_made(stranger: Path) -> None:
    with forgetting():
        assert command(["train", f"checkpoint.resume={stranger / 'run'}", "trainer.steps=2"]) == 0
    assert ran(stranger) == set(FILES)
