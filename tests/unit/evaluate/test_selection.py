from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from gerl.evaluate.loras import find_lora
from gerl.evaluate.selection import Selection, select
from gerl.protocol import Prompt
from gerl.run.checkpoint import save_checkpoint
from gerl.run.validation import save_validation

TEXTS = [f"prompt {i}" for i in range(40)]
PROMPTS = [Prompt(i, text) for i, text in enumerate(TEXTS)]


def validate(run: Path, rewards: Mapping[int, Sequence[float | None]], texts: Sequence[str] = TEXTS) -> None:
    for step, values in rewards.items():
        save_validation(run, step, texts, [], values, {"ocr": values})


def trained(run: Path, rewards: Mapping[int, Sequence[float]], keep: int = 9) -> Path:
    """A run with a checkpoint for each validation."""
    validate(run, rewards)
    for step, values in rewards.items():
        state = {"val_reward": float(np.mean(values)), "settings": {"checkpoint": {"keep": keep}}}
        files = {"lora/pytorch_lora_weights.safetensors": save({"weight": np.zeros(1)})}
        save_checkpoint(run / "checkpoints", step, files, state)
    return run


def selected(run: Path, prompts: Sequence[Prompt] = PROMPTS, whole: str | None = None) -> Selection:
    return select({"mine": find_lora(str(run))[0]}, {"mine": run}, prompts, whole)


def step_of(found: Selection, name: str = "mine") -> int:
    return int(found.loras[name].parents[1].name.removeprefix("step_"))


