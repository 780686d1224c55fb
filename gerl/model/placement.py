"""Placement and precision of the frozen parts of a pipeline: offloading, 8-bit copies, compiled blocks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import accelerate
import torch
import transformers
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from gerl.config import ModelConfig
from gerl.config.blocks import Offload, RolloutPrecision
from gerl.engine.rows import Arguments, Tree
from gerl.errors import ConfigError, ModelError
from gerl.model.components import weights_checked
from gerl.model.quantization import quantisation_config, text_encoders
from gerl.model.sharding import repeated_blocks
from gerl.utils.files import first_line, reason

# --- Placement of the frozen parts of a pipeline, and the precision they compute in

Modules = Iterable[torch.nn.Module]
DECODER = ("post_quant_conv", "decoder")  # the parts of a VAE that decode latents to images


class OffloadedComponents:
    """Offloading of pipeline components to the CPU while they are not used.

    A component is copied to `device` when it or a part of it is called, and the copy is dropped when another one or a
    denoiser runs: at most one is on the device, and none while the denoiser needs the memory for its activations.
    Frozen weights stay mapped from their files, which the processes of a machine share.
    """

    def __init__(self, components: Modules, denoisers: Modules, device: str) -> None:
        self.device = torch.device(device)
        self.present: torch.nn.Module | None = None
        self.homes: dict[torch.nn.Module, list[Home]] = {}
        for component in components:
            component.to("cpu")
            self.homes[component] = homes_of(component)
            for part in component.modules():  # pipelines call `vae.decode` and `text_encoder.model` bypassing `forward`
                part.register_forward_pre_hook(partial(self._enter, component), with_kwargs=True)
        for denoiser in denoisers:
            denoiser.register_forward_pre_hook(self._leave)

    def _enter(
        self, component: torch.nn.Module, part: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Arguments | None:
        if component is not self.present:
            self._leave()
            component.to(self.device)
            self.present = component
        elif part is not component:
            return None
        # the pipeline may have moved the inputs to the component's previous device
        return tree_map(lambda v: v.to(self.device) if torch.is_tensor(v) else v, (args, kwargs))

    @torch.compiler.disable
    def _leave(self, *_: object) -> None:
        if self.present is None:
            return
        for tensors, name, tensor, home in self.homes[self.present]:
            if tensor.device != home.device:  # a parameter; a buffer was replaced
                tensor.data = home
            tensors[name] = tensor
        if not self.homes[self.present]:
            self.present.to("cpu")
        self.present = None


Home = tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]


def homes_of(component: torch.nn.Module) -> list[Home]:
    """Return the tensors of a component, with their places and values; [] if it is quantised, by special classes."""
    places: list[dict[str, Any]] = [p for m in component.modules() for p in (m._parameters, m._buffers)]
    homes = [(place, name, t, t.data) for place in places for name, t in place.items() if t is not None]
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for _, _, tensor, _ in homes)
    return homes if plain else []


class OffloadedBlocks:
    """Offloading of the frozen weights of repeated blocks: one block at a time is on `device`, the others on the CPU.

    A block's weights are copied before it is called, and again before its backward pass; they never change, so the copy
    is dropped when the next block's weights arrive. Diffusers' group offload would move the LoRA too, and leaves a
    block's weights on the CPU while the block is recomputed piece by piece.
    """

    def __init__(self, denoisers: Modules, device: str) -> None:
        self.device = torch.device(device)
        self.present: torch.nn.Module | None = None
        self.resident = False  # whether all blocks are on the device
        self.homes: dict[torch.nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for denoiser in denoisers:
            OFFLOADED[denoiser] = self
            blocks = repeated_blocks(denoiser)
            for block in blocks:
                for tensor in (*block.parameters(), *block.buffers()):
                    home = tensor.data.to("cpu")
                    tensor.data = home.pin_memory() if self.device.type != "cpu" else home
                    self.homes.setdefault(block, []).append((tensor, tensor.data))
                for part in block.modules():  # some models call a part of a block directly
                    part.register_forward_pre_hook(lambda *_, block=block: self.enter(block))
                    part.register_forward_hook(partial(self._after, block))
            inside = {id(t) for block in blocks for t, _ in self.homes[block]}
            for tensor in (*denoiser.parameters(), *denoiser.buffers()):
                if id(tensor) not in inside:
                    tensor.data = tensor.data.to(self.device)

    def enter(self, block: torch.nn.Module) -> None:
        """Move the weights of `block` to the device, replacing those of the previous block."""
        if block is self.present or self.resident:
            return
        self.leave()
        self.present = block
        for tensor, home in self.homes[block]:
            tensor.data = home.to(self.device, non_blocking=True)
        for tensor in block.parameters():  # parameters added since, such as the LoRA's, stay on the device
            if tensor.device != self.device:
                tensor.data = tensor.data.to(self.device)

    def leave(self) -> None:
        """Remove the current block's weights from the device."""
        if self.present is not None:
            for tensor, home in self.homes[self.present]:
                tensor.data = home
            self.present = None

    @contextlib.contextmanager
    def all_resident(self) -> Iterator[None]:
        """Hold the weights of all blocks on the device within the block."""
        tensors = [pair for pairs in self.homes.values() for pair in pairs]
        self.leave()
        self.resident = True
        try:
            for tensor, home in tensors:
                tensor.data = home.to(self.device)
            yield
        finally:
            self.resident = False
            for tensor, home in tensors:
                tensor.data = home

    def _after(self, block: torch.nn.Module, part: torch.nn.Module, args: object, output: object) -> None:
        for tensor in tree_leaves(output):
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self.enter(block))


