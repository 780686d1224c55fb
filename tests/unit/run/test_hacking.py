import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gerl.run.checkpoint import save_checkpoint
from gerl.run.guard import FILE, GuardLog, Signal
from gerl.run.hacking import HackingCard, hacking_card
from gerl.run.page import RunData
from gerl.run.report import write_report
from gerl.run.validation import save_validation

PROMPTS = ["<b>one</b>", "two", "two", "four", "five"]
CONFIG: dict[str, Any] = {"reward": {"scorers": {"ocr": {"weight": 0, "during": "validation"}, "mine": {}}}}
LEVELS = {0: 0.5, 10: 0.8, 20: 0.6, 30: 0.2}  # of OCR by step


def signal(step: int, name: str, column: str, value: float, shown: Sequence[int] = ()) -> Signal:
    return Signal(name, column, step, value, 0.0, f"{name} {column} at {step}", list(shown))


def validate(run: Path, step: int, shown: Sequence[int] = range(5)) -> None:
    pixels = np.full((len(shown), 8, 16, 3), 0, np.uint8) + np.array(shown, np.uint8)[:, None, None, None] + step
    scores: list[float | None] = [LEVELS[step]] * len(PROMPTS)
    save_validation(run, step, PROMPTS, pixels, scores, {"ocr": scores}, list(shown))


def make(run: Path, signals: Sequence[Signal], steps: Sequence[int] = (0, 10, 20, 30)) -> Path:
    """A run with a checkpoint at each validation but the first."""
    run.mkdir(parents=True)
    for step in steps:
        validate(run, step)
        keys = [one.key for one in signals if one.step == step]
        if step:
            save_checkpoint(run / "checkpoints", step, {}, {"val_reward": step / 100, "signals": keys})
    GuardLog(run, 99).add(signals, "warn")
    return run


def card_of(run: Path, config: dict[str, Any] = CONFIG) -> HackingCard:
    found = hacking_card(run, config)
    assert found is not None
    return found


def command(card: HackingCard) -> str:
    return next((keys for _, keys in card.advice if keys.startswith("gerl export")), "")


HACKED = [
    signal(20, "base", "alignment", -0.5, [3]),
    signal(30, "looks", "red", 9.0, [4, 3]),
    signal(30, "base", "alignment", -2.0, [1, 2, 0]),
    signal(30, "disagreement", "ocr", -1.0, [2]),
    signal(30, "watched", "ocr", -0.3, [2, 1]),
]


def test_the_card_of_a_hacked_run_says_what_to_use_what_fell_and_what_to_do(tmp_path: Path) -> None:
    card = card_of(make(tmp_path / "a run", HACKED))
    assert card.title == "Probably hacked since step 20: use step 10" and card.lasts
    assert card.falls[0] == "ocr fell by 75%, from 0.800 to 0.200"  # since its best, and said once
    assert ["prompts" in fall or "red" in fall for fall in card.falls[1:]] == [True, True] and "red" in card.falls[-1]
    assert command(card) == f"gerl export 'run={tmp_path / 'a run'}' step=10"
    keys = [keys for _, keys in card.advice]
    assert "reward.scorers.ocr.weight=1 reward.scorers.ocr.during=both" in keys
    assert keys[-1] == "'guard.ignored=[disagreement/ocr, watched/ocr, base/alignment, looks/red]'"


def test_a_pair_is_of_the_same_prompt_the_worst_first_and_of_no_prompt_twice(tmp_path: Path) -> None:
    card = card_of(make(tmp_path / "run", HACKED))
    assert list(card.steps) == [0, 30]
    assert [pair.prompt for pair in card.pairs] == ["two", "<b>one</b>", "five"]  # of what fell, then of what drifted
    for pair in card.pairs:
        row = PROMPTS.index(pair.prompt) + (pair.prompt == "two")  # the second image of `two` fell most
        assert (pair.before == row).all() and (pair.after == 30 + row).all()


def test_a_look_between_validations_has_the_rows_of_the_first_one(tmp_path: Path) -> None:
    run = make(tmp_path / "run", [signal(25, "base", "alignment", -2.0, [4, 1])], (0, 10, 20))
    rows = [1, 3, 4]
    pixels = np.full((3, 8, 16, 3), 90, np.uint8) + np.array(rows, np.uint8)[:, None, None, None]
    prompts, unscored = [PROMPTS[row] for row in rows], [None] * 3
    save_validation(run, 25, prompts, pixels, unscored, {}, ids=rows, name="look")
    card = card_of(run)
    assert card.title == "Probably hacked since step 25: use step 20" and list(card.steps) == [0, 25]
    assert [pair.prompt for pair in card.pairs] == ["five", "two", "four"]
    assert [(pair.before[0, 0, 0], pair.after[0, 0, 0]) for pair in card.pairs] == [(4, 94), (1, 91), (3, 93)]


def test_a_measured_weight_of_the_kl_is_advised(tmp_path: Path) -> None:
    run = make(tmp_path / "run", [signal(30, "base", "alignment", -2.0)])
    assert any("algorithm.kl_coef" in words for words, _ in card_of(run).advice)
    with (run / FILE).open("a") as file:
        row = {"step": 30, "signal": "advice", "column": "kl_coef", "value": 0.7, "text": "train again with it"}
        file.write(json.dumps(row) + "\n")
    card = card_of(run)
    assert [keys for _, keys in card.advice if "kl_coef" in keys] == ["algorithm.kl_coef=0.7"]
    assert len(card.falls) == 1


