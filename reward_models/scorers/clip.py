"""Scorers based on CLIP: CLIPScore, PickScore, aesthetic score and HPS v2; scorers in one process share the model."""

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import Field

from gerl.errors import RewardError
from gerl.rewards.scorers.base import Metadata, require
from gerl.utils.tensors import tensors_of
from reward_models.scorers.networks import (
    PIXEL_MEAN,
    PIXEL_STD,
    NetworkScorer,
    expanded,
    hub_file,
    image_processor,
    in_batches,
    linear_head,
    loading,
    longer_side,
    normalised,
    pooled,
    pretrained,
    read_tensors,
    resized,
    resolve_device,
    resolve_dtype,
    shorter_side,
)

if TYPE_CHECKING:
    import open_clip
    from transformers import BaseImageProcessor, CLIPModel, PreTrainedTokenizerBase


# --- CLIP model shared by the scorers of a process, and their base classes
#
# Source: "Learning Transferable Visual Models From Natural Language Supervision" (arXiv 2103.00020).

CLIP_L14 = "openai/clip-vit-large-patch14"


@dataclass(frozen=True, eq=False)
class ClipTower:
    """CLIP model that computes image and text features; use `clip_tower` to load one."""

    model: "CLIPModel"
    image_processor: "BaseImageProcessor"
    tokenizer: "PreTrainedTokenizerBase"
    logit_scale: float  # exp of the model's parameter, about 100
    dtype: torch.dtype

    @property
    def dim(self) -> int:
        """Feature dimension."""
        return int(self.model.config.projection_dim)

    def image_features(self, images: list[Image.Image], batch_size: int) -> torch.Tensor:
        """Return unit-norm features `[B, dim]`, fp32 on the CPU; each image is resized and cropped separately."""

        def features(batch: list[Image.Image]) -> torch.Tensor:
            rgb = [image.convert("RGB") for image in batch]
            return self._encoded(self.image_processor(images=rgb, return_tensors="pt")["pixel_values"])

        return in_batches(batch_size, features, images)

    def features_of(self, images: torch.Tensor) -> torch.Tensor:
        """Return differentiable unit-norm features `[B, dim]`, fp32, of images `[B, 3, H, W]` in [0, 1]."""
        processor = self.image_processor
        size, crop = processor.size, processor.crop_size if processor.do_center_crop else None
        if processor.do_resize:
            short = size.get("shortest_edge")
            images = shorter_side(images, short) if short else resized(images, size["height"], size["width"])
        if crop is not None:
            height, width = crop["height"], crop["width"]
            top, left = (images.shape[2] - height) // 2, (images.shape[3] - width) // 2
            images = images[:, :, top : top + height, left : left + width]
        return self._encoded(normalised(images, processor.image_mean, processor.image_std))

    def _encoded(self, pixels: torch.Tensor) -> torch.Tensor:
        output = self.model.get_image_features(pixels.to(self.model.device, self.dtype))
        return F.normalize(pooled(output).float(), dim=-1)

    def text_features(self, texts: list[str], batch_size: int) -> torch.Tensor:
        """Return unit-norm features `[B, dim]`, fp32 on the CPU; texts are truncated to the model's 77 tokens."""
        # Padding to the longest text of the batch would make the shape, and so in half precision the value, depend on
        # the other texts.
        length = self.model.config.text_config.max_position_embeddings

        def features(batch: list[str]) -> torch.Tensor:
            inputs = self.tokenizer(
                batch, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
            ).to(self.model.device)
            output = self.model.get_text_features(inputs["input_ids"], attention_mask=inputs["attention_mask"])
            return F.normalize(pooled(output).float(), dim=-1)

        unique = list(dict.fromkeys(texts))  # the images of a group share their prompt
        rows = {text: row for row, text in enumerate(unique)}
        return in_batches(batch_size, features, unique)[[rows[text] for text in texts]]


def clip_tower(model: str, processor: str | None = None, device: str = "auto", dtype: str = "auto") -> ClipTower:
    """Load the weights of `model` with the tokenizer and image processor of `processor` (default: `model`).

    Both are Hub ids or local folders. Each tower is loaded once per process and shared.

    Raises:
        RewardError: something cannot be loaded, the weights are not a CLIP model, or the device is missing.
    """
    place = resolve_device(device)
    return _tower(model, model if processor is None else processor, str(place), resolve_dtype(dtype, place))


@cache
def _tower(model: str, processor: str, device: str, dtype: torch.dtype) -> ClipTower:
    import transformers

    clip = pretrained(transformers.CLIPModel, model, "a transformers CLIP model")
    with loading("processor", processor, "a CLIP tokenizer and image processor"):
        images = image_processor(processor)
        tokenizer = transformers.AutoTokenizer.from_pretrained(expanded(processor))
    # before the cast: 4.605 in bfloat16 is 4.594, which would lower every score by 1.1 %
    scale = clip.logit_scale.detach().exp().item()
    return ClipTower(clip.to(device, dtype).requires_grad_(False), images, tokenizer, scale, dtype)


