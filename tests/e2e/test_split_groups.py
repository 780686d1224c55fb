"""Algorithms that compare the images of a group, with micro-batches that hold only some of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drills import more

Train = Callable[..., Any]


@more
@pytest.mark.parametrize("name", ["dgpo", "crd"])
def test_runs_with_split_groups_are_those_with_whole_ones(name: str, train: Train, tmp_path: Path) -> None:
    """Two updates a step, two workers, each with some images of every group."""
    settings = f"""
    algorithm={name} sampling.window_range=[0,3] rollout.n=6 rollout.prompts_per_step=2 trainer.steps=3
    actor.updates_per_step=2 algorithm.old_decay=[0,0.5,0.0,0.5] algorithm.kl_coef=0.1 validation.every=0
    """.split()
    whole = train(tmp_path / "whole", *settings, rollout__micro_batch_size=6)
    split = train(
        tmp_path / "split",
        *settings,
        rollout__micro_batch_size=4,
        actor__micro_batch_size=2,
        cluster__num_workers=2,
        cluster__launcher="local",
    )
    for key in ("actor/grad_norm", "actor/loss", "actor/kl", "reward/mean"):
        assert split.column(key) == pytest.approx(whole.column(key), rel=2e-3, abs=1e-6), key
    assert len(split.column("actor/grad_norm")) == 3