OFFLOADED: WeakKeyDictionary[torch.nn.Module, OffloadedBlocks] = WeakKeyDictionary()


@contextlib.contextmanager
def resident_blocks(denoisers: Modules) -> Iterator[None]:
    """Hold the weights of offloaded blocks of `denoisers` on their device within the block."""
    with contextlib.ExitStack() as stack:
        for blocks in {OFFLOADED[denoiser] for denoiser in denoisers if denoiser in OFFLOADED}:
            stack.enter_context(blocks.all_resident())
        yield


def place(
    pipe: DiffusionPipeline,
    denoisers: dict[str, ModelMixin],
    device: str,
    offload: Offload,
    sharded: Collection[str] = (),
) -> None:
    """Move `pipe` to `device`, except components that are `sharded`, and parts on the CPU while unused (`offload`)."""
    named = pipe.components.items()
    modules = {name: c for name, c in named if isinstance(c, torch.nn.Module) and name not in sharded}
    others = {name: c for name, c in modules.items() if name not in denoisers and offload != "none"}
    offloaded = {name: c for name, c in others.items() if isinstance(c, PreTrainedModel) or hasattr(c, "decode")}
    for name, module in modules.items():
        if name not in offloaded and not (name in denoisers and offload == "blocks"):
            module.to(device)
    if offload == "blocks":
        OffloadedBlocks([d for name, d in denoisers.items() if name not in sharded], device)
    if offloaded:
        OffloadedComponents(offloaded.values(), denoisers.values(), device)


def decode_in_fp32(pipe: DiffusionPipeline) -> None:
    """Let VAEs with `force_upcast` decode in fp32, which diffusers does only in some pipelines and for fp16."""
    for component in pipe.components.values():
        if isinstance(component, ModelMixin) and component.config.get("force_upcast", False):
            for part in (getattr(component, name, None) for name in DECODER):
                if isinstance(part, torch.nn.Module):
                    part.float().register_forward_pre_hook(_in_fp32, with_kwargs=True)