def test_the_base_model_is_named_where_every_checkpoint_has_signals(tmp_path: Path) -> None:
    signals = [signal(step, "watched", "ocr", -0.1) for step in (10, 20, 30)]
    card = card_of(make(tmp_path / "run", signals))
    assert card.title == "Probably hacked since step 10: use the base model"
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    card = card_of(tmp_path / "run")
    assert card.title == "Probably hacked since step 10" and command(card) == ""  # nothing is saved


def test_signals_that_went_are_no_hacked_run_and_none_is_no_card(tmp_path: Path) -> None:
    card = card_of(make(tmp_path / "run", [signal(20, "watched", "ocr", -0.1)]))
    assert card.title == "Signs of reward hacking at step 20, none since: use step 30" and not card.lasts
    assert list(card.steps) == [0, 20]
    off = card_of(tmp_path / "run", {**CONFIG, "guard": {"action": "off"}})  # nobody has looked since
    assert off.title == "Probably hacked since step 20: use step 30" and off.lasts
    again = make(tmp_path / "again", [signal(10, "kl", "reward", -0.1), signal(30, "kl", "reward", -0.1)])
    assert card_of(again).title.startswith("Probably hacked since step 30")
    assert hacking_card(make(tmp_path / "honest", []), CONFIG) is None


def test_a_run_that_went_back_shows_what_it_went_back_for(tmp_path: Path) -> None:
    run = make(tmp_path / "run", [], (0, 10))
    for name, level in (("after_step_10", 20), ("after_step_10_2", 30)):
        make(run / "abandoned" / name, [signal(level, "watched", "ocr", -0.3, [3])], (level,))
    GuardLog(run, 99).rolled_back_row(10, [signal(30, "watched", "ocr", -0.3)], 0.5)
    card = card_of(run)
    assert card.title == "Returned from step 30 to step 10 for signs of reward hacking: use step 10"
    assert not card.lasts and list(card.steps) == [0, 30] and (card.pairs[0].after == 33).all()
    assert card.falls == ["ocr fell by 75%, from 0.800 to 0.200"]
    shutil.rmtree(run / "abandoned")
    assert hacking_card(run, CONFIG) is None


def test_a_card_has_what_is_not_damaged(tmp_path: Path) -> None:
    run = make(tmp_path / "run", HACKED)
    (run / "validation" / "step_000030.npz").write_bytes(b"PK")
    assert list(card_of(run).steps) == [0, 20]  # the newest flagged one with images
    (run / "validation" / "step_000030.json").write_text("{")
    assert any("watched ocr at 30" in fall for fall in card_of(run).falls)  # the sentence of the guard
    shutil.rmtree(run / "validation")
    card = card_of(run)
    assert card.pairs == [] and card.title == "Probably hacked since step 20: use step 10"
    odd = {
        "step": 40,
        "signal": "of a newer gerl",
        "column": "<i>",
        "text": "<script>",
        "value": "x",
        "shown": [1e9, {}],
    }
    (run / FILE).write_text(json.dumps(odd) + "\n{half")
    assert card_of(run).falls == ["<script>"] and "<i>" in card_of(run).advice[-1][1]
    (run / FILE).write_text(json.dumps({**odd, "signal": "kl", "value": 10**400}) + "\n")
    assert card_of(run).falls == ["<script>"]
    for state in (run / "checkpoints").glob("*/state.json"):
        state.write_text("{")
    assert card_of(run).title == "Probably hacked since step 40"


def test_the_page_and_the_report_show_the_card_and_no_lora_that_it_does_not_name(tmp_path: Path) -> None:
    run = make(tmp_path / "run", HACKED)
    for step in (10, 30):
        folder = run / "checkpoints" / f"step_{step}" / "lora"
        folder.mkdir()
        (folder / "pytorch_lora_weights.safetensors").write_text(str(step))
    page = RunData("run", run)
    shown = page.warnings()["hacking"]
    assert shown["title"] == card_of(run).title and json.loads(json.dumps(shown))["prompts"] == [
        "two",
        "<b>one</b>",
        "five",
    ]
    assert page.lora() == (10, b"10") and page.overview()["lora"] == 10
    before, after = (page.hacking_picture(0, side) for side in (0, 1))
    assert before is not None and after is not None and before != after and before[1] == "image/png"
    assert page.hacking_picture(3, 0) is page.hacking_picture(0, 2) is None
    GuardLog(run, 99).add([signal(30, "base", "surprise", 9.0)], "warn")
    changed = page.warnings()["hacking"]
    assert changed["version"] != shown["version"] and len(changed["falls"]) > len(shown["falls"])
    text = write_report(run).read_text()
    still = text.split('<div class="still">')[1].split("Before and after")[0]
    assert card_of(run).title in still and "<b>one" not in text and "in doubt" in still
    assert "better" not in still and "5 fell of 5 held-out prompts" in still
    (run / FILE).unlink()
    text = write_report(run).read_text()
    assert (
        "in doubt" not in text.split("Before and after")[0].split('<div class="still">')[1] and "5 worse of 5" in text
    )
    assert RunData("run", run).lora() == (10, b"10")  # the checkpoints have their signals
