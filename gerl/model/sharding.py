"""Frozen weights in parts: each rank of a worker holds one, and gathers a block's others while the block computes.

FSDP2 (`torch.distributed.fsdp.fully_shard`) on the repeated blocks and the rest of a model. The LoRA is left out: it
stays whole on every rank, so that optimizer, averages, all-reduce, checkpoints and export are as without.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Literal

import torch
from diffusers import DiffusionPipeline
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import register_parametrization
from transformers import PreTrainedModel

from gerl.errors import ModelError
from gerl.model.stored import Unread, fill


def sharded_components(
    pipe: DiffusionPipeline, denoisers: Mapping[str, torch.nn.Module], which: Literal["none", "denoiser", "all"]
) -> dict[str, torch.nn.Module]:
    """The components of `pipe` whose weights are divided, by name: the denoisers, with "all" text encoders as well."""
    if which == "none":
        return {}
    encoders = {name: part for name, part in pipe.components.items() if isinstance(part, PreTrainedModel)}
    return {**denoisers, **(encoders if which == "all" else {})}


def shard(
    components: Mapping[str, torch.nn.Module],
    whole: set[torch.nn.Parameter],
    mesh: DeviceMesh,
    unread: Unread | None = None,
    on_cpu: bool = False,
) -> None:
    """Divide the weights of `components` among the ranks of `mesh`, but for the parameters `whole`.

    They come to the device of the mesh block by block, and so do those `unread`, which are still in their files;
    `on_cpu`: the parts stay on the CPU until their block computes. Raises `ModelError` for a component without repeated
    blocks.
    """
    files = {} if unread is None else unread
    parts = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if on_cpu else OffloadPolicy()
    for name, component in components.items():
        blocks = blocks_to_gather(component, f"model.shard: {name}", "model.shard=none")
        # pipelines call text encoders in many ways, past their own `forward`: what they call in the end are layers
        rest = layers(component, blocks) if isinstance(component, PreTrainedModel) else [component]
        _unwrap_quantised(component)
        for module in (*blocks, *rest):
            fill(module, files)
            fully_shard(module, mesh=mesh, ignored_params=whole, reshard_after_forward=True, offload_policy=parts)
        fill(component, files)
        for tensor in (*component.parameters(), *component.buffers()):
            if not isinstance(tensor, DTensor):  # what is left: buffers, and weights that layers share
                tensor.data = tensor.data.to(mesh.device_type)


def _unwrap_quantised(model: torch.nn.Module) -> None:
    """Let the quantised weights of torchao be codes and scales, which can be divided, and one tensor in their layer."""
    wrapped = [m for m in model.modules() if type(m._parameters.get("weight")).__module__.startswith("torchao")]
    if wrapped:
        from torchao.utils import UnwrapTensorSubclass  # an optional package
    for module in wrapped:
        register_parametrization(module, "weight", UnwrapTensorSubclass())


def blocks_to_gather(model: torch.nn.Module, what: str, remedy: str) -> list[torch.nn.Module]:
    """The `repeated_blocks` of `model`; raises `ModelError`, in which `what` and `remedy` are named, if it has none."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise ModelError(
            f"{what} ({type(model).__name__}) has no repeated blocks whose weights could be gathered one after the "
            f"other: use {remedy}"
        )
    return blocks


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The entries of the outermost lists of modules in `model` that have weights, in order."""
    found: list[torch.nn.Module] = []
    lists: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists.append(name)
            found += [entry for entry in module if next(entry.parameters(), None) is not None]
    return found


def layers(model: torch.nn.Module, blocks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The linear and embedding layers of `model` outside of `blocks` whose weight no other layer has."""
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return [
        module
        for module in outside
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding) and uses[id(module.weight)] == 1
    ]
