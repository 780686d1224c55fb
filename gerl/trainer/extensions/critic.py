"""A critic gives a value to the noisy latents of each trained step (algorithm.adv_estimator=gae).

The value `V(x_k, sigma_k, prompt)` predicts the reward of the image that becomes of the latents `x_k`; what the reward
exceeds it by is the merit of the noise sampled from step k on (GAE, arXiv 1506.02438; PPO, arXiv 1707.06347). Workers
record the features on their tapes; the network is small and is trained here, on the CPU of the driver in one thread, so
that it does not depend on the number of workers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from gerl.algorithms.core_algos import generalised_advantages
from gerl.algorithms.flow_grpo import ChainConfig, FlowGRPO
from gerl.config import Config, CriticConfig
from gerl.errors import CheckpointError, ModelError
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Metrics, Step
from gerl.utils.seeding import derive_seed
from gerl.utils.tensors import pack_tensors, unpack_tensors
from gerl.workers.worker import PolicyWorker

if TYPE_CHECKING:
    from gerl.engine import Tape

logger = logging.getLogger(__name__)
SIDE = 8  # latents are averaged to this height and width
FRAMES = 4  # and to so many frames of a video
OCTAVES = 4  # sines and cosines of the noise level
LIMIT = 5.0  # of standardised features, in standard deviations
DECAY = 0.9  # per trainer step, of the averages by which rewards are normalised
MAX_GRAD_NORM = 1.0
BETAS, MOMENTS = (0.9, 0.999), ("adam/mean", "adam/square")


@dataclass(frozen=True)
class States:
    """Noisy latents of trained steps as a critic sees them.

    Example: a task of 6 images with 9 trained steps has `features` of shape [6, 9, d].
    """

    steps: torch.Tensor  # [K] indices of the steps
    sigmas: torch.Tensor  # [K]
    features: torch.Tensor  # [B, K, d] fp32
    prompts: torch.Tensor  # [B, p] fp32; p = 0: the denoiser is called with no prompt embedding
    hidden: bool  # whether the features are hidden states


class Critic(Extension):
    """Give the samples of a step their values, and train on their rewards."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model = ValueModel(config.critic, config.sampling.num_inference_steps, config.trainer.seed)
        self.described = False

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return config.algorithm.needs.values

    def rewarded(self, run: Run, step: Step) -> None:
        algorithm, rewards = run.algorithm, step.rewards
        assert isinstance(algorithm, FlowGRPO) and isinstance(algorithm.settings, ChainConfig) and rewards is not None
        with step.watch("critic"), one_thread():
            seen = [states for states in run.fleet.on_trajectories(states_of) if states is not None]
            self._describe(seen, step.number)
            inputs = Inputs.of(seen, rewards.rows)
            returns, settings = algorithm.returns(rewards), algorithm.settings
            self.model.observe(inputs, returns)
            values = self.model.values(inputs)
            targets = values + generalised_advantages(returns, values, settings.gamma, settings.lam)
            trained = self.model.trained
            step.metrics |= explained(values, returns, settings.gamma) | self.model.learn(inputs, targets)
        if trained >= self.config.critic.warmup_steps:
            step.rewards = replace(rewards, values=values)

    def _describe(self, states: Sequence[States], number: int) -> None:
        if not self.described:
            kind, size = "hidden states" if states[0].hidden else "latents", states[0].features.shape[-1]
            prompts = states[0].prompts.shape[1]
            seen = f"prompt embeddings of {prompts:,}" if prompts else "no prompt embedding"
            left = self.config.critic.warmup_steps - self.model.trained
            used = f"; its values are used from step {number + left} on" if left > 0 else ""
            logger.info("the critic sees %s of %s dimensions and %s%s", kind, f"{size:,}", seen, used)
            self.described = True

    def state(self) -> bytes | None:
        return self.model.state()

    def load_state(self, state: bytes | None) -> None:
        self.model.load_state(state)


def explained(values: torch.Tensor, returns: torch.Tensor, gamma: float) -> Metrics:
    """Return the share of the variance of `returns` `[B]` that `values` `[B, T]` explain, and the mean of these.

    1 - Var(return - value) / Var(return) over all states, with returns discounted to their step; NaN if they are equal.
    """
    valued = ~values.isnan()
    left = valued.flip(1).cumsum(1).flip(1) - 1  # actions after each
    outcomes = (returns[:, None] * gamma**left)[valued].double()
    spread = outcomes.var(correction=0)
    share = 1 - (outcomes - values[valued]).var(correction=0) / spread if spread > 0 else torch.tensor(torch.nan)
    return {"critic/explained_variance": float(share), "critic/value_mean": float(values[valued].mean())}


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread: the last bits of a sum depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- Features, computed on the workers


