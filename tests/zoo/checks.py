"""The checks that every entry of the zoo has to pass, in a mode: with classifier-free guidance or without.

`guided`: the call with guidance runs at all. `stock`: noise 0 gives the stock pipeline's output, bitwise (for
consistency models, whose own sampler is stochastic, noise 1, but for rounding). `replay`: the ratio of a full replay
is 1, exactly (of a flow map, which has no noise: it goes where the rollout went). `gradient`: every LoRA gradient is
finite and they are not zero. `derivative`: it is the change of the log-probs per change of the weights. `window`:
ratio and gradient for a replay of one step. `encoders`: the same without the text and image encoders. `sub_batch`: a
replay of some samples of a lean tape has a ratio within 1e-5 of 1. `micro_batch`: the gradients of sub-batches add up
to that of the batch. `modes`: replays that treat guidance otherwise (`algorithm.cfg`) have the same ratio or are
refused. `stacked`: two steps in one pass have the same gradient or are refused. `noised`: replays at given latents, as
forward-process algorithms need them, have the gradient of their loss. `judged`: the denoising errors of
the stock pipeline's latents are those of a recorded call.
"""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import pytest
import tiny
import torch
from torch.utils._pytree import tree_leaves
from zoo.base import CheckName, Entry

from gerl.engine import ReplayedStep, RequiredTensors, Tape, compact, record, replay
from gerl.engine.denoising_error import denoising_errors, finished_latents, structure_of
from gerl.engine.rows import select_call
from gerl.errors import ReplayError
from gerl.model.denoisers import find_denoisers
from gerl.model.lora import add_lora

NUM_STEPS, NOISE = 3, 0.7  # the last step is deterministic: steps 0 and 1 are trained
WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 3.0])  # a different one for each sample, so that mixed-up samples show
MOST = 0.6  # of the LoRA tensors have a gradient: a last block's text stream and experts without a token have none


@dataclass
class Report:
    """The findings for an entry: the checks that passed, by mode, and its scheduler."""

    entry: Entry
    scheduler: str = ""
    passed: dict[bool, list[CheckName]] = field(default_factory=dict)  # guided or not -> checks
    modes: list[str] = field(default_factory=list)  # what the update can do with guidance


@dataclass
class Trial:
    """An entry in one mode: what its checks share."""

    entry: Entry
    pipe: Any
    lora: dict[str, list[torch.nn.Parameter]]  # by denoiser
    call: dict[str, Any]
    guided: bool
    tape: Tape = field(default_factory=lambda: Tape({}, 0))
    full: list[torch.Tensor] = field(default_factory=list)  # gradients of the full replay
    modes: list[str] = field(default_factory=list)  # see `Report`

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return list(itertools.chain.from_iterable(self.lora.values()))

    @property
    def steps(self) -> list[int]:
        """The trained steps: those with noise, or of a flow map, which has none, the same ones."""
        return [0, 1] if self.entry.kernel == "ode" else self.tape.stochastic_steps

    def arguments(self) -> dict[str, Any]:
        """A copy of the call: some pipelines write into their lists."""
        return select_call(self.call, range(self.entry.batch))

    def generators(self) -> Any:
        """As the pipeline takes them."""
        drawn = tiny.generators(self.entry.batch)
        return drawn[0] if self.entry.text else drawn

    def halves(self) -> list[list[int]]:
        """The batch in two parts, out of order."""
        return [[2, 0], [3, 1]] if self.entry.batch == 4 else [[i] for i in reversed(range(self.entry.batch))]

    def record(self, noise_level: float, probe: bool = True) -> tuple[Any, Tape]:
        options = {"kernel": self.entry.kernel, "generators": tiny.generators(self.entry.batch), "probe": probe}
        return record(self.pipe, self.arguments(), noise_level=noise_level, **options)

    @contextlib.contextmanager
    def weights_kept(self) -> Iterator[None]:
        """The weights are afterwards what they were before."""
        before = [p.detach().clone() for p in self.parameters]
        try:
            yield
        finally:
            for p, kept in zip(self.parameters, before, strict=True):
                p.data.copy_(kept)

    def gradients(self, tape: Tape | None = None, **options: Any) -> tuple[list[torch.Tensor], float]:
        """LoRA gradients of a weighted sum of log-probs, and the largest |ratio - 1|."""
        index: Sequence[int] = options.get("index", range(self.entry.batch))
        weights, deviations = WEIGHTS[list(index)], []

        def on_step(k: int, step: ReplayedStep) -> torch.Tensor | None:
            value = trained_value(step)
            assert value.shape == weights.shape
            deviations.append(ratio_deviation(step))
            return (weights * value).sum() if value.requires_grad else None

        for p in self.parameters:
            p.grad = None
        replay(self.pipe, tape or self.tape, on_step, **{"steps": self.steps} | options)
        assert len(deviations) >= 1
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters], max(deviations)


