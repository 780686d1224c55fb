"""Likeness of images: to a reference, in pixels or in the features of DINO, and to others of the group (diversity)."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import Field

from gerl.config.blocks import Dtype
from gerl.errors import RewardError
from gerl.rewards.scorers.base import Metadata, Scorer, features_of, reference_of
from gerl.rewards.scorers.clip import ClipScorer, Device, expanded, loading, resolve_device, resolve_dtype

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedModel


# --- Likeness of the drawn image to a reference or source picture, in the features of DINO, DINOv2 or DINOv3.
#
# Source: the DINO metric of "DreamBooth" (arXiv 2208.12242), section 4.2, the cosine of the CLS features of a ViT that
# learnt without labels: unlike CLIP it tells apart subjects of one kind. Models: arXiv 2104.14294, 2304.07193 and
# 2508.10104. The published weights have not been run by this project.

DINO_NAME = "dino_similarity"
# Those whose first token, after the last norm, is the feature of the whole image; "vit" is the first DINO.
KINDS = ("vit", "dinov2", "dinov2_with_registers", "dinov3_vit", "dinov3_convnext")


@dataclass(frozen=True, kw_only=True)
class DinoSimilarity(Scorer):
    """Cosine of the CLS features of image and reference, in [-1, 1], 1 for the reference itself.

    The reference is the row's `metadata_key`: a path, absolute or from the current directory, or a PIL image. `model`
    is the Hub id or the folder of a DINO, DINOv2 or DINOv3 model of transformers.
    """

    model: str = "facebook/dinov2-base"
    metadata_key: str = "image"
    batch_size: Annotated[int, Field(ge=1)] = 32
    device: Device = "auto"
    dtype: Dtype = "auto"

    @property
    def shares(self) -> str:
        return f"dino {self.model} {self.device} {self.dtype}"

    @property
    def network(self) -> "DinoNetwork":
        """Loaded when it is first needed, once a process for all that ask for the same one."""
        device = resolve_device(self.device)
        return _network(self.model, device, resolve_dtype(self.dtype, device))

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        references = [
            reference_of(DINO_NAME, prompt, row, self.metadata_key)
            for prompt, row in zip(prompts, metadata, strict=True)
        ]

        def features(pictures: list[Image.Image]) -> torch.Tensor:
            return self.network.features(pictures, self.batch_size)

        return (features(images) * features_of(references, features)).sum(-1).tolist()

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        reference_of(DINO_NAME, prompt, metadata, self.metadata_key)


@dataclass(frozen=True, eq=False)
class DinoNetwork:
    """A DINO model with its image processor."""

    model: "PreTrainedModel"
    processor: "BaseImageProcessor"
    dtype: torch.dtype

    def features(self, images: list[Image.Image], batch_size: int) -> torch.Tensor:
        """CLS features [B, dim] of length 1, fp32 on the CPU."""
        found = []
        for start in range(0, len(images), batch_size):
            batch = [image.convert("RGB") for image in images[start : start + batch_size]]
            pixels = self.processor(images=batch, return_tensors="pt")["pixel_values"]
            with torch.inference_mode():
                tokens = self.model(pixels.to(self.model.device, self.dtype)).last_hidden_state
            found.append(F.normalize(tokens[:, 0].float(), dim=-1).cpu())
        return torch.cat(found)


@cache
def _network(model: str, device: torch.device, dtype: torch.dtype) -> DinoNetwork:
    import transformers

    source, what = expanded(model), "a DINO model of transformers"
    with loading("model", model, what):
        kind = transformers.AutoConfig.from_pretrained(source).model_type
    if kind not in KINDS:
        raise RewardError(f"model={model} is a {kind} model: give a DINO, DINOv2 or DINOv3 one ({', '.join(KINDS)})")
    with loading("model", model, what):
        network, info = transformers.AutoModel.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
        processor = _processor(source, kind)
    # The pooler of the first DINO's class was never trained, and takes no part.
    missing = sorted(name for name in info["missing_keys"] if not name.startswith("pooler."))
    if missing:
        raise RewardError(
            f"model={model} has no weights for {missing[0]} and {len(missing) - 1} more tensors of a {kind} model: "
            "give the Hub id or the folder of a complete one"
        )
    return DinoNetwork(network.to(device, dtype).eval(), processor, dtype)


def _processor(source: str, kind: str) -> Any:
    import transformers

    # torchvision resizes to slightly other pixels than PIL: where it happens to be installed must not matter. The
    # class that DINOv3 names has no form without it; that of ViT resizes and normalises alike.
    automatic = transformers.AutoImageProcessor
    kept = transformers.ViTImageProcessorPil if kind.startswith("dinov3") else automatic
    return kept.from_pretrained(source, **({"backend": "pil"} if kept is automatic else {}))


# --- Likeness of the drawn image to a reference image, for editing and for drawing a given subject.
#
# Source: the CLIP-I metric of "DreamBooth" (arXiv 2208.12242), section 4.2.

IMAGE_NAME = "image_similarity"


@dataclass(frozen=True, kw_only=True)
class ImageSimilarity(ClipScorer):
    """Cosine of the CLIP features of image and reference, in [-1, 1], 1 for the reference itself.

    The reference is the row's `metadata_key`: a path, absolute or from the current directory, or a PIL image.
    """

    metadata_key: str = "image"

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        references = [
            reference_of(IMAGE_NAME, prompt, row, self.metadata_key)
            for prompt, row in zip(prompts, metadata, strict=True)
        ]

        def features(pictures: list[Image.Image]) -> torch.Tensor:
            return self.tower.image_features(pictures, self.batch_size)

        return (features(images) * features_of(references, features)).sum(-1).tolist()

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        reference_of(IMAGE_NAME, prompt, metadata, self.metadata_key)


# --- Diversity: how unlike the other images of its prompt an image is, against the collapse to one picture per prompt


@dataclass(frozen=True, kw_only=True)
class Diversity(ClipScorer):
    """1 - the mean cosine of an image's CLIP feature with those of the other images of its group, in [0, 2].

    0 for an image without others, as in validation. `nearest`: 1 - the largest cosine in place of the mean one, as
    GARDO measures it (arXiv 2512.24138; there with DINOv3).
    """

    nearest: bool = False
    groupwise = True

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        features = self.tower.image_features(images, self.batch_size)
        distances = (1 - features @ features.T).fill_diagonal_(0)
        if self.nearest and len(images) > 1:
            return distances.fill_diagonal_(torch.inf).min(1).values.tolist()
        return (distances.sum(1) / max(len(images) - 1, 1)).tolist()
