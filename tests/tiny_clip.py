"""Tiny CLIP models in folders as the Hub has them: real classes, random weights, a byte tokenizer of CLIP's kind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from newer import tokenizer, transformers
from PIL import Image
from tokenizers import pre_tokenizers

SIZE, LOGIT_SCALE = 32, 3.1


def save(folder: Path, model: Any, processor: Any, std: float) -> str:
    """Weights are drawn large enough that different inputs get different features and scores."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=std)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def clip_folder(folder: Path) -> str:
    """Save a CLIP model with its processor."""
    # Without merges: one token a byte; the highest id ends a text, as in the published one.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokens = tokenizer(transformers.CLIPTokenizer, {name: i for i, name in enumerate(names)}, model_max_length=77)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    special = {name: getattr(tokens, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.CLIPConfig(
        text_config=dict(vocab_size=len(tokens), max_position_embeddings=20, **special, **sizes),
        vision_config=dict(image_size=SIZE, patch_size=8, **sizes),
        projection_dim=16,
    )
    torch.manual_seed(0)
    model = transformers.CLIPModel(config).eval()
    model.logit_scale.data.fill_(LOGIT_SCALE)
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


@torch.no_grad()
def whole_model(folder: str, images: list[Image.Image], texts: list[str]) -> Any:
    """The output of transformers' whole CLIP model for images and texts."""
    processor = transformers.CLIPProcessor.from_pretrained(folder, backend="pil")
    inputs = processor(text=texts, images=images, padding=True, truncation=True, max_length=20, return_tensors="pt")
    return transformers.CLIPModel.from_pretrained(folder)(**inputs)


def assert_scored_alone(score: Any, images: list[Image.Image], prompts: list[str], tolerance: float = 1e-6) -> None:
    """Assert that a score depends on its image and on its prompt, and neither on their place nor on the others.

    The second image and the second prompt are unlike the first.
    """
    scores, rows = score(images, prompts, [{}] * len(images)), [{}] * len(images)
    assert score(images[::-1], prompts[::-1], rows) == pytest.approx(scores[::-1], abs=tolerance)
    alone = [score([image], [prompt], [{}])[0] for image, prompt in zip(images, prompts, strict=True)]
    assert alone == pytest.approx(scores, abs=tolerance)
    for image, prompt in ((images[0], prompts[1]), (images[1], prompts[0])):
        assert abs(score([image], [prompt], [{}])[0] - scores[0]) > 1e-3
