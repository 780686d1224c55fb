"""Scorers on a CLIP model, shared by those of a process: CLIPScore, PickScore and the aesthetic score."""

import hashlib
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import safetensors.torch
import torch
from PIL import Image
from pydantic import Field
from safetensors import SafetensorError

from gerl.config.blocks import Dtype
from gerl.errors import RewardError
from gerl.rewards.scorers.base import Metadata, Scorer
from gerl.rewards.scorers.tensor_preprocessing import normalised, resized, shorter_side

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, CLIPModel, PreTrainedTokenizerBase


# --- A CLIP model shared by the scorers of a process that use the same weights, and what those scorers have in common.
#
# Source: "Learning Transferable Visual Models From Natural Language Supervision" (arXiv 2103.00020).

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


# --- CLIPScore: how well an image fits its prompt.
#
# Source: "CLIPScore: A Reference-free Evaluation Metric for Image Captioning" (arXiv 2104.08718), without its clipping
# at 0; the scale is that of Flow-GRPO (arXiv 2505.05470), whose own resizing of the image differs from CLIP's by a
# little.

SCALE = 30.0


@dataclass(frozen=True, kw_only=True)
class ClipScore(ClipScorer):
    """exp(logit_scale) * cosine(image, prompt) / 30, about 0.5 to 1.2; with `raw` the cosine, in [-1, 1]."""

    raw: bool = False

    differentiable = True

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        return (self.cosines(images, prompts) * self.factor).tolist()

    def tensor_scores(self, images: torch.Tensor, prompts: list[str], metadata: list[Metadata]) -> torch.Tensor:
        return self.tensor_cosines(images, prompts) * self.factor

    @property
    def factor(self) -> float:
        """Of the cosine in the score."""
        return 1.0 if self.raw else self.tower.logit_scale / SCALE


# --- PickScore: how likely people are to prefer an image for its prompt.
#
# Source: "Pick-a-Pic: An Open Dataset of User Preferences for Text-to-Image Generation" (arXiv 2305.01569), section 4;
# the division by 26, near the mean score of good images, is Flow-GRPO's (arXiv 2505.05470).


@dataclass(frozen=True, kw_only=True)
class PickScore(ClipScorer):
    """exp(logit_scale) * cosine(image, prompt) / `scale`, about 0.7 to 0.9; scale=1 is the score of the paper."""

    model: str = "yuvalkirstain/PickScore_v1"
    processor: str | None = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 26.0

    differentiable = True

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        return (self.cosines(images, prompts) * (self.tower.logit_scale / self.scale)).tolist()

    def tensor_scores(self, images: torch.Tensor, prompts: list[str], metadata: list[Metadata]) -> torch.Tensor:
        return self.tensor_cosines(images, prompts) * (self.tower.logit_scale / self.scale)


# --- Aesthetic score: how much people like the look of an image, whatever its prompt.
#
# Source: LAION's improved aesthetic predictor (github.com/christophschuhmann/improved-aesthetic-predictor, commit
# 6934dd8, simple_inference.py, lines 40 to 117), a linear head on the CLIP ViT-L/14 feature, trained on ratings from 1
# to 10. The published head loads here; with the published CLIP weights it has not been run.

# The heads that have a name, and the SHA-256 of their files, taken from those in the authors' repository.
HEADS = {"sac+logos+ava1-l14-linearMSE": "21dd590f3ccdc646f0d53120778b296013b096a035a2718c9cb0d511bff0f1e0"}
LAYERS = (0, 2, 4, 6, 7)  # the linear ones of the original module: 1, 3 and 5 are dropout


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
        self._head.to(features.device)
        with torch.inference_mode():
            return self._head(features).squeeze(-1).tolist()

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
    from transformers.utils import cached_file

    name = f"{head}.pth"
    with loading("repository", repository, f"a repository with {name}"):
        file = cached_file(expanded(repository), name)
    with Path(file).open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != HEADS[head]:
        raise RewardError(
            f"repository={repository}: its {name} has the SHA-256 {found}, not {HEADS[head]} of the authors' file: "
            "use another repository, or set head to the path of the file if this is intended"
        )
    return str(file)


def linear_head(tensors: dict[str, torch.Tensor], width: int, source: str) -> torch.nn.Sequential:
    """The head [B, width] -> [B, 1] in fp32: linear layers with nothing between them, as the dropout is off.

    `tensors` has the names of the original: `layers.0.weight`, `layers.0.bias`, ... `layers.7.bias`.

    Raises:
        RewardError: other tensors (such as those of a head with activations), or sizes that do not fit together.
    """
    if set(tensors) != {f"layers.{i}.{kind}" for i in LAYERS for kind in ("weight", "bias")}:
        raise RewardError(
            f"{source}: expected weight and bias of layers {', '.join(map(str, LAYERS))} of a linear head, "
            f"got {', '.join(sorted(tensors)) or 'nothing'}; give the published file"
        )
    weights = [tensors[f"layers.{i}.weight"].float() for i in LAYERS]
    sizes = [width, *(weight.shape[0] for weight in weights)]
    if [weight.shape[-1] for weight in weights] != sizes[:-1] or sizes[-1] != 1:
        raise RewardError(
            f"{source}: expected a head from {width} to 1 number, got layers of the shapes "
            f"{', '.join(str(tuple(weight.shape)) for weight in weights)}; give the head that belongs to the model"
        )
    head = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    with torch.no_grad():
        for layer, i, weight in zip(head, LAYERS, weights, strict=True):
            assert isinstance(layer, torch.nn.Linear)
            layer.weight.copy_(weight)
            layer.bias.copy_(tensors[f"layers.{i}.bias"])
    return head.eval().requires_grad_(False)


def read_tensors(kwarg: str, path: str) -> dict[str, torch.Tensor]:
    """The tensors in the file `path`, on the CPU: safetensors, or PyTorch's format read as data without running code.

    Raises:
        RewardError: there is no such file, or it cannot be read as what its suffix says.
        pickle.UnpicklingError: a PyTorch file holds more than tensors.
    """
    file = Path(path).expanduser()
    with loading(kwarg, path, "such weights"):
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        # Published on a GPU, which the machine at hand may lack.
        state = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise RewardError(f"{kwarg}={path} contains {type(state).__name__}, not named tensors; give a state dict")
    return dict(state)
