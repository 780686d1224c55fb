"""Which checkpoint is used, and which ones are kept."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gerl.errors import CheckpointError, FlaggedError
from gerl.run.checkpoint import intact_checkpoints, load_checkpoint, save_checkpoint
from gerl.run.choice import (
    Choice,
    best_checkpoint,
    choice_of,
    choose,
    comparable_checkpoints,
    find_checkpoint,
    good_checkpoint,
    prune,
    signals_of,
)

FILES = {"lora/pytorch_lora_weights.safetensors": b"weights"}


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_prune_keeps_newest_and_best(tmp_path: Path) -> None:
    for step, reward in enumerate([0.1, 0.9, None, float("nan"), 0.3, None]):
        save_checkpoint(tmp_path, step, FILES, {"val_reward": reward})
    (tmp_path / ".tmp-step_4-abc").mkdir()
    prune(tmp_path, 2)
    assert names(tmp_path) == ["step_1", "step_4", "step_5"]
    prune(tmp_path, 1)
    assert names(tmp_path) == ["step_1", "step_5"]


def test_of_checkpoints_with_the_same_reward_the_newer_is_the_best(tmp_path: Path) -> None:
    for step, reward in ((2, 0.9), (3, 0.5), (10, 0.9), (11, None)):
        save_checkpoint(tmp_path / "checkpoints", step, FILES, {"val_reward": reward})
    assert find_checkpoint(tmp_path)[1].step == 10
    prune(tmp_path / "checkpoints", 1)
    assert names(tmp_path / "checkpoints") == ["step_10", "step_11"]


def test_the_best_checkpoint_before_a_step(tmp_path: Path) -> None:
    for step, reward in ((0, 0.1), (2, 0.5), (4, 0.4), (6, None), (8, 0.9)):
        save_checkpoint(tmp_path, step, FILES, {"val_reward": reward})
    found = [best_checkpoint(tmp_path, before) for before in (0, 1, 6, 8, 9)]
    assert [None if one is None else one.step for one in found] == [None, 0, 2, 2, 8]


def test_signals_of_the_guard_keep_a_checkpoint_from_being_the_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, flagged = tmp_path / "checkpoints", ["base/alignment"]
    for step, reward in ((2, 0.8), (4, 0.9)):
        save_checkpoint(root, step, FILES, {"val_reward": reward, "signals": flagged})
    save_checkpoint(root, 1, FILES, {"val_reward": 0.5, "signals": []})
    _, found, why = find_checkpoint(tmp_path)
    assert found.step == 1 and "0.500; step=4 has 0.900" in why and "base/alignment" in why
    with caplog.at_level("INFO"):
        assert [c.step for c in comparable_checkpoints(tmp_path)] == [1]
    assert "signals of the guard: step 2, 4" in caplog.text
    assert best_checkpoint(root, before=5).step == 1  # type: ignore[union-attr]
    save_checkpoint(root, 6, FILES, {"val_reward": 1.0, "signals": []})
    assert find_checkpoint(tmp_path)[2] == "step 6, the best: held-out reward 1.000"
    prune(root, 1)
    assert names(root) == ["step_1", "step_2", "step_6"]  # the earliest with signals, and the last one before


def test_the_largest_reward_is_not_pruned_for_signals_of_the_guard(tmp_path: Path) -> None:
    for step, reward, flagged in ((1, 0.5, []), (2, 0.9, ["base/alignment"]), (3, 0.4, []), (4, 0.8, ["looks/red"])):
        save_checkpoint(tmp_path, step, FILES, {"val_reward": reward, "signals": flagged})
    prune(tmp_path, 1)
    assert names(tmp_path) == ["step_1", "step_2", "step_3", "step_4"]  # step 3 would be resumed


def test_rewards_that_were_measured_otherwise_are_not_compared(tmp_path: Path) -> None:
    def save(step: int, reward: float, weight: float, **more: int) -> None:
        scorers = {"ocr": {"weight": weight, **more}}
        save_checkpoint(
            tmp_path / "checkpoints", step, FILES, {"val_reward": reward, "settings": {"reward": {"scorers": scorers}}}
        )

    save_checkpoint(tmp_path / "checkpoints", 1, FILES, {"val_reward": 0.5})  # of the first format: not known
    save(2, 8.0, 10.0)
    save(3, 0.7, 1.0, replicas=2)
    save(4, 0.6, 1.0)
    assert find_checkpoint(tmp_path)[1].step == 3
    save(5, 6.0, 10.0)
    assert find_checkpoint(tmp_path)[1].step == 2


def test_the_best_checkpoint_may_be_that_of_another_metric(tmp_path: Path) -> None:
    root, flagged = tmp_path / "checkpoints", ["base/alignment"]
    for step, reward, lpips in ((1, 0.9, 0.3), (2, 0.5, 0.1), (3, 0.6, 0.2), (4, 0.7, 0.4), (5, 0.4, None)):
        found = {"val/reward/mean": reward} | ({} if lpips is None else {"val/lpips/mean": lpips})
        state = {"val_reward": reward, "val_metrics": found, "signals": flagged if step == 2 else []}
        save_checkpoint(root, step, FILES, state | {"settings": {"checkpoint": {"best": "-val/lpips/mean"}}})
    assert find_checkpoint(tmp_path)[1:] == (
        load_checkpoint(root / "step_3"),
        "step 3, the best without signals of the guard: val/lpips/mean 0.200; step=2 has 0.100, and signals of the "
        "guard: base/alignment",
    )
    assert [c.step for c in comparable_checkpoints(tmp_path)] == [1, 3, 4]
    assert best_checkpoint(root, 3).step == 1  # type: ignore[union-attr]
    prune(root, 1)
    assert names(root) == ["step_1", "step_2", "step_3", "step_4", "step_5"]


FELL = "ocr, which is watched, fell from 0.800 at step 0 to 0.300 while the reward rose from 0.1 to 0.9"


def test_where_all_validated_checkpoints_have_signals_none_is_taken(tmp_path: Path) -> None:
    """Step 2 was not validated; step 6 has the signals of the last validation before it; `ignored` are none."""
    root, flagged = tmp_path / "checkpoints", ["base/alignment", "watched/ocr"]
    states: dict[int, dict[str, Any]] = {
        2: {"signals": []},
        4: {"val_reward": 0.5, "signals": flagged},
        6: {"signals": flagged},
        8: {"val_reward": 0.9, "signals": ["looks/red"]},
    }
    for step, state in states.items():
        save_checkpoint(root, step, FILES, {"val_reward": None, **state})
    with (tmp_path / "guard.jsonl").open("w") as log:
        for step, signal, column, text in (
            (4, "base", "alignment", "the base model sees less; do this"),
            (4, "watched", "ocr", f"{FELL}, most for 'a' (by chance: 1 in 9); do that"),
            (8, "watched", "ocr", "later"),
        ):
            log.write(json.dumps({"step": step, "signal": signal, "column": column, "text": text}) + "\n")
    choice = choice_of(tmp_path)
    assert choice is not None and (choice.use, choice.latest, choice.flagged) == (None, 8, (4, 6, 8))
    assert choice.offered is None and not any(map(choice.offers, states))
    for part in ("base model", "step 4", FELL, "step=4", str(root / "step_4"), "step=2"):
        assert part in choice.why
    assert "by chance" not in choice.why
    with pytest.raises(FlaggedError, match=f"^run={tmp_path}: ") as refused:
        find_checkpoint(tmp_path)
    assert isinstance(refused.value, CheckpointError) and choice.why in str(refused.value)
    assert comparable_checkpoints(tmp_path) == []
    _, found, why = find_checkpoint(tmp_path, 4)
    assert found.step == find_checkpoint(root / "step_4")[1].step == 4 and "base/alignment" in why
    prune(root, 1)
    assert names(root) == ["step_2", "step_4", "step_8"]
    assert choice_of(tmp_path) == Choice(None, 8, (4, 8), choice.why)
    settings = {"guard": {"ignored": ["looks", "base/alignment"]}}
    save_checkpoint(root, 8, FILES, {"val_reward": 0.9, "signals": ["looks/red"], "settings": settings})
    assert find_checkpoint(tmp_path)[1].step == 8 and signals_of(found, ["base/alignment"]) == ["watched/ocr"]


@st.composite
def runs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """States of the checkpoints of a run: some were validated, in one of two ways, and some have signals."""
    values = st.sampled_from([None, 0.1, 0.2, 0.3])
    signals = st.sampled_from([[], [], ["watched/ocr"], ["looks/red"], ["looks/red", "watched/ocr"]])
    ways = st.sampled_from([0.5, 1.0])
    found = draw(st.lists(st.tuples(values, signals, ways), min_size=1, max_size=7))
    guard = {"ignored": draw(st.sampled_from([[], ["looks"]]))}
    best = draw(st.sampled_from(["val/reward/mean", "-val/reward/mean"]))
    return [
        {"val_reward": value, "signals": keys, "settings": {
            "guard": guard, "checkpoint": {"best": best}, "reward": {"scorers": {"ocr": {"weight": way}}}
        }} for value, keys, way in found
    ]  # fmt: skip


@given(runs(), st.integers(1, 3))
def test_signals_are_never_taken_and_pruning_changes_no_choice(states: list[dict[str, Any]], keep: int) -> None:
    folder = Path(tempfile.mkdtemp())
    for step, state in enumerate(states):
        save_checkpoint(folder / "checkpoints", step, {}, state)
    ignored = states[-1]["settings"]["guard"]["ignored"]
    intact = intact_checkpoints(folder / "checkpoints")
    choice, good = choose(intact), good_checkpoint(folder / "checkpoints")
    flagged = [c.step for c in intact if signals_of(c, ignored)]
    clean = [c for c in intact if c.step not in flagged and c.state["val_reward"] is not None]
    assert list(choice.flagged) == flagged and choice.use not in flagged and choice.offered not in flagged
    assert (choice.use is None) == bool(flagged and not clean)
    assert good is None or good.step not in flagged
    if choice.use is None:
        with pytest.raises(FlaggedError):
            find_checkpoint(folder)
    else:
        assert find_checkpoint(folder)[1].step == choice.use
        assert choice.use in [c.step for c in comparable_checkpoints(folder)] or not clean
    before = [c.step for c in clean if c.step < min(flagged, default=0)]
    prune(folder / "checkpoints", keep)
    left = [c.step for c in intact_checkpoints(folder / "checkpoints")]
    assert choice_of(folder) == Choice(choice.use, choice.latest, tuple(s for s in flagged if s in left), choice.why)
    assert set(left) >= {*before[-1:], *flagged[:1], *range(max(0, len(states) - keep), len(states))}
    if flagged:  # what is resumed is there too
        assert good_checkpoint(folder / "checkpoints") == good
    shutil.rmtree(folder)
