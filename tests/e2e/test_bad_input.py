"""Bad input: one sentence on stderr with key, value and remedy, before any work is done."""

import importlib
import json
import logging
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny
import torch

from gerl.trainer.main_flowgrpo import main

Arguments = Callable[..., list[str]]
FILES = {
    "empty.txt": "\n  \n",
    "rows.jsonl": '{"prompt": "a"}\n\n{"text": "482"}\n',
    "broken.jsonl": '{"prompt": "a"}\n{"prompt": \n',
    "number.jsonl": '{"prompt": 3}\n',
    "unquoted.txt": 'a sign that reads "1"\na sign\n',
    "notes.md": "a\n",
    "mine.yaml": "trainer:\n  stepz: 3\n",
    "typed.yaml": "actor:\n  lr: fast\n",
    "broken.yaml": "trainer: [\n",
    "list.yaml": "- trainer\n",
    "signs.yaml": "trainer:\n  steps: 3\n",
    "other.py": "def score(images, prompts, metadata):\n    return [0.0] * len(images)\n",
    "fewer.py": "def compute_score(images):\n    return [0.0] * len(images)\n",
    "syntax.py": "def compute_score(images, prompts, metadata) return\n",
    "in_the_way": "a file\n",
    "folder/readme": "no pipeline\n",
}
# (overrides, words of the sentence); {} is the folder of FILES.
TABLE: dict[str, tuple[list[str], list[str]]] = {
    # keys and values
    "mistyped key": (["trainer.stepz=3"], ["trainer.stepz: there is no such key", "did you mean 'trainer.steps'"]),
    "mistyped block": (["trianer.steps=3"], ["trianer.steps: there is no such key", "did you mean 'trainer.steps'"]),
    "added key": (["+trainer.stepz=3"], ["trainer.stepz: there is no such key", "'trainer.steps'", "--help"]),
    "unknown key": (["rollout.zebra=1"], ["rollout.zebra: there is no such key", "--help"]),
    "key of a scorer": (["reward.scorers.bright.wieght=2"], ["reward.scorers.bright.wieght: there is no such key"]),
    "key in a yaml": (["experiment={}/mine.yaml"], ["trainer.stepz: there is no such key", "'trainer.steps'"]),
    "type in a yaml": (["experiment={}/typed.yaml"], ["actor.lr='fast'", "must be a valid number"]),
    "wrong type": (["trainer.steps=three"], ["trainer.steps='three'", "must be a valid integer"]),
    "null": (["trainer.steps=null"], ["trainer.steps=None", "must be a valid integer"]),
    "wrong choice": (["sampling.kernel=sde"], ["sampling.kernel='sde'", "'flow_sde'"]),
    "below the range": (["actor.lr=0"], ["actor.lr=0.0", "greater than 0"]),
    "above the range": (["actor.ema_decay=1.5"], ["actor.ema_decay=1.5", "at most 1"]),
    "not a number": (["actor.lr=nan"], ["actor.lr=nan", "finite"]),
    "block as value": (["trainer=3"], ["trainer=3", "must be a dictionary"]),
    "no equals sign": (["trainer.steps"], ["trainer.steps: expected key=value"]),
    "space": (["model.path a"], ["model.path a: expected key=value", "quote"]),
    "open bracket": (["actor.betas=[0.9"], ["actor.betas=[0.9: expected key=value"]),
    "comma": (["trainer.seed=1,2"], ["trainer.seed=1,2: expected one value"]),
    "option": (["--multirun"], ["--multirun: expected key=value"]),
    "interpolation": (["model.path='${nope}'"], ["nope", "model.path"]),
    # experiments
    "unknown experiment": (["experiment=sings"], ["experiment=sings: there is no such file", "plain, ", "signs"]),
    "missing yaml": (["experiment={}/nope.yaml"], ["experiment={}/nope.yaml: there is no such file"]),
    "broken yaml": (["experiment={}/broken.yaml"], ["experiment={}/broken.yaml: it is no yaml file"]),
    "list as yaml": (["experiment={}/list.yaml"], ["experiment={}/list.yaml: expected blocks of keys"]),
    "name taken": (["experiment={}/signs.yaml"], ["experiment={}/signs.yaml", "give the file another"]),
    # what cannot train
    "one image a group": (["rollout.n=1"], ["rollout.n=1", "use at least 2"]),
    "no noise": (["sampling.noise_level=0"], ["sampling.noise_level=0", "use kernel=flow_sde"]),
    "last step": (["sampling.window_range=[1,4]"], ["sampling.window_range=[1, 4]", "step 3", "end at 3"]),
    "wide window": (["sampling.window_size=4"], ["sampling.window_size=4", "lower it"]),
    "large micro-batch": (
        ["actor.micro_batch_size=9"],
        ["actor.micro_batch_size=9", "at most rollout.micro_batch_size"],
    ),
    # prompts
    "missing prompts": (["data.train={}/nope.txt"], ["data.train={}/nope.txt: ", "does not exist in {}"]),
    "missing list": (["data.train=sings_train"], ["data.train=sings_train: ", "signs_train"]),
    "missing held-out": (["validation.data={}/empty.text"], ["validation.data={}/empty.text: ", "mean empty.txt"]),
    "empty prompts": (["data.train={}/empty.txt"], ["data.train={}/empty.txt: ", "has no prompts: put at least one"]),
    "row without prompt": (["data.train={}/rows.jsonl"], ["data.train={}/rows.jsonl: ", "rows.jsonl:3", "'prompt'"]),
    "broken row": (["data.train={}/broken.jsonl"], ["{}/broken.jsonl:2"]),
    "number as prompt": (["data.train={}/number.jsonl"], ["{}/number.jsonl:1"]),
    "suffix of prompts": (["data.train={}/notes.md"], ["data.train={}/notes.md: ", ".txt, .jsonl or .parquet"]),
    "no ground truth": (
        ["data.train={}/unquoted.txt", "reward.scorers.ocr.weight=1"],
        ["data.train={}/unquoted.txt: ", "prompt 1", "'a sign'", "put it in double quotes"],
    ),
    "no ground truth held out": (
        ["validation.data={}/unquoted.txt", "data.train=signs_train", "reward.scorers.ocr.weight=1"],
        ["validation.data={}/unquoted.txt: ", "prompt 1", "'a sign'"],
    ),
    # the model
    "missing model": (["model.path={}/nope"], ["model.path='{}/nope' is no pipeline"]),
    "folder that is no model": (
        ["model.path={}/folder"],
        ["model.path='{}/folder' is no pipeline", "model_index.json"],
    ),
    "name that is no model": (["model.path=sings"], ["model.path='sings' is no pipeline", "'signs'"]),
    # scorers
    "unknown scorer": (["reward.scorers.ocrr.weight=1"], ["reward.scorers.ocrr", "only ocr, pick", ".path"]),
    "no scorer file": (["reward.scorers.bright.path={}/nope.py"], ["reward.scorers.bright.path", "correct the path"]),
    "no such function": (["reward.scorers.bright.path={}/other.py"], ["reward.scorers.bright.function", "only score"]),
    "wrong signature": (["reward.scorers.bright.path={}/fewer.py"], ["reward.scorers.bright.kwargs", "metadata"]),
    "syntax error": (["reward.scorers.bright.path={}/syntax.py"], ["reward.scorers.bright.path", "SyntaxError"]),
    "kwargs of a scorer": (
        ["reward.scorers.jpeg_compressibility.kwargs.quality=0"],
        ["reward.scorers.jpeg_compressibility.kwargs", "quality=0"],
    ),
    "no weights": (["reward.scorers.bright.weight=0"], ["reward.scorers", "weight"]),
    "reserved name": (["reward.scorers.reward.weight=1"], ["reward.scorers.reward", "choose another"]),
    # places
    "file in the way": (["hydra.run.dir={}/in_the_way"], ["hydra.run.dir={}/in_the_way", "cannot be written"]),
    "file on the way": (["hydra.run.dir={}/in_the_way/run"], ["hydra.run.dir={}/in_the_way/run", "cannot be written"]),
    "no run to resume": (["checkpoint.resume={}/folder"], ["checkpoint.resume={}/folder", "auto or never"]),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    return folder


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """What went to stderr, which must be one line that ends in a remedy, not in a traceback."""
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("case", TABLE)
def test_bad_input_gets_one_sentence_before_any_work(
    arguments: Arguments, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr("gerl.cluster.Cluster.__enter__", never)
    overrides, words = TABLE[case]
    given = [override.replace("{}", str(files)) for override in overrides]
    assert main([*arguments(tmp_path / "run"), *given]) in (1, 2)
    said = sentence(capsys)
    for word in words:
        assert word.replace("{}", str(files)) in said, said
    assert not (tmp_path / "run").exists()
    assert (files / "in_the_way").read_text() == "a file\n"


def test_lora_targets_that_match_nothing(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path / "run", "model.lora_targets=to_qq")) == 1
    said = sentence(capsys)
    assert "model.lora_targets='to_qq'" in said and "SD3Transformer2DModel" in said and "to_q" in said
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_an_argument_the_pipeline_does_not_take(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path / "run", "sampling.call.true_cfg=4")) == 1
    assert "StableDiffusion3Pipeline takes no argument 'true_cfg'" in sentence(capsys)


