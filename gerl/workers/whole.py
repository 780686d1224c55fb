"""Checkpoints of runs that train weights themselves: each process writes its parts, and any number of others read them.

The folder `state` has the trained weights, their averages and the optimizer's moments. Beside it are the averaged
denoisers as diffusers has them, whole, made of these parts without asking another process.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch.distributed.tensor import DTensor

from gerl.model.policy import Policy
from gerl.model.shards import Part, Shards, part_of, write_parts
from gerl.model.whole import class_of, kept_in_fp32
from gerl.run.state import WorkerState
from gerl.workers.actor import OPTIMIZER, Actor
from gerl.workers.optimizers import ADAMW

STATE = "state"  # the folder with the parts
FROZEN = ".frozen"  # a folder with parts of weights that are not trained, until the denoisers are written
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


def write_state(policy: Policy, parts: dict[str, Part], folder: Path, number: int) -> None:
    """Write what is here of a checkpoint into its `folder`."""
    # what is not divided is the same everywhere: the first process writes it
    write_parts(folder / STATE, number, {k: part for k, part in parts.items() if number == 0 or any(part.offset)})
    if frozen := frozen_parts(policy):
        write_parts(folder / FROZEN, number, frozen)


def write_denoisers(policy: Policy, folder: Path) -> None:
    """Write the averaged denoisers into `folder`, where all processes have written their state."""
    state = Shards(folder / STATE)
    frozen = Shards(folder / FROZEN) if (folder / FROZEN).is_dir() else None
    for name, denoiser in policy.denoisers.items():
        dtype: torch.dtype = denoiser.dtype
        kept = {id(p) for module in kept_in_fp32(denoiser) for p in module.parameters()}
        in_fp32 = {key for key, p in denoiser.named_parameters() if id(p) in kept}

        def values(name: str = name, denoiser: torch.nn.Module = denoiser) -> Iterator[tuple[str, torch.Tensor]]:
            for key, own in denoiser.state_dict().items():
                full = f"{name}.{key}"
                if full in policy.trained:
                    yield key, state.whole(f"ema/{full}")
                elif isinstance(own, DTensor):
                    assert frozen is not None
                    yield key, frozen.whole(full)
                else:
                    yield key, own.detach().cpu()

        stored = {
            key: value.to(dtype) if value.is_floating_point() and key not in in_fp32 else value
            for key, value in values()
        }
        place = folder / name
        place.mkdir()
        config = json.loads(denoiser.to_json_string()) | {"_class_name": class_of(denoiser).__name__}
        (place / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        save_torch_state_dict(
            {key: value.contiguous() for key, value in stored.items()},
            place,
            filename_pattern=PATTERN,
            max_shard_size="10GB",
        )


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