@dataclass(frozen=True, kw_only=True)
class ClipScorer(NetworkScorer):
    """Base class of the scorers on a CLIP tower.

    `model` and `processor` (default: `model`) are Hub ids or local folders.
    """

    model: str = CLIP_L14
    processor: str | None = None

    identity = ("clip", "model", "processor")

    @property
    def tower(self) -> ClipTower:
        """CLIP tower, loaded on first use and shared with other scorers."""
        return clip_tower(self.model, self.processor, self.device, self.dtype)


class ClipCosine(ClipScorer):
    """Base class of scorers that return `factor` times the cosine of image and prompt features."""

    differentiable = True

    @property
    def factor(self) -> float:
        """Score of a cosine of 1."""
        raise NotImplementedError

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        image = self.tower.image_features(images, self.batch_size)
        return ((image * self.tower.text_features(prompts, self.batch_size)).sum(-1) * self.factor).tolist()

    def tensor_scores(self, images: torch.Tensor, prompts: list[str], metadata: list[Metadata]) -> torch.Tensor:
        image = self.tower.features_of(images)
        text = self.tower.text_features(prompts, self.batch_size).to(image.device)
        return (image * text).sum(-1) * self.factor


# --- CLIPScore: how well an image matches its prompt
#
# Source: "CLIPScore: A Reference-free Evaluation Metric for Image Captioning" (arXiv 2104.08718), without its clipping
# at 0; the scale is from Flow-GRPO (arXiv 2505.05470), whose image resizing differs slightly from CLIP's.

SCALE = 30.0


@dataclass(frozen=True, kw_only=True)
class ClipScore(ClipCosine):
    """exp(logit_scale) * cosine(image, prompt) / 30, about 0.5 to 1.2; with `raw` the cosine, in [-1, 1]."""

    raw: bool = False

    @property
    def factor(self) -> float:
        return 1.0 if self.raw else self.tower.logit_scale / SCALE


# --- PickScore: human preference between images of a prompt
#
# Source: "Pick-a-Pic: An Open Dataset of User Preferences for Text-to-Image Generation" (arXiv 2305.01569), section 4;
# the division by 26, near the mean score of good images, is from Flow-GRPO (arXiv 2505.05470).


@dataclass(frozen=True, kw_only=True)
class PickScore(ClipCosine):
    """exp(logit_scale) * cosine(image, prompt) / `scale`, about 0.7 to 0.9; scale=1 gives the score of the paper."""

    model: str = "yuvalkirstain/PickScore_v1"
    processor: str | None = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 26.0

    @property
    def factor(self) -> float:
        return self.tower.logit_scale / self.scale


# --- Aesthetic score: visual appeal of an image, independent of its prompt
#
# Source: LAION's improved aesthetic predictor (github.com/christophschuhmann/improved-aesthetic-predictor, commit
# 6934dd8, simple_inference.py, lines 40 to 117), a linear head on the CLIP ViT-L/14 feature, trained on ratings from 1
# to 10. The published head loads here; it has not been run with the published CLIP weights.

# published heads by name, with the SHA-256 of the files in the authors' repository
HEADS = {"sac+logos+ava1-l14-linearMSE": "21dd590f3ccdc646f0d53120778b296013b096a035a2718c9cb0d511bff0f1e0"}


@dataclass(frozen=True, kw_only=True)
class AestheticScore(ClipScorer):
    """Aesthetic rating of an image by a head on its unit-norm CLIP feature, about 1 to 10.

    `head` is the name of a published head (3.7 MB), or the path of a .pth or .safetensors file. A named head is
    downloaded once from `repository`, a Hub id or a local folder, and rejected if its checksum differs from the
    authors' file.
    """

    head: str = "sac+logos+ava1-l14-linearMSE"
    repository: str = "camenduru/improved-aesthetic-predictor"  # the authors publish it on GitHub only

    differentiable = True

    def __post_init__(self) -> None:
        if self.head not in HEADS and not Path(self.head).expanduser().is_file():
            raise RewardError(
                f"the aesthetic scorer's kwarg head={self.head} is neither a file nor a published head: give the "
                f"path of one, or {' or '.join(HEADS)}"
            )

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        features = self.tower.image_features(images, self.batch_size)
        with torch.inference_mode():
            return self._head.to(features.device)(features).squeeze(-1).tolist()

    def tensor_scores(self, images: torch.Tensor, prompts: list[str], metadata: list[Metadata]) -> torch.Tensor:
        features = self.tower.features_of(images)
        scores: torch.Tensor = self._head.to(features.device)(features).squeeze(-1)
        return scores

    @cached_property
    def _head(self) -> torch.nn.Sequential:
        file = self.head if self.head not in HEADS else published(self.head, self.repository)
        return linear_head(read_tensors("head", file), self.tower.dim, f"head={self.head}")


