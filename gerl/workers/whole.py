"""Checkpoints of runs that train weights themselves: each process writes its parts, and any number of others read them.

The folder `state` has the trained weights, their averages and the optimizer's moments. Beside it are the averaged
denoisers as diffusers has them, whole, made of these parts without asking another process.
"""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from huggingface_hub import save_torch_state_dict
from torch.distributed.tensor import DTensor

from gerl.model.policy import Policy
from gerl.model.shards import Part, Shards, part_of, write_parts
from gerl.model.whole import class_of, kept_in_fp32
from gerl.run.state import FROZEN, STATE, WorkerState
from gerl.workers.actor import OPTIMIZER, Actor
from gerl.workers.optimizers import ADAMW

PATTERN = "diffusion_pytorch_model{suffix}.safetensors"  # diffusers' name for the files of a model


def parts_of(actor: Actor) -> tuple[dict[str, Part], WorkerState]:
    """The parts of the exact state that are here, and its numbers."""
    tensors, numbers = actor.state()
    return {name: part_of(tensor) for name, tensor in tensors.items()}, numbers


def frozen_parts(policy: Policy) -> dict[str, Part]:
    """The parts that are here of weights that are divided and not trained."""
    return {
        f"{name}.{key}": part_of(value)
        for name, denoiser in policy.denoisers.items()
        for key, value in denoiser.state_dict().items()
        if isinstance(value, DTensor) and f"{name}.{key}" not in policy.trained
    }


class Writing:
    """A checkpoint that this process writes beside the training, which changes nothing of what it has here.

    `parts`: what is here of the state, as copies.
    """

    def __init__(self, policy: Policy, parts: dict[str, Part]) -> None:
        self._parts, self._frozen = parts, frozen_parts(policy)
        # in the thread of the training: while a call of the model goes on, divided weights must not be looked at
        self._denoisers = {name: _Stored.of(name, denoiser, policy) for name, denoiser in policy.denoisers.items()}
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None]

    def start_state(self, folder: Path, number: int) -> None:
        """Begin to write what is here of the checkpoint into its `folder`, as process `number` of those that do."""
        self._writing = self._executor.submit(self.write_state, folder, number)

    def start_denoisers(self, folder: Path) -> None:
        """Begin to write the averaged denoisers into `folder`, where all processes have written their state."""
        self._writing = self._executor.submit(self.write_denoisers, folder)

    def written(self) -> bool:
        """Whether what was begun is written; raises what it raised."""
        return self._writing.done() and self._writing.result() is None

    def write_state(self, folder: Path, number: int) -> None:
        """Write what is here of the checkpoint."""
        # what is not divided is the same everywhere: the first process writes it
        own = {name: part for name, part in self._parts.items() if number == 0 or any(part.offset)}
        write_parts(folder / STATE, number, own)
        if self._frozen:
            write_parts(folder / FROZEN, number, self._frozen)

    def write_denoisers(self, folder: Path) -> None:
        """Write the averaged denoisers."""
        state = Shards(folder / STATE)
        frozen = Shards(folder / FROZEN) if (folder / FROZEN).is_dir() else None
        for name, stored in self._denoisers.items():
            stored.write(folder / name, state, frozen)


@dataclass(frozen=True)
class _Stored:
    """A denoiser as it is stored: where each of its tensors is, and in which precision."""

    config: dict[str, Any]
    places: dict[str, tuple[str, torch.Tensor | None]]  # by key: the name among the parts, or the tensor itself
    trained: frozenset[str]  # names among the parts
    dtype: torch.dtype
    in_fp32: frozenset[str]  # keys

    @classmethod
    def of(cls, name: str, denoiser: ModelMixin, policy: Policy) -> "_Stored":
        kept = {id(p) for module in kept_in_fp32(denoiser) for p in module.parameters()}
        found = {}
        for key, value in denoiser.state_dict().items():
            full = f"{name}.{key}"
            divided = full in policy.trained or isinstance(value, DTensor)
            found[key] = (full, None if divided else value.detach())
        return cls(
            json.loads(denoiser.to_json_string()) | {"_class_name": class_of(denoiser).__name__},
            found,
            frozenset(policy.trained),
            denoiser.dtype,
            frozenset(key for key, p in denoiser.named_parameters() if id(p) in kept),
        )

    def write(self, folder: Path, state: Shards, frozen: Shards | None) -> None:
        def value(full: str, own: torch.Tensor | None) -> torch.Tensor:
            if own is not None:
                return own.cpu()
            if full in self.trained:
                return state.whole(f"ema/{full}")
            assert frozen is not None
            return frozen.whole(full)

        stored = {}
        for key, (full, own) in self.places.items():
            tensor = value(full, own)
            half = tensor.is_floating_point() and key not in self.in_fp32
            stored[key] = (tensor.to(self.dtype) if half else tensor).contiguous()
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config, indent=2, sort_keys=True) + "\n")
        save_torch_state_dict(stored, folder, filename_pattern=PATTERN, max_shard_size="10GB")


@torch.no_grad()
def load_state(actor: Actor, folder: Path, numbers: WorkerState) -> None:
    """Continue from the checkpoint in `folder`, whoever wrote it.

    Raises `CheckpointError`, before anything is changed, unless it is exactly that of these weights and averages.
    """
    shards = Shards(folder / STATE)
    counter = f"{OPTIMIZER}step/"
    known = {name: t.view(()) if name.startswith(counter) else t for name, t in shards.shapes().items()}
    actor.check_state(known, numbers)
    for name, p in actor.policy.trained.items():
        if f"{counter}{name}" in known:
            moments = {key: torch.zeros_like(p, requires_grad=False) for key in ADAMW if key != "step"}
            actor.optimizer.state[p] = {"step": torch.zeros(()), **moments}
    shards.read_into(parts_of(actor)[0])
    actor.load_numbers(numbers)
