"""The policy: a pipeline, its trained weights, their averages, and variants of them."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline, ModelMixin
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from gerl.errors import ModelError
from gerl.model.components import weights_checked
from gerl.model.latents import ImageLatents
from gerl.model.lora import ADAPTER, activate, adapted_layers, adapter_active, lora_disabled
from gerl.model.lora_files import check_components, inject, lora_file, read_lora
from gerl.model.placement import QuantizedRollout
from gerl.model.sharding import blocks_to_gather
from gerl.model.teachers import FAKE, TeacherModel
from gerl.utils.files import first_line, reason


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `tensor`, sharing its memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- Exponential moving averages of the trained weights: for validation, and as old policies


class EMA:
    """Exponential moving average `e <- d e + (1 - d) p`, where `d` depends on the number `n` of updates so far.

    `decay`: a number, `d = min((1 + n) / (10 + n), decay)`, or a function `n -> d`. With 0 it equals the weights.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], decay: float | Callable[[int], float]) -> None:
        self.parameters = parameters
        self.decay = decay
        self.updates = 0
        self.on_device = True  # False: in main memory
        # clones: `detach().cpu()` would alias the weights on a CPU, and a swap would destroy them
        self.average = {name: p.detach().clone() for name, p in parameters.items()}

    @classmethod
    def in_main_memory(cls, parameters: Mapping[str, torch.nn.Parameter]) -> "EMA":
        """Return a copy of this rank's weights that is never updated, in main memory."""
        fixed = cls({}, 1.0)
        fixed.parameters, fixed.on_device = parameters, False
        fixed.average = {name: local(p.detach()).to("cpu", copy=True) for name, p in parameters.items()}
        return fixed

    @property
    def next_decay(self) -> float:
        """Decay of the next update."""
        if callable(self.decay):
            return self.decay(self.updates)
        return min((1 + self.updates) / (10 + self.updates), self.decay)

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights."""
        d = self.next_decay
        for name, p in self.parameters.items():
            local(self.average[name]).lerp_(local(p), 1 - d)
        self.updates += 1

    @contextlib.contextmanager
    def swapped_in(self, average: Mapping[str, torch.Tensor] | None = None) -> Iterator[None]:
        """Compute with the averaged weights, or the earlier `average`, within the block; then restore the trained."""
        copies = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._copy(self.average if average is None else average)
        try:
            yield
        finally:
            self._copy(copies)

    def load(self, average: Mapping[str, torch.Tensor], updates: int) -> None:
        """Restore a saved average with the same names."""
        for name, value in self.average.items():
            value.copy_(average[name])
        self.updates = updates

    @torch.no_grad()
    def _copy(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, p in self.parameters.items():
            local(p).copy_(local(values[name]))


# --- The policy: a pipeline, its trained weights, and copies of them at other times


@dataclass
class Policy:
    """Pipeline with its trained parameters, a LoRA on its denoisers or their weights, for rollout and actor.

    `trained`: fp32, named `denoiser.parameter`; full weights may be sharded, and then so are the averages. `ema`: for
    validation and export; `old`: an earlier policy that an algorithm compares with; `sampler`: for rollouts, if not the
    trained weights. `earlier[i]`: the rollout weights `i` finished steps ago, whose `version` is its number of updates.
    `quantized`: 8-bit copies of frozen weights for rollouts. `teachers`: in the order of `algorithm.teachers`.
    """

    pipe: DiffusionPipeline
    denoisers: dict[str, ModelMixin]
    trained: dict[str, torch.nn.Parameter]
    ema: EMA
    fingerprint: str = ""  # of the base weights
    version: int = 0  # optimizer steps taken
    old: EMA | None = None
    old_is_current: bool = True  # `old` equals the trained weights and need not run
    sampler: EMA | None = None
    whole: bool = False  # `trained` are the denoisers' weights, not a LoRA
    # weights of `base`: for full fine-tuning the initial ones if an algorithm needs them; later those of
    # `move_reference`
    reference: EMA | None = None
    reference_moves: bool = False
    earlier: list[EMA] = field(default_factory=list)
    quantized: QuantizedRollout | None = None
    teachers: list[TeacherModel] = field(default_factory=list)
    images: ImageLatents = field(default_factory=lambda: ImageLatents(0.0))
    gathered: list["Gathered"] = field(default_factory=list)  # of full fine-tuning, if they stay after a forward pass
    adapter: str = ADAPTER  # peft's name of the trained LoRA

    def averages(self) -> dict[str, EMA]:
        """Return all weights except the trained ones, by name."""
        named = {"ema": self.ema, "old": self.old, "sampler": self.sampler}
        named["reference"] = self.reference if self.reference_moves else None
        named |= {f"earlier_{i}": average for i, average in enumerate(self.earlier)}
        return {name: average for name, average in named.items() if average is not None}

    @torch.no_grad()
    def keep_average(self) -> None:
        """Copy the averaged values to the trained parameters, for use of the pipeline after the run."""
        for name, p in self.trained.items():
            p.copy_(self.ema.average[name])

    @torch.no_grad()
    def remember(self) -> None:
        """Insert the rollout weights into `earlier` at the end of a step, and drop the oldest."""
        newest = self.earlier.pop()
        newest.load(self.trained if self.sampler is None else self.sampler.average, self.version)
        self.earlier.insert(0, newest)

    @torch.no_grad()
    def move_reference(self) -> None:
        """Make the current trained weights the reference used by `base`."""
        assert self.reference is not None and self.reference_moves
        self.reference.load(self.trained, self.version)

    @contextlib.contextmanager
    def as_sampler(self, old: bool = False, lag: int = 0) -> Iterator[None]:
        """Compute with the rollout weights within the block: of `lag` finished steps ago, or of the `old` policy."""
        average = self.old if old else self.earlier[lag] if lag else self.sampler
        with contextlib.ExitStack() as stack:
            for weights in (average, self.quantized):
                if weights is not None:
                    stack.enter_context(weights.swapped_in())
            yield

    @property
    def frozen(self) -> list[str]:
        """Names of the denoisers that have no trained parameters."""
        return [name for name, d in self.denoisers.items() if not any(p.requires_grad for p in d.parameters())]

    def base(self) -> AbstractContextManager[None]:
        """Compute as the reference of `algorithm.kl_coef`: the base model, or the weights set by `move_reference`."""
        if self.whole or self.reference is not None:
            assert self.reference is not None, "an algorithm that uses it must declare Needs.base_model"
            return self.reference.swapped_in()
        return lora_disabled(self.denoisers.values())

    def first(self) -> AbstractContextManager[None]:
        """Compute as at the start of training within the block, even if the reference has moved."""
        return self.base() if self.whole else lora_disabled(self.denoisers.values())

    @contextlib.contextmanager
    def teacher(self, number: int) -> Iterator[DiffusionPipeline]:
        """Yield the pipeline of a teacher, with the teacher's weights within the block."""
        model = self.teachers[number]
        if model.pipe is not None:
            yield model.pipe
        elif model.adapter is not None:
            with adapter_active(self.denoisers.values(), model.adapter):
                yield self.pipe
        else:
            with self.first():
                yield self.pipe

    def fake(self) -> AbstractContextManager[None]:
        """Compute and train with the LoRA that imitates the policy's images within the block (`algorithm=dmdr`)."""
        return adapter_active(self.denoisers.values(), FAKE, trained=True)

    def lora_file(self, average: Mapping[str, torch.Tensor] | None = None) -> bytes:
        """Return the averaged LoRA as a diffusers safetensors file; `average`: an earlier copy to use instead."""
        with self.ema.swapped_in(average):
            return lora_file(self.denoisers, self.adapter)


