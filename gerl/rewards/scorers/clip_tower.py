"""A CLIP model shared by the scorers of a process that use the same weights, and what those scorers have in common.

Source: "Learning Transferable Visual Models From Natural Language Supervision" (arXiv 2103.00020).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated

import torch
from PIL import Image
from pydantic import Field
from safetensors import SafetensorError

from gerl.config.blocks import Dtype
from gerl.errors import RewardError
from gerl.rewards.scorers.base import Scorer
from gerl.rewards.scorers.on_tensors import normalised, resized, shorter_side

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, CLIPModel, PreTrainedTokenizerBase

Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]

CLIP_L14 = "openai/clip-vit-large-patch14"


@dataclass(frozen=True, eq=False)
class ClipTower:
    """Image and text features of a CLIP model, in batches and without gradients; `clip_tower` gives one."""

    model: "CLIPModel"
    image_processor: "BaseImageProcessor"
    tokenizer: "PreTrainedTokenizerBase"
    logit_scale: float  # exp of the model's parameter, about 100
    dtype: torch.dtype

    @property
    def dim(self) -> int:
        """Length of a feature."""
        return int(self.model.config.projection_dim)

    def image_features(self, images: list[Image.Image], batch_size: int) -> torch.Tensor:
        """Features [B, dim] of length 1, fp32 on the CPU; each image is resized and cropped by itself."""
        features = []
        for start in range(0, len(images), batch_size):
            batch = [image.convert("RGB") for image in images[start : start + batch_size]]
            pixels = self.image_processor(images=batch, return_tensors="pt")["pixel_values"]
            with torch.inference_mode():
                output = self.model.get_image_features(pixels.to(self.model.device, self.dtype))
            features.append(_normalised(output.pooler_output))
        return torch.cat(features)

    def features_of(self, images: torch.Tensor) -> torch.Tensor:
        """Features [B, dim] of length 1, fp32 on the model's device, with graph, of images [B, 3, H, W] in [0, 1]."""
        processor = self.image_processor
        size, crop = processor.size, processor.crop_size if processor.do_center_crop else None
        if processor.do_resize:
            short = size.get("shortest_edge")
            images = shorter_side(images, short) if short else resized(images, size["height"], size["width"])
        if crop is not None:
            top, left = (
                (side - crop[name]) // 2 for side, name in zip(images.shape[2:], ("height", "width"), strict=True)
            )
            images = images[:, :, top : top + crop["height"], left : left + crop["width"]]
        pixels = normalised(images, processor.image_mean, processor.image_std)
        output = self.model.get_image_features(pixels.to(self.model.device, self.dtype))
        return torch.nn.functional.normalize(output.pooler_output.float(), dim=-1)

    def text_features(self, texts: list[str], batch_size: int) -> torch.Tensor:
        """Features [B, dim] of length 1, fp32 on the CPU; a text beyond the model's length (77 tokens) is cut off."""
        unique = list(dict.fromkeys(texts))  # the images of a group share their prompt
        # Padded to the longest of the batch, a text would be computed in another shape next to other texts, and so,
        # in half precision, to another value.
        length = self.model.config.text_config.max_position_embeddings
        features = []
        for start in range(0, len(unique), batch_size):
            inputs = self.tokenizer(
                unique[start : start + batch_size],
                padding="max_length",
                max_length=length,
                truncation=True,
                return_tensors="pt",
            ).to(self.model.device)
            with torch.inference_mode():
                output = self.model.get_text_features(inputs["input_ids"], attention_mask=inputs["attention_mask"])
            features.append(_normalised(output.pooler_output))
        rows = {text: row for row, text in enumerate(unique)}
        return torch.cat(features)[[rows[text] for text in texts]]


