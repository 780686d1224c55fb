"""The statistics of gradients, against what they mean written out, and on gradients whose signal is known."""

import itertools
import math

import pytest
import torch

from gerl.preflight.agreement import Cosine, clearly_above, combined, cosine, inner_products, larger_batch

STEPS = (0, 2, 5)


def drawn(batches: int, size: int = 50, signal: float = 0.5, seed: int = 0) -> list[dict[int, torch.Tensor]]:
    """Gradients with an expected one and noise."""
    generator = torch.Generator().manual_seed(seed)
    expected = {k: torch.randn(size, generator=generator) * signal for k in STEPS}
    return [{k: expected[k] + torch.randn(size, generator=generator) for k in STEPS} for _ in range(batches)]


def naive_cosines(vectors: list[torch.Tensor]) -> list[float]:
    pairs = itertools.combinations(vectors, 2)
    return [float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0)) for a, b in pairs]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("factors", [(1.0, 1.0, 1.0), (0.0, 2.0, 0.0), (3.0, 0.5, -1.0)])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_cosines_of_any_weighted_sum_come_from_the_products_of_steps(count: int, factors: tuple[float, ...]) -> None:
    batches = drawn(count)
    sums = [sum((f * b[k] for f, k in zip(factors, STEPS, strict=True)), torch.zeros(50)) for b in batches]
    found = cosine(combined(inner_products(batches, STEPS), factors))
    assert found is not None and found.mean == pytest.approx(mean(naive_cosines(sums)), abs=1e-5)
    if count == 2:
        assert found.error is None
        return
    left_out = [mean(naive_cosines(sums[:i] + sums[i + 1 :])) for i in range(count)]
    centre = mean(left_out)
    jackknife = math.sqrt((count - 1) / count * sum((value - centre) ** 2 for value in left_out))
    assert found.error == pytest.approx(jackknife, rel=1e-4)


def test_a_step_that_a_batch_lacks_counts_as_nothing() -> None:
    batches = drawn(3)
    del batches[1][2]
    products = inner_products(batches, STEPS)
    assert products[1, 0, 1].abs().max() == 0 and products[0, 1, 0, 1] == 0
    alone = cosine(combined(products, (0, 1, 0)))
    assert alone is not None and alone.error is None
    assert alone.mean == pytest.approx(naive_cosines([batches[0][2], batches[2][2]])[0], abs=1e-5)
    assert cosine(torch.zeros(3, 3)) is None


def test_the_error_is_that_of_repeated_measurements() -> None:
    """Pairs that share a batch would give a smaller one: 6 pairs of 4 batches are not 6 measurements."""
    found = [cosine(combined(inner_products(drawn(4, 400, seed=s), STEPS), (1, 1, 1))) for s in range(150)]
    means = torch.tensor([c.mean for c in found if c is not None])
    # the expected gradient, hence the cosine of a measurement, differs between the seeds, but hardly in 400 dimensions
    errors = torch.tensor([c.error or 0.0 for c in found if c is not None])
    assert float(errors.square().mean().sqrt()) == pytest.approx(float(means.std()), rel=0.5)


@pytest.mark.parametrize("times", [2, 8])
def test_a_larger_batch_agrees_as_foretold(times: int) -> None:
    size, signal = 20_000, 0.3
    generator = torch.Generator().manual_seed(1)
    expected = signal * torch.randn(size, generator=generator)

    def batches(images: int) -> list[dict[int, torch.Tensor]]:
        return [{0: expected + torch.randn(size, generator=generator) / math.sqrt(images)} for _ in range(4)]

    one, larger = (cosine(combined(inner_products(batches(n), [0]), [1.0])) for n in (1, times))
    assert one is not None and larger is not None
    foretold = larger_batch(one.mean, larger.mean)
    assert foretold == pytest.approx(times, rel=0.15)


def test_how_much_larger_a_batch_must_be() -> None:
    assert larger_batch(0.1) == pytest.approx(9.0) and larger_batch(0.5) == 1.0 and larger_batch(1.0) == 0.0
    assert larger_batch(0.0) is None and larger_batch(-0.1) is None


@pytest.mark.parametrize(
    ("candidate", "errors", "above"),
    [
        (0.3, (0.05, 0.05), True),
        (0.19, (0.05, 0.05), False),
        (0.3, (0.16, 0.01), False),
        (0.9, (None, 0.05), False),
        (0.9, (0.05, None), False),
    ],
)
def test_what_is_recommended_is_above_by_more_than_the_errors(
    candidate: float, errors: tuple[float | None, float | None], above: bool
) -> None:
    assert clearly_above(Cosine(candidate, errors[0]), Cosine(0.1, errors[1])) == above
    assert Cosine(0.1, 0.05).highest == pytest.approx(0.2)