def states_of(worker: PolicyWorker, task_id: int) -> States | None:
    """Return the states of a sampled task; None for a task of dataset images."""
    trajectory, wanted = worker.trajectories[task_id], worker.config.critic.features
    if trajectory.task.samples[0].dataset_image is not None:
        return None
    steps = trajectory.task.segments[0].trained
    hidden = wanted != "latents" and all(has_hidden(tape, steps) for tape in trajectory.tapes)
    if wanted == "hidden" and not hidden:
        raise ModelError(
            f"critic.features=hidden: the hidden states of {type(worker.policy.pipe).__name__} have no form that is "
            "known; use critic.features=latents"
        )
    features = torch.cat([torch.stack([features_of(tape, k, hidden) for k in steps], 1) for tape in trajectory.tapes])
    prompts = torch.cat([prompts_of(tape) for tape in trajectory.tapes])
    sigmas = torch.tensor([trajectory.tapes[0].steps[k].rule.sigma for k in steps])
    return States(torch.tensor(steps), sigmas, features.cpu(), prompts.cpu(), hidden)


def has_hidden(tape: Tape, steps: Sequence[int]) -> bool:
    """Whether the hidden states of `steps` were recorded."""
    return tape.features is not None and tape.features.hidden.keys() >= set(steps)


def features_of(tape: Tape, k: int, hidden: bool) -> torch.Tensor:
    """Return the features `[B, d]` of the latents before step `k`."""
    if hidden:
        assert tape.features is not None
        return tape.features.hidden[k]
    return averaged(tape.steps[k].x)


def prompts_of(tape: Tape) -> torch.Tensor:
    """Return the prompt embeddings of a tape, `[B, p]`; p = 0 if there are none."""
    assert tape.features is not None
    prompts = tape.features.prompt
    return torch.empty(tape.batch_size, 0) if prompts is None else prompts


def averaged(latents: torch.Tensor) -> torch.Tensor:
    """Return latents averaged to 8 x 8, and at most 4 frames: `[B, ...]` -> `[B, d]`.

    `[B, C, H, W]` are images, `[B, C, F, H, W]` videos; of any other form, such as the packed latents `[B, L, C]` of
    FLUX, the channels are the last dimension, and 64 stretches of the rest are averaged.
    """
    sizes = latents.shape[2:]
    match latents.ndim:
        case 4:
            pooled = nn.functional.adaptive_avg_pool2d(latents, (min(SIDE, sizes[0]), min(SIDE, sizes[1])))
        case 5:
            most = (min(FRAMES, sizes[0]), min(SIDE, sizes[1]), min(SIDE, sizes[2]))
            pooled = nn.functional.adaptive_avg_pool3d(latents, most)
        case _:
            rows = latents.flatten(1, -2).transpose(1, 2)
            pooled = nn.functional.adaptive_avg_pool1d(rows, min(SIDE * SIDE, rows.shape[2]))
    return pooled.flatten(1)


# --- The network, on the driver


@dataclass(frozen=True)
class Inputs:
    """The states of a step's samples, one after the other."""

    row: torch.Tensor  # [N] sample of each state
    step: torch.Tensor  # [N] its denoising step
    sigma: torch.Tensor  # [N]
    features: torch.Tensor  # [N, d]
    prompts: torch.Tensor  # [N, p]
    samples: int

    @classmethod
    def of(cls, tasks: Sequence[States], rows: Sequence[int]) -> Inputs:
        """Join the states of all tasks and select the samples `rows`."""
        kinds = {(states.features.shape[-1], states.prompts.shape[-1]) for states in tasks}
        if len(kinds) > 1:
            raise ModelError(
                "the critic would see features of several sizes, which the pipeline computes for different samples; "
                "use critic.features=latents"
            )
        first = 0
        parts: list[tuple[torch.Tensor, ...]] = []
        number = {row: i for i, row in enumerate(rows)}  # in the table of scores -> among the trainable samples
        for states in tasks:
            chosen = [i for i in range(len(states.features)) if first + i in number]
            row = torch.tensor([number[first + i] for i in chosen], dtype=torch.long)
            first += len(states.features)
            count = len(states.steps)
            parts.append(
                (
                    row.repeat_interleave(count),
                    states.steps.repeat(len(chosen)),
                    states.sigmas.repeat(len(chosen)),
                    states.features[chosen].flatten(0, 1),
                    states.prompts[chosen].repeat_interleave(count, 0),
                )
            )
        row, step, sigma, features, prompts = (torch.cat(values) for values in zip(*parts, strict=True))
        return cls(row, step, sigma, features, prompts, len(rows))


