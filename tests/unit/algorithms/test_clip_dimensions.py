"""Clip ranges for the size of the latents: log-probabilities are means over D dimensions."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from training import Training, chain_credit, config, relative

from gerl.algorithms import build_algorithm
from gerl.algorithms.core_algos import guard_log_ratio, ratio_spread
from gerl.config import AlgorithmConfig, algorithm_config
from gerl.config.registry import ALGORITHMS
from gerl.engine.transitions import gaussian_log_prob

SCALED = """
flow_grpo flow_grpo_fast dance_grpo mix_grpo ddpo flow_ppo grpo_guard tempflow_grpo dense_grpo branch_grpo tree_grpo
dmdr mixed_gradient
""".split()


def log_ratios(dimensions: int, shift: float, std: float, rows: int = 400) -> dict[str, torch.Tensor]:
    """Log-ratios `[rows]` of x' drawn around 0 to the same under a mean that is `shift` std away, both kinds."""
    generator = torch.Generator().manual_seed(dimensions)
    x = std * torch.randn(rows, dimensions, generator=generator, dtype=torch.float64).float()
    old = torch.zeros(rows, dimensions)
    new = old + shift * std
    before, after = gaussian_log_prob(x, old, std), gaussian_log_prob(x, new, std)
    return {"plain": after - before, "guard": guard_log_ratio(after, before, new, old, std) / std}


@pytest.mark.parametrize("kind", ["plain", "guard"])
def test_log_ratios_spread_as_one_over_the_root_of_the_dimensions(kind: str) -> None:
    shift, sizes = 0.02, (256, 1024, 4096)
    spreads = [float(log_ratios(size, shift, 0.3)[kind].std()) for size in sizes]
    for size, spread in zip(sizes, spreads, strict=True):
        assert spread == pytest.approx(shift / math.sqrt(size), rel=0.15)  # 400 rows: a standard error of 3.5 %
    assert spreads[0] / spreads[2] == pytest.approx(4, rel=0.25)


def test_a_naive_twin_of_the_law() -> None:
    """Dimension by dimension: the log-ratio is the mean of `shift z - shift^2 / 2`, its variance shift^2 / D."""
    generator, shift, size = torch.Generator().manual_seed(0), 0.05, 64
    found = []
    for _ in range(2000):
        z = torch.randn(size, generator=generator, dtype=torch.float64).tolist()
        found.append(sum(-((value - shift) ** 2) / 2 + value**2 / 2 for value in z) / size)
    values = torch.tensor(found, dtype=torch.float64)
    assert float(values.mean()) == pytest.approx(-(shift**2) / 2, abs=4 * shift / math.sqrt(size * 2000))
    assert float(values.std()) == pytest.approx(shift / math.sqrt(size), rel=0.07)


def test_the_same_share_is_clipped_at_any_size_of_latents() -> None:
    settings, shares = algorithm_config("flow_grpo", clip_low=1e-4, clip_high=1e-4), []
    for size in (256, 4096, 65536):
        low, high = settings.clip_range(size) or (0.0, 0.0)
        ratio = log_ratios(size, 0.03, 0.3, rows=200 if size > 10000 else 2000)["guard"].exp()
        shares.append(float(((ratio > 1 + high) | (ratio < 1 - low)).float().mean()))
    assert all(share == pytest.approx(shares[0], abs=0.12) for share in shares) and 0.2 < shares[0] < 0.6


def test_which_ranges_are_scaled() -> None:
    for name in ALGORITHMS:
        settings: AlgorithmConfig = algorithm_config(name)
        bounds = settings.clip_range(65536)
        if name not in SCALED:
            assert settings.clip_range(256) == bounds and not hasattr(settings, "clip_dimensions")
            continue
        assert bounds is not None
        assert settings.clip_range(256) == pytest.approx([16 * bound for bound in bounds])
        assert replace(settings, clip_dimensions=None).clip_range(256) == bounds  # type: ignore[call-arg]
        assert replace(settings, clip_dimensions=1024).clip_range(256) == pytest.approx([2 * b for b in bounds])  # type: ignore[call-arg]


def test_the_update_clips_at_the_range_of_its_latents() -> None:
    """256 dimensions: 16 times what is configured for 65536."""
    training = Training(config("flow_grpo"))
    credit = chain_credit([1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.1, -0.1])
    generator = torch.Generator().manual_seed(0)
    for p in training.policy.trained.values():
        p.data.add_(0.01 * torch.randn(p.shape, generator=generator))
    (_, _, (tape,)) = training.tasks[0]
    assert tape.steps[0].x[0].numel() == 256

    def clipped(**keys: Any) -> tuple[torch.Tensor, dict[str, float]]:
        gradient, stats = training.gradient(credit, algorithm=build_algorithm(config("flow_grpo", **keys)))
        return gradient, {name: value / stats.pairs for name, value in stats.sums.items()}

    for bound in (1e-5, 1e-4, 1e-3):
        scaled, metrics = clipped(clip_low=bound, clip_high=bound)
        given, twin = clipped(clip_low=16 * bound, clip_high=16 * bound, clip_dimensions=None)
        assert relative(scaled, given) == 0 and metrics == twin
        assert metrics["outside_fraction"] >= metrics["clip_fraction_low"] + metrics["clip_fraction_high"]
    wide, narrow = (clipped(clip_low=b, clip_high=b)[1]["outside_fraction"] for b in (0.9, 1e-9))
    assert wide == 0 and narrow == 1 and metrics["log_ratio_abs"] > 0


def test_how_far_ratios_went() -> None:
    found = ratio_spread(torch.tensor([-0.2, 0.1, 0.3, 0.0]), torch.tensor([True, False, True, False]))
    assert found == {"log_ratio_abs": pytest.approx(0.15), "outside_fraction": 0.5}
