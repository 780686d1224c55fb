"""Bad input: one sentence on stderr with key, value and remedy, before any work is done."""

import json
import re
import socket
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

ROOT = Path(__file__).resolve().parents[2]
Refused = Callable[..., str]
Failing = Callable[..., dict[str, Any]]
Train = Callable[..., Any]
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
# (exit code, what is named: key or place, pattern of the remedy, overrides...); {} is the folder of FILES.
TABLE: dict[str, tuple[str, ...]] = {
    # keys and values
    "mistyped key": ("2", "trainer.stepz: ", r"'trainer\.steps'.*--help", "trainer.stepz=3"),
    "mistyped block": ("2", "trianer.steps: ", r"'trainer\.steps'.*--help", "trianer.steps=3"),
    "added key": ("2", "trainer.stepz: ", r"'trainer\.steps'.*--help", "+trainer.stepz=3"),
    "unknown key": ("2", "rollout.zebra: ", r"micro_batch_size.*--help", "rollout.zebra=1"),
    "key of a scorer": ("2", "reward.scorers.bright.wieght: ", r"\.weight'", "reward.scorers.bright.wieght=2"),
    "key in a yaml": ("2", "trainer.stepz: ", r"'trainer\.steps'", "experiment={}/mine.yaml"),
    "type in a yaml": ("2", "actor.lr='fast': ", "number", "experiment={}/typed.yaml"),
    "wrong type": ("2", "trainer.steps='three': ", "integer", "trainer.steps=three"),
    "null": ("2", "trainer.steps=None: ", "integer", "trainer.steps=null"),
    "wrong choice": ("2", "sampling.kernel='sde': ", "'ode'.*'flow_sde'.*'ddim'", "sampling.kernel=sde"),
    "below the range": ("2", "actor.lr=0.0: ", "greater than 0", "actor.lr=0"),
    "above the range": ("2", "actor.ema_decay=1.5: ", "at most 1", "actor.ema_decay=1.5"),
    "not a number": ("2", "actor.lr=nan: ", "finite", "actor.lr=nan"),
    "block as value": ("2", "trainer=3: ", "dictionary", "trainer=3"),
    "no equals sign": ("2", "trainer.steps: ", "key=value.*--help", "trainer.steps"),
    "space": ("2", "model.path a: ", "key=value.*quote", "model.path a"),
    "open bracket": ("2", "actor.betas=[0.9: ", "key=value", "actor.betas=[0.9"),
    "comma": ("2", "trainer.seed=1,2: ", r"\[1,2\]", "trainer.seed=1,2"),
    "option": ("2", "--multirun: ", "key=value.*--help", "--multirun"),
    "interpolation": ("2", "nope", r"model\.path", "model.path='${nope}'"),
    # experiments
    "unknown experiment": ("2", "experiment=sings: ", r"plain, .*signs.*\.yaml", "experiment=sings"),
    "missing yaml": ("2", "experiment={}/nope.yaml: ", "no such file", "experiment={}/nope.yaml"),
    "broken yaml": ("2", "experiment={}/broken.yaml: ", "no yaml", "experiment={}/broken.yaml"),
    "list as yaml": ("2", "experiment={}/list.yaml: ", "trainer: .steps", "experiment={}/list.yaml"),
    "name taken": ("2", "experiment={}/signs.yaml: ", "another", "experiment={}/signs.yaml"),
    # what cannot train
    "one image a group": ("2", "rollout.n=1: ", "at least 2", "rollout.n=1"),
    "no noise": ("2", "sampling.noise_level=0: ", "kernel=flow_sde .*noise_level=", "sampling.noise_level=0"),
    "last step": ("2", "sampling.window_range=[1, 4]: ", "end at 3", "sampling.window_range=[1,4]"),
    "wide window": ("2", "sampling.window_size=4: ", r"lower.*sampling\.window_range", "sampling.window_size=4"),
    "large micro-batch": (
        "2", "actor.micro_batch_size=9: ", r"at most rollout\.micro_batch_size=4", "actor.micro_batch_size=9",
    ),
    # prompts
    "missing prompts": ("1", "data.train={}/nope.txt: ", r"unquoted\.txt", "data.train={}/nope.txt"),
    "missing list": ("1", "data.train=sings_train: ", r"signs_train.*\.jsonl", "data.train=sings_train"),
    "missing held-out": ("1", "validation.data={}/empty.text: ", r"empty\.txt", "validation.data={}/empty.text"),
    "empty prompts": ("1", "data.train={}/empty.txt: ", "at least one", "data.train={}/empty.txt"),
    "row without prompt": (
        "1", "data.train={}/rows.jsonl: ", r"rows\.jsonl:3 .*'prompt'.*data\.prompt_key", "data.train={}/rows.jsonl",
    ),
    "broken row": ("1", "data.train={}/broken.jsonl: ", r"broken\.jsonl:2 .*correct", "data.train={}/broken.jsonl"),
    "number as prompt": ("1", "data.train={}/number.jsonl: ", r"number\.jsonl:1 .*text", "data.train={}/number.jsonl"),
    "suffix of prompts": ("1", "data.train={}/notes.md: ", r"\.txt, \.jsonl or \.parquet", "data.train={}/notes.md"),
    "no ground truth": (
        "1", "data.train={}/unquoted.txt: ", "prompt 1: 'a sign'.*double quotes",
        "data.train={}/unquoted.txt", "reward.scorers.ocr.weight=1",
    ),
    "no ground truth held out": (
        "1", "validation.data={}/unquoted.txt: ", "prompt 1: 'a sign'.*double quotes",
        "validation.data={}/unquoted.txt", "data.train=signs_train", "reward.scorers.ocr.weight=1",
    ),
    # the model
    "missing model": ("1", "model.path='{}/nope' ", r"model_index\.json", "model.path={}/nope"),
    "folder that is no model": ("1", "model.path='{}/folder' ", r"model_index\.json", "model.path={}/folder"),
    "name that is no model": ("1", "model.path='sings' ", "owner/name.*'signs'", "model.path=sings"),
    # scorers
    "unknown scorer": ("1", "reward.scorers.ocrr: ", r"ocr, pick.*\.path", "reward.scorers.ocrr.weight=1"),
    "no scorer file": ("1", "reward.scorers.bright.path=", "correct", "reward.scorers.bright.path={}/nope.py"),
    "no such function": (
        "1", "reward.scorers.bright.function=compute_score: ", "only score;", "reward.scorers.bright.path={}/other.py",
    ),
    "wrong signature": (
        "1", "reward.scorers.bright.kwargs: ", r"\(images, prompts, metadata", "reward.scorers.bright.path={}/fewer.py",
    ),
    "syntax error": (
        "1", "reward.scorers.bright.path=", "SyntaxError.*line 1", "reward.scorers.bright.path={}/syntax.py",
    ),
    "kwargs of a scorer": (
        "1", "reward.scorers.jpeg_compressibility.kwargs: ", "quality=0.*greater than or equal to 1",
        "reward.scorers.jpeg_compressibility.kwargs.quality=0",
    ),
    "no weights": ("2", "reward.scorers ", r"weight.*\+reward\.scorers\.", "reward.scorers.bright.weight=0"),
    "reserved name": ("2", "reward.scorers.reward: ", "another", "reward.scorers.reward.weight=1"),
    # places
    "no GPU": ("1", "cluster.device=cuda, ", r"cluster\.device=auto", "cluster.device=cuda"),
    "file in the way": ("2", "hydra.run.dir={}/in_the_way: ", "another folder", "hydra.run.dir={}/in_the_way"),
    "file on the way": ("2", "hydra.run.dir={}/in_the_way/run: ", "another folder", "hydra.run.dir={}/in_the_way/run"),
    "no run to resume": ("1", "checkpoint.resume={}/folder: ", "auto.*never", "checkpoint.resume={}/folder"),
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize("case", TABLE)
def test_bad_input_gets_one_sentence_before_any_work(
    refused: Refused, files: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr("gerl.cluster.Cluster.__enter__", never)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, named, remedy, *overrides = (part.replace("{}", str(files)) for part in TABLE[case])
    message = refused(*overrides, expect=int(code))
    _, found, rest = message.partition(named)
    assert found and re.search(remedy, rest), message
    assert not (tmp_path / "run").exists()
    assert (files / "in_the_way").read_text() == "a file\n"


def test_lora_targets_that_match_nothing(refused: Refused, tmp_path: Path) -> None:
    message = refused("model.lora_targets=to_qq")
    assert re.search("model.lora_targets='to_qq'.*SD3Transformer2DModel.*linear_1", message), message
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_an_argument_the_pipeline_does_not_take(refused: Refused) -> None:
    assert re.search("StableDiffusion3Pipeline.*'true_cfg'", refused("sampling.call.true_cfg=4"))


def test_a_pipeline_with_a_missing_part(refused: Refused, tmp_path: Path) -> None:
    tiny.sd3(layers=1).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "vae" / "config.json").unlink()
    assert f"model.path='{tmp_path / 'model'}' " in refused(model__path=tmp_path / "model")


def test_a_scorer_that_is_not_installed(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    message = refused("reward.scorers.ocr.weight=1")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "rapidocr" in message and any(f"pip install 'gerl[{extra}]'" in message for extra in extras), message
    assert not (tmp_path / "run").exists()


def test_a_ray_cluster_that_is_not_there(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    message = refused(cluster__launcher="ray")
    assert re.search(f"RAY_ADDRESS={address}: .*unset", message), message


# Scorers that fail on the first image of every group of the prompt "blue", and the reason that is given.
FAILING = {
    "nan": ("return [float('nan') if i == 0 else 0.1 * i for i in range(len(prompts))]", "nan"),
    "raise": ("raise RuntimeError('out of\\nmemory')", "RuntimeError: out of memory"),
    "count": ("return [0.5] * (len(prompts) + 1)", "5 scores for 4 images"),
    "nothing": ("return None", "NoneType"),
    "text": ("return ['good'] * len(prompts)", "'good'"),
}
SCORER = """
import pathlib

def compute_score(images, prompts, metadata, log, until):
    calls = pathlib.Path(log)
    count = calls.stat().st_size if calls.exists() else 0
    calls.write_text("x" * (count + 1))
    if "blue" in prompts and count < until:
        BODY
    return [0.1 * i for i in range(len(prompts))]
"""


@pytest.fixture
def failing(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Keys of a run with a group of four per prompt, one micro-batch each, of which the scorer fails for one."""

    def keys(kind: str, prompts: str = "blue\na red fox\n", until: int = 10**9) -> dict[str, Any]:
        (tmp_path / "failing.py").write_text(SCORER.replace("BODY", FAILING[kind][0]))
        (tmp_path / "prompts.txt").write_text(prompts)
        return {
            "scorer": tmp_path / "failing.py",
            "data__train": tmp_path / "prompts.txt",
            "reward__scorers__bright__kwargs": f"{{log: {tmp_path / 'calls'}, until: {until}}}",
            "reward__retries": 0,
        }

    return keys


@pytest.mark.parametrize("kind", FAILING)
def test_the_group_of_a_failed_score_is_dropped_and_named(
    train: Train, failing: Failing, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    run = train(tmp_path / "run", **failing(kind))
    assert run.column("group/dropped") == [1, 1]
    assert run.column("reward/failures") == ([1, 1] if kind == "nan" else [4, 4])
    assert run.column("actor/policy_version") == [1, 2]  # the other group is trained on
    kept = [0.0, 0.1, 0.2, 0.3] + ([0.1, 0.2, 0.3] if kind == "nan" else [])
    assert run.column("reward/mean") == pytest.approx([sum(kept) / len(kept)] * 2)  # no silent 0
    dropped = [message for message in caplog.messages if "dropped" in message]
    assert len(dropped) == 2
    assert all(re.search(f"bright .*image 0 of 'blue': .*{FAILING[kind][1]}", message) for message in dropped), dropped


def test_a_failed_call_is_retried(
    train: Train, failing: Failing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(tmp_path / "run", trainer__steps=1, **failing("raise", until=3) | {"reward__retries": 2})
    assert run.column("group/dropped") == [0]
    again = [message for message in caplog.messages if re.search("bright .*again.*4 of 4.*out of memory", message)]
    assert len(again) == sum(run.column("scorer/bright/retries")) == 2


def test_a_failed_score_may_stop_the_run_with_a_checkpoint(
    refused: Refused, failing: Failing, run_of: Any, tmp_path: Path
) -> None:
    keys = failing("raise", prompts="a red fox\nx y\nblue\nseven\n")
    message = refused("data.shuffle=false", reward__on_error="stop", **keys)
    assert re.search("bright .*image 0 of 'blue': .*out of memory.*reward.on_error=drop_group", message), message
    run = run_of(tmp_path / "run")
    assert run.metrics[-1]["step"] == 1  # the first step had no failure
    state = json.loads((run.checkpoint(1) / "state.json").read_text())
    assert state["step"] == 1 and state["finished"] is False
    assert (run.folder / "report.html").exists()


def test_a_step_without_any_score_stops_the_run(refused: Refused, failing: Failing) -> None:
    message = refused(**failing("raise", prompts="blue\n"))
    assert re.search("100% .*step 1 .*reward.max_failed=0.5", message), message
