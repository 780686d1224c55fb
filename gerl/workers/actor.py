"""The actor of a worker: turns trajectories and credit into an update of the LoRA or of all weights."""

import contextlib
import importlib.util
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from diffusers.optimization import get_scheduler

from gerl.algorithms import Algorithm, Batch
from gerl.algorithms.base import Pooled, pooled_sum
from gerl.algorithms.core_algos import decay_at
from gerl.config import ActorConfig
from gerl.engine.replay import StepGradients, squared_norm
from gerl.errors import CheckpointError, ConfigError, TrainingError
from gerl.model.errors import is_full, release
from gerl.model.policy import EMA, Policy, local
from gerl.model.shards import Part, part_of
from gerl.protocol import StepResult, UpdateStats
from gerl.run.checkpoint import ScheduleState, WorkerState
from gerl.utils.files import first_line
from gerl.workers.collective import Ranks
from gerl.workers.rollout import half

logger = logging.getLogger(__name__)
T = TypeVar("T")
Tensors = dict[str, torch.Tensor]
OPTIMIZER = "optimizer/"  # prefix of the optimizer's tensors in a checkpoint
# optimizer state per parameter: always, and for parameters with at least 4096 elements
ADAMW = ("step", "exp_avg", "exp_avg_sq")
ADAMW8BIT = ("step", "state1", "state2")
QUANTISED = ("qmap1", "qmap2", "absmax1", "absmax2")
PACKAGE = "bitsandbytes"

# --- Optimizer


def check_optimizer(config: ActorConfig, device: str) -> None:
    """Raise `ConfigError` if a step of `config.optimizer` does not work on `device`."""
    if config.optimizer == "adamw":
        return
    setting = f"actor.optimizer={config.optimizer}"
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"{setting} needs the package {PACKAGE}: pip install 'gerl[{PACKAGE}]', or use actor.optimizer=adamw"
        )
    parameters = [torch.nn.Parameter(torch.ones(size, device=device)) for size in (8, 8192)]
    optimizer = build_optimizer(config, parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError, AttributeError, OSError) as error:
        raise ConfigError(
            f"{setting}: the installed {PACKAGE} does not work on {device} ({first_line(error)}); use adamw"
        ) from None
    if not all(bool((p < 1).all()) for p in parameters):
        raise ConfigError(f"{setting}: the installed {PACKAGE} has no effect on {device}; use actor.optimizer=adamw")


