"""Runs with what makes them cheaper: approximate steps that are not trained, 8-bit rollouts, other kernels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from drills import more

Train = Callable[..., Any]
FAST = ("algorithm=flow_grpo_fast", "sampling.window_size=1", "sampling.window_range=[1,2]", "actor.lr=0.01")


def test_a_run_with_a_feature_cache_is_exact_where_it_trains(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny.sd3().save_pretrained(tmp_path / "model")  # of its two blocks the second is left out
    keys = {"sampling__num_inference_steps": 6, "model__path": tmp_path / "model"}
    plain = train(tmp_path / "plain", *FAST, **keys)
    assert "approximate" not in caplog.text
    cached = train(tmp_path / "cached", *FAST, "sampling.cache=first_block", "sampling.cache_threshold=9", **keys)
    assert "sampling.cache=first_block: images are sampled with approximate" in caplog.text
    assert plain.column("reward/mean") != cached.column("reward/mean")
    assert max(cached.column("actor/ratio_deviation")) == 0.0 and min(cached.column("actor/grad_norm")) > 0


@more
def test_8_bit_rollouts_are_corrected_by_the_ratio(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ["rollout.quantize=int8", "algorithm.clip_low=0.5", "algorithm.clip_high=0.5", "actor.lr=0.01"]
    plain = train(tmp_path / "plain", actor__lr=0.01).lora(2)
    for decoupled in ("false", "true"):
        caplog.clear()
        run = train(tmp_path / decoupled, *keys, f"algorithm.decoupled={decoupled}")
        assert "images are sampled with 8-bit weights, their ratio corrects for it" in caplog.text
        assert run.column("actor/ratio_deviation") == []  # nothing is on policy
        spread = run.column("actor/off_policy/log_ratio_abs")
        assert len(spread) == 2 and min(spread) > 0 and max(run.column("actor/clip_fraction")) == 0
        assert float(run.lora(2).abs().sum()) > 0 and float((run.lora(2) - plain).abs().max()) > 0


@more
def test_a_resumed_run_with_them_goes_on_exactly(train: Train, tmp_path: Path) -> None:
    keys = [*FAST, "sampling.cache=taylorseer", "rollout.quantize=int8", "checkpoint.every=1", "checkpoint.keep=9"]
    whole = train(tmp_path / "whole", *keys, trainer__steps=2)
    train(tmp_path / "half", *keys, trainer__steps=1)
    resumed = train(tmp_path / "half", f"checkpoint.resume={tmp_path / 'half'}", trainer__steps=2)
    resumed.assert_same(whole, 2)


@more
def test_kernels_of_the_denoiser_and_the_vae(train: Train, tmp_path: Path) -> None:
    flux = tiny.flux()
    flux.save_pretrained(tmp_path / "flux")
    keys = {"model__path": tmp_path / "flux"}
    plain = train(tmp_path / "plain", actor__lr=0.01, **keys).lora(2)
    chosen = ["model.attention=_native_math", "model.channels_last=true", "model.compile=eager"]
    other = train(tmp_path / "chosen", *chosen, actor__lr=0.01, **keys).lora(2)
    assert 0 < float((plain - other).norm()) < 2e-2 * float(plain.norm())
    assert torch.isfinite(other).all()
