"""Likeness of images: to a reference, in the features of DINO or CLIP, and to others of the group (diversity)."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from PIL import Image

from gerl.errors import RewardError
from gerl.rewards.scorers.base import Metadata, Scorer, features_of, reference_of
from reward_models.scorers.clip import ClipScorer
from reward_models.scorers.networks import NetworkScorer, expanded, image_processor, in_batches, loading, pretrained

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class ReferenceScorer(Scorer):
    """Cosine of the features of image and reference, in [-1, 1], 1 for the reference itself.

    The reference is the row's `metadata_key`: a path, absolute or from the current directory, or a PIL image.
    """

    metadata_key: str = "image"

    label = ""  # in messages

    def features(self, images: list[Image.Image]) -> torch.Tensor:
        """Features [B, dim] of length 1, fp32 on the CPU."""
        raise NotImplementedError

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        rows = zip(prompts, metadata, strict=True)
        references = [reference_of(self.label, prompt, row, self.metadata_key) for prompt, row in rows]
        return (self.features(images) * features_of(references, self.features)).sum(-1).tolist()

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        reference_of(self.label, prompt, metadata, self.metadata_key)


# --- Likeness to a reference or source picture in the features of DINO, DINOv2 or DINOv3.
#
# Source: the DINO metric of "DreamBooth" (arXiv 2208.12242), section 4.2, the cosine of the CLS features of a ViT that
# learnt without labels: unlike CLIP it tells apart subjects of one kind. Models: arXiv 2104.14294, 2304.07193 and
# 2508.10104. The published weights have not been run by this project.

# Those whose first token, after the last norm, is the feature of the whole image; "vit" is the first DINO.
KINDS = ("vit", "dinov2", "dinov2_with_registers", "dinov3_vit", "dinov3_convnext")


@dataclass(frozen=True, kw_only=True)
class DinoSimilarity(ReferenceScorer, NetworkScorer):
    """Cosine of the CLS features of image and reference, in [-1, 1], 1 for the reference itself.

    The reference is the row's `metadata_key`: a path, absolute or from the current directory, or a PIL image. `model`
    is the Hub id or the folder of a DINO, DINOv2 or DINOv3 model of transformers.
    """

    model: str = "facebook/dinov2-base"

    label = "dino_similarity"
    identity = ("dino", "model")

    @property
    def network(self) -> "DinoNetwork":
        """Loaded when it is first needed, once a process for all that ask for the same one."""
        return _network(self.model, *self.placement)

    def features(self, images: list[Image.Image]) -> torch.Tensor:
        return in_batches(self.batch_size, self.network.features, images)


@dataclass(frozen=True, eq=False)
class DinoNetwork:
    """A DINO model with its image processor."""

    model: "PreTrainedModel"
    processor: "BaseImageProcessor"
    dtype: torch.dtype

    def features(self, images: list[Image.Image]) -> torch.Tensor:
        """CLS features [B, dim] of length 1, fp32."""
        pixels = self.processor(images=[image.convert("RGB") for image in images], return_tensors="pt")["pixel_values"]
        tokens = self.model(pixels.to(self.model.device, self.dtype)).last_hidden_state
        return F.normalize(tokens[:, 0].float(), dim=-1)


@cache
def _network(model: str, device: torch.device, dtype: torch.dtype) -> DinoNetwork:
    import transformers

    what = "a DINO, DINOv2 or DINOv3 model of transformers"
    with loading("model", model, what):
        kind = transformers.AutoConfig.from_pretrained(expanded(model)).model_type
    if kind not in KINDS:
        raise RewardError(f"model={model} is a {kind} model: give {what} ({', '.join(KINDS)})")
    # The pooler of the first DINO's class was never trained, and takes no part.
    network = pretrained(transformers.AutoModel, model, what, unused="pooler.")
    with loading("model", model, what):
        if kind.startswith("dinov3"):  # its class has no form without torchvision; that of ViT does the same
            processor = transformers.ViTImageProcessorPil.from_pretrained(expanded(model))
        else:
            processor = image_processor(model)
    return DinoNetwork(network.to(device, dtype), processor, dtype)


# --- Likeness to a reference image, for editing and for a given subject, in the features of CLIP.
#
# Source: the CLIP-I metric of "DreamBooth" (arXiv 2208.12242), section 4.2.


@dataclass(frozen=True, kw_only=True)
class ImageSimilarity(ReferenceScorer, ClipScorer):
    """Cosine of the CLIP features of image and reference, in [-1, 1], 1 for the reference itself.

    The reference is the row's `metadata_key`: a path, absolute or from the current directory, or a PIL image.
    """

    label = "image_similarity"

    def features(self, images: list[Image.Image]) -> torch.Tensor:
        return self.tower.image_features(images, self.batch_size)


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
