"""Tiny object detectors and instance segmenters in folders as the Hub has them: real classes, random weights."""

from pathlib import Path

import torch
from newer import transformers
from tiny_clip import save

LABELS = {0: "dog", 1: "cat", 2: "sofa"}


def detr_folder(folder: Path) -> str:
    """Save a DETR (boxes only), which pads the images of a batch to the largest."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    sizes = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}
    halves = {f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in sizes.items()}
    config = transformers.DetrConfig(
        **halves,
        backbone_config=backbone,
        **dict(use_timm_backbone=False, use_pretrained_backbone=False),
        **dict(d_model=16, num_queries=12, id2label=LABELS),
    )
    torch.manual_seed(5)
    model = transformers.DetrForObjectDetection(config)
    return save(folder, model, transformers.DetrImageProcessorPil(size={"shortest_edge": 32, "longest_edge": 64}), 0.4)


def mask2former_folder(folder: Path) -> str:
    """Save a Mask2Former; building one takes scipy."""
    sizes = dict(image_size=32, patch_size=2, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4)
    backbone = transformers.SwinConfig(**sizes, out_features=["stage1", "stage2", "stage3", "stage4"])
    widths = dict(feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16, dim_feedforward=16)
    layers = dict(encoder_layers=1, decoder_layers=2, num_attention_heads=2, num_queries=12)
    config = transformers.Mask2FormerConfig(
        **widths, **layers, backbone_config=backbone, feature_strides=[2, 4, 8, 16], id2label=LABELS
    )
    torch.manual_seed(0)
    model = transformers.Mask2FormerForUniversalSegmentation(config)
    return save(folder, model, transformers.Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}), 0.25)
