"""Image similarity to a reference in DINO or CLIP features, and diversity within a group."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from PIL import Image

from gerl.errors import RewardError
from gerl.rewards.scorers.base import Metadata, Scorer, features_of, reference_of
from gerl.utils.versions import has
from reward_models.scorers.clip import ClipScorer
from reward_models.scorers.networks import NetworkScorer, expanded, image_processor, in_batches, loading, pretrained

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class ReferenceScorer(Scorer):
    """Base class of scorers that return the cosine of the features of image and reference, in [-1, 1].

    The reference is the row's `metadata_key`: a path, absolute or relative to the current directory, or a PIL image.
    """

    metadata_key: str = "image"

    label = ""  # scorer name in error messages

    def features(self, images: list[Image.Image]) -> torch.Tensor:
        """Return unit-norm features `[B, dim]`, fp32 on the CPU."""
        raise NotImplementedError

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        rows = zip(prompts, metadata, strict=True)
        references = [reference_of(self.label, prompt, row, self.metadata_key) for prompt, row in rows]
        return (self.features(images) * features_of(references, self.features)).sum(-1).tolist()

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        reference_of(self.label, prompt, metadata, self.metadata_key)


# --- Similarity to a reference or source image in DINO, DINOv2 or DINOv3 features
#
# Source: the DINO metric of "DreamBooth" (arXiv 2208.12242), section 4.2, the cosine of the CLS features of a
# self-supervised ViT: unlike CLIP it distinguishes subjects of the same class. Models: arXiv 2104.14294, 2304.07193 and
# 2508.10104. The published weights have not been run by this project.

# models whose first token, after the last norm, is the feature of the whole image; "vit" is the first DINO
KINDS = ("vit", "dinov2", "dinov2_with_registers", "dinov3_vit", "dinov3_convnext")


@dataclass(frozen=True, kw_only=True)
class DinoSimilarity(ReferenceScorer, NetworkScorer):
    """Cosine of the CLS features of image and reference, in [-1, 1], 1 for the reference itself.

    The reference is the row's `metadata_key`: a path, absolute or relative to the current directory, or a PIL image.
    `model` is the Hub id or folder of a DINO, DINOv2 or DINOv3 model of transformers.
    """

    model: str = "facebook/dinov2-base"

    label = "dino_similarity"
    identity = ("dino", "model")

    @property
    def network(self) -> "DinoNetwork":
        """DINO network, loaded on first use, once per process."""
        return _network(self.model, *self.placement)

    def features(self, images: list[Image.Image]) -> torch.Tensor:
        return in_batches(self.batch_size, self.network.features, images)


@dataclass(frozen=True, eq=False)
class DinoNetwork:
    """DINO model with its image processor."""

    model: "PreTrainedModel"
    processor: "BaseImageProcessor"
    dtype: torch.dtype

    def features(self, images: list[Image.Image]) -> torch.Tensor:
        """Return unit-norm CLS features `[B, dim]`, fp32."""
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
    # the pooler in the class of the first DINO is untrained and unused
    network = pretrained(transformers.AutoModel, model, what, unused="pooler.")
    with loading("model", model, what):
        if kind.startswith("dinov3"):  # its class requires torchvision; the ViT processor is equivalent
            name = "ViTImageProcessorPil" if has("transformers", "5.4") else "ViTImageProcessor"
            processor = getattr(transformers, name).from_pretrained(expanded(model))
        else:
            processor = image_processor(model)
    return DinoNetwork(network.to(device, dtype), processor, dtype)


# --- Similarity to a reference image in CLIP features, for editing and subject-driven generation
#
# Source: the CLIP-I metric of "DreamBooth" (arXiv 2208.12242), section 4.2.


@dataclass(frozen=True, kw_only=True)
class ImageSimilarity(ReferenceScorer, ClipScorer):
    """Cosine of the CLIP features of image and reference, in [-1, 1], 1 for the reference itself.

    The reference is the row's `metadata_key`: a path, absolute or relative to the current directory, or a PIL image.
    """

    label = "image_similarity"

    def features(self, images: list[Image.Image]) -> torch.Tensor:
        return self.tower.image_features(images, self.batch_size)


# --- Diversity: dissimilarity to the other images of the prompt, against mode collapse


@dataclass(frozen=True, kw_only=True)
class Diversity(ClipScorer):
    """1 - the mean cosine of an image's CLIP feature with the features of the rest of its group, in [0, 2].

    0 for a single image, as in validation. `nearest`: 1 - the largest cosine instead of the mean, as in GARDO (arXiv
    2512.24138; there with DINOv3).
    """

    nearest: bool = False
    groupwise = True

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        features = self.tower.image_features(images, self.batch_size)
        distances = (1 - features @ features.T).fill_diagonal_(0)
        if self.nearest and len(images) > 1:
            return distances.fill_diagonal_(torch.inf).min(1).values.tolist()
        return (distances.sum(1) / max(len(images) - 1, 1)).tolist()
