"""How a pipeline computes, not what: compiled blocks, attention kernels, the layout of a VAE's weights."""

from collections.abc import Mapping

import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn

from gerl.errors import ConfigError, ModelError
from gerl.model.sharding import repeated_blocks

# relative error of half-precision attention; a kernel with 8-bit products is off by more
CLOSE = 2e-2
# of one function: all blocks have the same code, with and without gradient, for one row and for several
RECOMPILATIONS = 64


def compile_blocks(denoiser: ModelMixin, backend: str) -> None:
    """Let torch.compile compile the repeated blocks of `denoiser`, which have one graph, rather than all of it.

    What lies around the blocks is small. The hooks of divided weights (`model.shard`) stay outside.
    """
    torch._dynamo.config.recompile_limit = max(RECOMPILATIONS, torch._dynamo.config.recompile_limit)
    for block in repeated_blocks(denoiser):
        block.compile(backend=backend)


def check_attention(name: str, device: str, dtype: torch.dtype) -> None:
    """Raise `ConfigError` unless the attention backend `name` of diffusers can train here.

    It has to exist, run on `device` with `dtype`, and give what torch's own gives, with a gradient: kernels for
    inference (sage) give none, which a denoiser would not show, since the gradient goes around its attention.
    """
    given = f"model.attention={name}"
    known = [backend.value for backend in AttentionBackendName]
    if name not in known:
        raise ConfigError(f"{given}: diffusers has no such attention backend, only {', '.join(known)}")
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 128, 2, 64, generator=generator).to(device, dtype) for _ in range(4)]

    def computed(backend: str) -> list[torch.Tensor]:
        inputs = [v.clone().requires_grad_() for v in drawn[:3]]
        with attention_backend(backend):
            output = dispatch_attention_fn(*inputs)
        return [output, *torch.autograd.grad(output, inputs, drawn[3])]

    try:
        found, expected = computed(name), computed("native")
    except (RuntimeError, ValueError, TypeError, ImportError, AttributeError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"{given} does not work here, or has no gradient ({reason[0]}): use another, or null for torch's own"
        ) from None
    if any((a - b).float().norm() > CLOSE * b.float().norm() for a, b in zip(found, expected, strict=True)):
        raise ConfigError(f"{given} differs numerically from torch's own attention: use another, or null")


def set_attention(denoisers: Mapping[str, ModelMixin], name: str) -> None:
    """Let `denoisers` compute their attention with the backend `name`; raises `ModelError` where one has no choice."""
    with attention_backend(name):  # which puts back what other models of this process compute with
        for component, denoiser in denoisers.items():
            denoiser.set_attention_backend(name)
            processors = [getattr(module, "processor", None) for module in denoiser.modules()]
            if not any(getattr(processor, "_attention_backend", None) for processor in processors):
                raise ModelError(
                    f"model.attention={name}: {component} ({type(denoiser).__name__}) has no attention with a "
                    "selectable backend; use null"
                )


def channels_last(pipe: DiffusionPipeline) -> None:
    """Keep the convolutions of VAEs in the memory layout in which GPUs compute them fastest."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    for component in pipe.components.values():
        if isinstance(component, ModelMixin) and hasattr(component, "decode"):
            for p in component.parameters():
                if p.ndim in layouts:
                    p.data = p.data.to(memory_format=layouts[p.ndim])