def _in_fp32(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Arguments:
    module.float()  # pipelines that upcast their VAE cast it back after use
    return tree_map(lambda v: v.float() if torch.is_tensor(v) and v.is_floating_point() else v, (args, kwargs))


# --- 8-bit copies of frozen weights for rollouts in int8 or fp8; updates use the original weights.
#
# Unlike `model.quantize`, which stores weights compactly and computes in the model's precision, these layers compute in
# 8 bits, inputs included. The rollout policy is then close to the trained one, but not equal.

MULTIPLE = 16  # 8-bit kernels need layer widths that are multiples of this


class QuantizedRollout:
    """8-bit copies of frozen linear weights in repeated blocks. Raises `ModelError` if there are none."""

    def __init__(self, denoisers: Mapping[str, ModelMixin], kind: RolloutPrecision) -> None:
        layers = {
            id(layer): layer
            for denoiser in denoisers.values()
            for block in repeated_blocks(denoiser)
            for layer in block.modules()
            if isinstance(layer, torch.nn.Linear)
            and layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0
            and layer.weight.is_floating_point()
            and not layer.weight.requires_grad
        }
        if not layers:
            raise ModelError(
                f"rollout.quantize={kind}: the denoiser has no frozen linear layers with widths that are multiples of "
                f"{MULTIPLE}; use none"
            )
        self.copies = [(layer, quantised(layer.weight, kind)) for layer in layers.values()]

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Compute with the copies within the block."""
        weights = [layer.weight for layer, _ in self.copies]
        try:
            for layer, copy in self.copies:
                layer.weight = copy
            yield
        finally:
            for (layer, _), weight in zip(self.copies, weights, strict=True):
                layer.weight = weight


def check_quantized_rollout(kind: RolloutPrecision, device: str, dtype: torch.dtype) -> None:
    """Raise `ConfigError` if the package for `kind` is missing, or if `device` cannot compute in this format."""
    weight = torch.eye(2 * MULTIPLE, dtype=dtype, device=device)
    try:
        with torch.no_grad():
            torch.nn.functional.linear(weight, quantised(weight, kind))
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"rollout.quantize={kind}: layers cannot compute in this format on {device} ({reason(error)}); use "
            "int8, or none"
        ) from error


def quantised(weight: torch.Tensor, kind: RolloutPrecision) -> torch.nn.Parameter:
    """Return an 8-bit copy of a linear layer's `weight`, with a scale for each row and each input vector."""
    try:
        from torchao import quantization  # an optional package
    except ImportError:
        raise ConfigError(
            f"rollout.quantize={kind} needs the package torchao: pip install 'gerl[quantize]', or use none"
        ) from None
    rows, columns = weight.shape
    layer = torch.nn.Linear(columns, rows, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    int8 = quantization.Int8DynamicActivationInt8WeightConfig
    fp8 = partial(quantization.Float8DynamicActivationFloat8WeightConfig, granularity=quantization.PerRow())
    quantization.quantize_(layer, int8() if kind == "int8" else fp8())
    layer.weight.requires_grad_(False)
    return layer.weight


# --- Execution options that keep the results: compiled blocks, attention kernels, memory layout of VAE weights

# relative error allowed for half-precision attention; kernels with 8-bit products exceed it
CLOSE = 2e-2
# per function: all blocks share their code, with and without gradient, for one row and several
RECOMPILATIONS = 64


def compile_blocks(denoiser: ModelMixin, backend: str) -> None:
    """Compile each repeated block with torch.compile, all as one graph; hooks of `model.shard` stay outside it."""
    torch._dynamo.config.recompile_limit = max(RECOMPILATIONS, torch._dynamo.config.recompile_limit)
    mode = CompiledForTraining()
    denoiser.forward = update_wrapper(partial(mode.call, denoiser.forward), denoiser.forward)
    for block in repeated_blocks(denoiser):
        block.compile(backend=backend)
        assert block._compiled_call_impl is not None
        block._compiled_call_impl = partial(mode.call_block, block._compiled_call_impl)


class CompiledForTraining:
    """Calls a compiled denoiser with gradients enabled in rollouts too, so that rollout and update run the same code.

    A compiler fuses the forward pass for training differently from that for inference, and the results round
    differently: the ratio on policy would not be 1. In a rollout only the graph of the current block is alive.
    """

    def __init__(self) -> None:
        self.releases = False  # whether the graph of a block is dropped after it

    def call(self, forward: Callable[..., Tree], *args: object, **kwargs: object) -> Tree:
        """Call the denoiser's `forward`; without gradients, return detached outputs."""
        if torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self.releases = True
        try:
            with torch.enable_grad():
                return tree_map(lambda v: v.detach() if torch.is_tensor(v) else v, forward(*args, **kwargs))
        finally:
            self.releases = False

    def call_block(self, compiled: Callable[..., Tree], *args: object, **kwargs: object) -> Tree:
        """Call the `compiled` block; in a rollout, detach its outputs but keep `requires_grad`, a guard of the code."""
        output = compiled(*args, **kwargs)
        if not self.releases:
            return output
        return tree_map(lambda v: v.detach().requires_grad_(v.requires_grad) if torch.is_tensor(v) else v, output)


def check_attention(name: str, device: str, dtype: torch.dtype) -> None:
    """Raise `ConfigError` unless the attention backend `name` of diffusers can be used for training here.

    It must exist, run on `device` with `dtype`, match torch's attention, and provide a gradient: inference kernels
    (sage) have none, which would go unnoticed in a denoiser, since the gradient also flows around its attention.
    """
    setting = f"model.attention={name}"
    backends = [backend.value for backend in AttentionBackendName]
    if name not in backends:
        raise ConfigError(f"{setting}: diffusers has no such attention backend, only {', '.join(backends)}")
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(1, 128, 2, 64, generator=generator).to(device, dtype) for _ in range(4)]

    def computed(backend: str) -> list[torch.Tensor]:
        inputs = [v.clone().requires_grad_() for v in values[:3]]
        with attention_backend(backend):
            output = dispatch_attention_fn(*inputs)
        return [output, *torch.autograd.grad(output, inputs, values[3])]

    try:
        outputs, expected = computed(name), computed("native")
    except (RuntimeError, ValueError, TypeError, ImportError, AttributeError, OSError) as error:
        raise ConfigError(
            f"{setting} does not work here, or has no gradient ({first_line(error)}): use another, or null for torch's"
        ) from None
    if any((a - b).float().norm() > CLOSE * b.float().norm() for a, b in zip(outputs, expected, strict=True)):
        raise ConfigError(f"{setting} differs numerically from torch's own attention: use another, or null")


def set_attention(denoisers: Mapping[str, ModelMixin], name: str) -> None:
    """Set the attention backend `name` on `denoisers`. Raises `ModelError` if one has no selectable backend."""
    with attention_backend(name):  # restores the global backend, which other models of this process use
        for component, denoiser in denoisers.items():
            denoiser.set_attention_backend(name)
            processors = [getattr(module, "processor", None) for module in denoiser.modules()]
            if not any(getattr(processor, "_attention_backend", None) for processor in processors):
                raise ModelError(
                    f"model.attention={name}: {component} ({type(denoiser).__name__}) has no attention with a "
                    "selectable backend; use null"
                )


def channels_last(pipe: DiffusionPipeline) -> None:
    """Convert the convolutions of VAEs to the memory layout that is fastest on GPUs."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    vaes = [c for c in pipe.components.values() if isinstance(c, ModelMixin) and hasattr(c, "decode")]
    for p in (p for vae in vaes for p in vae.parameters() if p.ndim in layouts):
        p.data = p.data.to(memory_format=layouts[p.ndim])


# --- Text encoders loaded on first use, and hence never if all prompt embeddings are cached

logger = logging.getLogger(__name__)


class LazyTextEncoder(torch.nn.Module):
    """Proxy of a text encoder, which `read` loads when it is called or one of its attributes is read."""

    def __init__(self, skeleton: torch.nn.Module, read: Callable[[], torch.nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        # not registered as submodules: a pipeline takes its device from its first weights
        self.__dict__ |= {"skeleton": skeleton, "read": read}
        self.__dict__["known"] = {"dtype": dtype, "device": torch.device("cpu"), "config": skeleton.config}

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.loaded()(*args, **kwargs)

    def loaded(self) -> torch.nn.Module:
        """Return the encoder, loading it on the first call."""
        if "encoder" not in self._modules:
            self.encoder = self.read().requires_grad_(False).eval().to(self.known["device"])
        return self.encoder

    def to(self, device: Any, *_: object, **__: object) -> LazyTextEncoder:  # type: ignore[override]
        self.known["device"] = torch.device(device)
        return super().to(device)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "encoder" not in self._modules and (name in self.known or not hasattr(self.skeleton, name)):
                if name in self.known:
                    return self.known[name]
                raise
        return getattr(self.loaded(), name)


def encoder_skeletons(folder: str) -> dict[str, torch.nn.Module]:
    """Return the text encoders of the pipeline in `folder` without weights, on the meta device."""
    index = DiffusionPipeline.load_config(folder)
    skeletons: dict[str, torch.nn.Module] = {}
    for name in (name for name in text_encoders(folder) if name.startswith("text_encoder")):
        kind = getattr(transformers, index[name][1])
        with accelerate.init_empty_weights():
            skeletons[name] = kind(kind.config_class.from_pretrained(Path(folder) / name))
    return skeletons


def lazy_text_encoders(config: ModelConfig, folder: str, dtype: torch.dtype) -> dict[str, LazyTextEncoder]:
    """Return unloaded text encoders of the pipeline in `folder`, which will load as diffusers loads them."""
    index = DiffusionPipeline.load_config(folder)
    encoders_only = ModelConfig(path=config.path, quantize_encoders=config.quantize_encoders)
    quantised = quantisation_config(encoders_only, folder, dtype, lambda _: {})

    def late(name: str) -> LazyTextEncoder:
        kind = getattr(transformers, index[name][1])
        options = {} if quantised is None else {"quantization_config": quantised.quant_mapping[name]}

        def read() -> torch.nn.Module:
            logger.info("loading %s, for a prompt whose embedding is not cached", name)
            with weights_checked():
                return kind.from_pretrained(Path(folder) / name, dtype=dtype, **options)

        return LazyTextEncoder(skeletons[name], read, dtype)

    skeletons = encoder_skeletons(folder)
    return {name: late(name) for name in skeletons}
