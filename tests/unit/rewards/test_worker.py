"""One process of scorers: what a call returns, whatever the scorer does."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gerl.config import RewardConfig, ScorerConfig
from gerl.errors import Interrupted
from gerl.protocol import Images, Prompt, ScorerFailure
from gerl.rewards.gradients import TensorReward
from gerl.rewards.scorers import Scorer
from gerl.rewards.worker import Answer, RewardWorker
from gerl.utils.seeding import isolated


class Fake(Scorer):
    """A scorer that gives prepared answers, the last one again and again."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls = 0

    def __call__(self, images: list[Any], prompts: list[str], metadata: list[dict[str, Any]]) -> Any:
        answer = self.answers[min(self.calls, len(self.answers) - 1)]
        self.calls += 1
        if isinstance(answer, BaseException):
            raise answer
        return answer(images, prompts, metadata) if callable(answer) else answer


def worker(fake: Fake, retries: int = 0) -> RewardWorker:
    made = RewardWorker({}, retries, os.getcwd())
    made.scorers["a"] = fake
    return made


def score(fake: Fake, retries: int = 0, batch: int = 2, pixels: np.ndarray | None = None) -> Answer:
    if pixels is None:
        pixels = np.arange(batch * 4 * 4 * 3, dtype=np.uint8).reshape(batch, 4, 4, 3)
    places = [(0, i) for i in range(len(pixels))]
    prompts, metadata = [f"p{i}" for i in range(len(pixels))], [{"i": i} for i in range(len(pixels))]
    return worker(fake, retries).score("a", places, prompts, metadata, Images(0, pixels, 0.0))


def reasons(answer: Answer, column: str = "a") -> list[str | None]:
    return [v.reason if isinstance(v := row[column], ScorerFailure) else None for row in answer.rows]


async def sleeping() -> list[float]:
    return [1.0, 2.0]


@pytest.mark.parametrize(
    "answer",
    [
        (1, 2),
        np.array([1.0, 2.0], np.float32),
        torch.tensor([1.0, 2.0]),
        [np.float64(1), torch.tensor(2)],
        iter([1.0, 2.0]),
    ],
)
def test_numbers_of_any_kind_become_floats(answer: Any) -> None:
    found = score(Fake(answer))
    assert found.rows == [{"a": 1.0}, {"a": 2.0}] and 0 < found.seconds < 10 and not found.retried
    assert {type(row["a"]) for row in found.rows} == {float}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([1.0], "returned a list of length 1 for 2 images"),
        ([1.0, 2.0, 3.0], "returned a list of length 3 for 2 images"),
        (0.5, "returned 0.5, expected a list with one number per image"),
        (None, "returned None, expected a list with one number per image"),
        ({"a": 1.0, "b": 2.0}, "returned 1.0 as 'a', expected a list"),
        ({"a": "12"}, "returned a str as 'a', expected a list"),
        (np.ones((2, 1)), "returned a ndarray of shape [2, 1], expected a list"),
        (np.ones((2, 1)), "by name: return its .reshape(-1)"),
        (([1.0, 2.0], {}), "returned a tuple of list, dict, expected a list"),
        ((torch.ones(2), None), "by name: return only the scores"),
        ({1.0, 2.0}, "returned a set, expected a list"),
        (sleeping(), "asyncio.run"),
        (torch.ones(()), "returned a Tensor of shape [], expected a list"),
        (SystemExit(3), "it called sys.exit(3)"),
        ({}, "returned an empty dict"),
        ({"score": [1.0], "detail": [1.0, 2.0]}, "returned a list of length 1 for 2 images"),
        (ValueError("no\nmodel"), "ValueError: no model"),
    ],
)
def test_a_failed_call_fails_every_image(answer: Any, reason: str) -> None:
    found = reasons(score(Fake(answer)))
    assert len(found) == 2 and all(r is not None and reason in r for r in found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None, "0.5", [1.0, 2.0], torch.ones(2), 10**400, -1e300])
def test_a_bad_score_fails_its_image_only(bad: Any) -> None:
    first, second = reasons(score(Fake([bad, 2.0])))
    assert first is not None and "returned " in first and second is None


def test_of_several_columns_the_first_has_the_scorers_name() -> None:
    found = score(Fake({"mean": [1.0, 2.0], "hands": [0.1, float("nan")]}))
    assert found.rows[0] == {"a": 1.0, "a/hands": 0.1} and found.rows[1]["a"] == 2.0
    assert reasons(found, "a/hands") == [None, "returned nan, which is not finite"]


def test_a_retry_fills_in_what_failed_and_keeps_the_rest() -> None:
    flaky = Fake(OSError("timeout"), {"mean": [1.0, float("nan")], "hands": [3.0, 4.0]}, {"mean": [9.0, 2.0]})
    found = score(flaky, retries=2)
    assert found.rows == [{"a": 1.0, "a/hands": 3.0}, {"a": 2.0, "a/hands": 4.0}]
    assert found.retried == ["2 of 2 images: OSError: timeout", "1 of 2 images: returned nan, which is not finite"]
    always = Fake(OSError("timeout"))
    assert reasons(score(always, retries=1)) == ["OSError: timeout"] * 2 and always.calls == 2