def published(head: str, repository: str) -> str:
    """Return the path of a head of `HEADS`, from the Hub, its cache, or the folder `repository`.

    Raises:
        RewardError: the file cannot be loaded, or differs from the authors' file.
    """
    name = f"{head}.pth"
    file = hub_file("repository", repository, name)
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != HEADS[head]:
        raise RewardError(
            f"repository={repository}: its {name} has the SHA-256 {digest}, not {HEADS[head]} of the authors' file: "
            "use another repository, or set head to the path of the file if this is intended"
        )
    return file


# --- HPS v2 and v2.1: human preference between images of a prompt
#
# Source: "Human Preference Score v2" (arXiv 2306.09341) and its code (github.com/tgxs002/HPSv2), whose score is the
# cosine without a scale: a CLIP ViT-H/14, fine-tuned on preferences between images of one prompt. Scores are comparable
# only for the same prompt and version. The authors' package bundles an old copy of open_clip; here the model runs in
# open_clip itself. The published checkpoints have not been run by this project.


@dataclass(frozen=True, kw_only=True)
class HpsV2(NetworkScorer):
    """cosine(image, prompt), about 0.2 to 0.4 for v2.1; prompts are truncated to 77 tokens, images padded, not cropped.

    `model` is a Hub repository or a local folder with the file `checkpoint` (v2.0: HPS_v2_compressed.pt),
    `architecture` open_clip's name of the architecture. The authors' code computes in float16 on a GPU.
    """

    model: str = "xswu/HPSv2"
    checkpoint: str = "HPS_v2.1_compressed.pt"
    architecture: str = "ViT-H-14"

    identity = ("hpsv2", "model", "checkpoint", "architecture")
    differentiable = True

    def __post_init__(self) -> None:
        _open_clip()

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        return in_batches(self.batch_size, self.network.cosines, images, prompts).tolist()

    def tensor_scores(self, images: torch.Tensor, prompts: list[str], metadata: list[Metadata]) -> torch.Tensor:
        network = self.network
        return network.tensor_cosines(longer_side(images, network.size), prompts)

    @property
    def network(self) -> "HpsNetwork":
        """HPS network, loaded on first use, once per process."""
        return _hps_network(self.model, self.checkpoint, self.architecture, *self.placement)


@dataclass(frozen=True, eq=False)
class HpsNetwork:
    """open_clip CLIP model with its tokenizer."""

    clip: "open_clip.CLIP"
    tokenizer: "open_clip.HFTokenizer | open_clip.SimpleTokenizer"
    device: torch.device
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Side of the input images in pixels."""
        return int(self.clip.visual.image_size[0])

    def cosines(self, images: list[Image.Image], prompts: list[str]) -> torch.Tensor:
        """Return the cosine `[B]` of image and prompt features, fp32.

        Resizes float tensors with antialiasing, like the authors' code with torchvision >= 0.17; PIL would round to
        bytes.
        """
        whole = torch.cat([longer_side(tensors_of([image]), self.size) for image in images])
        return self.tensor_cosines(whole, prompts)

    def tensor_cosines(self, images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """Return `cosines` of images `[B, 3, size, size]` in [0, 1], on the model's device, differentiable."""
        pixels = normalised(images, PIXEL_MEAN, PIXEL_STD)
        image = self.clip.encode_image(pixels.to(self.device, self.dtype))
        unique = list(dict.fromkeys(prompts))  # the images of a group share their prompt
        with torch.no_grad():
            text = self.clip.encode_text(self.tokenizer(unique).to(self.device))
        return F.cosine_similarity(image.float(), text[[unique.index(prompt) for prompt in prompts]].float())


@cache
def _hps_network(
    model: str, checkpoint: str, architecture: str, device: torch.device, dtype: torch.dtype
) -> HpsNetwork:
    sizes = _open_clip().get_model_config(architecture)
    if sizes is None:
        raise RewardError(f"architecture={architecture}: open_clip has no such model; the published one is ViT-H-14")
    file = hub_file("model", model, checkpoint)
    with loading("model", model, f"a repository with {checkpoint}"):
        tensors = torch.load(file, map_location="cpu", weights_only=True)["state_dict"]
        clip = _open_clip().CLIP(**sizes)
        clip.load_state_dict(tensors)
    clip = clip.to(device, dtype).eval().requires_grad_(False)
    return HpsNetwork(clip, _open_clip().get_tokenizer(architecture), device, dtype)


def _open_clip() -> ModuleType:
    """Import open_clip; raises `RewardError` naming the pip extra if it, or its torchvision, cannot be imported."""
    try:
        return require("open_clip", "clip")
    except RuntimeError as error:  # raised by a torchvision built for another torch
        raise RewardError(
            f"this scorer needs the package open_clip, whose torchvision does not match torch {torch.__version__} "
            f"({error}): run pip install 'gerl[clip]', then install the torchvision built for that torch"
        ) from error
