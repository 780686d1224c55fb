"""The state of a worker as files of a checkpoint, and as weights to send to samplers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import ModelMixin
from huggingface_hub import save_torch_state_dict
from torch.distributed.tensor import DTensor

from gerl.model.paths import WEIGHTS
from gerl.model.policy import Policy, class_of, kept_in_fp32, local
from gerl.model.shards import Part, Shards, part_of, write_parts
from gerl.run.checkpoint import FROZEN, PARTS, WorkerFiles, WorkerState
from gerl.utils.tensors import PackedFiles, pack_tensors, unpack_tensors
from gerl.workers.actor import ADAMW, OPTIMIZER, Actor, Snapshots, parts_of

PATTERN = "diffusion_pytorch_model{suffix}.safetensors"  # diffusers' name for a model's files
TRAINED = "trained"
COUNTER = f"{OPTIMIZER}step/"  # prefix of the optimizer's numbers of steps


# --- Checkpoints


def checkpoint_files(snapshots: Snapshots, policy: Policy, step: int) -> WorkerFiles:
    """Return the files of a LoRA's checkpoint after `step`, and its counters."""
    tensors, numbers = snapshots.take(step)  # without a snapshot nothing has changed since
    average = {name: tensors[f"ema/{name}"] for name in policy.trained}
    lora = policy.lora_file(average)
    return PackedFiles({"state.safetensors": pack_tensors(tensors), f"lora/{WEIGHTS}": lora}), numbers


def load_state(actor: Actor, source: bytes | Path, numbers: WorkerState) -> None:
    """Resume from `state.safetensors` or a checkpoint's folder; raises `CheckpointError`, unchanged, unless it fits."""
    if isinstance(source, Path):
        _load_parts(actor, source, numbers)
    else:
        actor.load_state(unpack_tensors(source), numbers)


def load_tensors(actor: Actor, tensors: Mapping[str, torch.Tensor], numbers: WorkerState) -> None:
    """Continue from the complete tensors of a state; raises `CheckpointError` unless they fit."""
    actor.optimizer.state.clear()
    if actor.policy.whole:
        actor.check_state(dict(tensors), numbers)
        _make_moments(actor, tensors)
        for name, part in parts_of(actor)[0].items():
            part.values.copy_(tensors[name].view_as(part.values))  # of one rank: the whole
        actor.load_numbers(numbers)
    else:
        actor.load_state(dict(tensors), numbers)


@torch.no_grad()
def _load_parts(actor: Actor, folder: Path, numbers: WorkerState) -> None:
    shards = Shards(folder / PARTS)
    shapes = {name: t.view(()) if name.startswith(COUNTER) else t for name, t in shards.shapes().items()}
    actor.check_state(shapes, numbers)
    _make_moments(actor, shapes)
    shards.read_into(parts_of(actor)[0])
    for gathered in actor.policy.gathered:
        gathered.drop()
    actor.load_numbers(numbers)


def _make_moments(actor: Actor, shapes: Mapping[str, torch.Tensor]) -> None:
    """Create the optimizer's state of the parameters that have one in `shapes`."""
    for name, p in actor.policy.trained.items():
        if f"{COUNTER}{name}" in shapes:
            moments = {key: torch.zeros_like(p, requires_grad=False) for key in ADAMW if key != "step"}
            actor.optimizer.state[p] = {"step": torch.zeros(()), **moments}


def frozen_parts(policy: Policy) -> dict[str, Part]:
    """Return this rank's shards of the weights that are sharded but not trained."""
    return {
        f"{name}.{key}": part_of(value)
        for name, denoiser in policy.denoisers.items()
        for key, value in denoiser.state_dict().items()
        if isinstance(value, DTensor) and f"{name}.{key}" not in policy.trained
    }


