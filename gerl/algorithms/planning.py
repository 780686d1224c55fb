"""Planning of the samples of a step: pure functions of configuration and step, independent of the workers."""

from __future__ import annotations  # torch is imported lazily

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import groupby, pairwise
from math import ceil, floor
from typing import TYPE_CHECKING

import numpy as np

from gerl.config import Config, SamplingConfig
from gerl.data.sources import max_prompts_per_step, weights
from gerl.protocol import Group, Prompt, Sample
from gerl.utils.condition_images import pictures_of
from gerl.utils.lazy import lazy
from gerl.utils.seeding import derive_seed

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

# --- Order of the prompts of weighted sources, a pure function of seed and step

HALF = Fraction(1, 2)


@dataclass(frozen=True)
class MixtureSchedule:
    """Prompts of each trainer step for weighted sources, whose prompts are concatenated.

    Occurrence j (from 0) of source i is due at time (j + 1/2) / weight_i, and a step takes the next `per_step` in order
    of these times (stride scheduling), so each source has its share of every step, up to rounding. A pass over a source
    uses each prompt once. With `shuffle` every pass has its own order: the half of the pass in which a prompt occurs is
    random but fixed, its place there random per pass, so that no prompt occurs twice in a step.
    """

    sizes: tuple[int, ...]
    weights: tuple[Fraction, ...]
    per_step: int
    shuffle: bool
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps after which every prompt of every source has been used."""
        each = zip(self.sizes, self.weights, strict=True)
        return max(ceil(size / (self.per_step * weight / sum(self.weights))) for size, weight in each)

    def epoch(self, step: int) -> int:
        """Return the epoch (from 0) of `step` (from 0)."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> list[int]:
        """Return the indices of the prompts of `step` (from 0)."""
        orders: dict[tuple[int, int], np.ndarray] = {}
        chosen: list[int] = []
        for source, number in self._due(step * self.per_step):
            turn, place = divmod(number, self.sizes[source])
            if (source, turn) not in orders:
                orders[source, turn] = sum(self.sizes[:source]) + self._order(source, turn)
            chosen.append(int(orders[source, turn][place]))
            if len(chosen) == self.per_step:
                break
        return chosen

    def mixed(self, order: Sequence[int]) -> list[int]:
        """Interleave the sources by their weights, keeping the order within each."""
        ends = np.cumsum(self.sizes)
        counts = [0] * len(self.sizes)
        due = []
        for index in order:
            source = int(np.searchsorted(ends, index, side="right"))
            due.append(((counts[source] + HALF) / self.weights[source], source, index))
            counts[source] += 1
        return [index for _, _, index in sorted(due)]

    def _due(self, first: int) -> Iterator[tuple[int, int]]:
        """Yield (source, occurrence) from place `first` (from 0) of the order on, without end."""
        time = Fraction(max(0, first - len(self.sizes))) / sum(self.weights)
        done = [floor(weight * time + HALF) for weight in self.weights]  # due before place `first`
        queue = [((n + HALF) / weight, i, n) for i, (n, weight) in enumerate(zip(done, self.weights, strict=True))]
        heapq.heapify(queue)
        place = sum(done)
        while True:
            _, source, number = queue[0]
            heapq.heapreplace(queue, ((number + 1 + HALF) / self.weights[source], source, number + 1))
            if place >= first:
                yield source, number
            place += 1

    def _order(self, source: int, turn: int) -> np.ndarray:
        """Return the order of a source in pass `turn`."""
        size = self.sizes[source]
        if not self.shuffle:
            return np.arange(size)
        order = self._generator(source, 0).permutation(size)
        if size < 2 * max_prompts_per_step(self.weights, self.per_step)[source]:
            return order  # the same in every pass: otherwise a prompt could occur twice in a step
        halves = order[: size // 2], order[size // 2 :]
        generator = self._generator(source, turn + 1)
        return np.concatenate([generator.permutation(half) for half in halves])

    def _generator(self, *parts: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=parts))


# --- Samples of a step: pure functions of configuration and step, independent of the number of workers

# MixGRPO's decay strategy (arXiv 2507.21802, section 4.2): a window stays exp(-RATE * steps past the threshold) as long
DECAY_RATE = 0.1
# TreeGRPO's random window (arXiv 2512.08153, equation 7): the probability of a start is this of that of the one before
GEOMETRIC_RATE = 0.5
VALIDATION_SEED = 42  # seed of the fixed noise of held-out prompts


