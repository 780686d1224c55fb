import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

from gerl.config import RewardConfig, ScorerConfig
from gerl.errors import Interrupted, RewardError
from gerl.protocol import Images, Prompt, Scores
from gerl.workers.reward_manager import RewardManager


class Fake:
    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls = 0

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[dict[str, Any]]) -> Any:
        answer = self.answers[min(self.calls, len(self.answers) - 1)]
        self.calls += 1
        if isinstance(answer, Exception):
            raise answer
        return answer(images, prompts, metadata) if callable(answer) else answer

    def check_prompts(self, prompts: list[Prompt]) -> None:
        pass


def manager(retries: int = 0, **scorers: tuple[float, Fake]) -> RewardManager:
    configs = {name: ScorerConfig(weight=weight, path="x.py") for name, (weight, _) in scorers.items()}
    with patch("gerl.workers.reward_manager.build_scorer", lambda name, _: scorers[name][1]):
        return RewardManager(RewardConfig(configs, retries=retries))


def score(made: RewardManager, batch: int = 2) -> Scores:
    pixels = np.arange(batch * 4 * 4 * 3, dtype=np.uint8).reshape(batch, 4, 4, 3)
    return made.score(Images(0, pixels, 0.0), [f"p{i}" for i in range(batch)], [{"i": i} for i in range(batch)])


def test_total_is_the_weighted_sum() -> None:
    scores = score(manager(a=(2.0, Fake([1.0, 3.0])), b=(-0.5, Fake([4.0, 2.0])), c=(0.0, Fake([9.0, 9.0]))))
    assert scores.totals == [0.0, 5.0]
    assert scores.by_scorer == {"a": [1.0, 3.0], "b": [4.0, 2.0], "c": [9.0, 9.0]}
    assert scores.failures == [[], []]
    assert 0 < scores.seconds < 10


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
    totals = score(manager(a=(1.0, Fake(answer)))).totals
    assert totals == [1.0, 2.0]
    assert [type(total) for total in totals] == [float, float]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([1.0], "returned 1 scores for 2 images"),
        ([1.0, 2.0, 3.0], "returned 3 scores for 2 images"),
        (0.5, "TypeError: "),
        (None, "TypeError: "),
        ({"a": 1.0, "b": 2.0}, "TypeError: "),
        ({"a": "12"}, "returned a str, expected a list of floats, or a dict of them by name"),
        ({}, "returned an empty dict"),
        ({"score": [1.0], "detail": [1.0, 2.0]}, "returned 1 scores for 2 images"),
        (ValueError("no\nmodel"), "ValueError: no model"),
    ],
)
def test_a_failed_call_fails_every_sample(answer: Any, reason: str) -> None:
    scores = score(manager(a=(1.0, Fake(answer)), b=(1.0, Fake([1.0, 2.0]))))
    assert scores.totals == [None, None]
    assert {name: scores.by_scorer[name] for name in ("a", "b")} == {"a": [None, None], "b": [1.0, 2.0]}
    assert [[f.scorer for f in row] for row in scores.failures] == [["a"], ["a"]]
    assert reason in scores.failures[0][0].reason


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None, "0.5", [1.0, 2.0], torch.ones(2), 10**400])
def test_a_bad_score_fails_its_sample_only(bad: Any) -> None:
    scores = score(manager(a=(1.0, Fake([bad, 2.0]))))
    assert scores.totals == [None, 2.0]
    assert scores.by_scorer["a"] == [None, 2.0]
    assert "returned " in scores.failures[0][0].reason
    assert scores.failures[1] == []


def test_of_several_columns_the_first_is_the_score_and_the_others_are_watched() -> None:
    answer = {"mean": [1.0, 2.0], "hands": [0.1, float("nan")]}
    scores = score(manager(judge=(2.0, Fake(answer)), b=(1.0, Fake([1.0, 2.0]))))
    assert scores.totals == [3.0, 6.0]
    assert scores.by_scorer == {"judge": [1.0, 2.0], "b": [1.0, 2.0], "judge/hands": [0.1, None]}
    assert [[f.reason for f in row] for row in scores.failures] == [[], ["returned nan, which is not finite"]]