class Writing:
    """Checkpoint that this process writes while training continues; `parts`: copies of its shards of the state."""

    def __init__(self, policy: Policy, parts: dict[str, Part]) -> None:
        self._parts, self._frozen = parts, frozen_parts(policy)
        # in the training thread, since sharded weights must not be read during a model call
        self._denoisers = {name: _Stored.of(name, denoiser, policy) for name, denoiser in policy.denoisers.items()}
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None]

    def start(self, write: Callable[..., None], *arguments: object) -> None:
        """Start one of the two methods below in a thread."""
        self._writing = self._executor.submit(write, *arguments)

    def written(self) -> bool:
        """Whether the current write has ended. Raises its error."""
        return self._writing.done() and self._writing.result() is None

    def write_state(self, folder: Path, number: int) -> None:
        """Write this process's shards of the checkpoint into its `folder`, as writer `number`."""
        # unsharded tensors are the same on all ranks: the first process writes them
        parts = {name: part for name, part in self._parts.items() if number == 0 or any(part.offset)}
        write_parts(folder / PARTS, number, parts)
        if self._frozen:
            write_parts(folder / FROZEN, number, self._frozen)

    def write_denoisers(self, folder: Path) -> None:
        """Write the averaged denoisers into `folder`, after all processes have written their shards."""
        state = Shards(folder / PARTS)
        frozen = Shards(folder / FROZEN) if (folder / FROZEN).is_dir() else None
        for name, stored in self._denoisers.items():
            stored.write(folder / name, state, frozen)


@dataclass(frozen=True)
class _Stored:
    """Denoiser in a checkpoint: source and precision of each of its tensors."""

    config: dict[str, Any]
    places: dict[str, tuple[str, torch.Tensor | None]]  # by key: name among the shards; tensor if unsharded
    trained: frozenset[str]  # names among the shards
    dtype: torch.dtype
    in_fp32: frozenset[str]  # keys

    @classmethod
    def of(cls, name: str, denoiser: ModelMixin, policy: Policy) -> _Stored:
        in_fp32 = {id(p) for module in kept_in_fp32(denoiser) for p in module.parameters()}
        tensors = {}
        for key, value in denoiser.state_dict().items():
            full = f"{name}.{key}"
            divided = full in policy.trained or isinstance(value, DTensor)
            tensors[key] = (full, None if divided else value.detach())
        return cls(
            json.loads(denoiser.to_json_string()) | {"_class_name": class_of(denoiser).__name__},
            tensors,
            frozenset(policy.trained),
            denoiser.dtype,
            frozenset(key for key, p in denoiser.named_parameters() if id(p) in in_fp32),
        )

    def write(self, folder: Path, state: Shards, frozen: Shards | None) -> None:
        stored = {}
        for key, (full, part) in self.places.items():
            if part is not None:
                tensor = part.cpu()
            elif full in self.trained:
                tensor = state.whole(f"ema/{full}")
            else:
                assert frozen is not None
                tensor = frozen.whole(full)
            half = tensor.is_floating_point() and key not in self.in_fp32
            stored[key] = (tensor.to(self.dtype) if half else tensor).contiguous()
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config, indent=2, sort_keys=True) + "\n")
        save_torch_state_dict(stored, folder, filename_pattern=PATTERN, max_shard_size="10GB")


# --- Weights for samplers


@dataclass(frozen=True)
class Weights:
    """Weights for rollouts: the trained ones and their averages, each as one fp32 vector; of one rank if sharded."""

    flat: dict[str, np.ndarray]  # by name of the average
    version: int
    updates: dict[str, int]  # of each average, their number
    old_is_current: bool


def weights_of(policy: Policy, earlier: bool) -> Weights:
    """Copy the rollout weights of `policy`; `earlier`: including those of earlier steps."""
    averages = {name: a for name, a in policy.averages().items() if earlier or not name.startswith("earlier")}
    averages.pop("reference", None)  # not used in rollouts
    flat = {name: _flat(average.average.values()) for name, average in averages.items()}
    updates = {name: average.updates for name, average in averages.items()}
    return Weights(flat | {TRAINED: _flat(policy.trained.values())}, policy.version, updates, policy.old_is_current)


@torch.no_grad()
def take_weights(policy: Policy, weights: Weights) -> None:
    """Load `weights` of another policy into `policy`, for rollouts."""
    averages = policy.averages()
    for name, updates in weights.updates.items():
        _fill(averages[name].average.values(), weights.flat[name])
        averages[name].updates = updates
    _fill(policy.trained.values(), weights.flat[TRAINED])
    policy.version, policy.old_is_current = weights.version, weights.old_is_current


def _flat(tensors: Iterable[torch.Tensor]) -> np.ndarray:
    return torch.cat([local(tensor.detach()).flatten() for tensor in tensors]).to("cpu", copy=True).numpy()


def _fill(tensors: Iterable[torch.Tensor], flat: np.ndarray) -> None:
    """Copy `flat` into `tensors`, which have the same total size."""
    places = [local(tensor) for tensor in tensors]
    values = torch.from_numpy(flat.copy())  # the memory of Ray's store is read-only
    for place, part in zip(places, values.split([place.numel() for place in places]), strict=True):
        place.copy_(part.view_as(place))