@dataclass(frozen=True)
class PromptSchedule:
    """Which of `count` prompts a trainer step uses: a pure function of the step, so resuming needs no state.

    An epoch uses each prompt exactly once; its last batch may be smaller. With `shuffle` every epoch has its own order,
    from (seed, epoch).
    """

    count: int
    per_step: int
    shuffle: bool
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.count // self.per_step)

    def epoch(self, step: int) -> int:
        """Return the epoch (from 0) of `step` (from 0)."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> list[int]:
        """Return the indices of the prompts of `step` (from 0): `per_step`, or fewer at the end of an epoch."""
        start = step % self.steps_per_epoch * self.per_step
        end = min(start + self.per_step, self.count)
        if not self.shuffle:
            return list(range(start, end))
        return [int(i) for i in _order(self.count, self.seed, self.epoch(step))[start:end]]


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch,))
    return np.random.default_rng(sequence).permutation(count)


def sde_window(config: Config, step: int, group: Group | None = None) -> tuple[int, ...]:
    """Return the stochastic steps of trainer step `step`, from the run's seed; `group`: if groups differ."""
    if config.sampling.kernel == "ode":
        return ()
    first, end = config.sampling.steps_range
    size, every = config.sampling.trained_steps, config.sampling.window_every
    if config.sampling.window_schedule in ("random", "geometric"):
        prompt_parts = (group.prompt,) if group is not None and config.sampling.window_per == "group" else ()
        # a window that changes each step is sampled from the step
        parts = (*prompt_parts, step if every == 1 else (step - 1) // every)
        generator = torch.Generator().manual_seed(derive_seed("window", config.trainer.seed, *parts))
        count = end - first - size + 1
        if config.sampling.window_schedule == "random":
            start = first + int(torch.randint(count, (), generator=generator))
        else:
            odds = GEOMETRIC_RATE ** torch.arange(count, dtype=torch.double)
            start = first + int(torch.multinomial(odds, 1, generator=generator))
    else:
        start = _moving_start(config.sampling, step)
    return tuple(range(start, start + size))


def _moving_start(sampling: SamplingConfig, step: int) -> int:
    """Return the start of a window that moves by its stride from the first step to the last, and then starts over."""
    first, end = sampling.steps_range
    size, every = sampling.trained_steps, sampling.window_every
    stride = size if sampling.window_stride is None else sampling.window_stride
    starts = [*range(first, end - size, stride), end - size] if stride else [first]
    middle = (first + end) / 2
    decay = DECAY_RATE if sampling.window_schedule == "decay" else 0.0
    stays = [max(1, round(every * math.exp(-decay * max(0.0, start - middle)))) for start in starts]
    rest = (step - 1) % sum(stays)
    for start, stay in zip(starts, stays, strict=True):
        if rest < stay:
            return start
        rest -= stay
    raise AssertionError("unreachable: the stays add up")


def sampled_steps(steps: Sequence[int], count: int, *seed: int | str) -> tuple[int, ...]:
    """Sample `count` of `steps`, one from each of as many strata of nearly equal length, from `seed`; in order."""
    count = min(count, len(steps))
    bounds = [round(i * len(steps) / count) for i in range(count + 1)]
    generator = torch.Generator().manual_seed(derive_seed("steps", *seed))
    return tuple(steps[a + int(torch.randint(b - a, (), generator=generator))] for a, b in pairwise(bounds))


def any_steps(steps: Sequence[int], count: int, *seed: int | str) -> tuple[int, ...]:
    """Sample `count` of `steps` uniformly from `seed`; in order."""
    generator = torch.Generator().manual_seed(derive_seed("any steps", *seed))
    chosen = torch.randperm(len(steps), generator=generator)[:count].tolist()
    return tuple(steps[i] for i in sorted(chosen))


def plan_samples(config: Config, prompts: Iterable[Prompt], step: int, policy_version: int) -> list[Sample]:
    """Return the samples of trainer step `step`: `rollout.n` per prompt, or its dataset images."""
    seed, same = config.trainer.seed, config.sampling.same_init_noise
    planned = [
        Sample(
            prompt,
            k,
            derive_seed("sample", seed, step, prompt.id, k),
            step,
            policy_version,
            init_seed=derive_seed("initial", seed, step, prompt.id) if same else None,
        )
        for prompt in prompts
        for k in range(len(prompt.dataset_images) or config.rollout.n)
    ]
    return (
        planned if all(sample.prompt.turn is None for sample in planned) else [_in_turn(sample) for sample in planned]
    )


def _in_turn(sample: Sample) -> Sample:
    """Return a sample of an episode with its turn, and seeds of its own if it starts from an earlier turn."""
    turn, seed, init_seed = sample.prompt.turn, sample.seed, sample.init_seed
    assert turn is not None
    if turn.state is not None:
        parts = ("turn", turn.number, turn.state)
        seed = derive_seed(seed, *parts)
        init_seed = None if init_seed is None else derive_seed(init_seed, *parts)
    return replace(sample, seed=seed, init_seed=init_seed, turn=turn.number, role=turn.role, branch=turn.state)


def plan_prompts(
    schedule: PromptSchedule | MixtureSchedule, prompts: Sequence[Prompt], step: int, attempt: int = 0
) -> list[Prompt]:
    """Return the prompts of trainer step `step` (from 1); the last batch of an epoch may be smaller.

    `attempt` > 0: further prompts for dynamic sampling, without repetition within the step while prompts are left.
    """
    chosen = schedule.batch(step - 1)
    if attempt == 0:
        return [prompts[i] for i in chosen]
    generator = torch.Generator().manual_seed(derive_seed("further", schedule.seed, step))
    taken = set(chosen)
    order = torch.randperm(len(prompts), generator=generator).tolist()
    others = [i for i in order if i not in taken]
    if isinstance(schedule, MixtureSchedule):
        others = schedule.mixed(others)
    return [prompts[i] for i in others[(attempt - 1) * schedule.per_step : attempt * schedule.per_step]]


def plan_images(config: Config, images: Sequence[Prompt], step: int) -> list[Prompt]:
    """Return the `images` of `data.regularise` that trainer step `step` (from 1) imitates."""
    count = min(len(images), config.data.regularise_images or config.rollout.prompts_per_step)
    schedule = PromptSchedule(len(images), count, config.data.shuffle, derive_seed("images", config.trainer.seed))
    return [images[i] for i in schedule.batch(step - 1)]


def plan_validation(config: Config, prompts: Sequence[Prompt], step: int) -> list[list[Sample]]:
    """Return micro-batches of images of all held-out prompts, prompt by prompt, with the same noise at every step."""
    count = range(config.validation.images_per_prompt)
    samples = [Sample(prompt, k, validation_seed(prompt, k), step) for prompt in prompts for k in count]
    if any(prompt.turn for prompt in prompts):
        samples = [_in_turn(sample) for sample in samples if _goes_on(sample)]
    return micro_batches(samples, config.validation.micro_batch_size)


def _goes_on(sample: Sample) -> bool:
    """Whether an image is sampled in validation: in a turn that starts from images, one for each of them."""
    state = None if sample.prompt.turn is None else sample.prompt.turn.state
    return state is None or sample.index == state


def validation_seed(prompt: Prompt, k: int) -> int:
    """Return the seed of the noise of image `k` (from 0) of a held-out prompt."""
    return derive_seed("validation", VALIDATION_SEED, prompt.id, *([k] if k else []))


def micro_batches(samples: Sequence[Sample], size: int) -> list[list[Sample]]:
    """Split samples into consecutive micro-batches of at most `size`; one with condition images has a single prompt."""
    if not any(sample.prompt.metadata or sample.prompt.turn for sample in samples):
        return chunks(list(samples), size)
    alike = groupby(samples, key=lambda sample: pictures_of(sample.prompt))
    return [chunk for _, part in alike for chunk in chunks(list(part), size)]


def prompt_schedule(config: Config, prompts: Sequence[Prompt]) -> PromptSchedule | MixtureSchedule:
    """Return the prompt schedule of the run; `prompts` are ordered by source."""
    per_step, shuffle, seed = config.rollout.prompts_per_step, config.data.shuffle, config.trainer.seed
    shares = weights(config.data.train)
    if shares is None:
        return PromptSchedule(len(prompts), per_step, shuffle, seed)
    sizes = np.bincount([prompt.source for prompt in prompts], minlength=len(shares)).tolist()
    return MixtureSchedule(tuple(sizes), tuple(shares), per_step, shuffle, seed)


def planned_steps(config: Config, prompts: Sequence[Prompt]) -> int:
    """Return the number of trainer steps of a run: `trainer.steps`, or those of `trainer.epochs` if these are fewer."""
    epochs = config.trainer.epochs
    if epochs is None:
        return config.trainer.steps
    return min(config.trainer.steps, epochs * prompt_schedule(config, prompts).steps_per_epoch)


def group_chunks(samples: Sequence[Sample], size: int) -> list[list[Sample]]:
    """Split samples into micro-batches of whole groups; a group of more than `size` into nearly equal parts."""
    parts: list[list[Sample]] = []
    for _, members in groupby(samples, key=lambda sample: sample.group):
        group = list(members)
        alike = parts and pictures_of(parts[-1][0].prompt) == pictures_of(group[0].prompt)
        if alike and len(parts[-1]) + len(group) <= size:
            parts[-1] = parts[-1] + group
            continue
        bounds = [round(i * len(group) / -(-len(group) // size)) for i in range(-(-len(group) // size) + 1)]
        parts += [group[a:b] for a, b in pairwise(bounds)]
    return parts


def chunks(samples: list[Sample], size: int) -> list[list[Sample]]:
    """Split `samples` into parts of at most `size`."""
    return [samples[i : i + size] for i in range(0, len(samples), size)]