def trained_value(step: ReplayedStep) -> torch.Tensor:
    """What is differentiated, `[B]`: the log-probability, or of a step without noise a projection of where it goes."""
    if step.std > 0:
        return step.log_prob
    direction = torch.randn(step.mean.shape[1:], generator=torch.Generator().manual_seed(8))
    return (step.mean * direction).flatten(1).mean(1)


def ratio_deviation(step: ReplayedStep) -> float:
    """The largest |ratio - 1|, or of a step without noise the largest difference from where the rollout went."""
    assert step.x_next is not None
    if step.std == 0:
        return float((step.mean.detach() - step.x_next).abs().max())
    assert step.recorded_log_prob is not None
    return float(((step.log_prob.detach() - step.recorded_log_prob).exp() - 1).abs().max())


def build(entry: Entry) -> tuple[Any, dict[str, list[torch.nn.Parameter]]]:
    """A fresh pipeline with gerl's LoRA on its denoisers, B not zero, and the LoRA's parameters by denoiser."""
    torch.manual_seed(0)
    pipe = tiny.build(tiny.Case(entry.build, {}, {}))
    assert type(pipe).__name__ == entry.name, f"the entry is named {entry.name} but builds a {type(pipe).__name__}"
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.requires_grad_(False).eval()
    lora = {name: list(add_lora(d, 4, 8.0, None, seed=0).values()) for name, d in find_denoisers(pipe).items()}
    torch.manual_seed(1)
    for p in itertools.chain.from_iterable(lora.values()):
        p.data.normal_(0, 0.2)
    return pipe, lora


def call_for(entry: Entry, pipe: Any, guided: bool) -> dict[str, Any]:
    """Keyword arguments of a call of `entry.batch` prompts of different lengths; negative prompts likewise."""
    accepted = inspect.signature(type(pipe).__call__).parameters
    common = {"height": entry.size, "width": entry.size, "num_inference_steps": NUM_STEPS, "output_type": "latent"}
    call: dict[str, Any] = {"prompt": tiny.PROMPTS[: entry.batch]}
    call |= {name: value for name, value in common.items() if name in accepted}
    call |= entry.call | ((entry.cfg or {}) if guided else entry.no_cfg)
    if "negative_prompt" in call:
        call["negative_prompt"] = tiny.NEGATIVE[: entry.batch]
    if entry.text:
        call |= {name: call[name][0] for name in ("prompt", "negative_prompt") if name in call}
    return call | (entry.inputs(entry.batch) if entry.inputs else {})


def check_guided(trial: Trial) -> None:
    trial.pipe(**trial.arguments(), generator=trial.generators())