def _normalised(features: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(features.float(), dim=-1).cpu()


def clip_tower(model: str, processor: str | None = None, device: str = "auto", dtype: str = "auto") -> ClipTower:
    """The tower with the weights of `model` and the tokenizer and image processor of `processor` (default: `model`).

    Both are Hub ids or local folders. A tower is loaded once a process and used by all who ask for the same one.

    Raises:
        RewardError: something cannot be loaded, the weights are not those of a CLIP model, or there is no such device.
    """
    place = resolve_device(device)
    return _tower(model, model if processor is None else processor, str(place), resolve_dtype(dtype, place))


@cache
def _tower(model: str, processor: str, device: str, dtype: torch.dtype) -> ClipTower:
    import transformers

    with loading("model", model, "a transformers CLIP model"):
        clip, info = transformers.CLIPModel.from_pretrained(
            expanded(model), dtype=torch.float32, output_loading_info=True
        )
    if info["missing_keys"]:  # transformers fills them with random numbers, and so would the scores be
        raise RewardError(
            f"model={model} has no weights for {sorted(info['missing_keys'])[0]} and {len(info['missing_keys']) - 1} "
            "more tensors of a CLIP model: give the Hub id or the folder of a complete transformers CLIP model"
        )
    with loading("processor", processor, "a CLIP tokenizer and image processor"):
        source = expanded(processor)
        # torchvision resizes to slightly other pixels than PIL: where it happens to be installed must not matter.
        images = transformers.AutoImageProcessor.from_pretrained(source, backend="pil")
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    # Before the cast: 4.605 in bfloat16 is 4.594, which would lower every score by 1.1 %.
    scale = clip.logit_scale.detach().exp().item()
    return ClipTower(clip.to(device, dtype).eval().requires_grad_(False), images, tokenizer, scale, dtype)


def expanded(source: str) -> str:
    """A folder below `~` as a path; Hub ids and other folders as they are."""
    return os.path.expanduser(source)


@contextmanager
def loading(kwarg: str, source: str, what: str) -> Iterator[None]:
    """Turn what goes wrong while `source` is read from disk or from the Hub into one `RewardError`."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise RewardError(
            f"{kwarg}={source} cannot be loaded ({type(error).__name__}: {reason}): give the Hub id of {what} that "
            "this machine can download, or a local folder with one"
        ) from error


def resolve_device(device: str) -> torch.device:
    """`auto` is the GPU if there is one, else the CPU; raises `RewardError` for a GPU that is not there."""
    count = torch.cuda.device_count()
    found = torch.device(("cuda" if count else "cpu") if device == "auto" else device)
    if found.type == "cpu":
        return found
    found = torch.device("cuda", found.index or 0)  # so that cuda and cuda:0 are one tower
    if found.index >= count:
        raise RewardError(
            f"device={device}: the scorer's process sees {count} CUDA devices; use another, or device=auto"
        )
    return found


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on the CPU."""
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    found: torch.dtype = getattr(torch, dtype)
    return found


@dataclass(frozen=True, kw_only=True)
class ClipScorer(Scorer):
    """The kwargs and the model of the scorers on a CLIP tower.

    `model` and `processor` (default: `model`) are Hub ids or local folders, `batch_size` the images or texts a call of
    the model, `device` auto, cpu, cuda or cuda:N.
    """

    model: str = CLIP_L14
    processor: str | None = None
    batch_size: Annotated[int, Field(ge=1)] = 32
    device: Device = "auto"
    dtype: Dtype = "auto"

    @property
    def shares(self) -> str:
        return f"clip {self.model} {self.processor} {self.device} {self.dtype}"

    @property
    def tower(self) -> ClipTower:
        """Loaded when it is first needed, by whichever scorer comes first."""
        return clip_tower(self.model, self.processor, self.device, self.dtype)

    def cosines(self, images: list[Image.Image], prompts: list[str]) -> torch.Tensor:
        """Cosine [B] of each image's feature with that of its prompt."""
        image = self.tower.image_features(images, self.batch_size)
        return (image * self.tower.text_features(prompts, self.batch_size)).sum(-1)

    def tensor_cosines(self, images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """`cosines` of images [B, 3, H, W] in [0, 1], with graph."""
        image = self.tower.features_of(images)
        return (image * self.tower.text_features(prompts, self.batch_size).to(image.device)).sum(-1)