def test_a_pipeline_with_a_missing_part(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.sd3(layers=1).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "vae" / "config.json").unlink()
    capsys.readouterr()
    assert main(arguments(tmp_path / "run", model__path=tmp_path / "model")) == 1
    assert f"model.path='{tmp_path / 'model'}' cannot be loaded" in sentence(capsys)


def test_a_scorer_that_is_not_installed(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def without_rapidocr(name: str, package: str | None = None) -> ModuleType:
        if name == "rapidocr":
            raise ModuleNotFoundError("No module named 'rapidocr'", name=name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without_rapidocr)
    assert main(arguments(tmp_path / "run", "reward.scorers.ocr.weight=1")) == 1
    said = sentence(capsys)
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert "rapidocr" in said and any(f"pip install 'gerl[{extra}]'" in said for extra in extras), said
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(tmp_path / "run", cluster__device="cuda")) == 1
    said = sentence(capsys)
    assert "cluster.device=cuda" in said and "use cluster.device=auto or cpu" in said
    assert not (tmp_path / "run").exists()


def test_a_ray_cluster_that_is_not_there(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert main(arguments(tmp_path / "run", cluster__launcher="ray")) == 1
    said = sentence(capsys)
    assert f"RAY_ADDRESS={address}: this Ray cluster cannot be joined" in said and "unset the variable" in said


# Scorers that fail on the first image of every group of the prompt "blue", and count their calls.
FAILING = {
    "nan": "return [float('nan') if p == 'blue' and m['first'] else 0.1 * i for i, (p, m) in enumerate(rows)]",
    "raise": "raise RuntimeError('out of\\nmemory')",
    "count": "return [0.5] * (len(rows) + 1)",
    "nothing": "return None",
    "text": "return ['good'] * len(rows)",
}
SCORER = """
import pathlib

def compute_score(images, prompts, metadata, log, until=10**9):
    calls = pathlib.Path(log)
    count = calls.stat().st_size if calls.exists() else 0
    calls.write_text("x" * (count + 1))
    rows = list(zip(prompts, [{"first": i == 0} for i in range(len(prompts))]))
    if "blue" in prompts and count < until:
        BODY
    return [0.1 * i for i in range(len(prompts))]
"""
REASONS = {
    "nan": "returned nan, which is not finite",
    "raise": "RuntimeError: out of memory",
    "count": "returned 5 scores for 4 images",
    "nothing": "TypeError: 'NoneType' object is not iterable",
    "text": "returned 'good', which is not a number",
}


@pytest.fixture
def failing(arguments: Arguments, run_of: Any, tmp_path: Path) -> Callable[..., Any]:
    """A run of two groups of four, one micro-batch each, of which the scorer fails for one."""

    def start(kind: str, *overrides: str, expect: int = 0, **keys: Any) -> Any:
        (tmp_path / "failing.py").write_text(SCORER.replace("BODY", FAILING[kind]))
        (tmp_path / "two.txt").write_text("blue\na red fox\n")
        settings = {
            "data__train": tmp_path / "two.txt",
            "reward__scorers__bright__kwargs": f"{{log: {tmp_path / 'calls'}}}",
            "reward__retries": 0,
        }
        path = f"reward.scorers.bright.path={tmp_path / 'failing.py'}"
        assert main(arguments(tmp_path / "run", path, *overrides, **settings | keys)) == expect
        return run_of(tmp_path / "run")

    return start


@pytest.mark.parametrize("kind", FAILING)
def test_the_group_of_a_failed_score_is_dropped_and_named(
    failing: Callable[..., Any], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with caplog.at_level(logging.WARNING, logger="gerl"):
        run = failing(kind)
    assert run.column("group/dropped") == [1, 1]
    assert run.column("reward/failures") == ([1, 1] if kind == "nan" else [4, 4])
    assert run.column("actor/policy_version") == [1, 2]  # the other group is trained on
    kept = [0.0, 0.1, 0.2, 0.3] + ([0.1, 0.2, 0.3] if kind == "nan" else [])
    assert run.column("reward/mean") == pytest.approx([sum(kept) / len(kept)] * 2)  # no silent 0
    dropped = [message for message in caplog.messages if message.startswith("group dropped")]
    assert dropped == [f"group dropped: scorer bright has no score for image 0 of 'blue': {REASONS[kind]}"] * 2


def test_a_failed_call_is_retried(
    failing: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    retries = {"reward__retries": 2, "reward__scorers__bright__kwargs": f"{{log: {tmp_path / 'calls'}, until: 3}}"}
    with caplog.at_level(logging.WARNING, logger="gerl"):
        run = failing("raise", trainer__steps=1, **retries)
    assert run.column("group/dropped") == [0]
    again = "scorer bright was asked again, it failed for 4 of 4 images: RuntimeError: out of memory"
    assert sum(again in message for message in caplog.messages) == sum(run.column("scorer/bright/retries")) == 2


def test_a_failed_score_may_stop_the_run_with_a_checkpoint(
    failing: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "four.txt").write_text("a red fox\nx y\nblue\nseven\n")
    run = failing("raise", "data.shuffle=false", expect=1, data__train=tmp_path / "four.txt", reward__on_error="stop")
    said = sentence(capsys)
    assert "scorer bright has no score for image 0 of 'blue': RuntimeError: out of memory" in said
    assert "reward.on_error=drop_group" in said
    assert run.metrics[-1]["step"] == 1  # the first step had no failure
    state = json.loads((run.checkpoint(1) / "state.json").read_text())
    assert state["step"] == 1 and state["finished"] is False
    assert (run.folder / "report.html").exists()


def test_a_step_without_any_score_stops_the_run(
    failing: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "blue.txt").write_text("blue\n")
    failing("raise", expect=1, data__train=tmp_path / "blue.txt")
    assert "100% of the images of step 1 have no reward, more than reward.max_failed=0.5" in sentence(capsys)
