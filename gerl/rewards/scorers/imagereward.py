"""ImageReward: how people would rate an image for its prompt.

Source: "ImageReward: Learning and Evaluating Human Preferences for Text-to-Image Generation" (arXiv 2304.05977) and its
code (github.com/THUDM/ImageReward): a BLIP image encoder, a BERT that reads the prompt and attends to the image, and a
linear head on its first token. The model is built here from the BLIP parts of transformers, as the package does not run
with current releases. At small sizes with random weights it was compared with the modules of that package (image-reward
1.5); the published checkpoint itself has not been run.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
from PIL import Image
from pydantic import Field

from gerl.config.blocks import Dtype
from gerl.rewards.scorers.base import Metadata, Scorer
from gerl.rewards.scorers.clip import (
    Device,
    expanded,
    linear_head,
    loading,
    read_tensors,
    resolve_device,
    resolve_dtype,
)
from gerl.rewards.scorers.tensor_preprocessing import normalised, shorter_side

if TYPE_CHECKING:
    from transformers import BlipTextConfig, BlipVisionConfig, PreTrainedTokenizerBase

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the head's output over the authors' data
TOKENS = 35
PIXEL_MEAN = np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float32)
PIXEL_STD = np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float32)

# Names in the published checkpoint -> those of transformers' BlipVisionModel; the text encoder's are the same.
VISION_NAMES = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^norm\.", "post_layernorm."),
    (r"^blocks\.(\d+)\.norm(\d)\.", r"encoder.layers.\1.layer_norm\2."),
    (r"^blocks\.(\d+)\.attn\.qkv\.", r"encoder.layers.\1.self_attn.qkv."),
    (r"^blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.projection."),
    (r"^blocks\.(\d+)\.mlp\.", r"encoder.layers.\1.mlp."),
)


@dataclass(frozen=True, kw_only=True)
class ImageReward(Scorer):
    """The standardised rating, about -2 to 2. A prompt is cut off after 35 tokens, an image cropped to a square.

    `model` is a Hub repository or a local folder with the original ImageReward.pt and med_config.json, `tokenizer` that
    of the BERT it was trained with.
    """

    model: str = "THUDM/ImageReward"
    tokenizer: str = "google-bert/bert-base-uncased"
    batch_size: Annotated[int, Field(ge=1)] = 32
    device: Device = "auto"
    dtype: Dtype = "auto"

    differentiable = True

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        network, tokenizer = self._network, self._tokenizer
        scores: list[float] = []
        for start in range(0, len(images), self.batch_size):
            rows = slice(start, start + self.batch_size)
            pixels = torch.stack([preprocess(image, network.image_size) for image in images[rows]])
            with torch.inference_mode():
                scores += network(pixels, *_read(tokenizer, prompts[rows])).tolist()
        return scores

    def tensor_scores(self, images: torch.Tensor, prompts: list[str], metadata: list[Metadata]) -> torch.Tensor:
        network = self._network
        images = shorter_side(images, size := network.image_size)
        top, left = (round((side - size) / 2) for side in images.shape[2:])
        pixels = normalised(images[:, :, top : top + size, left : left + size], PIXEL_MEAN, PIXEL_STD)
        ratings: torch.Tensor = network(pixels, *_read(self._tokenizer, prompts))
        return ratings

    @cached_property
    def _network(self) -> "ImageRewardNetwork":
        from transformers.utils import cached_file

        device = resolve_device(self.device)
        with loading("model", self.model, "a repository with ImageReward.pt and med_config.json"):
            weights, config = (cached_file(expanded(self.model), f) for f in ("ImageReward.pt", "med_config.json"))
            with open(config) as file:
                text = json.load(file)
        network = ImageRewardNetwork(read_tensors("model", weights), text, self.model).eval().to(device)
        for encoder in (network.vision, network.text):  # the head stays in fp32
            encoder.to(dtype=resolve_dtype(self.dtype, device))
        return network.requires_grad_(False)

    @cached_property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        import transformers

        with loading("tokenizer", self.tokenizer, "a BERT tokenizer"):
            return transformers.AutoTokenizer.from_pretrained(expanded(self.tokenizer))


class ImageRewardNetwork(torch.nn.Module):
    """The network of a checkpoint with the original names, whose sizes it has; `text` is the original med_config.json.

    Raises:
        RewardError: tensors are missing or of other shapes than they should be.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], text: Mapping[str, object], source: str) -> None:
        super().__init__()
        import transformers

        vision_tensors, text_tensors, head = (
            part(tensors, f"{name}.") for name in ("blip.visual_encoder", "blip.text_encoder", "mlp")
        )
        text_tensors.pop("embeddings.position_ids", None)  # 0, 1, 2, ...: a buffer, not a weight
        with loading("model", source, "ImageReward with its med_config.json"):
            vision_config = vision_config_of(vision_tensors)
            self.image_size: int = vision_config.image_size
            self.vision = transformers.BlipVisionModel(vision_config)
            self.vision.load_state_dict({vision_name(name): value for name, value in vision_tensors.items()})
            text_config = _text_config(text, vision_config.hidden_size)
            self.text = transformers.BlipTextModel(text_config, add_pooling_layer=False)
            self.text.load_state_dict(text_tensors)
        self.head = linear_head(head, text_config.hidden_size, source)

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Ratings [B], fp32, of pixels [B, 3, size, size] for token ids and mask [B, tokens]."""
        device, dtype = self.vision.device, self.vision.dtype
        seen = self.vision(pixels.to(device, dtype)).last_hidden_state
        read = self.text(ids.to(device), attention_mask=mask.to(device), encoder_hidden_states=seen)
        ratings: torch.Tensor = self.head(read.last_hidden_state[:, 0].float()).squeeze(-1)
        return (ratings - MEAN) / STD


def _read(tokenizer: "PreTrainedTokenizerBase", prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask [B, tokens]."""
    inputs = tokenizer(prompts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
    return inputs["input_ids"], inputs["attention_mask"]


def part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def vision_name(name: str) -> str:
    for pattern, replacement in VISION_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def vision_config_of(tensors: dict[str, torch.Tensor]) -> "BlipVisionConfig":
    """The sizes of the image encoder, which only its tensors tell."""
    import transformers

    positions, width = tensors["pos_embed"].shape[1:]
    patch = tensors["patch_embed.proj.weight"].shape[-1]
    return transformers.BlipVisionConfig(
        hidden_size=width,
        intermediate_size=tensors["blocks.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=len({name.split(".")[1] for name in tensors if name.startswith("blocks.")}),
        num_attention_heads=width // 64,  # in BLIP's base and large encoder alike
        image_size=math.isqrt(positions - 1) * patch,
        patch_size=patch,
        layer_norm_eps=1e-6,  # of BLIP; transformers' default is 1e-5
    )


def _text_config(text: Mapping[str, object], vision_width: int) -> "BlipTextConfig":
    import transformers

    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings"
    sizes = {name: text[name] for name in f"{names} hidden_act layer_norm_eps pad_token_id".split()}
    # With is_decoder the layers have cross-attention; whether the mask is causal is an argument of forward.
    return transformers.BlipTextConfig(**sizes, encoder_hidden_size=vision_width, is_decoder=True)


def preprocess(image: Image.Image, size: int) -> torch.Tensor:
    """Pixels [3, size, size]: the shorter side resized to `size`, the middle cut out, normalised as for CLIP.

    Rounds where torchvision's Resize and CenterCrop do, which the original uses.
    """
    image = image.convert("RGB")
    short = min(image.size)
    width, height = (int(size * side / short) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), dtype=np.float32) / 255
    return torch.from_numpy((pixels - PIXEL_MEAN) / PIXEL_STD).permute(2, 0, 1)
