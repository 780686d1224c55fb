"""Tiny models of the DINO family in folders as the Hub has them: real classes, random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from newer import transformers
from tiny_clip import SIZE, save

KINDS = ("vit", "dinov2", "dinov2_with_registers", "dinov3_vit", "dinov3_convnext")


def dino_folder(folder: Path, kind: str = "dinov2") -> str:
    """Save a model of that kind with its image processor."""
    sizes: dict[str, Any] = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=SIZE)
    sizes |= dict(patch_size=8, layerscale_value=1.0)
    match kind:
        case "vit":
            config = transformers.ViTConfig(intermediate_size=32, **sizes)
        case "dinov2":
            config = transformers.Dinov2Config(mlp_ratio=2, **sizes)
        case "dinov2_with_registers":
            config = transformers.Dinov2WithRegistersConfig(mlp_ratio=2, num_register_tokens=2, **sizes)
        case "dinov3_vit":
            config = transformers.DINOv3ViTConfig(intermediate_size=32, num_register_tokens=2, **sizes)
        case "dinov3_convnext":
            config = transformers.DINOv3ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1])
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    square = {"height": SIZE, "width": SIZE}
    processor = transformers.BitImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=square)
    if not kind.startswith("dinov2"):
        processor = transformers.ViTImageProcessorPil(size=square)
    path = save(folder, model, processor, 0.4)
    if kind.startswith("dinov3"):  # the class that the published folder names
        file = folder / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"image_processor_type": "DINOv3ViTImageProcessor"}))
    return path
