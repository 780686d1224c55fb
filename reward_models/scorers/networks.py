"""Base of scorers that run a network in their process: kwargs, loading, placement, batches, image tensors."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from pydantic import Field
from safetensors import SafetensorError

from gerl.config.blocks import Dtype
from gerl.errors import RewardError
from gerl.rewards.scorers.base import Scorer
from gerl.utils.versions import has

Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
Channels: TypeAlias = Sequence[float] | np.ndarray  # one number per channel

PIL = {"backend": "pil"} if has("transformers", "5.4") else {"use_fast": False}
# mean and standard deviation per channel, with which CLIP and BLIP normalise pixels
PIXEL_MEAN = np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float32)
PIXEL_STD = np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float32)


@dataclass(frozen=True, kw_only=True)
class NetworkScorer(Scorer):
    """Base class with the batch size (images or texts), `device` (auto, cpu, cuda or cuda:N) and the dtype.

    `identity`: a prefix and the kwargs that determine the network; scorers that agree in them share a process.
    """

    batch_size: Annotated[int, Field(ge=1)] = 32
    device: Device = "auto"
    dtype: Dtype = "auto"

    identity: ClassVar[tuple[str, ...]] = ()

    @property
    def shares(self) -> str | None:
        kwargs = (*self.identity[1:], "device", "dtype")
        return " ".join([self.identity[0], *(str(getattr(self, kwarg)) for kwarg in kwargs)]) if self.identity else None

    @property
    def placement(self) -> tuple[torch.device, torch.dtype]:
        """Device and dtype of the network; raises `RewardError` if the GPU does not exist."""
        device = resolve_device(self.device)
        return device, resolve_dtype(self.dtype, device)


def resolve_device(device: str) -> torch.device:
    """Resolve `auto` to the GPU if there is one, else the CPU; raises `RewardError` if the GPU does not exist."""
    count = torch.cuda.device_count()
    chosen = torch.device(("cuda" if count else "cpu") if device == "auto" else device)
    if chosen.type == "cpu":
        return chosen
    chosen = torch.device("cuda", chosen.index or 0)  # so that cuda and cuda:0 share a network
    if chosen.index >= count:
        raise RewardError(
            f"device={device}: the scorer's process sees {count} CUDA devices; use another, or device=auto"
        )
    return chosen


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Resolve `auto` to bfloat16 on a GPU and float32 on the CPU."""
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


# --- Loading, from disk or from the Hub


def expanded(source: str) -> str:
    """Expand `~` in a folder; Hub ids and other folders are unchanged."""
    return os.path.expanduser(source)


