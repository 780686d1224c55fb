"""Tiny object detectors and instance segmenters in folders as the Hub has them: real classes, random weights."""

from pathlib import Path
from typing import Any

import torch
import transformers

LABELS = {0: "dog", 1: "cat", 2: "sofa"}


def detr_folder(folder: Path) -> str:
    """Save a DETR (boxes only), which pads the images of a batch to the largest."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=12,
        id2label=LABELS,
    )
    torch.manual_seed(0)
    model = transformers.DetrForObjectDetection(config)
    processor = transformers.DetrImageProcessorPil(size={"shortest_edge": 32, "longest_edge": 64})
    return _saved(folder, model, processor, 0.4)


def mask2former_folder(folder: Path) -> str:
    """Save a Mask2Former; building one takes scipy."""
    backbone = transformers.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=12,
        feature_strides=[2, 4, 8, 16],
        id2label=LABELS,
    )
    torch.manual_seed(0)
    model = transformers.Mask2FormerForUniversalSegmentation(config)
    processor = transformers.Mask2FormerImageProcessorPil(size={"height": 64, "width": 64})
    return _saved(folder, model, processor, 0.25)


def _saved(folder: Path, model: Any, processor: Any, std: float) -> str:
    """Weights are large enough that queries and images differ, with scores of all sizes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=std)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)