# --- Full fine-tuning: selection of the trained denoiser weights, sharding and casting.
#
# The trained weights are fp32 in any precision of the model. In half precision, or with several ranks, FSDP2
# (`torch.distributed.fsdp.fully_shard`) gathers and casts the fp32 shards of a block while it computes.

Modules = Mapping[str, torch.nn.Module]


def chosen(train: str, denoisers: Modules) -> list[str]:
    """Return the names `denoiser.parameter` of the weights in `model.train`. Raises `ModelError` if there are none."""
    named = [(f"{name}.{key}", p) for name, model in denoisers.items() for key, p in model.named_parameters()]
    names = [name for name, p in named if p.is_floating_point()]
    matched = [name for name in names if train == "full" or re.search(train, name)]
    if not matched:
        raise ModelError(
            f"model.train={train!r} matches none of the {len(names)} weights of {' and '.join(denoisers)}, whose "
            f"names look like {', '.join(names[:3])}: use lora, full, or a regular expression that does"
        )
    return matched


def parameters_of(denoisers: Modules, names: Iterable[str]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters with these names `denoiser.parameter`."""
    parts = {name: name.partition(".") for name in names}
    return {name: denoisers[denoiser].get_parameter(key) for name, (denoiser, _, key) in parts.items()}


def alone(device: str) -> DeviceMesh:
    """Return a device mesh of this process only."""
    kind = device.partition(":")[0]
    if not dist.is_initialized():
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return DeviceMesh.from_group(group, kind)


def divide(
    denoisers: Modules,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    reduced: torch.dtype = torch.float32,
    reshard: bool = True,
) -> list["Gathered"]:
    """Shard the fp32 weights of `denoisers` among the ranks of `mesh`; blocks compute with them in `dtype`.

    A rank's gradients are its shard of the sum over the ranks, in fp32, summed in `reduced`; layers that a model class
    keeps in fp32 stay in fp32. `reshard`: gathered weights of a block are dropped after its forward pass, rather than
    after its backward pass; then those that stay are returned. Raises `ModelError` for a denoiser without repeated
    blocks.
    """
    half = dtype != torch.float32
    plain = MixedPrecisionPolicy(reduce_dtype=None if reduced == torch.float32 else reduced, cast_forward_inputs=False)
    mixed = MixedPrecisionPolicy(dtype, reduced, cast_forward_inputs=False) if half else plain
    for name, denoiser in denoisers.items():
        blocks = blocks_to_gather(denoiser, f"model.train: {name}", "model.dtype=float32 and model.shard=none")
        whole_modules = kept_in_fp32(denoiser) if half else []
        for module in (*whole_modules, *blocks, denoiser):
            fully_shard(
                module, mesh=mesh, mp_policy=plain if module in whole_modules else mixed, reshard_after_forward=reshard
            )
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)  # the loss is already divided by the number of all samples
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support a sum with a factor
        denoiser.to(mesh.device_type)  # moves the remaining tensors: buffers
        if half:
            kept_buffers = {id(b) for module in whole_modules for b in module.buffers()}
            saved = denoiser.state_dict().keys()
            for buffer_name, buffer in denoiser.named_buffers():  # diffusers loads saved buffers in `dtype`
                if buffer_name in saved and buffer.is_floating_point() and id(buffer) not in kept_buffers:
                    buffer.data = buffer.data.to(dtype)
            # pipelines create inputs in `denoiser.dtype`, which must be that of the computation, not of the parameters
            kind = type(denoiser)
            denoiser.__class__ = type(kind.__name__, (kind,), {"dtype": property(lambda self: dtype)})
    return [] if reshard else [Gathered(denoiser) for denoiser in denoisers.values()]


class Gathered:
    """Gathered weights of a denoiser that stay after a forward pass; dropped before their next use if they changed.

    All ranks change weights at the same time, so they also gather them at the same time. Call `drop` after a change
    through `DTensor.detach`, which torch does not count.
    """

    def __init__(self, denoiser: torch.nn.Module) -> None:
        self.parts = [module for module in denoiser.modules() if isinstance(module, FSDPModule)]
        self.weights = [p for p in denoiser.parameters() if isinstance(p, DTensor)]
        self.seen = self._changes()
        # called before the hooks of `fully_shard`, in the forward pass and in the backward pass
        denoiser.register_forward_pre_hook(lambda module, args: self.drop_if_changed(), prepend=True)
        denoiser.register_forward_hook(lambda module, args, output: self._watch(output), prepend=True)

    def _changes(self) -> int:
        """Return how often the weights were changed in place, as sharded tensors or as this rank's shards."""
        return sum(p._version + p._local_tensor._version for p in self.weights)

    def drop_if_changed(self) -> None:
        """Drop the gathered weights if the sharded ones have changed since the last call."""
        if self._changes() != self.seen:
            self.drop()

    def drop(self) -> None:
        """Drop the gathered weights."""
        self.seen = self._changes()
        for part in self.parts:
            part.set_reshard_after_forward(True, recurse=False)  # also if an error ended its last forward pass
            part.reshard()
            part.set_reshard_after_forward(False, recurse=False)

    def _watch(self, output: Any) -> None:
        """Call `drop_if_changed` before the backward pass of `output`, since another policy may have run meanwhile."""
        for tensor in tree_leaves(output):
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.drop_if_changed())


