"""Tiny Qwen2-VL and Qwen2.5-VL reward models in folders as the Hub has them: real classes, random weights."""

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from newer import tokenizer, transformers
from tokenizers import pre_tokenizers
from torch import nn

from reward_models.scorers.networks import pooled

WIDTH, PIXELS = 16, 4 * 28 * 28
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
MARKS += ["<|video_pad|>"]
# The conversation as the published tokenizers write it, without tools.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type != 'text' %}"
    "<|vision_start|><|{{ c.type }}_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen_folder(folder: Path, kind: str = "qwen2_vl") -> str:
    """Save the configuration, tokenizer and image processor that a reward model is based on, without weights."""
    vocabulary = {name: i for i, name in enumerate(["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    options = dict(additional_special_tokens=MARKS[1:], chat_template=TEMPLATE)
    tokens = tokenizer(transformers.Qwen2Tokenizer, vocabulary, **options)
    images = transformers.Qwen2VLImageProcessorPil()
    marks = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    marks["vision_start_token_id"] = "<|vision_start|>"
    ids: dict[str, Any] = {name: tokens.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    sizes: dict[str, Any] = dict(hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=1, vocab_size=len(tokens) + 7)  # rows that no token uses, as published
    sizes["rope_scaling"] = {"type": "default", "rope_type": "default", "mrope_section": [2, 1, 1]}
    vision: dict[str, Any] = dict(depth=1, num_heads=2)
    config: Any
    if kind == "qwen2_vl":
        vision |= dict(embed_dim=16, hidden_size=WIDTH, mlp_ratio=2)
        config = transformers.Qwen2VLConfig(text_config=sizes, vision_config=vision, **ids)
    else:
        vision |= dict(hidden_size=16, out_hidden_size=WIDTH, intermediate_size=32, fullatt_block_indexes=[0])
        config = transformers.Qwen2_5_VLConfig(text_config=sizes, vision_config=vision, **ids)
    for part in (config, tokens, images):
        part.save_pretrained(folder)
    return str(folder)


def head(outputs: int = 2) -> nn.Sequential:
    """A head as the authors build it."""
    layers = [nn.Linear(WIDTH, 8), nn.ReLU(), nn.Dropout(0.05), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, outputs)]
    return nn.Sequential(*layers).eval()


def whole_model(base: str, *added: str) -> tuple[Any, Any]:
    """A model of transformers with random weights and a row for each `added` token, and its tokenizer."""
    tokens = transformers.AutoTokenizer.from_pretrained(base)
    tokens.add_special_tokens({"additional_special_tokens": list(added)})
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.from_pretrained(base)).eval()
    model.resize_token_embeddings(len(tokens))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model, tokens


def save_reward_model(file: Path, model: Any, heads: dict[str, nn.Module], old_names: bool = False) -> None:
    """Save weights in one file, under the names of transformers since 4.52, or of earlier ones."""
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    if old_names:
        tensors = {
            name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
            for name, value in tensors.items()
        }
    for name, module in heads.items():
        tensors |= {f"{name}.{part}": value for part, value in module.state_dict().items()}
    safetensors.torch.save_file(tensors, file)


@torch.no_grad()
def hidden_of_token(model: Any, tokens: Any, pictures: list[Any], text: str, token: str) -> torch.Tensor:
    """The hidden state [1, width] of `token` in one conversation, as the authors' code gets it.

    Embeddings are put together by hand and go through the language model without ids: with positions of a text.
    """
    flat = [picture.convert("RGB") for picture in pictures]
    size = {"shortest_edge": PIXELS, "longest_edge": PIXELS}
    seen = transformers.Qwen2VLImageProcessorPil()(images=flat, size=size, return_tensors="pt")
    content = "".join(
        f"<|vision_start|>{'<|image_pad|>' * (int(grid.prod()) // 4)}<|vision_end|>" for grid in seen["image_grid_thw"]
    )
    chat = f"<|im_start|>user\n{content}{text}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokens(chat, return_tensors="pt")["input_ids"]
    embeddings = model.get_input_embeddings()(ids)
    patches = pooled(model.model.visual(seen["pixel_values"], grid_thw=seen["image_grid_thw"]))
    embeddings[ids == tokens.convert_tokens_to_ids("<|image_pad|>")] = patches
    hidden = model.model.language_model(inputs_embeds=embeddings).last_hidden_state
    return hidden[ids == tokens.convert_tokens_to_ids(token)]
