"""Inpainting: log-probability, ratio and KL over those latents that reach the picture, by record, replay and branch."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from newer import needs
from training import config
from zoo.checks import call_for
from zoo.entries import ENTRIES

from gerl.algorithms import Batch, build_algorithm
from gerl.algorithms.contrib.fdfo import directions
from gerl.engine import RequiredTensors, Tape, branch, compact, record, replay
from gerl.engine.transitions import unwritten
from gerl.errors import ModelError, ReplayError
from gerl.model.policy import EMA, Policy
from gerl.protocol import Prompt, Sample

NAMES = ["FluxInpaintPipeline", "StableDiffusion3InpaintPipeline", "StableDiffusionXLInpaintPipeline"]


@pytest.fixture(scope="module", params=NAMES)
def trial(request: pytest.FixtureRequest) -> tuple[Any, list[torch.nn.Parameter], Tape]:
    """An inpainting pipeline with a LoRA, and a rollout of four samples, all noisy but for the last step."""
    entry = next(e for e in ENTRIES if e.name == request.param)
    pipe = entry.build()
    pipe.set_progress_bar_config(disable=True)
    parameters = tiny.add_lora(pipe)
    return pipe, parameters, rollout(pipe, call_for(entry, pipe, False), entry.kernel)


def rollout(pipe: Any, call: dict[str, Any], kernel: str) -> Tape:
    return record(pipe, call, kernel=kernel, noise_level=0.7, generators=tiny.generators())[1]


def test_half_of_the_latents_reach_the_picture(trial: tuple[Any, list[torch.nn.Parameter], Tape]) -> None:
    tape = trial[2]
    for k in tape.stochastic_steps:
        overwritten = tape.overwritten(k)
        assert overwritten is not None and overwritten.flatten(1).float().mean(1).tolist() == [0.5] * 4
        # the pipeline goes on from something else there, and from the same elsewhere
        following = tape.steps[k + 1].x
        assert ((tape.steps[k].x_next == following) == ~overwritten).all()


def test_the_log_probability_is_theirs_alone(trial: tuple[Any, list[torch.nn.Parameter], Tape]) -> None:
    pipe, _, tape = trial
    seen: dict[int, torch.Tensor] = {}

    def check(k: int, step: Any) -> None:
        assert torch.equal(step.log_prob, step.recorded_log_prob)
        seen[k] = step.log_prob
        for row in range(4):  # by hand
            left = ~tape.overwritten(k)[row]  # type: ignore[index]
            z = (step.x_next[row] - step.mean[row])[left] / step.std
            density = [-v * v / 2 - math.log(step.std) - math.log(2 * math.pi) / 2 for v in z.double().tolist()]
            assert float(step.log_prob[row]) == pytest.approx(sum(density) / len(density), rel=1e-5)
        reached = step.reached()
        assert torch.equal(reached.log_prob, step.log_prob) and reached.x.shape == (4, left.sum())

    replay(pipe, tape, check, grad=False)
    kept = compact(tape, RequiredTensors(frozenset(tape.stochastic_steps)))

    def same(k: int, step: Any) -> None:
        torch.testing.assert_close(step.log_prob, seen[k][[2, 0]], rtol=1e-4, atol=1e-4)

    replay(pipe, kept, same, grad=False, index=[2, 0])


def test_its_gradient_comes_from_these_latents(trial: tuple[Any, list[torch.nn.Parameter], Tape]) -> None:
    pipe, parameters, tape = trial
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0])

    def gradient(loss: Callable[[int, Any], torch.Tensor]) -> torch.Tensor:
        pipe.unet.zero_grad() if hasattr(pipe, "unet") else pipe.transformer.zero_grad()
        replay(pipe, tape, loss)
        return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    def naive(k: int, step: Any) -> torch.Tensor:
        left = ~tape.overwritten(k)  # type: ignore[operator]
        z = torch.where(left, step.x_next - step.mean, 0.0) / step.std
        return (weights * (-z.square() / 2).flatten(1).sum(1) / left.flatten(1).sum(1)).sum()

    def outside(k: int, step: Any) -> torch.Tensor:
        z = torch.where(tape.overwritten(k), step.x_next - step.mean, 0.0) / step.std  # type: ignore[arg-type]
        return z.square().sum()

    found, expected = gradient(lambda k, s: (weights * s.log_prob).sum()), gradient(naive)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
    assert gradient(outside).norm() > 0.1 * expected.norm()  # what was noise in it before


def test_the_update_is_that_of_the_opening_alone(trial: tuple[Any, list[torch.nn.Parameter], Tape]) -> None:
    """Ratio, clip range and KL of a policy gradient, against the same by hand."""
    pipe, parameters, tape = trial
    name = "unet" if hasattr(pipe, "unet") else "transformer"
    lora = {f"{name}.{i}": p for i, p in enumerate(parameters)}
    policy = Policy(pipe, {name: getattr(pipe, name)}, lora, EMA(lora, 0.9))
    settings = config("flow_grpo", kl_coef=0.5, clip_low=1e-4, clip_high=1e-4)
    algorithm = build_algorithm(settings)
    credit = torch.tensor([1.0, -2.0, 0.5, 3.0])
    samples = [Sample(Prompt(0, "p"), i, i, 1) for i in range(4)]
    trained = tuple(tape.stochastic_steps)
    batch = Batch(tape, samples, trained, credit[:, None].expand(-1, len(tape.steps)))
    getattr(pipe, name).zero_grad()
    stats = algorithm.train(policy, batch, [0, 1, 2, 3], 4 * len(trained))
    found = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    assert stats.ratio_deviation == 0

    base = algorithm.base_steps(policy, tape, {"steps": trained})  # type: ignore[attr-defined]
    kl: list[float] = []

    def by_hand(k: int, step: Any) -> torch.Tensor:
        left = (~tape.overwritten(k)).float()  # type: ignore[operator]
        each = left.flatten(1).sum(1)
        distance = ((step.mean - base[k].mean).square() * left).flatten(1).sum(1) / each / (2 * step.std**2)
        kl.append(float(distance.detach().mean()))
        ratio = (step.log_prob - step.recorded_log_prob).exp()
        return (-(credit * ratio).mean() + 0.5 * distance.mean()) / len(trained)

    getattr(pipe, name).zero_grad()
    replay(pipe, tape, by_hand)
    expected = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
    assert stats.sums["kl"] / stats.pairs == pytest.approx(sum(kl) / len(kl), rel=1e-4)


def test_a_branch_has_it_too(trial: tuple[Any, list[torch.nn.Parameter], Tape]) -> None:
    pipe, _, tape = trial
    kernel = "ddim" if hasattr(pipe, "unet") else "flow_sde"
    tape.probe = None
    child = branch(pipe, tape, 1, [0, 1, 2, 3], kernel, 0.7, generators=tiny.generators(seed=7))[1]
    assert child.stochastic_steps
    replay(pipe, child, lambda k, s: torch.testing.assert_close(s.log_prob, s.recorded_log_prob), grad=False)
    assert all(child.overwritten(k) is not None for k in child.stochastic_steps)


def test_a_callback_that_changes_all_latents_leaves_them_all() -> None:
    pipe = tiny.build(tiny.CASES["sd3"])
    call = tiny.call_for(tiny.CASES["sd3"], False)
    call["callback_on_step_end"] = lambda pipe, i, t, values: {"latents": values["latents"] * 0.9}
    tape = rollout(pipe, call, "flow_sde")
    assert tape.steps[1].written is not None and tape.overwritten(0) is None


def test_the_rows_that_are_left() -> None:
    values = torch.arange(12.0).view(2, 2, 3)
    written = torch.tensor([[[1, 0, 0], [1, 1, 0]], [[0, 1, 0], [1, 1, 0]]], dtype=torch.bool)
    assert unwritten(values, None) is values
    assert unwritten(values, written).tolist() == [[1, 2, 5], [6, 8, 11]]
    written[1, 0, 0] = True  # by chance, as in half precision
    assert unwritten(values, written).tolist() == [
        [1, 2, 5],
        [pytest.approx(8 * 1.5**0.5), pytest.approx(11 * 1.5**0.5), 0],
    ]
    written[1] = True
    with pytest.raises(ReplayError, match="opening"):
        unwritten(values, written)


@needs(
    "diffusers",
    "0.37",
    "hands the attention of Flux on as it lies: bf16 on CPUs then rounds a part of the rows otherwise",
)
def test_rows_in_half_precision_count_for_themselves() -> None:
    """Overwritten latents that stay the same by chance: log-probability, KL and gradient of rows alone and together."""
    entry = next(e for e in ENTRIES if e.name == "FluxInpaintPipeline")
    pipe = entry.build().to(torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    parameters = tiny.add_lora(pipe)
    for p in parameters:
        p.data = p.data.float()  # as in a run
    tape = rollout(pipe, call_for(entry, pipe, False), entry.kernel)
    left = torch.stack([(~tape.overwritten(k)).flatten(1).sum(1) for k in tape.stochastic_steps])  # type: ignore[operator]
    assert (left.amin(1) < left.amax(1)).any(), "no chance in this rollout: use another seed"
    lora = {f"transformer.{i}": p for i, p in enumerate(parameters)}
    policy = Policy(pipe, {"transformer": pipe.transformer}, lora, EMA(lora, 0.9))
    trained = tuple(tape.stochastic_steps)
    credit = torch.tensor([1.0, -2.0, 0.5, 3.0])[:, None].expand(-1, len(tape.steps))
    batch = Batch(tape, [Sample(Prompt(0, "p"), i, i, 1) for i in range(4)], trained, credit)

    def gradient(name: str, parts: list[list[int]], **keys: float) -> torch.Tensor:
        algorithm = build_algorithm(config(name, **keys))
        pipe.transformer.zero_grad()
        for rows in parts:
            stats = algorithm.train(policy, batch, rows, 4 * len(trained))
            assert name != "flow_grpo" or stats.ratio_deviation == 0
        return torch.cat([p.grad.flatten().float() for p in parameters if p.grad is not None])

    for name, keys in (("flow_grpo", {"kl_coef": 0.5}), ("diffusion_nft", {}), ("awm", {})):
        together, alone = (gradient(name, parts, **keys) for parts in ([[0, 1, 2, 3]], [[0], [1], [2], [3]]))
        assert (together - alone).norm() < 1e-4 * together.norm(), name


def test_nan_is_named_or_handed_on_but_not_taken_for_a_condition() -> None:
    pipe = tiny.build(tiny.CASES["sd3"])

    def spoiled(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values[:1], values[1:2] * math.nan, values[2:]])

    call = tiny.call_for(tiny.CASES["sd3"], False)
    hook = pipe.transformer.register_forward_hook(lambda module, inputs, output: (spoiled(output[0]),))
    call["callback_on_step_end"] = lambda pipe, i, t, values: {"latents": values["latents"] * 1.0}
    tape = rollout(pipe, call, "flow_sde")
    hook.remove()
    assert tape.overwritten(0) is None and tape.steps[1].log_prob.isnan().tolist() == [False, True, False, False]  # type: ignore[union-attr]
    call["callback_on_step_end"] = lambda pipe, i, t, values: {"latents": spoiled(values["latents"])}
    with pytest.raises(ModelError, match="nan"):
        rollout(pipe, call, "flow_sde")


def test_fdfo_divides_by_what_is_left() -> None:
    finished = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    written = torch.arange(8).expand(2, 8) < 3
    found = directions(finished, torch.tensor([1, 0]), written)
    assert not found[written].any()
    torch.testing.assert_close(unwritten(found, written), directions(finished[:, 3:], torch.tensor([1, 0])))
