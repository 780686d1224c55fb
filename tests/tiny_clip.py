"""Tiny CLIP models in folders as the Hub has them: real classes, random weights, a byte tokenizer of CLIP's kind."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import pre_tokenizers

SIZE = 32


def tokenizer(max_length: int = 77) -> Any:
    """CLIP's tokenizer without merges: one token a byte; the highest id ends a text, as in the published one."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*bytes_, *(b + "</w>" for b in bytes_), "<|startoftext|>", "<|endoftext|>"]
    return transformers.CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=max_length
    )


def save(folder: Path, model: Any, processor: Any, std: float) -> str:
    """Weights are drawn large enough that different inputs get different features and scores."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=std)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def clip_folder(folder: Path, seed: int = 0, projection: int = 16, logit_scale: float = 3.1) -> str:
    """Save a CLIP model with its processor."""
    tokens = tokenizer()
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    special = {name: getattr(tokens, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.CLIPConfig(
        text_config=dict(vocab_size=len(tokens), max_position_embeddings=20, **special, **sizes),
        vision_config=dict(image_size=SIZE, patch_size=8, **sizes),
        projection_dim=projection,
    )
    torch.manual_seed(seed)
    model = transformers.CLIPModel(config).eval()
    model.logit_scale.data.fill_(logit_scale)
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    return save(folder, model, transformers.CLIPProcessor(images, tokens), 0.4)


def pictures(count: int, seed: int = 0) -> list[Image.Image]:
    """Coloured noise images, every other one wider than high."""
    rng = np.random.default_rng(seed)
    images = []
    for i in range(count):
        pixels = rng.integers(0, 256, (5, 5 + 3 * (i % 2), 3), dtype=np.uint8)
        images.append(Image.fromarray(pixels).resize((40 + 24 * (i % 2), 40)))
    return images
