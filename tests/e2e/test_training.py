"""Whole runs: the reward follows its sign, the numbers mean what they say, the batch layout changes nothing."""

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from drills import more
from transformers import PreTrainedModel

Train = Callable[..., Any]
# An easy task for random weights: a large LoRA and a high learning rate, scored by the brightness.
EASY = """
model.lora_alpha=32 actor.lr=0.02 actor.ema_decay=0.5 rollout.prompts_per_step=3 rollout.n=8 rollout.micro_batch_size=24
""".split()
BLOCKS = {
    "reward": "mean best_of_n bright/mean bright/best_of_n std failures",
    "group": "zero_std_fraction dropped",
    "actor": "ratio_deviation clip_fraction clip_fraction_low clip_fraction_high log_ratio_mean loss grad_norm lr "
    "lora_max grad_rms step_grad_norm/0 step_grad_norm/1 step_grad_norm/2 step_grad_share "
    "nonfinite_updates policy_version",
    "health": "no_signal_steps blank_fraction bright/constant_steps groups stuck_groups highest_reward",
    "evaluations": "images forward backward",
    "scorer/bright": "latency_s queue_s images_per_s retries restarts warnings",
    "timing": "rollout_s reward_wait_s update_s step_s",
}
STEP_KEYS = {"step", "time", *(f"{block}/{name}" for block, names in BLOCKS.items() for name in names.split())}
COLUMNS = ("reward", "bright", "base/alignment", "base/surprise")
GAIN_KEYS = {f"val/{name}/gain{end}" for name in COLUMNS for end in ("", "_low", "_high")} | {"guard/signals"}
VALIDATION_KEYS = {"val/reward/mean", "val/bright/mean", "val/failures"} | {
    "val/base/alignment/mean",
    "val/base/surprise/mean",
    "timing/judge_share",
}


