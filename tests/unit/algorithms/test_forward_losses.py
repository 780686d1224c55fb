"""What holds for the loss of every forward-process algorithm: the direction, rows of their own, what it needs."""

from typing import Any

import pytest
import torch
from training import config, noised, rewards, samples_of

from gerl.algorithms import ALGORITHMS, ForwardProcess, build_algorithm

WIDE = {"clip_low": 1.0, "clip_high": 9.0}
KEYS: dict[str, dict[str, Any]] = {
    "diffusion_nft": {},
    **{f"awm {kind}": {"weighting": kind, **WIDE} for kind in ("uniform", "t", "t2", "huber", "ghuber")},
    "dgpo": {"beta": 1.0, **WIDE},
    "crd": {},
    "diffusion_dpo": {"beta": 2.0},
    "rwr": {"beta": 2.0},
    "best_of_n": {},
    "sft": {},
    "kto": {"beta": 2.0},
}


def algorithm(case: str) -> ForwardProcess:
    built = build_algorithm(config(case.split()[0], sampling_kernel="ode", **KEYS[case]))
    assert isinstance(built, ForwardProcess)
    return built


def nearer_to_the_good(a: ForwardProcess, totals: list[float]) -> float:
    """How much nearer to the first of two images than to the second a velocity ends that starts between them."""
    credit = a.credit(rewards(samples_of([0, 0]), totals))[:, 0].nan_to_num()
    target = torch.tensor([[-0.7, -0.7], [1.3, 1.3]])
    theta = start = target.mean(0)
    for _ in range(20):
        theta.requires_grad_()
        known = start.detach().expand(2, 2)
        losses, _ = a.loss(noised(theta.expand(2, 2), target, credit, old=known, reference=known))
        theta = (theta - 0.02 * torch.autograd.grad(losses.sum(), theta)[0]).detach()
    distances = (theta - target).norm(dim=1)
    return float(distances[1] - distances[0])


@pytest.mark.parametrize("case", KEYS)
def test_the_model_moves_to_good_images_and_away_from_bad_ones(case: str) -> None:
    assert nearer_to_the_good(algorithm(case), [0.9, 0.1]) > 0.1
    assert nearer_to_the_good(algorithm(case), [0.1, 0.9]) < -0.1
    assert nearer_to_the_good(algorithm(case), [0.5, 0.5]) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("case", KEYS)
def test_the_losses_follow_their_rows(case: str) -> None:
    generator = torch.Generator().manual_seed(1)
    output, target, old, base = (torch.randn(7, 3, 2, generator=generator, dtype=torch.float64) for _ in range(4))
    credit = torch.tensor([-2.0, 1.0, 0.0, -0.5, 1.5, 0.7, -1.2], dtype=torch.float64)
    groups, order = torch.tensor([4, 9, 4, 9, 4, 9, 9]), torch.tensor([3, 0, 6, 5, 1, 4, 2])

    def losses(rows: torch.Tensor) -> torch.Tensor:
        s = noised(output[rows], target[rows], credit[rows], groups[rows], old[rows], base[rows])
        return algorithm(case).loss(s)[0]

    torch.testing.assert_close(losses(order), losses(torch.arange(7))[order], rtol=1e-12, atol=1e-15)
    assert losses(order).count_nonzero() > 2


NEEDS = {  # old policy, base model, rows without advantage, one noise per group
    "diffusion_nft": (True, False, True, False),
    "awm uniform": (True, False, False, False),
    "dgpo": (True, True, False, True),
    "crd": (True, False, True, False),
    "diffusion_dpo": (True, False, False, True),
    "rwr": (False, False, False, False),
    "best_of_n": (False, False, False, False),
    "sft": (False, False, False, False),
    "kto": (False, True, False, False),
}


def test_what_each_needs() -> None:
    built = {case: algorithm(case) for case in NEEDS}
    assert {type(a) for a in built.values()} == {a for a in ALGORITHMS.values() if issubclass(a, ForwardProcess)}
    for case, a in built.items():
        assert (a.needs.old_decay is not None, a.needs.base_model, a.needs_all_samples, a.shared_noise) == NEEDS[case]
