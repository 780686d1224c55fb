"""Where the frozen parts of a pipeline are, and in which precision they compute."""

from collections.abc import Collection, Iterable
from functools import partial

import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from gerl.engine.batching import Arguments

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


def place(
    pipe: DiffusionPipeline, denoisers: dict[str, ModelMixin], device: str, offload: bool, sharded: Collection[str] = ()
) -> None:
    """Bring `pipe` to `device`; with `offload` its text encoders, image encoders and VAEs only while they are used.

    The components `sharded` stay where they are.
    """
    components = pipe.components.items()
    modules = {name: c for name, c in components if isinstance(c, torch.nn.Module) and name not in sharded}
    offloaded = {
        name: c
        for name, c in modules.items()
        if offload and name not in denoisers and (isinstance(c, PreTrainedModel) or hasattr(c, "decode"))
    }
    for name, module in modules.items():
        if name not in offloaded:
            module.to(device)
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