def build_optimizer(config: ActorConfig, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Build AdamW, or for `adamw8bit` the one of bitsandbytes (Dettmers et al. 2021, blockwise 8-bit moments)."""
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    if config.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit  # an optional package

        kind = AdamW8bit
    return kind(
        parameters,  # type: ignore[call-arg]
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def gradient_of(p: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient of `p`, zeros if it has none."""
    return p.grad if p.grad is not None else torch.zeros_like(p)


def flat_copy(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate all values into one fp32 vector on the CPU."""
    return torch.cat([local(gradient).detach().float().cpu().flatten() for gradient in gradients])


def clip_gradients(
    parameters: Sequence[torch.nn.Parameter], limit: float, group: dist.ProcessGroup | None = None
) -> float:
    """Clip the norm to `limit`, return it before; `group`: holders of a shard of each parameter (collective call)."""
    if group is None:
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit))
    here = [gradient for p in parameters if p.grad is not None and (gradient := local(p.grad)).numel()]
    square = torch.zeros((), dtype=torch.float64, device=local(parameters[0]).device)
    if here:
        square += torch.nn.utils.get_total_norm(here).double().square()
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    if here:
        torch._foreach_mul_(here, (limit / (norm + 1e-6)).clamp(max=1.0).float())  # as clip_grad_norm_ does
    return float(norm)


def state_of(optimizer: torch.optim.Optimizer, lora: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return the state tensors of `optimizer` as `KEY/NAME`, by the names of `lora`; empty before the first update."""
    return {
        f"{key}/{name}": value if torch.is_tensor(value) else torch.tensor(float(value))
        for name, p in lora.items()
        for key, value in optimizer.state.get(p, {}).items()
    }


def expected_state(
    config: ActorConfig, lora: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return tensors with the shapes and dtypes of `state_of`, for the parameters that have any in `tensors`."""
    expected: dict[str, torch.Tensor] = {}
    keys = ADAMW8BIT if config.optimizer == "adamw8bit" else ADAMW
    for name, p in lora.items():
        moments = {key: torch.zeros((), dtype=torch.float32) if key == "step" else p for key in keys}
        if config.optimizer == "adamw8bit" and any(f"{key}/{name}" in tensors for key in QUANTISED):
            blocks = tensors.get(f"absmax1/{name}", torch.zeros(0)).shape  # as many as the package creates
            moments |= {key: p.to(torch.uint8) for key in ("state1", "state2")}
            moments |= {key: torch.zeros(256) for key in ("qmap1", "qmap2")}
            moments |= {key: torch.zeros(blocks) for key in ("absmax1", "absmax2")}
        if any(f"{key}/{name}" in tensors for key in moments):  # none before the first update
            expected |= {f"{key}/{name}": like for key, like in moments.items()}
    return expected


def restore(
    optimizer: torch.optim.Optimizer, lora: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Load the result of `state_of`, checked by `expected_state`, into `optimizer`."""
    counts = not isinstance(optimizer, torch.optim.AdamW)  # if the number of updates is a number, not a tensor
    for name, p in lora.items():
        stored = {
            key: tensors[f"{key}/{name}"] for key in (*ADAMW, *ADAMW8BIT, *QUANTISED) if f"{key}/{name}" in tensors
        }
        if not stored:
            continue
        state = {key: value.to(p.device, copy=True) for key, value in stored.items() if key != "step"}
        step = stored["step"].to("cpu", copy=True)  # AdamW keeps its step counter on the CPU
        optimizer.state[p] = {"step": int(step) if counts else step, **state}


# --- Update


class Actor:
    """Accumulator of the gradient of an update, and its optimizer step."""

    def __init__(
        self,
        policy: Policy,
        config: ActorConfig,
        algorithm: Algorithm,
        total_updates: int,
        ranks: Ranks | None = None,
        group: dist.ProcessGroup | None = None,
        staleness: int = 0,
        reduced: torch.dtype = torch.float32,
    ) -> None:
        """Build optimizer and averages.

        `ranks`: in lockstep; `group`: shares the weights; `staleness`: in steps; `reduced`: precision of sums.
        """
        self.policy, self.config, self.algorithm, self.ranks, self.group = policy, config, algorithm, ranks, group
        self.parameters = list(policy.trained.values())
        self.reduced = reduced
        if config.alternate and len(names := {name.partition(".")[0] for name in policy.trained}) == 1:
            raise ConfigError(f"actor.alternate={config.alternate}: only {names.pop()} is trained; use 0")
        self.most: int | None = None  # rows of a replay that fit into memory; None: no known limit
        self.divides = ranks is None  # whether it searches for that limit
        self.say: Callable[[str], None] = logger.warning
        self.subtracted: list[torch.Tensor] = []  # a gradient, see `gerl.workers.kl_gradient`
        self.looked = False  # whether layers were checked for a missing gradient
        self.optimizer = build_optimizer(config, self.parameters)
        name = "constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule
        self.schedule = get_scheduler(
            name, self.optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=total_updates
        )
        needs = algorithm.needs
        if needs.old_decay is not None:
            policy.old = EMA(policy.trained, partial(decay_at, needs.old_decay))
        if needs.rollout_decay is not None:
            policy.sampler = EMA(policy.trained, partial(decay_at, needs.rollout_decay))
        if staleness or needs.start_weights:
            policy.earlier = [EMA(policy.trained, 0.0) for _ in range(staleness + 1)]
        policy.reference_moves = algorithm.settings.moves_reference
        if policy.reference_moves or (policy.whole and (needs.base_model or algorithm.config.has_kl)):
            policy.reference = EMA(policy.trained, 1.0)
        elif policy.whole and algorithm.config.needs_base:  # rarely used: in main memory
            policy.reference = EMA.in_main_memory(policy.trained)

    def accumulate(self, batches: Sequence[Batch], num_pairs: int, by_step: bool = False) -> UpdateStats:
        """Add the gradient of `batches`, a part of `num_pairs` pairs; `by_step`: measure it by step (LoRA only)."""
        stats, measured = UpdateStats(), dict[int, torch.Tensor]()
        for batch in batches:
            parts, idle = self.parts(batch)
            algorithm = self.algorithm.of(batch.samples)
            for rows in parts:
                new = by_step and not self.policy.whole and not measured.keys() >= set(batch.trained)
                measure = squared_norm if (ranks := self.ranks) is None else lambda g: squared_norm(ranks.whole(g))
                meter = StepGradients(self.parameters, measure) if new else None
                added = algorithm.train(self.policy, batch, rows, num_pairs, meter)
                if algorithm is not self.algorithm:  # imitated dataset images are not part of the algorithm's averages
                    sums = {"data_error": added.sums["squared_error"], "data_pairs": float(added.pairs)}
                    added = UpdateStats(sums=sums)
                stats += added
                if meter is not None:
                    measured = meter.end() | measured
            for blank, rows in idle:
                self.algorithm.train(self.policy, blank, rows, math.inf)  # adds a zero gradient
        squares = torch.stack(list(measured.values())).tolist() if measured else []
        return replace(stats, step_squares={k: (square, 1) for k, square in zip(measured, squares, strict=True)})

    def accumulate_tasks(
        self, tasks: Mapping[int, Sequence[Batch]], num_pairs: int, measured: int | None
    ) -> UpdateStats:
        """Add the gradient of the batches of each task, by step for the task `measured`; retry if out of memory."""

        def work() -> UpdateStats:
            return sum([self.accumulate(b, num_pairs, by_step=i == measured) for i, b in tasks.items()], UpdateStats())

        return self.retry_on_oom(list(chain(*tasks.values())), work)

    def retry_on_oom(self, batches: Sequence[Batch], work: Callable[[], T]) -> T:
        """Run `work`; if it runs out of memory, zero the gradient, halve `batches` and retry."""
        while True:
            try:
                return work()
            except (MemoryError, RuntimeError) as error:
                if not (self.divides and is_full(error) and self._halve(batches)):
                    raise
                release(error)
            self.optimizer.zero_grad(set_to_none=True)

    def _halve(self, batches: Sequence[Batch]) -> bool:
        """Halve the micro-batches; return False if the largest one of `batches` cannot be halved."""

        def largest() -> int:
            return max((len(rows) for batch in batches for rows in self.parts(batch)[0]), default=0)

        rows, most = largest(), self.most
        self.most = half(rows)
        if largest() == rows:
            self.most = most
            return False
        self.say(
            f"out of memory in the update of {rows} images: continuing with actor.micro_batch_size={self.most}, "
            "which gives the same gradient; set it to skip this search"
        )
        return True

    def pool(self, batches: Sequence[Batch]) -> Pooled:
        """Return the contribution of `batches` to the group sums used in losses."""
        pooled: list[Pooled] = []
        for batch in batches:
            if self.algorithm.of(batch.samples) is not self.algorithm:
                continue
            parts, idle = self.parts(batch)
            pooled += [self.algorithm.pool(self.policy, batch, rows) for rows in parts]
            for blank, rows in idle:
                self.algorithm.pool(self.policy, blank, rows)
        return pooled_sum(pooled)

    def parts(self, batch: Batch) -> tuple[list[list[int]], list[tuple[Batch, list[int]]]]:
        """Return the micro-batches of `batch` as row indices, and zero-weight padding to equal counts on all ranks."""
        parts = list(self.algorithm.of(batch.samples).micro_batches(batch, self.most))
        more = 0 if self.ranks is None else self.ranks.most(len(parts)) - len(parts)
        if not more:
            return parts, []
        blank = replace(batch, credit=torch.ones_like(batch.credit), pooled=None)
        return parts, [(blank, next(self.algorithm.micro_batches(blank)))] * more

    def step_gradients(self, batches: Sequence[Batch], num_pairs: int) -> dict[int, torch.Tensor]:
        """Return what `accumulate` adds by trained step, as vectors on the CPU; drops accumulated gradients."""
        gradients: dict[int, torch.Tensor] = {}
        for batch in batches:
            parts, idle = self.parts(batch)
            for rows in parts:
                self.optimizer.zero_grad(set_to_none=True)  # avoids adding small numbers to large ones
                meter = StepGradients(self.parameters, flat_copy)
                self.algorithm.train(self.policy, batch, rows, num_pairs, meter)
                gradients |= {k: gradients[k] + new if k in gradients else new for k, new in meter.end().items()}
            for blank, rows in idle:
                self.algorithm.train(self.policy, blank, rows, math.inf)
        self.optimizer.zero_grad(set_to_none=True)
        return gradients

    def flat_gradient(self) -> torch.Tensor:
        """Return all gradients as one vector, zeros for missing ones."""
        return torch.cat([local(gradient_of(p)).flatten() for p in self.parameters])

    def set_flat_gradient(self, flat: torch.Tensor) -> None:
        """Replace all gradients by those in `flat`."""
        for p, values in zip(self.parameters, flat.split([local(p).numel() for p in self.parameters]), strict=True):
            p.grad = torch.empty_like(p)
            local(p.grad).copy_(values.view_as(local(p)))

    def all_reduce(self) -> None:
        """Sum the gradients of all workers, a collective call; those sharded over a worker's ranks are already sums."""
        if not self.policy.whole:
            flat = self.flat_gradient()
            self._sum(flat)
            self.set_flat_gradient(flat)
        elif self.ranks is None or self.ranks.peers.size() > 1:
            for p in self.parameters:
                p.grad = gradient_of(p)
                if local(p.grad).numel():
                    self._sum(local(p.grad), None if self.ranks is None else self.ranks.peers)

    def _sum(self, gradient: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Replace the gradient by its sum over the processes of `group`, or all; a collective call."""
        if self.reduced == gradient.dtype or dist.get_world_size(group) == 1:
            dist.all_reduce(gradient, group=group)
        else:
            rounded = gradient.to(self.reduced)
            dist.all_reduce(rounded, group=group)
            gradient.copy_(rounded)

    def step(self, finished: int = 0) -> StepResult:
        """Clip the gradient and take an optimizer step, or drop the gradient if it is not finite.

        `finished`: trainer steps before this one, which select the denoiser with `actor.alternate`.
        """
        if self.config.alternate:
            self._freeze(finished)
        lr = self.schedule.get_last_lr()[0]
        norm = clip_gradients(self.parameters, self.config.max_grad_norm, self.group)
        rms = norm / math.sqrt(sum(p.numel() for p in self.parameters))
        finite, largest = norm == norm and norm != float("inf"), None
        if finite and norm > 0 and not self.looked:
            self.looked = True
            self._name_idle()
        elif norm == 0 and not self.policy.whole and not any(p.any() for p in self.parameters):
            raise TrainingError(
                "the gradient of the LoRA is 0 everywhere, since all of its weights are, and it stays so: remove "
                "model.lora, or give a file whose weights are not 0"
            )
        elif norm == 0 and not self.looked and (frozen := self.policy.frozen):
            self.say(
                f"an update had no gradient: its steps are those of {' and '.join(frozen)}, which is not trained, or "
                "its images had equal rewards; extend sampling.window_range to steps of a trained denoiser"
            )
        if finite:
            self.optimizer.step()
            self.policy.ema.update()
            self.policy.version += 1
            self.policy.old_is_current = False
            if not self.policy.whole:  # weights of the base model may have any size
                with torch.no_grad():
                    largest = float(torch.nn.utils.get_total_norm(self.parameters, float("inf")))
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(norm, lr, finite, largest, rms)

    def _freeze(self, finished: int) -> None:
        """Drop the gradients of all denoisers but the one that is trained after `finished` trainer steps."""
        names = list(dict.fromkeys(name.partition(".")[0] for name in self.policy.trained))
        chosen = names[finished // self.config.alternate % len(names)]
        for name, p in self.policy.trained.items():
            if name.partition(".")[0] != chosen:
                p.grad = None  # no moment, decay or weight of it changes

    def _name_idle(self) -> None:
        """Report LoRA layers without gradient, judged by B, since A has no gradient either while B is zero."""
        second = {name: p for name, p in self.policy.trained.items() if ".lora_B." in name}
        if idle := [name for name, p in second.items() if not local(gradient_of(p)).any()]:
            layers = [name.split(".lora_B.")[0] for name in idle]
            self.say(
                f"{len(idle)} of the {len(second)} layers of the LoRA got no gradient in the first update: the "
                "pipeline does not call them in the trained steps, or does not use their output: "
                f"{', '.join(layers[:4])}" + (" and others" if len(layers) > 4 else "")
            )

    def finish_step(self, step: int, resets: bool = False) -> None:
        """End trainer step `step` by updating the averaged policies; `resets`: also move the reference."""
        policy = self.policy
        if resets:
            policy.move_reference()
        if policy.old is not None and self.algorithm.renews_old(step):
            policy.old_is_current |= policy.old.next_decay == 0
            policy.old.update()
        if policy.sampler is not None:
            policy.sampler.update()
        if policy.earlier:
            policy.remember()

    @property
    def kind(self) -> str:
        """Prefix of the names of the trained tensors in a checkpoint."""
        return "weights" if self.policy.whole else "lora"

    def state(self) -> tuple[dict[str, torch.Tensor], WorkerState]:
        """Return the exact state as tensors and counters, for `load_state`."""
        tensors = {f"{self.kind}/{name}": p.detach() for name, p in self.policy.trained.items()}
        averages = self.policy.averages()
        for kind, average in averages.items():
            tensors |= {f"{kind}/{name}": value for name, value in average.average.items()}
        tensors |= {f"{OPTIMIZER}{key}": value for key, value in state_of(self.optimizer, self.policy.trained).items()}
        return tensors, WorkerState(
            self.policy.version,
            {kind: average.updates for kind, average in averages.items()},
            self.policy.old_is_current,
            ScheduleState(self.schedule.last_epoch),
        )

    @torch.no_grad()
    def load_state(self, tensors: dict[str, torch.Tensor], numbers: WorkerState) -> None:
        """Restore the result of `state`, not the configured rates; raises as `check_state` before any change."""
        self.check_state(tensors, numbers)
        for name, p in self.policy.trained.items():
            p.copy_(tensors[f"lora/{name}"])
        restore(self.optimizer, self.policy.trained, _of_optimizer(tensors))
        for kind, average in self.policy.averages().items():
            average.load({name: tensors[f"{kind}/{name}"] for name in self.policy.trained}, numbers.averages[kind])
        self.load_numbers(numbers)

    def load_numbers(self, numbers: WorkerState) -> None:
        """Restore the counters of a state."""
        for kind, average in self.policy.averages().items():
            average.updates = numbers.averages[kind]
        self.policy.old_is_current = numbers.old_is_current
        self.policy.version = numbers.policy_version
        taken, schedule = numbers.lr_schedule.last_epoch, self.schedule
        rates = [base * rule(taken) for base, rule in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
        # the learning-rate rules are functions set by the constructor: None keeps them
        position = {"last_epoch": taken, "_step_count": taken + 1, "_last_lr": rates, "lr_lambdas": [None]}
        schedule.load_state_dict(schedule.state_dict() | position)
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr

    def check_state(self, tensors: dict[str, torch.Tensor], numbers: WorkerState) -> None:
        """Raise `CheckpointError` unless a saved state fits the trained parameters, averages and optimizer."""
        averages, file = self.policy.averages(), "state" if self.policy.whole else "state.safetensors"
        if set(numbers.averages) != set(averages):
            stored, trained_names = (", ".join(sorted(names)) or "none" for names in (numbers.averages, averages))
            raise CheckpointError(f"state.json has averages {stored} and the run has {trained_names}")
        if numbers.policy_version < 0 or numbers.lr_schedule.last_epoch < 0 or min(numbers.averages.values()) < 0:
            raise CheckpointError("state.json has a negative count of updates")
        lora: dict[str, torch.Tensor] = dict(self.policy.trained)
        expected = {f"{kind}/{name}": p for kind in (self.kind, *averages) for name, p in lora.items()}
        moments = expected_state(self.config, lora, _of_optimizer(tensors))
        expected |= {f"{OPTIMIZER}{key}": like for key, like in moments.items()}
        for name, like in expected.items():
            if name not in tensors:
                raise CheckpointError(f"{file} has no tensor {name}")
            tensor = tensors[name]
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                raise CheckpointError(
                    f"{file}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {like.dtype} {list(like.shape)}"
                )
        if extra := [name for name in tensors if name not in expected]:
            raise CheckpointError(f"{file} has an unexpected tensor {extra[0]}")


def _of_optimizer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.removeprefix(OPTIMIZER): value for key, value in tensors.items() if key.startswith(OPTIMIZER)}


# --- Snapshots: copies of the state after the last finished step


class Snapshots:
    """Copy of an actor's state after the last finished step, made while the next one is sampled."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.step: int | None = None  # the step after which the copy was made
        self._copy: Future[tuple[Tensors, WorkerState]] | None = None
        self._executor = ThreadPoolExecutor(1, "snapshot")

    def begin(self, step: int) -> None:
        """Start to copy the state after `step`; weights must not be trained or loaded before `take` returns."""
        if self.step == step:
            return
        into = {} if self._copy is None else self._copy.result()[0]
        self._copy = self.step = None
        tensors, numbers = self.actor.state()
        # immediately, since sampling with other weights temporarily replaces the trained ones
        trained = {name: t for name, t in tensors.items() if name.startswith(f"{self.actor.kind}/")}
        first, device = copied(trained, into), next(iter(trained.values())).device
        beside: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if device.type != "cpu":
            accelerator = torch.get_device_module(device)
            stream = accelerator.Stream(device)
            stream.wait_stream(accelerator.current_stream(device))
            beside = accelerator.stream(stream)

        def rest() -> tuple[Tensors, WorkerState]:
            with beside:
                both = first | copied({name: t for name, t in tensors.items() if name not in first}, into)
            return {name: both[name] for name in tensors}, numbers

        self._copy, self.step = self._executor.submit(rest), step

    def take(self, step: int) -> tuple[Tensors, WorkerState]:
        """Return the state after `step`, the last finished one, copying it now if `begin` was not called."""
        self.begin(step)
        assert self._copy is not None
        return self._copy.result()


class PartSnapshots:
    """Copy of this rank's shards, made just before a step changes them: earlier it would take memory of sampling."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.step: int | None = None
        self._copy: tuple[dict[str, Part], WorkerState] | None = None

    def begin(self, step: int) -> None:
        pass

    def take(self, step: int) -> tuple[dict[str, Part], WorkerState]:
        """Return the shards after `step`, the last finished one."""
        if self._copy is None or self.step != step:
            parts, numbers = parts_of(self.actor)
            self._copy, self.step = ({name: part.copy() for name, part in parts.items()}, numbers), step
        return self._copy


def snapshots_of(actor: Actor) -> Snapshots | PartSnapshots:
    """Return the kind of snapshots for a LoRA or for full fine-tuning."""
    return PartSnapshots(actor) if actor.policy.whole else Snapshots(actor)


def parts_of(actor: Actor) -> tuple[dict[str, Part], WorkerState]:
    """Return this rank's parts of the exact state, and its counters."""
    tensors, numbers = actor.state()
    return {name: part_of(tensor) for name, tensor in tensors.items()}, numbers


@torch.no_grad()
def copied(tensors: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> Tensors:
    """Copy `tensors` to main memory, reusing the copies `into` if shape and dtype match."""
    copies = {}
    for name, tensor in tensors.items():
        place = into.get(name)
        alike = place is not None and (place.shape, place.dtype) == (tensor.shape, tensor.dtype)
        copies[name] = place.copy_(tensor) if place is not None and alike else tensor.detach().to("cpu", copy=True)
    return copies
