"""Where the frozen parts of a pipeline are, and in which precision they compute."""

from collections.abc import Collection, Iterable
from functools import partial

import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from gerl.config.blocks import Offload
from gerl.engine.batching import Arguments
from gerl.model.sharding import repeated_blocks

DECODER = ("post_quant_conv", "decoder")  # the parts of a VAE that make images of latents


class OffloadedComponents:
    """Keeps components of a pipeline on the CPU, and on `device` only while they are used.

    A component comes to `device` when it, or a part of it, is called, and goes when another one comes or a denoiser
    runs: one at a time is there, and none while the denoiser needs the memory for its activations.
    """

    def __init__(
        self, components: Iterable[torch.nn.Module], denoisers: Iterable[torch.nn.Module], device: str
    ) -> None:
        self.device = torch.device(device)
        self.present: torch.nn.Module | None = None
        for component in components:
            component.to("cpu")
            for part in component.modules():  # pipelines call `vae.decode` and `text_encoder.model` past `forward`
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
        # the pipeline may have put the inputs where it found the component
        moved: Arguments = tree_map(lambda v: v.to(self.device) if torch.is_tensor(v) else v, (args, kwargs))
        return moved

    @torch.compiler.disable
    def _leave(self, *_: object) -> None:
        if self.present is not None:
            self.present.to("cpu")
            self.present = None


class OffloadedBlocks:
    """Keeps the frozen weights of the repeated blocks of denoisers on the CPU, and those of one block on `device`.

    A block's weights come before it is called, and again before its backward pass begins, be its activations kept or
    recomputed: they leave when another block's come. They never change, so leaving is free: the copy on the CPU is
    taken up again. All else stays on `device`: layers outside of the blocks, which are small and take part at both ends
    of the backward pass, and what is added to the blocks later, the LoRA.

    Diffusers' own group offload would take the LoRA along (with streams, restore it from a copy as it was before
    training), and leaves a block's weights on the CPU while the block is recomputed piece by piece.
    """

    def __init__(self, denoisers: Iterable[torch.nn.Module], device: str) -> None:
        self.device = torch.device(device)
        self.present: torch.nn.Module | None = None
        self.homes: dict[torch.nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for denoiser in denoisers:
            blocks = repeated_blocks(denoiser)
            for block in blocks:
                self.homes[block] = [(t, self._home(t)) for t in (*block.parameters(), *block.buffers())]
                for part in block.modules():  # of some models a part is called past its block
                    part.register_forward_pre_hook(partial(self._before, block))
                    part.register_forward_hook(partial(self._after, block))
            inside = {id(t) for block in blocks for t, _ in self.homes[block]}
            for tensor in (*denoiser.parameters(), *denoiser.buffers()):
                if id(tensor) not in inside:
                    tensor.data = tensor.data.to(self.device)

    def _home(self, tensor: torch.Tensor) -> torch.Tensor:
        home = tensor.data.to("cpu")
        tensor.data = home.pin_memory() if self.device.type == "cuda" else home
        return tensor.data

    def enter(self, block: torch.nn.Module) -> None:
        """Bring the weights of `block` to the device, in place of those that are there."""
        if block is self.present:
            return
        self.leave()
        self.present = block
        for tensor, home in self.homes[block]:
            tensor.data = home.to(self.device, non_blocking=True)
        for tensor in block.parameters():  # what was added to it since, which stays
            if tensor.device != self.device:
                tensor.data = tensor.data.to(self.device)

    def leave(self) -> None:
        """Send the weights away that are on the device."""
        if self.present is not None:
            for tensor, home in self.homes[self.present]:
                tensor.data = home
            self.present = None

    def _before(self, block: torch.nn.Module, *_: object) -> None:
        self.enter(block)

    def _after(self, block: torch.nn.Module, part: torch.nn.Module, args: object, output: object) -> None:
        for tensor in tree_leaves(output):
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self.enter(block))


def place(
    pipe: DiffusionPipeline,
    denoisers: dict[str, ModelMixin],
    device: str,
    offload: Offload,
    sharded: Collection[str] = (),
) -> None:
    """Bring `pipe` to `device`.

    `offload`: its text encoders, image encoders and VAEs only while they are used, and for `blocks` the blocks of its
    denoisers, too. The components `sharded` stay where they are.
    """
    components = pipe.components.items()
    modules = {name: c for name, c in components if isinstance(c, torch.nn.Module) and name not in sharded}
    offloaded = {
        name: c
        for name, c in modules.items()
        if offload != "none" and name not in denoisers and (isinstance(c, PreTrainedModel) or hasattr(c, "decode"))
    }
    for name, module in modules.items():
        if name not in offloaded and not (name in denoisers and offload == "blocks"):
            module.to(device)
    if offload == "blocks":
        OffloadedBlocks([d for name, d in denoisers.items() if name not in sharded], device)
    if offloaded:
        OffloadedComponents(offloaded.values(), denoisers.values(), device)


def decode_in_fp32(pipe: DiffusionPipeline) -> None:
    """Let VAEs whose configuration asks for it (`force_upcast`) decode in fp32; they still encode in their own dtype.

    Diffusers does so in some pipelines, and for fp16 only.
    """
    for component in pipe.components.values():
        if isinstance(component, ModelMixin) and component.config.get("force_upcast", False):
            for part in (getattr(component, name, None) for name in DECODER):
                if isinstance(part, torch.nn.Module):
                    part.float().register_forward_pre_hook(_in_fp32, with_kwargs=True)


def _in_fp32(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Arguments:
    module.float()  # pipelines that upcast their VAE themselves cast it back after use
    cast: Arguments = tree_map(
        lambda v: v.float() if torch.is_tensor(v) and v.is_floating_point() else v, (args, kwargs)
    )
    return cast
