"""BLIP for questions from the file that its authors published, model_base_vqa_capfilt_large.pth.

Source: "BLIP" (arXiv 2201.12086) and its code (github.com/salesforce/BLIP), whose names of tensors these are. The file
has the images' size, 480 pixels a side, in its positions; transformers' copy of these weights was made for 384.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gerl.errors import RewardError
from gerl.rewards.scorers.clip_tower import expanded, loading
from gerl.rewards.scorers.imagereward import part, vision_config_of, vision_name

if TYPE_CHECKING:
    from transformers import BlipForQuestionAnswering

WHAT = "the BLIP VQA checkpoint as published by its authors"


def is_original(model: str) -> bool:
    """Whether `model` is a file of BLIP's authors."""
    return Path(model).suffix == ".pth"


def load_original(model: str) -> "BlipForQuestionAnswering":
    """The network in the file `model`, in transformers' form; raises `RewardError` if it is none."""
    import transformers

    with loading("model", model, WHAT):
        content = torch.load(expanded(model), map_location="cpu", weights_only=True)
        tensors = content["model"]
        # 0, 1, 2, ...: a buffer, not a weight
        tensors = {name: value for name, value in tensors.items() if not name.endswith(".position_ids")}
    if not any(name.startswith("text_decoder.") for name in tensors):
        raise RewardError(f"model={model} has no answer decoder: give {WHAT}")
    vision = part(tensors, "visual_encoder.")
    rest = {name: value for name, value in tensors.items() if name.startswith(("text_encoder.", "text_decoder."))}
    with loading("model", model, WHAT):
        network = transformers.BlipForQuestionAnswering(
            transformers.BlipConfig(
                text_config=_text_sizes(part(tensors, "text_encoder."), vision["pos_embed"].shape[-1]),
                vision_config=vision_config_of(vision).to_dict(),
            )
        )
        network.load_state_dict(rest | {f"vision_model.{vision_name(name)}": value for name, value in vision.items()})
    return network


def _text_sizes(tensors: dict[str, torch.Tensor], vision_width: int) -> dict[str, int]:
    """The sizes of the text encoder, which only its tensors tell; the answers' decoder has the same."""
    words, width = tensors["embeddings.word_embeddings.weight"].shape
    return {
        "vocab_size": words,
        "bos_token_id": words - 2,  # [DEC], behind BERT's words; the last one is [ENC]
        "hidden_size": width,
        "num_attention_heads": width // 64,
        "intermediate_size": tensors["encoder.layer.0.intermediate.dense.weight"].shape[0],
        "num_hidden_layers": len({name.split(".")[2] for name in tensors if name.startswith("encoder.layer.")}),
        "max_position_embeddings": tensors["embeddings.position_embeddings.weight"].shape[0],
        "encoder_hidden_size": vision_width,
    }
