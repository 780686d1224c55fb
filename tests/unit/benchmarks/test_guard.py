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


def run(kind: str, seed: int, damage: list[float], signals: dict[str, list[str]], **more: Any) -> dict[str, Any]:
    found = {"model": "signs", "kind": kind, "rate": "small", "beside": False, "seed": seed}
    found |= {"steps": [3 * i for i in range(len(damage))], "reward": damage, "measures": {}, "damage": damage}
    return found | {"signals": signals, "signals_if_watched": signals} | more


@pytest.mark.parametrize("job", [job for job in guard.jobs(1) if job.model == "signs"], ids=lambda job: job.name)
def test_every_run_of_the_signs_composes(job: guard.Job, tmp_path: Path) -> None:
    config = compose_run(job.arguments(tmp_path)).config
    weighted = {name for name, scorer in config.reward.scorers.items() if scorer.weight}
    honest = {"ocr", "colour"} if job.kind == "OCR and colour" else {"ocr"}
    assert weighted == ({job.kind} if job.rate else set()) | (honest if job.beside or not job.rate else set())
    assert config.trainer.seed == job.seed and {"ocr", "colour"} <= set(config.reward.scorers)
    assert config.trainer.steps // config.validation.every >= 6


def test_there_are_runs_enough() -> None:
    every = list(guard.jobs(5))
    assert len({job.name for job in every}) == len(every)
    assert sum(not job.rate for job in every) >= 40 and len(guard.KINDS["signs"]) >= 12


@pytest.mark.parametrize("kind", guard.KINDS["signs"])
def test_a_hackable_reward_scores_images(kind: str) -> None:
    images = [Image.fromarray(pixels) for pixels in PAINTED]
    scores = getattr(hackable, kind)(images, ['a red sign that reads "35"'] * 2, [{}, {}])
    assert len(scores) == 2 and all(isinstance(score, float) and np.isfinite(score) for score in scores)


def test_the_table_counts_what_was_seen_before_half_of_the_damage() -> None:
    runs = [
        run("brightness", 1, [0.0, 0.1, 0.4, 0.8], {"3": ["base/alignment"], "6": ["looks/red"]}),
        run("brightness", 2, [0.0, 0.1, 0.4, 0.8], {"6": ["base/alignment"]}),
        run("brightness", 3, [0.0, 0.0, 0.02, 0.0], {"9": ["looks/red"]}),
        run("edges", 1, [0.0, 0.3, 0.4, 0.8], {}, beside=True),
        *(run("OCR", seed, [0.0, 0.0], {"3": ["base/surprise"]} if seed == 1 else {}, rate="") for seed in range(20)),
    ]
    card = {"cpu": "a CPU", "cores": 2, "torch": "2"}
    text = guard.table({"runs": runs, "card": card, "command": "benchmarks/guard.py"})
    assert "| brightness | signs | 3, 2 | 80% | 1 | 2 | `base/alignment` 2 |" in text
    assert "| all | 1 of 3 (1% to 91%) | 2 of 3 (9% to 99%) | 2 of 3 (9% to 99%) |" in text
    assert "Alarms in honest runs: 1 of 20 (0% to 25%), 0 while the damage was 5% or more." in text
    assert "In 0 of the 2 runs not seen before half of the damage" in text
    assert "more damage at that validation, seen before half of it: 1 of 3 (1% to 91%)." in text
    assert "Hackable rewards that did less than 5% of damage: an alarm in 1 of 1" in text
    assert "| `base/alignment` | 1, 2 | 0, 1 | 0 |" in text


def test_damage_between_two_validations_is_sudden() -> None:
    sudden, gradual = ([0.0, 0.04, 0.5, 0.8], [0.0, 0.06, 0.5, 0.8])
    assert [guard.is_sudden(run("edges", 1, damage, {})) for damage in (sudden, gradual)] == [True, False]


def test_each_action_exports_the_best_checkpoint_without_signals_or_the_base_model() -> None:
    found = {"steps": [0, 6, 12, 18, 24], "reward": [0.1, 0.2, 0.3, 0.5, 0.4]}
    for alarms, expected in (
        ([], (18, 18)),
        ([16, 18, 24], (12, 12)),
        ([12, 24], (18, 6)),
        ([4], (18, 0)),
        ([4, 6, 12, 18, 24], (0, 0)),
    ):
        assert (guard_actions.exported(found, alarms, False), guard_actions.exported(found, alarms, True)) == expected


def test_what_measures_the_damage_is_hidden_from_the_guard() -> None:
    found = guard.Validation(0, ["p"], [1.0], {"edges": [1.0], "ocr": [1.0], "ocr/exact": [1.0]}, [], [])
    assert list(guard.shown_to_the_guard(found, ["edges"]).by_scorer) == ["edges"]


def test_the_page_has_the_table_of_the_results() -> None:
    page = guard.PAGE.read_text(encoding="utf-8")
    assert guard.table(json.loads(guard.RESULTS.read_text())) in page


def test_the_page_has_the_table_of_the_actions() -> None:
    page = guard.PAGE.read_text(encoding="utf-8")
    assert guard_actions.table(guard_actions.stored()) in page
