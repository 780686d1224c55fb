"""Scorers on a CLIP model, shared by those of a process: CLIPScore, PickScore, the aesthetic score, and HPS v2."""

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


# --- A CLIP model shared by the scorers of a process that use the same weights, and what those scorers have in common.
#
# Source: "Learning Transferable Visual Models From Natural Language Supervision" (arXiv 2103.00020).

CLIP_L14 = "openai/clip-vit-large-patch14"


@dataclass(frozen=True, eq=False)
class ClipTower:
    """Image and text features of a CLIP model; `clip_tower` gives one."""

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

        def features(batch: list[Image.Image]) -> torch.Tensor:
            rgb = [image.convert("RGB") for image in batch]
            return self._encoded(self.image_processor(images=rgb, return_tensors="pt")["pixel_values"])

        return in_batches(batch_size, features, images)

    def features_of(self, images: torch.Tensor) -> torch.Tensor:
        """Features [B, dim] of length 1, fp32 on the model's device, with graph, of images [B, 3, H, W] in [0, 1]."""
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
        return F.normalize(output.pooler_output.float(), dim=-1)

    def text_features(self, texts: list[str], batch_size: int) -> torch.Tensor:
        """Features [B, dim] of length 1, fp32 on the CPU; a text beyond the model's length (77 tokens) is cut off."""
        # Padded to the longest of the batch, a text would be computed in another shape next to other texts, and so,
        # in half precision, to another value.
        length = self.model.config.text_config.max_position_embeddings

        def features(batch: list[str]) -> torch.Tensor:
            inputs = self.tokenizer(
                batch, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
            ).to(self.model.device)
            output = self.model.get_text_features(inputs["input_ids"], attention_mask=inputs["attention_mask"])
            return F.normalize(output.pooler_output.float(), dim=-1)

        unique = list(dict.fromkeys(texts))  # the images of a group share their prompt
        rows = {text: row for row, text in enumerate(unique)}
        return in_batches(batch_size, features, unique)[[rows[text] for text in texts]]


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

    clip = pretrained(transformers.CLIPModel, model, "a transformers CLIP model")
    with loading("processor", processor, "a CLIP tokenizer and image processor"):
        images = image_processor(processor)
        tokenizer = transformers.AutoTokenizer.from_pretrained(expanded(processor))
    # Before the cast: 4.605 in bfloat16 is 4.594, which would lower every score by 1.1 %.
    scale = clip.logit_scale.detach().exp().item()
    return ClipTower(clip.to(device, dtype).requires_grad_(False), images, tokenizer, scale, dtype)


@dataclass(frozen=True, kw_only=True)
class ClipScorer(NetworkScorer):
    """The kwargs and the model of the scorers on a CLIP tower.

    `model` and `processor` (default: `model`) are Hub ids or local folders.
    """

    model: str = CLIP_L14
    processor: str | None = None

    identity = ("clip", "model", "processor")

    @property
    def tower(self) -> ClipTower:
        """Loaded when it is first needed, by whichever scorer comes first."""
        return clip_tower(self.model, self.processor, self.device, self.dtype)


class ClipCosine(ClipScorer):
    """`factor` times the cosine of an image's feature with that of its prompt."""

    differentiable = True

    @property
    def factor(self) -> float:
        """The score of a cosine of 1."""
        raise NotImplementedError

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        image = self.tower.image_features(images, self.batch_size)
        return ((image * self.tower.text_features(prompts, self.batch_size)).sum(-1) * self.factor).tolist()

    def tensor_scores(self, images: torch.Tensor, prompts: list[str], metadata: list[Metadata]) -> torch.Tensor:
        image = self.tower.features_of(images)
        text = self.tower.text_features(prompts, self.batch_size).to(image.device)
        return (image * text).sum(-1) * self.factor


# --- CLIPScore: how well an image fits its prompt.
#
# Source: "CLIPScore: A Reference-free Evaluation Metric for Image Captioning" (arXiv 2104.08718), without its clipping
# at 0; the scale is that of Flow-GRPO (arXiv 2505.05470), whose own resizing of the image differs from CLIP's by a
# little.

SCALE = 30.0


@dataclass(frozen=True, kw_only=True)
class ClipScore(ClipCosine):
    """exp(logit_scale) * cosine(image, prompt) / 30, about 0.5 to 1.2; with `raw` the cosine, in [-1, 1]."""

    raw: bool = False

    @property
    def factor(self) -> float:
        return 1.0 if self.raw else self.tower.logit_scale / SCALE


# --- PickScore: how likely people are to prefer an image for its prompt.
#
# Source: "Pick-a-Pic: An Open Dataset of User Preferences for Text-to-Image Generation" (arXiv 2305.01569), section 4;
# the division by 26, near the mean score of good images, is Flow-GRPO's (arXiv 2505.05470).


