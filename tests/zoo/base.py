"""What an entry of the zoo is: a pipeline of diffusers built tiny, and the calls that exercise it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

# what is checked of an entry, in this order; see `checks`
CheckName = Literal[
    "guided", "stock", "replay", "gradient", "derivative", "window", "encoders", "sub_batch", "micro_batch", "modes",
    "stacked", "noised", "judged",
]  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A pipeline class of diffusers at tiny size; the coverage test runs every check on it.

    `limit` says in a sentence what does not hold for this class and why (with the place in its source); `fails` names
    the checks that fail for this reason, and the test insists that they do, so that no limit outlives its cause.
    """

    name: str  # the pipeline's class
    task: str  # text to image, inpainting, editing, video ...
    build: Callable[[], Any]
    no_cfg: dict[str, Any] = field(default_factory=dict)  # arguments that switch classifier-free guidance off
    cfg: dict[str, Any] | None = None  # and on; None: the pipeline has none
    call: dict[str, Any] = field(default_factory=dict)  # further arguments of every call
    inputs: Callable[[int], dict[str, Any]] | None = None  # arguments for a batch of so many: images, masks
    kernel: str = "flow_sde"
    stock_noise: float = 0.0  # noise level at which the rollout is the stock pipeline's
    batch: int = 4
    text: bool = False  # it takes its prompt as a string, not in a list: one prompt a call
    size: int = 16
    limit: str = ""
    fails: tuple[CheckName, ...] = ()


def scale(off: float, on: float, negative: bool = True) -> dict[str, Any]:
    """Guidance off and on by `guidance_scale`; `negative`: the pipeline takes negative prompts."""
    guided: dict[str, Any] = {"guidance_scale": on} | (NEGATIVE if negative else {})
    return {"no_cfg": {"guidance_scale": off}, "cfg": guided}


def true_cfg(on: float) -> dict[str, Any]:
    """Guidance on by `true_cfg_scale`; off without arguments."""
    return {"cfg": {"true_cfg_scale": on, **NEGATIVE}}


T2I = "text to image"
NEGATIVE = {"negative_prompt": "..."}  # replaced by one per sample
SHORT, MEDIUM, LONG = ({"max_sequence_length": length} for length in (8, 16, 64))
TWO_LAYERS = LONG | {"text_encoder_out_layers": (0, 1)}  # of FLUX.2


def as_class(pipe: Any, cls: type, **more: Any) -> Any:
    """A pipeline of another class with the components of `pipe`, and others."""
    return cls(**pipe.components | more)