def check_stock(trial: Trial) -> None:
    torch.manual_seed(0)  # some draw from the global generator what they were given no generator for
    stock = trial.pipe(**trial.arguments(), generator=trial.generators())
    torch.manual_seed(0)
    noise = trial.entry.stock_noise
    ours, _ = trial.record(noise, probe=False)
    pairs = list(zip(arrays(stock), arrays(ours), strict=True))
    assert pairs, "the pipeline's output has neither tensors nor images"
    for a, b in pairs:
        assert a.shape == b.shape and np.isfinite(a).all(), "the stock pipeline's output is not finite"
        same = np.array_equal(a, b) if noise == 0 else np.allclose(a, b, atol=1e-5)
        assert same, f"noise {noise:g} differs from the stock pipeline by {np.abs(a - b).max()}"


def check_replay(trial: Trial) -> None:
    _, trial.tape = trial.record(NOISE)
    trial.full, deviation = trial.gradients()
    assert deviation == 0.0, f"the ratio of the full replay is off by {deviation}"
    with trial.weights_kept():
        for p in trial.parameters:
            p.data.mul_(1.5)
        moved = trial.gradients(steps=trial.steps[:1], grad=False)[1]
    assert moved > 1e-6, "the ratio does not move with the weights"


def check_gradient(trial: Trial) -> None:
    assert all(torch.isfinite(g).all() for g in trial.full), "a LoRA gradient is not finite"
    grads = iter(trial.full)
    for name, parameters in trial.lora.items():
        reached = sum(bool(g.any()) for g in itertools.islice(grads, len(parameters)))
        if reached == 0 and len(trial.lora) > 1 and not trial.guided:
            continue  # one for the negative prompt
        assert reached >= MOST * len(parameters), f"{reached} of {len(parameters)} tensors of {name} have a gradient"
    assert any(g.any() for g in trial.full)


def check_derivative(trial: Trial) -> None:
    """By a central difference along a random direction: it has what a part computes without gradient as well."""
    first = trial.steps[:1]
    grads, _ = trial.gradients(steps=first)

    def value() -> float:
        values: list[torch.Tensor] = []
        replay(trial.pipe, trial.tape, lambda k, step: values.append(trained_value(step)), steps=first, grad=False)
        return float((WEIGHTS[: trial.entry.batch].double() * values[0].double()).sum())

    assert_derivative(trial, grads, value, seed=3)


def assert_derivative(trial: Trial, grads: Sequence[torch.Tensor], value: Callable[[], float], seed: int) -> None:
    """That `grads` of the LoRA's parameters are the derivative of `value`, along a random direction."""
    generator = torch.Generator().manual_seed(seed)
    direction = [torch.randn(p.shape, generator=generator) for p in trial.parameters]
    norm = float(torch.cat([g.flatten() for g in grads]).norm())
    expected = sum(float((g * d).sum()) for g, d in zip(grads, direction, strict=True))

    def moved(size: float) -> float:
        with trial.weights_kept():
            for p, d in zip(trial.parameters, direction, strict=True):
                p.data.add_(d, alpha=size)
            return value()

    # experts are chosen anew where the weights move far, rounding errors show where they move little
    # (those of Kandinsky's queries and keys, in bfloat16, still more)
    offs = (abs((moved(size) - moved(-size)) / (2 * size) - expected) / norm for size in (1e-3, 1e-2, 1e-4))
    assert any(off < 0.05 for off in offs), "the gradient is not the derivative"


def check_window(trial: Trial) -> None:
    grads, deviation = trial.gradients(steps=trial.steps[-1:])
    assert deviation == 0.0, f"the ratio of a replay of one step is off by {deviation}"
    assert any(g.any() for g in grads) and all(torch.isfinite(g).all() for g in grads)
    assert distance(grads, trial.full) > 1e-4, "one step has the gradient of all"


def encoders(pipe: Any) -> dict[str, Any]:
    """The text and image encoders of a pipeline; OmniGen has none."""
    return {name: c for name, c in pipe.components.items() if "encoder" in name and c is not None}


