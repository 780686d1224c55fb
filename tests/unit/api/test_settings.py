"""Python arguments as keys, prompt files and scorers."""

import json
from pathlib import Path

import pytest
import yaml

from gerl.api.settings import nested, plain, scorers_of, write_experiment, write_prompts
from gerl.commandline.composition import compose_run
from gerl.errors import ConfigError, DataError


def bright(images: list[object]) -> list[float]:
    return [0.0 for _ in images]


def test_keys_with_dots_and_blocks_are_the_same() -> None:
    dotted = nested({"sampling.height": 32, "sampling.call": {"a": (1, 2)}, "actor.lr": 1e-3})
    assert dotted == nested({"sampling": {"height": 32, "call": {"a": [1, 2]}}, "actor": {"lr": 1e-3}})
    assert nested({"sampling.call.a": 1, "sampling": {"call": {"b": 2}}})["sampling"]["call"] == {"a": 1, "b": 2}
    assert plain({"path": Path("x"), "none": None}) == {"path": "x", "none": None}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sampling": 3}, r"sampling=3: .*block"),
        ({"samplng.height": 3}, r"samplng\.height: there is no such key"),
        ({"sampling.height": object()}, "numbers, strings, lists and dictionaries"),
    ],
)
def test_wrong_keys_are_sentences(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        nested(given)


def test_rewards_by_function_name_file_and_keys() -> None:
    one = scorers_of(bright)
    assert one.keys == {"bright": {"path": "python:bright"}} and one.functions == {"bright": bright}
    assert scorers_of(lambda images: []).keys == {"my_reward": {"path": "python:my_reward"}}
    assert scorers_of("ocr").keys == {"ocr": {}} and scorers_of("my reward.py").keys == {
        "my_reward": {"path": "my reward.py"}
    }
    several = scorers_of({"b": bright, "ocr": 0.5, "c": {"function": bright, "weight": 0.0}, "f": "f.py", "hpsv2": {}})
    assert several.keys == {
        "b": {"path": "python:b"},
        "ocr": {"weight": 0.5},
        "c": {"weight": 0.0, "path": "python:c"},
        "f": {"path": "f.py"},
        "hpsv2": {},
    }
    assert set(several.functions) == {"b", "c"}


@pytest.mark.parametrize("given", [3, {"a": [1]}, {"a b": bright}, {"a": "ocr"}, {"a": True}])
def test_what_is_no_reward_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"^reward: "):
        scorers_of(given)  # type: ignore[arg-type]


def test_prompts_are_written_as_rows(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    assert write_prompts(["a „b“", {"prompt": "c", "text": "d"}], file) == str(file)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"prompt": "a „b“"},
        {"prompt": "c", "text": "d"},
    ]
    assert write_prompts("mine.txt", file) == "mine.txt"
    for wrong in ([], [3], 3, [{"prompt": "a", "x": object()}]):
        with pytest.raises(DataError):
            write_prompts(wrong, file)  # type: ignore[arg-type]


def test_the_experiment_file_composes_what_was_asked_for(tmp_path: Path) -> None:
    values = nested({"sampling.height": 32, "data.train": "signs_train", "validation.data": None})
    file = write_experiment(tmp_path, "mine", None, "flow_grpo_fast", values)
    composed = compose_run([f"experiment={file}"])
    assert (composed.config.sampling.height, composed.preset) == (32, "flow_grpo_fast")
    assert composed.config.validation.data is None and yaml.safe_load(file.read_text())["sampling"] == {"height": 32}
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    mine = write_experiment(folder, "python", str(file), None, {"trainer": {"steps": 3}})
    config = compose_run([f"experiment={mine}"]).config
    assert (config.sampling.height, config.trainer.steps, config.algorithm.name) == (32, 3, "flow_grpo_fast")
    for wrong, said in (("sings", "'signs'"), (folder / "pyton.yaml", r"python\.yaml")):
        with pytest.raises(ConfigError, match=f"^experiment=.*{said}"):
            write_experiment(tmp_path, "other", wrong, None, {})
    again = write_experiment(tmp_path, "other", "sd15_aesthetic", None, {"trainer": {"steps": 3}})
    config = compose_run([f"experiment={again}"]).config
    assert (config.trainer.steps, list(config.reward.scorers)) == (3, ["aesthetic"])