def test_a_retry_fills_in_the_columns() -> None:
    flaky = Fake(OSError("timeout"), {"mean": [1.0, float("nan")], "hands": [3.0, 4.0]}, {"mean": [9.0, 2.0]})
    scores = score(manager(retries=2, a=(1.0, flaky)))
    assert scores.by_scorer == {"a": [1.0, 2.0], "a/hands": [3.0, 4.0]} and scores.totals == [1.0, 2.0]


def test_a_watched_scorer_changes_no_total() -> None:
    scores = score(manager(watched=(0.0, Fake(RuntimeError("down"))), a=(1.0, Fake([float("nan"), 2.0]))))
    assert scores.totals == [None, 2.0]
    assert scores.by_scorer["watched"] == [None, None]
    assert [[f.scorer for f in row] for row in scores.failures] == [["a", "watched"], ["watched"]]


def test_retries_are_logged_and_keep_what_succeeded(caplog: pytest.LogCaptureFixture) -> None:
    flaky = Fake([float("nan"), 2.0], OSError("timeout"), [1.0, float("nan")])
    with caplog.at_level(logging.WARNING):
        scores = score(manager(retries=2, a=(1.0, flaky)))
    assert scores.totals == [1.0, 2.0]
    assert flaky.calls == 3
    assert [record.getMessage().split(": ")[0] for record in caplog.records] == [
        "scorer a failed for 1 of 2 images (attempt 1 of 3)",
        "scorer a failed for 1 of 2 images (attempt 2 of 3)",
    ]
    always = Fake(OSError("timeout"))
    assert score(manager(retries=1, a=(1.0, always))).totals == [None, None]
    assert always.calls == 2


def test_a_scorer_cannot_change_what_another_sees() -> None:
    def vandal(images: list[Image.Image], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        for image, row in zip(images, metadata, strict=True):
            image.paste((0, 0, 0), (0, 0, 4, 4))
            row["i"] = -1
        prompts.clear()
        return [0.0, 0.0]

    def witness(images: list[Image.Image], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        sums = [float(np.asarray(image).sum()) for image in images]
        return [s + 1e6 * row["i"] + len(prompts) / 10 for s, row in zip(sums, metadata, strict=True)]

    def run(first: Callable[..., list[float]]) -> list[float | None]:
        return score(manager(a=(1.0, Fake(first)), b=(1.0, Fake(witness)))).by_scorer["b"]

    assert run(vandal) == run(lambda *_: [0.0, 0.0]) == [sum(range(48)) + 0.2, 1e6 + sum(range(48, 96)) + 0.2]


def test_an_interrupt_is_no_scorer_failure() -> None:
    with pytest.raises(Interrupted):
        score(manager(retries=3, a=(1.0, Fake(Interrupted(2)))))


def test_unpaired_prompts_are_refused() -> None:
    with pytest.raises(RewardError, match="2 images came with 1 prompts"):
        manager(a=(1.0, Fake([1.0]))).score(Images(0, np.zeros((2, 4, 4, 3), np.uint8), 0.0), ["a"], [{}, {}])


def test_scorers_are_built_from_the_config(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def compute_score(images, prompts, metadata, bonus):\n    return [i.width + bonus for i in images]\n"
    )
    scorers = {"jpeg_incompressibility": ScorerConfig(), "mine": ScorerConfig(2.0, str(path), kwargs={"bonus": 1})}
    scores = score(RewardManager(RewardConfig(scorers)))
    assert scores.by_scorer["mine"] == [5.0, 5.0]
    sizes = scores.by_scorer["jpeg_incompressibility"]
    assert scores.totals == [10 + size for size in sizes if size is not None]
