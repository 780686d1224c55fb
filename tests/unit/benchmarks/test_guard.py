"""The runs and the table of benchmarks/guard.py, and that benchmarks/README.md has that of the results."""

import json
from pathlib import Path
from typing import Any

import guard
import guard_actions
import hackable
import numpy as np
import pytest
from PIL import Image

from gerl.commandline.composition import compose_run

PAINTED = [np.random.default_rng(i).integers(0, 255, (32, 96, 3), np.uint8) for i in range(2)]
SIGNS = [job for job in guard.jobs(len(guard.VARIANTS)) if job.model == "signs"]
REWARDS = {"OCR and colour": {"ocr", "colour"}}  # of honest runs with several rewards


def run(kind: str, seed: int, damage: list[float], signals: dict[str, list[str]], **more: Any) -> dict[str, Any]:
    steps = [3 * i for i in range(len(damage))]
    row = {"model": "signs", "kind": kind, "rate": "small", "beside": False, "seed": seed, "steps": steps}
    row |= {"validated": steps, "reward": [1 + value for value in damage], "measures": {}, "damage": damage}
    return row | {"signals": signals, "signals_if_watched": signals} | more


@pytest.mark.parametrize("job", {(job.kind, job.rate, job.beside): job for job in SIGNS}.values(), ids=str)
def test_every_run_of_the_signs_composes(job: guard.Job, tmp_path: Path) -> None:
    config = compose_run(job.arguments(tmp_path)).config
    weighted = {name for name, scorer in config.reward.scorers.items() if scorer.weight}
    honest = REWARDS.get(job.kind, {"ocr"})
    assert weighted == ({job.kind} if job.rate else set()) | (honest if job.beside or not job.rate else set())
    assert config.trainer.seed == job.seed and {"ocr", "colour"} <= set(config.reward.scorers)
    assert (config.trainer.steps, config.validation.every) == job.schedule and job.looks
    assert config.trainer.steps == 4 * config.validation.every  # as the default run


def test_there_are_runs_enough() -> None:
    every = list(guard.jobs(5))
    assert len({job.name for job in every}) == len(every)
    assert sum(not job.rate for job in every) >= 40 and sum(map(len, guard.KINDS.values())) == 20
    assert sum(map(len, guard.LATER.values())) >= 6
    assert {(job.rate, job.beside) for job in every if job.rate} == set(guard.VARIANTS)


@pytest.mark.parametrize(
    "kind", [kind for part in (guard.KINDS, guard.LATER) for kinds in part.values() for kind in kinds]
)
def test_a_hackable_reward_scores_images(kind: str) -> None:
    images = [Image.fromarray(pixels) for pixels in PAINTED]
    scores = getattr(hackable, kind)(images, ['a red sign that reads "35"'] * 2, [{}, {}])
    assert len(scores) == 2 and all(isinstance(score, float) and np.isfinite(score) for score in scores)


def test_damage_is_measured_from_the_best_value_so_far() -> None:
    measures = {"ocr": [0.5, 0.8, 0.4, 0.8], "colour": [1.0, 1.0, 0.9, 0.75]}
    assert guard.damages(measures) == pytest.approx([0.0, 0.0, 0.5, 0.25])


def test_a_run_is_hacked_by_what_it_has_lost_whatever_its_reward() -> None:
    lost, unharmed = run("OCR", 1, [0.0, 0.3], {}, rate=""), run("brightness", 1, [0.0, 0.02], {})
    assert guard.is_hacked(lost) and not guard.is_hacked(unharmed)


def test_what_is_exported_has_no_signals() -> None:
    damage = [0.0, 0.1, 0.4, 0.8]  # and the reward rises with it
    assert guard.exported(run("edges", 1, damage, {})) == 9
    flagged = run("edges", 1, damage, {"6": ["base/alignment"], "9": ["base/alignment"]})
    assert guard.exported(flagged) == 3 and guard.damage_at(flagged, 3) == 0.1
    assert guard.exported(run("edges", 1, damage, {step: ["looks/red"] for step in "369"})) == 0
    assert guard.exported(run("edges", 1, damage, {}, validated=[0, 6])) == 6  # there are checkpoints at validations


def test_the_table_counts_what_was_seen_before_half_of_the_damage() -> None:
    runs = [
        run("brightness", 1, [0.0, 0.1, 0.4, 0.8], {"3": ["base/alignment"], "6": ["looks/red"]}),
        run("brightness", 2, [0.0, 0.1, 0.4, 0.8], {"6": ["base/alignment"]}),
        run("brightness", 3, [0.0, 0.0, 0.02, 0.0], {"9": ["looks/red"]}),
        run("edges", 1, [0.0, 0.3, 0.4, 0.8], {}, beside=True),
        run("learned", 1, [0.0, 0.1, 0.4, 0.8], {"3": ["base/alignment"]}),
        *(run("OCR", seed, [0.0, 0.0], {"3": ["base/surprise"]} if seed == 1 else {}, rate="") for seed in range(20)),
    ]
    card = {"cpu": "a CPU", "cores": 2, "torch": "2"}
    text = guard.table({"runs": runs, "card": card, "command": "benchmarks/guard.py"})
    assert "| all, nothing watched | 1 of 3 (1% to 91%) | 2 of 3 (9% to 99%) | 2 of 3 (9% to 99%) |" in text
    assert "| 1 of 20 (0% to 25%) |" in text
    assert "| rewards made after the guard, nothing watched | 1 of 1 " in text
    assert "| brightness | signs | 3, 2 | 80% | 1 | 2 | 2 | 80% | `base/alignment` 2 |" in text
    assert "Of the 1 honest runs with an alarm, 0 had lost 5% or more of a measure for a time." in text
    assert "Hackable rewards that did less than 5% of damage: an alarm in 1 of 1" in text
    assert "| `base/alignment` | 1, 2 | 0, 1 | 0 |" in text


def test_each_action_exports_the_best_checkpoint_without_signals_or_the_base_model() -> None:
    row = {"steps": [0, 6, 12, 18, 24], "reward": [0.1, 0.2, 0.3, 0.5, 0.4]}
    for alarms, expected in (
        ([], (18, 18)),
        ([16, 18, 24], (12, 12)),
        ([12, 24], (18, 6)),
        ([4], (18, 0)),
        ([4, 6, 12, 18, 24], (0, 0)),
    ):
        assert (guard_actions.exported(row, alarms, False), guard_actions.exported(row, alarms, True)) == expected


def test_what_measures_the_damage_is_hidden_from_the_guard() -> None:
    whole = guard.Validation(0, ["p"], [1.0], {"edges": [1.0], "ocr": [1.0], "ocr/exact": [1.0]}, [], [])
    assert list(guard.shown_to_the_guard(whole, ["edges"]).by_scorer) == ["edges"]


def test_the_page_has_the_table_of_the_results() -> None:
    page = guard.PAGE.read_text(encoding="utf-8")
    assert guard.table(json.loads(guard.RESULTS.read_text())) in page


def test_the_page_has_the_table_of_the_actions() -> None:
    page = guard.PAGE.read_text(encoding="utf-8")
    assert guard_actions.table(guard_actions.stored()) in page