def check_encoders(trial: Trial) -> None:
    removed = encoders(trial.pipe)
    try:
        for name in removed:
            setattr(trial.pipe, name, None)
        grads, deviation = trial.gradients()
    finally:
        for name, component in removed.items():
            setattr(trial.pipe, name, component)
    assert deviation == 0.0, f"without encoders the ratio of the full replay is off by {deviation}"
    assert all(torch.equal(a, b) for a, b in zip(grads, trial.full, strict=True)), "the gradient is another"


def check_sub_batch(trial: Trial) -> None:
    steps = trial.steps[-1:]
    kept = compact(trial.tape, RequiredTensors(frozenset(steps), means=False, outputs=False))
    deviation = trial.gradients(kept, index=trial.halves()[0], steps=steps, grad=False)[1]
    assert deviation <= 1e-5, f"the ratio of a sub-batch is off by {deviation}"


def check_micro_batch(trial: Trial) -> None:
    parts = []
    for index in trial.halves():
        grads, deviation = trial.gradients(index=index)
        assert deviation <= 1e-5, f"the ratio of samples {index} is off by {deviation}"
        parts.append(grads)
    off = distance([sum(g) for g in zip(*parts, strict=True)], trial.full)
    assert off < 2e-4, f"the gradients of micro-batches add up to one that differs by {off} from the batch's"


def check_modes(trial: Trial) -> None:
    first = trial.steps[:1]
    parts: list[dict[str, Any]] = [{}] if trial.entry.batch == 1 else [{}, {"index": trial.halves()[0]}]
    for mode in ("detach_uncond", "off"):
        try:
            for part in parts:
                grads, deviation = trial.gradients(steps=first, cfg=mode, **part)
                assert any(g.any() for g in grads) and all(torch.isfinite(g).all() for g in grads)
                assert mode == "off" or deviation <= 1e-5, f"with {mode} the ratio is off by {deviation}"
        except ReplayError as error:
            assert "use cfg joint" in str(error)
        else:
            trial.modes.append(mode)


def check_stacked(trial: Trial) -> None:
    try:
        grads, deviation = trial.gradients(step_batch=2)
    except ReplayError as error:
        assert "use step_batch=1" in str(error)
        return
    off = distance(grads, trial.full)
    assert deviation <= 1e-4, f"the ratio is off by {deviation} where two steps run in one pass"
    assert off < 1e-3, f"the gradient of two steps in one pass differs by {off}"


def check_noised(trial: Trial) -> None:
    """Latents of the caller's, on a lean tape, without its last sample; one level a replay (guidance with momentum)."""
    _, tape = trial.record(0.0)
    x0, generator = tape.steps[-1].x_next, torch.Generator().manual_seed(6)
    index = list(range(trial.entry.batch))
    index = index if "sub_batch" in trial.entry.fails else index[:-1] or index
    for k in (0, 1) if trial.entry.cfg is None or "noised" in trial.entry.fails else (int(trial.guided),):
        noised = tape.steps[k].rule.noised(x0, torch.randn(x0.shape, generator=generator))
        rows = noised.unflatten(0, (trial.entry.batch, -1))[index].flatten(0, 1)
        kept = compact(tape, RequiredTensors(frozenset({k}), means=False, outputs=False, forward=True))
        check_noised_step(trial, kept, rows, {"steps": [k], "index": index, "latents": {k: rows}})


def check_noised_step(trial: Trial, kept: Tape, rows: torch.Tensor, options: dict[str, Any]) -> None:
    def loss(k: int, step: ReplayedStep) -> torch.Tensor:
        learnt = torch.ones_like(step.x, dtype=torch.bool) if step.written is None else ~step.written
        assert learnt.any() and torch.equal(step.x[learnt], rows[learnt])
        errors = (step.rule.clean(step.x, step.model_output) - 1).double() ** 2
        return (errors * learnt).sum() / learnt.sum()

    for p in trial.parameters:
        p.grad = None
    replay(trial.pipe, kept, loss, **options)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trial.parameters]

    def value() -> float:
        found: list[float] = []
        replay(trial.pipe, kept, lambda k, step: found.append(float(loss(k, step))), grad=False, **options)
        return found[0]

    assert_derivative(trial, grads, value, seed=7)


