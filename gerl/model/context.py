"""The sequence of a denoiser in parts: ranks compute a call together, each the tokens of its slice.

Diffusers' context parallelism, by Ulysses: a rank has its slice of the tokens, and in an attention some of the heads
for all of them. Inputs and output are whole on every rank. In the backward pass a rank finds the part of the gradient
that its slice has in it, wherever a layer is: the sum over the ranks is the whole gradient.
"""

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from diffusers import ContextParallelConfig, ModelMixin
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention, MochiAttention
from torch.distributed.device_mesh import DeviceMesh

from gerl.errors import ModelError

MASKS = ("encoder_hidden_states_mask", "encoder_attention_mask")  # arguments that say which tokens of a text count
# denoisers whose plan does not work with the attention that it is for, in diffusers 0.42
UNUSABLE = {
    "LTXVideoTransformer3DModel": "its text masks and token noise levels stay whole",
    "LTX2VideoTransformer3DModel": "its sound positions stay whole",
}
HEADS = ("num_attention_heads", "num_key_value_heads")  # ends of the names of numbers of heads in configurations


def check_context(components: Iterable[str], denoisers: Mapping[str, ModelMixin], ranks: int) -> None:
    """Raise `ModelError` if `ranks` cannot divide the sequence of one of `denoisers`; skeletons will do.

    `components`: names of all parts of the pipeline.
    """
    given = f"cluster.context={ranks}"
    if controlnet := next((name for name in components if "controlnet" in name), None):
        raise ModelError(
            f"{given}: the output of the pipeline's {controlnet} is not split among ranks; use cluster.context=1"
        )
    for name, denoiser in denoisers.items():
        kind = type(denoiser).__name__
        plan = getattr(denoiser, "_cp_plan", None)
        if not plan:
            raise ModelError(
                f"{given}: diffusers has no plan for splitting the sequence of {kind} ({name}) among ranks; use "
                "cluster.context=1"
            )
        if why := UNUSABLE.get(kind):
            raise ModelError(
                f"{given}: diffusers cannot split the sequence of {kind} ({name}) among ranks, although it has a "
                f"plan: {why}; use cluster.context=1"
            )
        lists = {n for n, module in denoiser.named_children() if isinstance(module, torch.nn.ModuleList)}
        if any(entry.partition(".")[0] in lists for entry, what in plan.items() if not isinstance(what, dict)):
            raise ModelError(  # layers between a gather and the next split would get a part of the gradient twice
                f"{given}: {kind} ({name}) gathers its sequence in every block, where the gradient would not be "
                "that of one rank; use cluster.context=1"
            )
        heads = {key: value for key, value in denoiser.config.items() if key.endswith(HEADS) and value}
        if odd := {key: value for key, value in heads.items() if value % ranks}:
            key, value = next(iter(odd.items()))
            raise ModelError(
                f"{given}: it must divide the {value} attention heads of {kind} ({name}: {key}); use a number that "
                "does, or 1"
            )


def divide_context(denoisers: Mapping[str, ModelMixin], mesh: DeviceMesh) -> None:
    """Let the ranks of `mesh`, with its dimensions ring and ulysses, share each call of `denoisers`.

    After a LoRA was added and `check_context` was called, and before weights are divided. Raises `ModelError` for an
    attention that cannot do it.
    """
    for name, denoiser in denoisers.items():
        with _some_accelerator():
            denoiser.enable_parallelism(config=ContextParallelConfig(ulysses_degree=mesh.size(), mesh=mesh))
        for part, module in denoiser.named_modules():
            if not isinstance(module, Attention | MochiAttention | AttentionModuleMixin):
                continue
            if getattr(module.processor, "_parallel_config", None) is None:  # it would attend to its slice only
                raise ModelError(
                    f"cluster.context={mesh.size()}: {type(module.processor).__name__} ({name}.{part}) does not "
                    "attend to tokens of other ranks; use cluster.context=1"
                )
        registry = HookRegistry.check_if_exists_or_initialize(denoiser)
        registry.register_hook(Together(denoiser, mesh.size()), "gerl_context")


@contextlib.contextmanager
def _some_accelerator() -> Iterator[None]:
    """Let diffusers, which numbers devices modulo their count, do so on a CPU as well, where torch counts none."""
    count = torch.accelerator.device_count
    if count():
        yield
        return
    torch.accelerator.device_count = lambda: 1
    try:
        yield
    finally:
        torch.accelerator.device_count = count


class Together(ModelHook):
    """The outermost hook of a denoiser: pads texts that have a mask, and refuses tokens that do not divide.

    Pipelines cut texts to the longest one of a batch, in which ranks need not go.
    """

    def __init__(self, denoiser: ModelMixin, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        parameters, plan = inspect.signature(denoiser.forward).parameters, getattr(denoiser, "_cp_plan", None) or {}
        divided = any("encoder_hidden_states" in what for what in plan.values() if isinstance(what, dict))
        # the argument that says which tokens of a divided text count
        self.mask = next((name for name in MASKS if name in parameters), None) if divided else None

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.mask is not None:
            kwargs |= self.padded(kwargs, self.mask)
        try:
            return self.fn_ref.original_forward(*args, **kwargs)
        except AssertionError as error:
            if "divisible by mesh" not in str(error):
                raise
            shapes = ", ".join(
                f"{name} {list(value.shape)}"
                for name, value in kwargs.items()
                if name.endswith("hidden_states") and torch.is_tensor(value)
            )
            raise ModelError(
                f"cluster.context={self.ranks}: the tokens of a call of {type(module).__name__} cannot be split "
                f"equally among this many ranks ({shapes}): choose sampling.height and sampling.width, and "
                "num_frames or max_sequence_length in sampling.call, that give a multiple of it, or lower it"
            ) from None

    def padded(self, given: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Text and mask with tokens that do not count, up to a number that the ranks can share."""
        text, mask = given.get("encoder_hidden_states"), given.get(name)
        if not torch.is_tensor(text) or not (missing := -text.shape[1] % self.ranks):
            return {}
        if mask is None:
            mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
        more = text.new_zeros(len(text), missing, *text.shape[2:]), mask.new_zeros(len(mask), missing)
        return {"encoder_hidden_states": torch.cat([text, more[0]], 1), name: torch.cat([mask, more[1]], 1)}