def test_a_scorer_cannot_change_what_a_retry_sees() -> None:
    def vandal(images: list[Image.Image], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        for image, row in zip(images, metadata, strict=True):
            image.paste((0, 0, 0), (0, 0, 4, 4))
            row["i"] = -1
        prompts.clear()
        raise OSError

    def witness(images: list[Image.Image], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        sums = [float(np.asarray(image).sum()) for image in images]
        return [s + 1e6 * row["i"] + len(prompts) / 10 for s, row in zip(sums, metadata, strict=True)]

    def run(first: Callable[..., list[float]]) -> list[Any]:
        return [row["a"] for row in score(Fake(first, witness), retries=1).rows]

    assert run(vandal) == run(witness) == [sum(range(48)) + 0.2, 1e6 + sum(range(48, 96)) + 0.2]


def test_an_interrupt_is_no_failure_of_the_scorer() -> None:
    with pytest.raises(Interrupted):
        score(Fake(Interrupted(2)), retries=3)


def test_the_end_of_a_process_by_ray_is_no_failure_of_the_scorer() -> None:
    end = SystemExit(1)
    end.ray_terminate_msg = "the process receives a SIGTERM"  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        score(Fake(end))


def test_images_come_from_several_micro_batches() -> None:
    narrow = Images(0, np.zeros((2, 4, 4, 3), np.uint8), 0.0)
    others = Images(1, [np.zeros((4, w, 3), np.uint8) for w in (5, 6)], 0.0)
    widths = Fake(lambda images, *_: [image.width for image in images])
    found = worker(widths).score("a", [(1, 1), (0, 0), (1, 0)], ["p"] * 3, [{}] * 3, narrow, others)
    assert [row["a"] for row in found.rows] == [6.0, 4.0, 5.0]


@pytest.mark.parametrize(("frames", "shown"), [(3, [0, 1, 2]), (21, [0, 3, 6, 9, 11, 14, 17, 20])])
def test_frames_of_a_video_are_shown_one_by_one_and_averaged(frames: int, shown: list[int]) -> None:
    def first_pixel(images: list[Image.Image], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        assert prompts == [f"p{row['i']}" for row in metadata]
        return [float(np.asarray(image)[0, 0, 0]) for image in images]

    video = np.zeros((2, frames, 4, 4, 3), np.uint8)
    video[:, :, 0, 0, 0] = np.arange(frames)
    video[1] += 100
    mean = sum(shown) / len(shown)
    assert [row["a"] for row in score(Fake(first_pixel), pixels=video).rows] == pytest.approx([mean, mean + 100])


def test_a_scorer_that_takes_frames_gets_the_whole_video() -> None:
    fake = Fake(lambda images, *_: [float(len(frames)) for frames in images])
    fake.takes_frames = True
    assert score(fake, pixels=np.zeros((2, 9, 4, 4, 3), np.uint8)).rows == [{"a": 9.0}, {"a": 9.0}]


def test_scorers_are_built_from_the_config_and_paths_are_seen_from_the_drivers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "def compute_score(images, prompts, metadata, bonus):\n    return [i.width + bonus for i in images]\n"
    )
    monkeypatch.chdir("/")
    made = RewardWorker({"mine": ScorerConfig(path="mine.py", kwargs={"bonus": 1})}, 0, str(tmp_path))
    made.build()
    images = Images(0, np.zeros((1, 4, 4, 3), np.uint8), 0.0)
    assert made.score("mine", [(0, 0)], ["p"], [{}], images).rows == [{"mine": 5.0}]
    RewardWorker({}, 0, str(tmp_path / "not on this machine")).build()


DOUBLE = """
import torch
torch.set_default_dtype(torch.float64)

def compute_score(images, prompts, metadata):
    torch.set_grad_enabled(False)
    return [float(torch.get_default_dtype() == torch.float64) for _ in images]

def of_tensors(images, prompts, metadata):
    return images.mean((1, 2, 3)) * torch.ones((), dtype=torch.get_default_dtype())

of_tensors.takes_tensors = True
"""


def test_settings_of_torch_that_a_scorer_chooses_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text(DOUBLE)
    config = ScorerConfig(path=str(tmp_path / "double.py"), weight=1.0)
    made = RewardWorker({"a": config}, 0, os.getcwd())
    made.build()
    for _ in range(2):
        answer = made.score("a", [(0, 0)], ["a fox"], [{}], Images(0, np.zeros((1, 4, 4, 3), np.uint8), 0.0))
        assert answer.rows == [{"a": 1.0}]
        assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    reward = RewardConfig({"a": replace(config, function="of_tensors")})
    with isolated():
        torch.set_grad_enabled(True)
    total = TensorReward(reward, ["a"], "cpu")(torch.ones(1, 3, 4, 4, requires_grad=True), [Prompt(0, "a fox")])
    assert total.requires_grad and torch.get_default_dtype() == torch.float32
    with isolated():
        torch.set_default_dtype(torch.float32)