def check_judged(trial: Trial) -> None:
    """With the structure of the call alone, as the guard has it, and with all that a rollout has recorded."""

    def noise(i: int, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=torch.Generator().manual_seed(i))

    torch.manual_seed(0)
    with finished_latents(trial.pipe) as finished:
        trial.pipe(**trial.arguments(), generator=trial.generators())
    assert finished.latents is not None, "it denoises with copies of its scheduler"
    torch.manual_seed(0)  # some encode their pictures with the global generator
    structure = structure_of(trial.pipe, trial.arguments(), finished.steps, tiny.generators(trial.entry.batch))
    errors = denoising_errors(trial.pipe, structure, finished.latents, noise)
    assert len(errors) == trial.entry.batch and torch.isfinite(errors).all() and (errors > 0).all()
    torch.manual_seed(0)
    _, tape = trial.record(0.0, probe=False)
    if trial.entry.stock_noise == 0 and not tape.companions:  # whose sound is at another noise level
        recorded = denoising_errors(trial.pipe, tape, tape.steps[-1].x_next, noise)
        torch.testing.assert_close(errors, recorded, rtol=1e-3, atol=1e-5)


CHECKS: dict[CheckName, Callable[[Trial], None]] = {
    "guided": check_guided,
    "stock": check_stock,
    "replay": check_replay,
    "gradient": check_gradient,
    "derivative": check_derivative,
    "window": check_window,
    "encoders": check_encoders,
    "sub_batch": check_sub_batch,
    "micro_batch": check_micro_batch,
    "modes": check_modes,
    "stacked": check_stacked,
    "noised": check_noised,
    "judged": check_judged,
}
assert tuple(CHECKS) == get_args(CheckName)


def check_mode(report: Report, pipe: Any, lora: dict[str, list[torch.nn.Parameter]], guided: bool) -> None:
    """Run the checks of one mode; those that `entry.fails` names must fail."""
    entry = report.entry
    trial = Trial(entry, pipe, lora, call_for(entry, pipe, guided), guided, modes=report.modes)
    passed = report.passed[guided] = []
    absent = [] if guided else ["guided", "modes"]
    absent += ["modes"] if "sub_batch" in entry.fails else []  # the halves of guidance are sub-batches too
    absent += ["stacked"] if "gradient" in entry.fails else []
    absent += ["sub_batch", "micro_batch"] if entry.batch == 1 else []
    absent += [] if encoders(pipe) else ["encoders"]
    for name, check in CHECKS.items():
        if name in absent:
            continue
        if name not in entry.fails:
            check(trial)
            passed.append(name)
            trial.modes += ["joint"] if guided and name == "replay" else []
            continue
        with pytest.raises(Exception, match=r"."):
            check(trial)
        if name in ("guided", "replay"):
            return


def check_entry(entry: Entry) -> Report:
    """Run every check on `entry` with and without guidance."""
    pipe, lora = build(entry)
    report = Report(entry, type(pipe.scheduler).__name__)
    for guided in [False] if entry.cfg is None else [False, True]:
        check_mode(report, pipe, lora, guided)
    return report


def arrays(output: Any) -> list[np.ndarray]:
    """The tensors and images of a pipeline's output, as arrays."""
    values = [v for v in output.values() if v is not None] if hasattr(output, "values") else list(output)
    leaves = tree_leaves(values)
    return [v.detach().float().numpy() if torch.is_tensor(v) else np.asarray(v) for v in leaves]


def distance(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Norm of the difference of two gradients relative to the norm of the second."""
    one, other = (torch.cat([g.flatten() for g in grads]).double() for grads in (a, b))
    return float((one - other).norm() / other.norm())
