"""What is concluded from the gradients of independent batches: weights, windows, and the report."""

import itertools
import json
import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from gerl.algorithms.core_algos import step_weights
from gerl.config import Config, SamplingConfig, algorithm_config
from gerl.engine.transitions import FlowRule, coefficients
from gerl.errors import TrainingError
from gerl.preflight.signal import (
    BatchGradients,
    Cosine,
    Signal,
    Weighting,
    clearly_above,
    combined_products,
    cosine,
    evaluate,
    inner_products,
    larger_batch,
)
from gerl.protocol import StepFacts

SIGMAS = [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]
SIZE = 4000


def config(name: str = "flow_grpo", **keys: Any) -> Config:
    return Config(algorithm=algorithm_config(name, **keys), sampling=SamplingConfig(num_inference_steps=5))


def facts_of(weighting: str = "uniform") -> list[StepFacts]:
    rules = [FlowRule(s, n, *coefficients("flow_sde", s, n, 0.7, SIGMAS[1])) for s, n in pairwise(SIGMAS[:-1])]
    parts = [r.std for r in rules], [r.dt for r in rules], [r.jacobian for r in rules]
    weights = step_weights(weighting, *parts)  # type: ignore[arg-type]
    return [
        StepFacts(k, r.sigma, r.dt, r.std, r.jacobian, w, w * r.jacobian / r.std)
        for k, (r, w) in enumerate(zip(rules, weights, strict=True))
    ]


def batches(count: int = 4, weighting: str = "uniform", noise: float = 300.0) -> list[BatchGradients]:
    """Gradients at weights `weighting`: a common one at the first two steps, and noise which grows to `noise`."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(SIZE, generator=generator)
    factors, found = [f.weight or 0.0 for f in facts_of(weighting)], []
    for _ in range(count):
        gradients = {}
        for k, factor in enumerate(factors):
            drawn = torch.randn(SIZE, generator=generator) * noise ** (k / 3)
            gradients[k] = factor * (drawn + (common if k < 2 else 0))
        found.append(BatchGradients(24, gradients, facts_of(weighting)))
    return found


def by_name(signal: Signal) -> dict[str, Weighting]:
    return {choice.name: choice for choice in signal.choices}


def test_each_step_has_its_norm_share_and_cosine() -> None:
    signal = evaluate(config(), batches())
    norms = [step.norm for step in signal.steps]
    assert norms == sorted(norms) and norms[3] == pytest.approx(300 * SIZE**0.5, rel=0.05)
    assert sum(step.share for step in signal.steps) == pytest.approx(1.0) and signal.steps[3].share > 0.9
    first, last = signal.steps[0].cosine, signal.steps[3].cosine
    assert first is not None and first.mean == pytest.approx(0.5, abs=0.05)
    assert last is not None and abs(last.mean) < 0.05
    assert signal.update.cosine is not None and abs(signal.update.cosine.mean) < 0.05
    assert (signal.images, signal.parameters, signal.batches, signal.weighting) == (24, SIZE, 4, "uniform")


def test_a_window_before_the_noise_is_recommended() -> None:
    signal = evaluate(config(), batches())
    windows = [choice.setting for choice in signal.choices if choice.name.startswith("window")]
    assert windows == ["sampling.window_range=[0,1]", "sampling.window_range=[0,2]", "sampling.window_range=[0,3]"]
    assert signal.recommended is not None and signal.recommended.setting == windows[0]
    assert "sampling.window_range=[0,1]: batches agree by 0.4" in signal.text()


@pytest.mark.parametrize("kind", ["std", "inverse_dt", "pcpo", "std2_over_jacobian"])
def test_other_weights_are_as_if_they_had_been_configured(kind: str) -> None:
    found = by_name(evaluate(config(), batches(noise=3.0)))[f"timestep_weights={kind}"]
    configured = evaluate(config(timestep_weights=kind), batches(noise=3.0, weighting=kind)).update
    assert found.setting == f"algorithm.timestep_weights={kind}"
    assert found.cosine is not None and configured.cosine is not None
    assert found.cosine.mean == pytest.approx(configured.cosine.mean, abs=1e-5)
    assert found.cosine.error == pytest.approx(configured.cosine.error, abs=1e-5)


def test_what_an_algorithm_has_no_key_for_is_left_out() -> None:
    forward = [BatchGradients(8, b.gradients, [StepFacts(f.step, f.sigma, f.dt) for f in b.facts]) for b in batches()]
    signal = evaluate(config("diffusion_nft"), forward)
    assert signal.weighting is None and all(choice.name.startswith("window_range") for choice in signal.choices)
    assert "|J|" not in signal.text() and "|J|" in evaluate(config(), batches()).text()
    tree = evaluate(config("branch_grpo", split_steps=[0, 2]), batches())
    assert [c.setting for c in tree.choices] == ["sampling.window_range=[0,3]"], "the tree splits at step 2"
    sampling = SamplingConfig(num_inference_steps=5, window_size=3)
    moving = evaluate(
        Config(sampling=sampling),
        [BatchGradients(8, {k: b.gradients[k] for k in (1, 2, 3)}, b.facts) for b in batches()],
    )
    assert not any("window" in choice.name for choice in moving.choices) and len(moving.steps) == 3


def test_two_batches_recommend_nothing_and_none_without_a_gradient_are_refused() -> None:
    signal = evaluate(config(), batches(2))
    assert signal.recommended is None and "use signal=4" in signal.text() and "+-" not in signal.text()
    nothing = [BatchGradients(8, {k: torch.zeros(SIZE) for k in range(4)}, facts_of()) for _ in range(2)]
    with pytest.raises(TrainingError, match=r"same reward; raise rollout\.n"):
        evaluate(config(), nothing)


@pytest.mark.parametrize(
    ("cosine", "words"),
    [
        (Cosine(0.1, 0.01), "9.0"),
        (Cosine(0.02, 0.001), "49"),
        (Cosine(0.01, 0.01), "more than 32"),
        (Cosine(-0.1, 0.01), "-"),
        (Cosine(0.1, 0.3), "-"),
        (Cosine(0.3, None), "-"),
        (None, "-"),
    ],
)
def test_how_many_images_would_do(cosine: Cosine | None, words: str) -> None:
    assert Weighting("", None, cosine).times_images == words


def test_the_report_is_json() -> None:
    values = json.loads(json.dumps(evaluate(config(), batches()).as_json(), allow_nan=False))
    assert values["steps"][1]["facts"]["step"] == 1 and values["steps"][1]["cosine"]["mean"] > 0
    assert values["recommended"]["setting"] == "sampling.window_range=[0,1]" and values["update"]["cosine"]["error"] > 0


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
    found = cosine(combined_products(inner_products(batches, STEPS), factors))
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
    alone = cosine(combined_products(products, (0, 1, 0)))
    assert alone is not None and alone.error is None
    assert alone.mean == pytest.approx(naive_cosines([batches[0][2], batches[2][2]])[0], abs=1e-5)
    assert cosine(torch.zeros(3, 3)) is None


def test_the_error_is_that_of_repeated_measurements() -> None:
    """Pairs that share a batch would give a smaller one: 6 pairs of 4 batches are not 6 measurements."""
    found = [cosine(combined_products(inner_products(drawn(4, 400, seed=s), STEPS), (1, 1, 1))) for s in range(150)]
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

    one, larger = (cosine(combined_products(inner_products(batches(n), [0]), [1.0])) for n in (1, times))
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