@pytest.fixture(scope="module")
def rising(train: Train, workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("rising") / "run"
    return train(
        folder,
        *EASY,
        trainer__steps=12,
        validation__data=workplace / "val.txt",
        validation__every=6,
        logger__report="true",
    )


def test_the_reward_rises(rising: Any) -> None:
    before, after = rising.column("val/bright/mean")[0], rising.column("val/bright/mean")[-1]
    assert after > before + 0.002
    training = rising.column("reward/bright/mean")
    assert sum(training[-3:]) / 3 > sum(training[:3]) / 3 + 0.002


def test_metrics_have_their_names_and_mean_what_they_say(rising: Any) -> None:
    rows = rising.metrics
    assert [row["step"] for row in rows] == list(range(13))
    assert set(rows[0]) == {"step", "time"} | VALIDATION_KEYS
    for row in rows[1:]:
        validated = VALIDATION_KEYS | GAIN_KEYS | {"timing/validation_s"} if row["step"] in (6, 12) else set()
        checked = {"actor/gradient_cosine", "actor/gradient_norm_ratio"} if row["step"] == 1 else set()
        assert set(row) == STEP_KEYS | validated | checked
        assert all(math.isfinite(value) for name, value in row.items() if name != "time")
        assert 0 < row["reward/mean"] < 1 and row["reward/mean"] == row["reward/bright/mean"]
        assert 0 < row["reward/std"] < 0.1
        assert row["reward/failures"] == row["group/dropped"] == row["group/zero_std_fraction"] == 0
        assert row["actor/clip_fraction"] == 0 and abs(row["actor/log_ratio_mean"]) < 1e-6  # one update
        assert 0 < row["actor/grad_norm"] < 1
        by_step = [row[f"actor/step_grad_norm/{k}"] for k in range(3)]  # of the only micro-batch
        assert max(by_step) - sum(sorted(by_step)[:2]) <= row["actor/grad_norm"] * (1 + 1e-4)
        assert row["actor/grad_norm"] <= sum(by_step) * (1 + 1e-4)
        assert row["actor/step_grad_share"] == pytest.approx(max(by_step) ** 2 / sum(x * x for x in by_step))
        assert row["actor/ratio_deviation"] < 1e-5  # it is one on policy
        assert row["actor/lr"] == 0.02
        assert row["actor/policy_version"] == row["step"]
        trained = 3 + 24 + 24  # three prompts, whose images start from the same noise
        assert row["evaluations/images"] == 24
        assert (row["evaluations/forward"], row["evaluations/backward"]) == (trained + 24 + trained, trained)
        parts = sum(row.get(f"timing/{name}_s", 0) for name in ("rollout", "reward_wait", "update", "validation"))
        assert parts <= row["timing/step_s"] < parts + 1


def test_the_run_folder(rising: Any) -> None:
    folder = rising.folder
    names = {"config.yaml", "metrics.jsonl", "report.html", "samples", "checkpoints", "validation"}
    names |= {"log.txt", "run.json", "live", "timeline.jsonl"}
    assert {path.name for path in folder.iterdir()} == names
    pictures = {f"validation_{step:06d}.png" for step in (0, 6, 12)} | {f"train_{k:06d}.png" for k in (1, 6, 12)}
    assert {path.name for path in (folder / "samples").iterdir()} == pictures
    assert {path.name for path in (folder / "checkpoints").iterdir()} >= {"step_10", "step_12"}
    assert 'src="data:image' in (folder / "report.html").read_text()


@more
def test_the_actor_micro_batch_changes_nothing(train: Train, tmp_path: Path) -> None:
    runs = [train(tmp_path / str(size), actor__micro_batch_size=size, actor__lr=0.01) for size in (1, 3, "null")]
    weights = [run.lora(2) for run in runs]
    assert weights[0].abs().max() > 0.01  # it did learn something
    for run, other in zip(runs[:2], weights[:2], strict=True):
        # AdamW divides a gradient near 0 by its own size: after the first update single weights show the rounding
        first, last = zip(run.column("actor/grad_norm"), runs[2].column("actor/grad_norm"), strict=True)
        assert first[0] == pytest.approx(first[1], rel=1e-4)
        assert last[0] == pytest.approx(last[1], rel=1e-3)
        assert (other - weights[2]).norm() < 1e-3 * weights[2].norm()


def test_kl_to_the_base_model(train: Train, tmp_path: Path) -> None:
    free, held = (train(tmp_path / k, *EASY, trainer__steps=4, algorithm__kl_coef=k) for k in ("1e-9", "1e3"))
    kl = free.column("actor/kl")
    assert kl[0] == 0  # the LoRA starts at zero
    assert 0 < kl[1] < kl[3]
    assert held.column("actor/kl")[3] < kl[3] / 2
    assert max(free.column("actor/ratio_deviation")) < 1e-5


def test_the_second_update_of_a_step_is_off_policy(train: Train, tmp_path: Path) -> None:
    keys = {"actor__updates_per_step": 2, "actor__lr": 0.01, "rollout__prompts_per_step": 4}
    run = train(tmp_path / "run", **keys, algorithm__clip_dimensions="null")
    assert max(run.column("actor/ratio_deviation")) < 1e-5  # before the first update of a step
    assert all(abs(value) > 1e-6 for value in run.column("actor/log_ratio_mean"))  # in the second
    assert all(value > 0 for value in run.column("actor/clip_fraction"))
    assert run.column("actor/policy_version") == [2, 4]
    clipped, outside = run.column("actor/off_policy/clip_fraction"), run.column("actor/off_policy/outside_fraction")
    assert clipped == pytest.approx([2 * value for value in run.column("actor/clip_fraction")])  # none in the first
    assert all(0 < some <= more for some, more in zip(clipped, outside, strict=True))
    assert min(run.column("actor/off_policy/log_ratio_abs")) > 1e-5
    assert run.column("actor/off_policy/clip_range") == [1e-4, 1e-4]
    scaled = train(tmp_path / "scaled", **keys)  # 4 x 8 x 8 latents
    assert scaled.column("actor/off_policy/clip_range") == pytest.approx([16e-4, 16e-4])
    assert sum(scaled.column("actor/off_policy/outside_fraction")) < sum(outside)


def test_images_are_trained_on_once_an_epoch(train: Train, tmp_path: Path) -> None:
    keys = {"actor__lr": 0.01, "actor__updates_per_step": 1, "rollout__prompts_per_step": 4, "trainer__steps": 1}
    keys |= {"algorithm__clip_low": 1, "algorithm__clip_high": 1}  # nothing is clipped, so every pair counts
    once, twice = (train(tmp_path / str(n), **keys, actor__epochs=n) for n in (1, 2))
    assert (once.column("actor/policy_version"), twice.column("actor/policy_version")) == ([1], [2])
    assert twice.column("actor/ratio_deviation") == once.column("actor/ratio_deviation")
    # the same images again, after a step that raised what they were rewarded for
    assert once.column("actor/log_ratio_mean") == pytest.approx([0], abs=1e-6)
    assert twice.column("actor/off_policy/log_ratio_abs")[0] > 1e-5
    assert twice.column("actor/loss")[0] < once.column("actor/loss")[0]


@pytest.mark.parametrize(
    "keys",
    [
        # six prompts, four a step: 4, 2, 4; and 16, 8, 16 images in micro-batches of at most 5
        {"trainer__steps": 3, "rollout__prompts_per_step": 4, "rollout__micro_batch_size": 5},
        {"sampling__window_size": 1, "sampling__window_range": "[0,2]"},
    ],
    ids=["the last batch of an epoch is partial", "one step of an SDE window is trained"],
)
def test_every_step_trains_on_policy(keys: dict[str, Any], train: Train, tmp_path: Path) -> None:
    run = train(tmp_path / "run", **keys)
    assert max(run.column("actor/ratio_deviation")) < 1e-5
    assert all(value > 0 for value in run.column("actor/grad_norm"))


def test_a_constant_reward_takes_no_optimizer_step(train: Train, workplace: Path, tmp_path: Path) -> None:
    (workplace / "constant.py").write_text("def compute_score(images, *_):\n    return [0.1] * len(images)\n")
    run = train(tmp_path / "run", scorer="constant.py", trainer__steps=2)
    assert run.column("group/zero_std_fraction") == [1, 1]
    assert run.column("actor/policy_version") == [0, 0]
    for name in ("grad_norm", "lr", "loss", "ratio_deviation", "clip_fraction"):
        assert run.column(f"actor/{name}") == []  # nothing was computed
    assert not any(name.startswith("optimizer/") for name in run.state(2))


@more
def test_checkpointing_and_compiling_compute_the_same(train: Train, tmp_path: Path) -> None:
    small = {"model__path": tmp_path / "model", "trainer__steps": 1, "rollout__prompts_per_step": 1}
    tiny.sd3(layers=1).save_pretrained(tmp_path / "model")
    plain = train(tmp_path / "plain", **small)
    compiled = ("model.gradient_checkpointing=true", "model.compile=eager")
    run = train(tmp_path / "compiled", *compiled, **small)
    assert run.column("actor/ratio_deviation")[0] < 1e-5
    assert run.column("reward/mean") == pytest.approx(plain.column("reward/mean"), rel=1e-3)
    assert run.column("actor/grad_norm") == pytest.approx(plain.column("actor/grad_norm"), rel=1e-2)


def test_the_screen_says_where_everything_lies(
    train: Train, workplace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="gerl"):
        run = train(tmp_path / "run", "logger.report=true", trainer__steps=1, validation__data=workplace / "val.txt")
    assert f"run folder: {run.folder}" in caplog.messages[:-1]
    last = caplog.messages[-1]
    before, after = run.column("val/bright/mean")
    assert re.search(rf"bright .* 4 .*{before:.3f} before.*{after:.3f} after", last)
    assert f"run folder: {run.folder}\n" in last and str(run.folder / "report.html") in last
    assert f"pipe.load_lora_weights('{run.checkpoint(1) / 'lora'}')" in last
    assert "first held-out image" in last
    assert (run.checkpoint(1) / "lora").is_dir()


@more
def test_a_run_that_finds_its_prompts_encoded_reads_no_text_encoder(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"data__cache": tmp_path / "cache", "validation__data": "signs_val", "validation__max_prompts": 3}
    plain = train(tmp_path / "plain", **{**kept, "data__cache": "null"})
    first = train(tmp_path / "first", **kept)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a text encoder is read")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)
    second = train(tmp_path / "second", **kept)
    for run in (first, second):
        run.assert_same(plain, 2)
    with pytest.raises(AssertionError, match="a text encoder is read"):
        train(tmp_path / "other", **{**kept, "sampling__call": "{max_sequence_length: 4}"})