def test_a_checkpoint_is_chosen_on_other_prompts_than_those_reported(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", {2: [0.5] * 40, 4: [0.4] * 40, 6: [0.3] * 40})
    reported = {prompt.id for prompt in selected(run).prompts}
    assert len(reported) == 20
    # step 4 is the best on the prompts of the choice, and step 2 on all
    validate(run, {4: [0.0 if i in reported else 0.6 for i in range(40)]})
    found = selected(run)
    assert step_of(found) == 4 and {prompt.id for prompt in found.prompts} == reported and found.aside == 20
    assert found.words == {"mine": "step 4, the best of 3 on 20 held-out prompts: reward 0.600"}
    assert found.remarks == (
        "mine: the checkpoint of step 4, the best of 3 on 20 held-out prompts: reward 0.600.",
        "The results are of the 20 prompts that had no part in this choice; split=false reports all 40.",
    )


@pytest.mark.parametrize(
    ("best", "step", "value"),
    [
        ("val/ocr/success_rate", 4, "val/ocr/success_rate 1.000"),
        ("-val/lpips/mean", 6, "val/lpips/mean 0.100"),
        ("-val/lpips/gain", 6, "val/lpips/mean 0.100"),  # the difference is the same for all
        ("val/reward/mean", 4, "reward 0.500"),
        ("val/ocr/success_rate_low", None, "val/ocr/success_rate_low"),  # not one of a part of the prompts
    ],
)
def test_a_run_with_another_metric_is_chosen_by_that(tmp_path: Path, best: str, step: int | None, value: str) -> None:
    scorers = {"ocr": {"weight": 1.0, "success": 0.5}, "lpips": {"weight": 0.0}}
    settings = {"checkpoint": {"keep": 9, "best": best}, "reward": {"scorers": scorers}}
    state = {"val_reward": 0.5, "val_metrics": {best.removeprefix("-"): 0.5}, "settings": settings}
    columns = {2: ([0.9] * 10 + [0.0] * 30, [0.3] * 40), 4: ([0.5] * 40, [0.2] * 40), 6: ([0.4] * 40, [0.1] * 40)}
    for number, (ocr, lpips) in columns.items():
        save_validation(tmp_path, number, TEXTS, [], ocr, {"ocr": ocr, "lpips": lpips})
        files = {"lora/pytorch_lora_weights.safetensors": save({"weight": np.zeros(1)})}
        save_checkpoint(tmp_path / "checkpoints", number, files, state)
    found = selected(tmp_path)
    if step is None:
        assert len(found.prompts) == 40 and f"chosen among 3 by its {value} on held-out prompts" in found.remarks[0]
    else:
        assert step_of(found) == step and f"the best of 3 on 20 held-out prompts: {value}" in found.remarks[0]


def test_all_runs_are_chosen_on_the_same_prompts_and_other_loras_stay(tmp_path: Path) -> None:
    runs = {"a": trained(tmp_path / "a", {2: [0.5] * 40, 4: [0.4] * 40})}
    runs["b"] = trained(tmp_path / "b", {3: [0.1] * 40, 9: [0.2] * 40})
    lone = trained(tmp_path / "lone", {5: [0.9] * 40})
    given = {name: find_lora(str(run))[0] for name, run in {**runs, "lone": lone}.items()}
    given["file"] = tmp_path / "a" / "checkpoints" / "step_4" / "lora" / "pytorch_lora_weights.safetensors"
    found = select(given, {**runs, "lone": lone}, PROMPTS)
    assert [step_of(found, name) for name in given] == [2, 9, 5, 4] and list(found.loras) == list(given)
    assert found.prompts == selected(runs["a"]).prompts == selected(runs["b"]).prompts
    assert set(found.words) == {"a", "b"}
    assert select({"lone": given["lone"]}, {"lone": lone}, PROMPTS) == Selection({"lone": given["lone"]}, PROMPTS)


def test_prompts_that_no_choice_has_seen_are_all_reported(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", {2: [0.5] * 40, 4: [0.4] * 40})
    others = [Prompt(i, f"another {i}") for i in range(3)]
    found = selected(run, others)
    assert (step_of(found), found.prompts, found.remarks, found.aside) == (2, others, (), 0)
    found = selected(run, [*PROMPTS[:16], *others])  # eight of these are left to the choice, and 24 not given
    assert len(found.prompts) == 11 and found.prompts[-3:] == others and "32 held-out prompts" in found.remarks[0]


def test_where_prompts_cannot_be_split_a_remark_says_so(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", {2: [0.5] * 40, 4: [0.4] * 40})

    def reason(prompts: Sequence[Prompt] = PROMPTS, whole: str | None = None) -> str:
        found = selected(run, prompts, whole)
        assert (step_of(found), found.prompts, found.aside, found.words) == (2, list(prompts), 0, {})
        (remark,) = found.remarks
        assert remark.startswith("mine: its checkpoint was chosen among 2 by its reward on held-out prompts")
        assert remark.endswith("expect a smaller gain on new prompts.")
        return remark

    assert "(split=false)" in reason(whole="split=false")
    assert "(15 are too few to split, it takes 16)" in reason(PROMPTS[:15])
    for damage in ("", "{}", None):
        file = run / "validation" / "step_000004.json"
        file.unlink() if damage is None else file.write_text(damage)
        assert f"the rewards of step 4 in {run / 'validation'} are missing, damaged or incomplete" in reason()
    validate(run, {4: [None, *[0.1] * 39]})
    assert "incomplete" in reason()


def test_a_choice_by_too_few_prompts_is_not_made(tmp_path: Path) -> None:
    long = trained(tmp_path / "long", {2: [0.5] * 40, 4: [0.4] * 40})
    short = trained(tmp_path / "short", {2: [0.5] * 40, 4: [0.4] * 40})
    validate(short, {2: [0.5] * 9, 4: [0.4] * 9}, TEXTS[:9])
    given = {name: find_lora(str(run))[0] for name, run in (("long", long), ("short", short))}
    found = select(given, {"long": long, "short": short}, PROMPTS)
    assert found.prompts == PROMPTS and "are too few to choose by, it takes 8" in found.remarks[1]


def test_a_checkpoint_that_outlived_others_by_its_reward_is_marked(tmp_path: Path) -> None:
    rewards = {2: [0.5] * 40, 6: [0.3] * 40, 8: [0.4] * 40}
    assert "checkpoint.keep=2" in selected(trained(tmp_path / "pruned", rewards, keep=2)).remarks[0]
    assert "checkpoint.keep" not in selected(trained(tmp_path / "whole", rewards, keep=3)).remarks[0]


def test_the_reported_mean_of_the_chosen_checkpoint_is_not_too_high(tmp_path: Path) -> None:
    run, generator = trained(tmp_path / "run", {step: [0.0] * 40 for step in range(1, 7)}), np.random.default_rng(0)
    highest, reported = [], []
    for _ in range(40):  # six checkpoints that are equally good
        rewards = {step: generator.normal(size=40) for step in range(1, 7)}
        validate(run, {step: list(map(float, values)) for step, values in rewards.items()})
        found = selected(run)
        reported.append(rewards[step_of(found)][[prompt.id for prompt in found.prompts]].mean())
        highest.append(max(values.mean() for values in rewards.values()))
    assert np.mean(highest) > 0.15 and np.mean(reported) == pytest.approx(0.0, abs=0.1)  # 2.8 standard errors