@dataclass(frozen=True, kw_only=True)
class PickScore(ClipCosine):
    """exp(logit_scale) * cosine(image, prompt) / `scale`, about 0.7 to 0.9; scale=1 is the score of the paper."""

    model: str = "yuvalkirstain/PickScore_v1"
    processor: str | None = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 26.0

    @property
    def factor(self) -> float:
        return self.tower.logit_scale / self.scale


# --- Aesthetic score: how much people like the look of an image, whatever its prompt.
#
# Source: LAION's improved aesthetic predictor (github.com/christophschuhmann/improved-aesthetic-predictor, commit
# 6934dd8, simple_inference.py, lines 40 to 117), a linear head on the CLIP ViT-L/14 feature, trained on ratings from 1
# to 10. The published head loads here; with the published CLIP weights it has not been run.

# The heads that have a name, and the SHA-256 of their files, taken from those in the authors' repository.
HEADS = {"sac+logos+ava1-l14-linearMSE": "21dd590f3ccdc646f0d53120778b296013b096a035a2718c9cb0d511bff0f1e0"}


@dataclass(frozen=True, kw_only=True)
class AestheticScore(ClipScorer):
    """The head's rating of the normalised image feature, about 1 to 10.

    `head` is the name of a published one (3.7 MB), or the path of a file, .pth or .safetensors. A named one is
    downloaded once from `repository`, a Hub id or a local folder, and refused unless it is the authors' file.
    """

    head: str = "sac+logos+ava1-l14-linearMSE"
    repository: str = "camenduru/improved-aesthetic-predictor"  # the authors have it on GitHub only

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
    """The file of a head of `HEADS`, from the Hub or its cache, or from the folder `repository`.

    Raises:
        RewardError: it cannot be had from there, or is another file than the authors'.
    """
    name = f"{head}.pth"
    file = hub_file("repository", repository, name)
    with open(file, "rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != HEADS[head]:
        raise RewardError(
            f"repository={repository}: its {name} has the SHA-256 {found}, not {HEADS[head]} of the authors' file: "
            "use another repository, or set head to the path of the file if this is intended"
        )
    return file


# --- HPS v2 and v2.1: which image people prefer for a prompt.
#
# Source: "Human Preference Score v2" (arXiv 2306.09341) and its code (github.com/tgxs002/HPSv2), whose score is the
# cosine without a scale: a CLIP ViT-H/14, fine-tuned on choices between images of one prompt. Only scores of the same
# prompt and version compare. The authors' package brings an old copy of open_clip; here open_clip itself runs the
# model. The published checkpoints have not been run by this project.


@dataclass(frozen=True, kw_only=True)
class HpsV2(NetworkScorer):
    """cosine(image, prompt), about 0.2 to 0.4 for v2.1; a prompt is cut off after 77 tokens, an image never cropped.

    `model` is a Hub repository or a local folder with the file `checkpoint` (v2.0: HPS_v2_compressed.pt),
    `architecture` open_clip's name for its sizes. The authors' code computes in float16 on a GPU.
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
        """Loaded when it is first needed, once a process for all that ask for the same one."""
        return _hps_network(self.model, self.checkpoint, self.architecture, *self.placement)


@dataclass(frozen=True, eq=False)
class HpsNetwork:
    """A CLIP model of open_clip with its tokenizer."""

    clip: "open_clip.CLIP"
    tokenizer: "open_clip.HFTokenizer | open_clip.SimpleTokenizer"
    device: torch.device
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Pixels a side of the images that it sees."""
        return int(self.clip.visual.image_size[0])

    def cosines(self, images: list[Image.Image], prompts: list[str]) -> torch.Tensor:
        """Cosine [B] of each image's feature with that of its prompt, fp32.

        Resizes numbers, with antialiasing, as the authors' code does with torchvision >= 0.17; PIL would round to
        bytes.
        """
        whole = torch.cat([longer_side(tensors_of([image]), self.size) for image in images])
        return self.tensor_cosines(whole, prompts)

    def tensor_cosines(self, images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """`cosines` of images [B, 3, size, size] in [0, 1], on the model's device, with graph."""
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
    """The package; raises `RewardError` naming the pip extra if it, or the torchvision it needs, cannot be imported."""
    try:
        return require("open_clip", "clip")
    except RuntimeError as error:  # of torchvision, where it was built for another torch
        raise RewardError(
            f"this scorer needs the package open_clip, whose torchvision does not match torch {torch.__version__} "
            f"({error}): run pip install 'gerl[clip]', then install the torchvision built for that torch"
        ) from error