def kept_in_fp32(denoiser: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the outermost modules of `denoiser` that diffusers always loads in fp32."""
    names = set(getattr(denoiser, "_keep_in_fp32_modules", None) or ())
    modules: list[torch.nn.Module] = []
    inside: set[int] = set()
    for name, module in denoiser.named_modules():
        if names & {name.rpartition(".")[2]} and id(module) not in inside and any(True for _ in module.parameters()):
            modules.append(module)
            inside |= {id(part) for part in module.modules()}
    return modules


def class_of(denoiser: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the class of `denoiser` before its weights were sharded."""
    classes = type(denoiser).__mro__
    return next(cls for cls in classes if issubclass(cls, torch.nn.Module) and not issubclass(cls, FSDPModule))


# --- Several sets of weights for the denoisers of one pipeline, one of which is active at a time

Values = list[tuple[torch.Tensor, torch.Tensor]]  # a weight of the pipeline, and its new value


class WeightVariants:
    """Named sets of trained denoiser weights, each from a folder; the pipeline's own weights are active at first.

    Only weights that differ are kept, in main memory. Raises `ModelError` for denoisers of another model.
    """

    def __init__(self, pipe: DiffusionPipeline, folders: Mapping[str, Mapping[str, Path]]) -> None:
        self._values = {name: _differing(pipe, models) for name, models in folders.items()}
        changed = {id(parameter): parameter for values in self._values.values() for parameter, _ in values}
        self._base: Values = [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in changed.values()]
        self._present: str | None = None

    @torch.no_grad()
    def switch(self, name: str | None) -> None:
        """Activate the weights `name`; None or an unknown name restores the pipeline's own."""
        wanted = name if name in self._values else None
        if wanted == self._present:
            return
        for parameter, value in (*self._base, *(self._values[wanted] if wanted is not None else ())):
            parameter.copy_(value)
        self._present = wanted


def _differing(pipe: DiffusionPipeline, models: Mapping[str, Path]) -> Values:
    differing: Values = []
    for name, folder in models.items():
        model = pipe.components.get(name)
        if not isinstance(model, ModelMixin):
            raise ModelError(f"{folder} is a {name}, which {type(pipe).__name__} does not have")
        try:
            with weights_checked():
                stored = type(model).from_pretrained(folder, dtype=model.dtype).state_dict()
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder} cannot be loaded as {type(model).__name__}: {reason(error)}") from None
        current = model.state_dict()
        fits = current.keys() == stored.keys() and all(
            current[key].shape == value.shape for key, value in stored.items()
        )
        if not fits:
            raise ModelError(f"{folder} has weights of another model than {name} of the pipeline: use matching ones")
        differing += [
            (current[key], value) for key, value in stored.items() if not torch.equal(current[key].cpu(), value)
        ]
    return differing