@contextmanager
def loading(kwarg: str, source: str, what: str) -> Iterator[None]:
    """Convert any failure to read `source` from disk or the Hub into a `RewardError`."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise RewardError(
            f"{kwarg}={source} cannot be loaded ({type(error).__name__}: {reason}): give the Hub id of {what} that "
            "this machine can download, or a local folder with one"
        ) from error


def pretrained(kind: Any, model: str, what: str, unused: str | None = None) -> Any:
    """Load the weights of `model` into the transformers class `kind`, in fp32 and eval mode.

    `unused`: prefix of parameters that may be missing. Raises `RewardError` if it cannot be loaded, or lacks weights,
    which transformers would initialise randomly.
    """
    with loading("model", model, what):
        network, info = kind.from_pretrained(expanded(model), dtype=torch.float32, output_loading_info=True)
    missing = sorted(set(info["missing_keys"]) & dict(network.named_parameters()).keys())
    if missing := [name for name in missing if unused is None or not name.startswith(unused)]:
        raise RewardError(
            f"model={model} has no weights for {missing[0]} and {len(missing) - 1} more tensors: give the Hub id or "
            f"the folder of {what} with all its weights"
        )
    return network.eval()


def image_processor(source: str) -> Any:
    """Load the image processor of `source` with the PIL backend, even if torchvision is installed.

    torchvision resizes to slightly different pixels, so that scores would depend on the environment.
    """
    import transformers

    return transformers.AutoImageProcessor.from_pretrained(expanded(source), **PIL)


def hub_file(kwarg: str, source: str, file: str) -> str:
    """Return the path of `file` in `source`, a Hub id or a folder."""
    from transformers.utils import cached_file

    with loading(kwarg, source, f"a repository with {file}"):
        return str(cached_file(expanded(source), file))


def read_tensors(kwarg: str, path: str) -> dict[str, torch.Tensor]:
    """Load the tensors of the file `path` on the CPU: safetensors, or PyTorch's format read without running code.

    Raises:
        RewardError: the file is missing, or cannot be read in the format of its suffix.
        pickle.UnpicklingError: a PyTorch file holds more than tensors.
    """
    file = Path(path).expanduser()
    with loading(kwarg, path, "such weights"):
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        # saved on a GPU, which this machine may lack
        state = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise RewardError(f"{kwarg}={path} contains {type(state).__name__}, not named tensors; give a state dict")
    return dict(state)


LINEAR_LAYERS = (0, 2, 4, 6, 7)  # of the heads of LAION's aesthetic score and ImageReward: 1, 3 and 5 are dropout


def linear_head(tensors: dict[str, torch.Tensor], width: int, source: str) -> torch.nn.Sequential:
    """Build the head `[B, width]` -> `[B, 1]` in fp32: linear layers without activations; dropout is off.

    `tensors` has the original names: `layers.0.weight`, `layers.0.bias`, ... `layers.7.bias`.

    Raises:
        RewardError: other tensors (such as a head with activations), or sizes that do not match.
    """
    if set(tensors) != {f"layers.{i}.{kind}" for i in LINEAR_LAYERS for kind in ("weight", "bias")}:
        raise RewardError(
            f"{source}: expected weight and bias of layers {', '.join(map(str, LINEAR_LAYERS))} of a linear head, "
            f"got {', '.join(sorted(tensors)) or 'nothing'}; give the published file"
        )
    weights = [tensors[f"layers.{i}.weight"].float() for i in LINEAR_LAYERS]
    sizes = [width, *(weight.shape[0] for weight in weights)]
    if [weight.shape[-1] for weight in weights] != sizes[:-1] or sizes[-1] != 1:
        raise RewardError(
            f"{source}: expected a head from {width} to 1 number, got layers of the shapes "
            f"{', '.join(str(tuple(weight.shape)) for weight in weights)}; give the head that belongs to the model"
        )
    head = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    head.load_state_dict(
        {
            f"{k}.{kind}": tensors[f"layers.{i}.{kind}"].float()
            for k, i in enumerate(LINEAR_LAYERS)
            for kind in ("weight", "bias")
        }
    )
    return head.eval().requires_grad_(False)


def pooled(output: Any) -> torch.Tensor:
    """Return the pooled features of a transformers model's output, which before transformers 5 is these features."""
    features: torch.Tensor = output if isinstance(output, torch.Tensor) else output.pooler_output
    return features


# --- Batching, and differentiable image preprocessing on tensors


def in_batches(size: int, call: Callable[..., torch.Tensor], *columns: Sequence[Any]) -> torch.Tensor:
    """Apply `call` to `columns` `[B]`, `size` rows at a time, without gradients; return `[B, ...]` on the CPU."""
    parts = []
    for start in range(0, len(columns[0]), size):
        with torch.inference_mode():
            parts.append(call(*(column[start : start + size] for column in columns)).cpu())
    return torch.cat(parts)  # not an inference tensor, which autograd would refuse to save


def resized(images: torch.Tensor, height: int, width: int, clamp: bool = True) -> torch.Tensor:
    """Resize images `[B, 3, H, W]` in [0, 1] to `[B, 3, height, width]`: antialiased bicubic, PIL up to rounding.

    `clamp`: limit the result to [0, 1], as PIL does; bicubic weights exceed it.
    """
    if images.shape[2:] == (height, width):
        return images
    resized_images = F.interpolate(images, (height, width), mode="bicubic", antialias=True)
    return resized_images.clamp(0, 1) if clamp else resized_images


def shorter_side(images: torch.Tensor, size: int) -> torch.Tensor:
    """Resize the shorter side of images `[B, 3, H, W]` to `size`, the longer one in proportion, rounded down."""
    short = min(images.shape[2:])
    height, width = (int(size * side / short) for side in images.shape[2:])
    return resized(images, height, width)


def longer_side(images: torch.Tensor, size: int) -> torch.Tensor:
    """Resize the longer side of images to `size` and pad the shorter one with black; return `[B, 3, size, size]`."""
    height, width = (max(1, round(side * size / max(images.shape[2:]))) for side in images.shape[2:])
    images = resized(images, height, width, clamp=False)
    top, left = (size - height) // 2, (size - width) // 2
    return F.pad(images, (left, size - width - left, top, size - height - top))


def normalised(images: torch.Tensor, mean: Channels, std: Channels) -> torch.Tensor:
    """Normalise images `[B, 3, H, W]` per channel: subtract the mean, divide by the std."""
    shift, scale = (torch.as_tensor(np.asarray(v)).to(images)[:, None, None] for v in (mean, std))
    return (images - shift) / scale
