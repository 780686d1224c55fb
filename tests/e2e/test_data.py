"""A run on a mixture of a file and a data set, and its resumption."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from gerl.run.validation import load_validation
from gerl.trainer.main_flowgrpo import main

SCORE = """
import json
import numpy as np

def compute_score(images, prompts, metadata, log):
    with open(log, "a") as file:
        file.writelines(json.dumps([p, m]) + "\\n" for p, m in zip(prompts, metadata))
    return [float(np.asarray(image).mean()) / 255 for image in images]
"""


@pytest.fixture
def mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Keys of a run: three of four prompts of a step are from the data set."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    rows = [{"caption": f"row {n}", "word": f"W{n}"} for n in range(9)]
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "log.py").write_text(SCORE)
    (tmp_path / "file.txt").write_text("\n".join(f"line {n}" for n in range(5)))
    source = f'{{path: "hf:{tmp_path}/set[train]", weight: 3, prompt_key: caption, columns: {{text: word}}}}'
    return {
        "data__train": f"[{tmp_path / 'file.txt'}, {source}]",
        "rollout__prompts_per_step": 4,
        "rollout__n": 2,
        "scorer": tmp_path / "log.py",
        "reward__scorers__bright__kwargs": f"{{log: {tmp_path / 'log'}}}",
        "reward__trial": "false",
        "checkpoint__every": 1,
        "actor__lr": 0.01,
    }


def test_a_mixture_is_drawn_by_weight_and_resumed_exactly(
    train: Callable[..., Any],
    arguments: Callable[..., list[str]],
    mixture: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = train(tmp_path / "whole", trainer__steps=3, **mixture)
    scored = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    steps = [scored[i : i + 8] for i in range(0, len(scored), 8)]
    assert len(steps) == 3
    for step in steps:
        assert sorted(prompt.split()[0] for prompt, _ in step) == ["line"] * 2 + ["row"] * 6
    assert all(m == {"text": f"W{p.split()[1]}"} for p, m in scored if p.startswith("row"))
    assert all(m == {} for p, m in scored if p.startswith("line"))

    (tmp_path / "log").unlink()
    train(tmp_path / "parts", trainer__steps=2, **mixture)
    parts = train(tmp_path / "parts", "checkpoint.resume=auto", trainer__steps=3, **mixture)
    again = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert again == scored
    parts.assert_same(whole, 3)

    (tmp_path / "log").unlink()
    other = {**mixture, "data__train": mixture["data__train"].replace("weight: 3", "weight: 1")}
    train(tmp_path / "parts", "checkpoint.resume=auto", trainer__steps=4, **other)
    assert [line[2:5] for line in (tmp_path / "log").read_text().splitlines()].count("row") == 4

    (tmp_path / "set" / "train.jsonl").write_text('{"caption": "another", "word": "X"}\n')
    assert main(arguments(tmp_path / "parts", "checkpoint.resume=auto", trainer__steps=5, **other)) == 1
    assert "the content of data.train has changed" in capsys.readouterr().err


def test_a_template_makes_training_and_held_out_prompts_and_scorers_find_the_rows_own(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    rows = {"train": ("a fox", "red"), "val": ("a hen", "blue")}
    for name, (text, colour) in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": text, "colour": colour}) + "\n")
    (tmp_path / "log.py").write_text(SCORE)
    keys = {"data__train": tmp_path / "train.jsonl", "validation__data": tmp_path / "val.jsonl"}
    kwargs = {"reward__scorers__bright__kwargs": f"{{log: {tmp_path / 'log'}}}", "scorer": tmp_path / "log.py"}
    template = "data.template=a photo of {prompt}, {colour}"
    run = train(tmp_path / "run", template, trainer__steps=1, rollout__prompts_per_step=1, **keys, **kwargs)
    found = {tuple(json.loads(line)[:1]) for line in (tmp_path / "log").read_text().splitlines()}
    assert found == {("a photo of a fox, red",), ("a photo of a hen, blue",)}
    _, metadata = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert metadata == {"colour": "blue", "original_prompt": "a hen"}
    assert load_validation(run.folder, 1).prompts == ["a photo of a hen, blue"]


WORDS = """
class Words:
    def __init__(self, words=("fox", "hen", "cat")):
        self.words = words

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return {"prompt": f"a {self.words[i]}", "word": self.words[i]}
"""


def test_a_class_gives_the_prompts_and_the_run_is_resumed_with_the_same_ones(
    train: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "words.py").write_text(WORDS)
    held_out = f"{{path: {tmp_path / 'words.py'}:Words, kwargs: {{words: [dog]}}}}"
    keys = [f"data.train={tmp_path / 'words.py'}:Words", f"validation.data=[{held_out}]", "checkpoint.every=1"]
    run = train(tmp_path / "run", *keys, trainer__steps=1)
    assert load_validation(run.folder, 1).prompts == ["a dog"]
    rows = "".join(json.dumps({"prompt": f"a {word}", "word": word}) + "\n" for word in ("fox", "hen", "cat"))
    (tmp_path / "words.jsonl").write_text(rows)
    same = train(tmp_path / "same", f"data.train={tmp_path / 'words.jsonl'}", *keys[1:], trainer__steps=1)
    assert (run.lora(1) == same.lora(1)).all()
    resume = f"checkpoint.resume={run.folder}"
    assert main([resume, "trainer.steps=2"]) == 0
    (tmp_path / "words.py").write_text(WORDS.replace("cat", "cow"))
    assert main([resume, "trainer.steps=3"]) == 1 and "content of data.train has changed" in capsys.readouterr().err