# --- Several LoRAs on one pipeline, at most one of which is active at a time


def attach(pipe: DiffusionPipeline, files: Mapping[str, Path]) -> None:
    """Add the LoRAs in `files`, by name, to the components of `pipe`, all inactive.

    A LoRA written by gerl computes in fp32, as in training, so its images equal those of the run; others are loaded by
    `pipe.load_lora_weights`. Raises `ModelError` for a file that cannot be read or does not fit.
    """
    plain = {name: read_lora(file) for name, file in files.items()}
    for name, file in files.items():  # check all before the first one changes the layers
        check_components(plain[name] or {}, pipe, file)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several LoRAs on a model are intended
        for name, file in files.items():
            loras = plain[name]
            if loras is None:
                _load(pipe, file, adapter_name(name))
            else:
                for denoiser, layers in loras.items():
                    inject(pipe.components[denoiser], layers, adapter_name(name))
    switch(pipe, None)


def switch(pipe: DiffusionPipeline, name: str | None) -> None:
    """Activate only the LoRA `name`; None: the base model."""
    for layer in _layers(pipe):
        layer.enable_adapters(name is not None)
        if name is not None:  # a layer missing in this LoRA computes without one
            activate(layer, adapter_name(name))


def adapter_name(name: str) -> str:
    """Return an adapter name valid for peft: torch allows no dot in a module's name."""
    return "variant_" + "".join(c if c.isalnum() else f"_{ord(c)}_" for c in name)


def _load(pipe: DiffusionPipeline, file: Path, name: str) -> None:
    load = getattr(pipe, "load_lora_weights", None)
    if load is None:
        raise ModelError(f"{file} was not written by gerl, and {type(pipe).__name__} has no load_lora_weights")
    try:
        load(str(file.parent), weight_name=file.name, adapter_name=name, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(
            f"{file} cannot be loaded as a LoRA of {type(pipe).__name__} ({first_line(error)}): use the model it was "
            "trained on"
        ) from error
    if not any(name in layer._all_available_adapter_names() for layer in _layers(pipe)):
        raise ModelError(f"{file} has no weights for {type(pipe).__name__}: use the model it was trained on")


def _layers(pipe: DiffusionPipeline) -> list[BaseTunerLayer]:
    return adapted_layers(c for c in pipe.components.values() if isinstance(c, torch.nn.Module))