class ValueModel:
    """A network of two hidden layers that predicts the normalised reward, with its optimizer and statistics.

    `tensors` is its whole state, from the first step on.
    """

    def __init__(self, config: CriticConfig, num_steps: int, seed: int) -> None:
        self.config, self.num_steps, self.seed = config, num_steps, seed
        self.tensors: dict[str, torch.Tensor] = {}
        self.network: nn.Sequential

    @property
    def trained(self) -> int:
        """Trainer steps for which it was trained."""
        return int(self.tensors["trained"]) if self.tensors else 0

    def build(self, features: int, prompts: int) -> None:
        """Build the network for features and prompt embeddings of these sizes."""
        width, inputs = self.config.width, features + prompts + 1 + 2 * OCTAVES
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed("critic", self.seed))
            last = nn.Linear(width, 1)
            layers = nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), last
        nn.init.zeros_(last.weight)  # at first every value is the mean reward
        nn.init.zeros_(last.bias)
        self.network = nn.Sequential(*layers)
        tensors = {"trained": torch.tensor(0), "updates": torch.tensor(0)}
        tensors["targets"] = torch.zeros(2, dtype=torch.double)  # averages of the targets and of their squares
        for name, rows, size in (("features", self.num_steps, features), ("prompts", 1, prompts)):
            tensors |= {f"{name}/{part}": torch.zeros(rows, size, dtype=torch.double) for part in ("mean", "squares")}
            tensors[f"{name}/count"] = torch.zeros(rows, dtype=torch.double)
        for name, p in self.network.state_dict().items():  # which shares the memory of the parameters
            tensors |= {f"network/{name}": p} | {f"{moment}/{name}": torch.zeros_like(p) for moment in MOMENTS}
        self.tensors = tensors

    def observe(self, inputs: Inputs, returns: torch.Tensor) -> None:
        """Update the statistics by which features are standardised, by step; first values: the mean of `returns`."""
        if not self.tensors:
            self.build(inputs.features.shape[1], inputs.prompts.shape[1])
            self.tensors["targets"].copy_(moments(returns))
        self._count("features", inputs.features, inputs.step)
        self._count("prompts", inputs.prompts, torch.zeros_like(inputs.step))

    def _count(self, name: str, values: torch.Tensor, place: torch.Tensor) -> None:
        """Merge the mean and the squared deviations of `values` `[N, d]` into those of their `place` `[N]`."""
        mean, squares, count = (self.tensors[f"{name}/{part}"] for part in ("mean", "squares", "count"))
        for k in place.unique().tolist():
            new = values[place == k].double()
            before, added = float(count[k]), len(new)
            distance = new.mean(0) - mean[k]
            squares[k] += ((new - new.mean(0)) ** 2).sum(0) + distance**2 * (before * added / (before + added))
            mean[k] += distance * (added / (before + added))
            count[k] += added

    def _standardised(self, name: str, values: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        mean, squares, count = (self.tensors[f"{name}/{part}"] for part in ("mean", "squares", "count"))
        scale = (squares / count.clamp_min(1)[:, None]).sqrt()
        scale = scale + 1e-4 * mean.abs() + 1e-8  # features that only differ by rounding stay small
        return ((values - mean[place]) / scale[place]).clamp(-LIMIT, LIMIT).float()

    def _inputs(self, inputs: Inputs) -> torch.Tensor:
        """Return the input of the network, [N, ...]."""
        angles = inputs.sigma[:, None] * math.pi * 2 ** torch.arange(OCTAVES)
        parts = [
            self._standardised("features", inputs.features, inputs.step),
            self._standardised("prompts", inputs.prompts, torch.zeros_like(inputs.step)),
        ]
        return torch.cat([*parts, inputs.sigma[:, None], angles.sin(), angles.cos()], 1)

    def scale(self) -> tuple[float, float]:
        """Return mean and standard deviation by which targets are normalised: averages over the latest steps."""
        mean, square = self.tensors["targets"].tolist()
        return mean, math.sqrt(max(square - mean**2, 0.0))

    @torch.no_grad()
    def values(self, inputs: Inputs) -> torch.Tensor:
        """Return the values of the samples at each step, [B, T], NaN where there is no state."""
        mean, std = self.scale()
        values = torch.full((inputs.samples, self.num_steps), torch.nan)
        values[inputs.row, inputs.step] = mean + std * self.network(self._inputs(inputs)).squeeze(1)
        return values

    def learn(self, inputs: Inputs, targets: torch.Tensor) -> Metrics:
        """Take the optimizer steps of a trainer step towards `targets` [B, T]; return loss and gradient norm."""
        wanted = targets[inputs.row, inputs.step].double()
        self.tensors["trained"] += 1
        self.tensors["targets"].lerp_(moments(wanted), 1 - DECAY)
        mean, std = self.scale()
        normalised = ((wanted - mean) / max(std, 1e-5 * abs(mean) + 1e-8)).float()  # rounding is no difference
        columns = self._inputs(inputs)
        with torch.no_grad():
            before = self.network(columns).squeeze(1)
        measures = [self._update(columns, normalised, before) for _ in range(self.config.updates)]
        loss, norm = torch.tensor(measures).mean(0).tolist()
        return {"critic/loss": loss, "critic/grad_norm": norm}

    def _update(self, columns: torch.Tensor, wanted: torch.Tensor, before: torch.Tensor) -> tuple[float, float]:
        """Take an optimizer step from `columns` [N, ...] to `wanted` [N]; return loss and unclipped gradient norm."""
        loss = value_loss(self.network(columns).squeeze(1), wanted, before, self.config.clip)
        parameters = dict(self.network.named_parameters())
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        norm = torch.stack([g.norm() for g in gradients]).norm()
        self.tensors["updates"] += 1
        count, (first, second) = int(self.tensors["updates"]), BETAS
        with torch.no_grad():  # Adam (arXiv 1412.6980); torch's takes seconds to import
            for (name, p), gradient in zip(parameters.items(), gradients, strict=True):
                g = gradient * min(1.0, MAX_GRAD_NORM / (float(norm) + 1e-6))
                mean, square = (self.tensors[f"{moment}/{name}"] for moment in MOMENTS)
                mean.lerp_(g, 1 - first)
                square.lerp_(g * g, 1 - second)
                scale = (square / (1 - second**count)).sqrt() + 1e-8
                p.addcdiv_(mean, scale, value=-self.config.lr / (1 - first**count))
        return float(loss.detach()), float(norm)

    def state(self) -> bytes | None:
        """Return everything as a safetensors file; None before the first step."""
        return pack_tensors(self.tensors) if self.tensors else None

    def load_state(self, state: bytes | None) -> None:
        """Restore what `state` returned; None: the initial state. Raises `CheckpointError` for anything else."""
        self.tensors = {}
        if state is None:
            return
        tensors = unpack_tensors(state)
        try:
            self.build(tensors["features/mean"].shape[1], tensors["prompts/mean"].shape[1])
            for name, tensor in self.tensors.items():
                tensor.copy_(tensors[name])
        except (KeyError, RuntimeError):
            self.tensors = {}
            raise CheckpointError(
                "the saved critic does not fit critic.width and sampling.num_inference_steps"
            ) from None


def moments(values: torch.Tensor) -> torch.Tensor:
    """Return the mean of `values` [N] and that of their squares, [2] fp64."""
    return torch.stack([values.double().mean(), values.double().square().mean()])


def value_loss(values: torch.Tensor, wanted: torch.Tensor, before: torch.Tensor, clip: float | None) -> torch.Tensor:
    """Return half the mean squared error of `values` [N], the larger one of clipped and unclipped values (PPO's code).

    `clip`: the distance from `before` [N], the values before the trainer step; None: unclipped.
    """
    errors = (values - wanted) ** 2
    if clip is not None:
        clipped = before + (values - before).clamp(-clip, clip)
        errors = errors.maximum((clipped - wanted) ** 2)
    return errors.mean() / 2
