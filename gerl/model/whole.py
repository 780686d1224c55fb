"""Training weights of the denoisers themselves: which they are, and how their fp32 values become those computed with.

The trained weights are fp32 in any precision of the model. Where that is half, or where several ranks have a part each,
FSDP2 (`torch.distributed.fsdp.fully_shard`) makes of the fp32 parts the whole weights of a block while it computes.
"""

import re
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gerl.errors import ModelError
from gerl.model.sharding import blocks_to_gather

Modules = Mapping[str, torch.nn.Module]


def chosen(train: str, denoisers: Modules) -> list[str]:
    """The names `denoiser.parameter` of the weights that `model.train` asks for; skeletons will do.

    Raises `ModelError` if there are none.
    """
    names = [
        f"{name}.{key}"
        for name, denoiser in denoisers.items()
        for key, p in denoiser.named_parameters()
        if p.is_floating_point()
    ]
    found = [name for name in names if train == "full" or re.search(train, name)]
    if not found:
        raise ModelError(
            f"model.train={train!r} matches none of the {len(names)} weights of {' and '.join(denoisers)}, whose "
            f"names look like {', '.join(names[:3])}: use lora, full, or a regular expression that does"
        )
    return found


def parameters_of(denoisers: Modules, names: Iterable[str]) -> dict[str, torch.nn.Parameter]:
    """The parameters of these names `denoiser.parameter`."""
    parts = {name: name.partition(".") for name in names}
    return {name: denoisers[denoiser].get_parameter(key) for name, (denoiser, _, key) in parts.items()}


def alone(device: str) -> DeviceMesh:
    """This process by itself, as the ranks among which weights are divided."""
    kind = device.partition(":")[0]
    if not dist.is_initialized():
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return DeviceMesh.from_group(group, kind)


def divide(denoisers: Modules, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Divide the fp32 weights of `denoisers` among the ranks of `mesh`; blocks compute with them in `dtype`.

    A rank's gradients are its part of the sum over the ranks, in fp32. Layers that a model's class keeps in fp32
    compute in that. Raises `ModelError` for a denoiser without repeated blocks.
    """
    half = dtype != torch.float32
    plain = MixedPrecisionPolicy(cast_forward_inputs=False)
    mixed = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False) if half else plain
    for name, denoiser in denoisers.items():
        blocks = blocks_to_gather(denoiser, f"model.train: {name}", "model.dtype=float32 and model.shard=none")
        kept = kept_in_fp32(denoiser) if half else []
        for module in (*kept, *blocks, denoiser):
            fully_shard(module, mesh=mesh, mp_policy=plain if module in kept else mixed, reshard_after_forward=True)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)  # the loss is divided by the number of all samples already
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
        denoiser.to(mesh.device_type)  # what is left: buffers
        if half:
            _halve_buffers(denoiser, dtype)
            _say_dtype(denoiser, dtype)


def kept_in_fp32(denoiser: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of `denoiser` that diffusers loads in fp32 whatever precision it is asked for, outermost ones."""
    names = set(getattr(denoiser, "_keep_in_fp32_modules", None) or ())
    found: list[torch.nn.Module] = []
    inside: set[int] = set()
    for name, module in denoiser.named_modules():
        if names & {name.rpartition(".")[2]} and id(module) not in inside and any(True for _ in module.parameters()):
            found.append(module)
            inside |= {id(part) for part in module.modules()}
    return found


def _halve_buffers(denoiser: torch.nn.Module, dtype: torch.dtype) -> None:
    """Let the buffers that are saved with the weights be as diffusers loads them for `dtype`."""
    kept = {id(b) for module in kept_in_fp32(denoiser) for b in module.buffers()}
    saved = denoiser.state_dict().keys()
    for name, buffer in denoiser.named_buffers():
        if name in saved and buffer.is_floating_point() and id(buffer) not in kept:
            buffer.data = buffer.data.to(dtype)


def class_of(denoiser: torch.nn.Module) -> type[torch.nn.Module]:
    """Its class, without what dividing its weights has made of that."""
    classes = (cls for cls in type(denoiser).__mro__ if issubclass(cls, torch.nn.Module))
    return next(cls for cls in classes if not issubclass(cls, FSDPModule))


def _say_dtype(denoiser: torch.nn.Module, dtype: torch.dtype) -> None:
    """Let `denoiser.dtype`, by which pipelines make its inputs, be what it computes in, not that of its parameters."""
    kind = type(denoiser)
    denoiser.__class__ = type(kind.__name__, (kind,), {"dtype": property(lambda self: dtype)})
