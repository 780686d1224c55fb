import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from newer import tokenizer, transformers
from PIL import Image
from tensor_scores import assert_differentiable
from tiny_clip import assert_scored_alone, pictures

from gerl.errors import RewardError
from reward_models.scorers.blip import ImageReward, preprocess

Tensors = dict[str, torch.Tensor]
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a cat dog on the red mat two blue sky sits".split()
SIZE, PATCH, VISION, TEXT, HEADS, LAYERS = 32, 8, 128, 48, 4, 2
PROMPTS = ["a cat on the mat", "two", "the red dog sits on the blue mat", "two"]
MED_CONFIG = {
    "encoder_width": 768,  # not that of the image encoder, in the published file neither
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    **dict(vocab_size=len(WORDS) + 2, max_position_embeddings=40, hidden_size=TEXT, intermediate_size=2 * TEXT),
    **dict(num_attention_heads=HEADS, num_hidden_layers=LAYERS),
}


def checkpoint() -> Tensors:
    """Random weights under the names of the published ImageReward.pt."""
    eye, bert = "blip.visual_encoder", "blip.text_encoder"
    # BERT's names are those of transformers.
    config = transformers.BlipTextConfig(**MED_CONFIG, encoder_hidden_size=VISION, is_decoder=True)
    text = transformers.BlipTextModel(config, add_pooling_layer=False).state_dict()
    shapes: dict[str, tuple[int, ...]] = {f"{bert}.{name}": tuple(value.shape) for name, value in text.items()}

    def linear(name: str, inputs: int, outputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    shapes[f"{eye}.cls_token"] = (1, 1, VISION)
    shapes[f"{eye}.pos_embed"] = (1, (SIZE // PATCH) ** 2 + 1, VISION)
    shapes[f"{eye}.patch_embed.proj.weight"] = (VISION, 3, PATCH, PATCH)
    shapes[f"{eye}.patch_embed.proj.bias"] = (VISION,)
    blocks = [f"{eye}.blocks.{i}" for i in range(LAYERS)]
    for norm in (f"{eye}.norm", *(f"{block}.norm{k}" for block in blocks for k in (1, 2))):
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (VISION,)
    for block in blocks:
        linear(f"{block}.attn.qkv", VISION, 3 * VISION)
        linear(f"{block}.attn.proj", VISION, VISION)
        linear(f"{block}.mlp.fc1", VISION, 4 * VISION)
        linear(f"{block}.mlp.fc2", 4 * VISION, VISION)
    for i, inputs, outputs in ((0, TEXT, 1024), (2, 1024, 128), (4, 128, 64), (6, 64, 16), (7, 16, 1)):
        linear(f"mlp.layers.{i}", inputs, outputs)
    linear("blip.vision_proj", VISION, 256)  # of the pre-training, unused by the reward
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = torch.randn(shape, generator=generator) * (1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 0.1)
        if name.endswith(("cls_token", "pos_embed")) or "patch_embed" in name:
            tensors[name] *= 0.01  # so small that the epsilon of the first norm counts
        if "norm" in name.lower() and name.endswith("weight"):
            tensors[name] += 1
    tensors[f"{bert}.embeddings.position_ids"] = torch.arange(40)[None]
    return tensors


def tokens() -> Any:
    return tokenizer(transformers.BertTokenizer, {word: i for i, word in enumerate(WORDS)})


def save(folder: Path, tensors: Tensors) -> str:
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / "ImageReward.pt")
    (folder / "med_config.json").write_text(json.dumps(MED_CONFIG))
    tokens().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("imagereward"), checkpoint())


def scorer(folder: str, **kwargs: Any) -> ImageReward:
    return ImageReward(model=folder, tokenizer=folder, device="cpu", **kwargs)


def rating(t: Tensors, pixels: torch.Tensor, ids: list[int]) -> float:
    """The network written out for one image [3, H, W] and one prompt without padding, from the paper's code."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, t[f"{name}.weight"], t[f"{name}.bias"])

    def norm(name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], eps)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
        split = [x.unflatten(-1, (heads, -1)).transpose(0, 1) for x in (q, k, v)]
        return F.scaled_dot_product_attention(*split).transpose(0, 1).flatten(1)

    eye = "blip.visual_encoder"
    patches = F.conv2d(
        pixels[None], t[f"{eye}.patch_embed.proj.weight"], t[f"{eye}.patch_embed.proj.bias"], stride=PATCH
    )
    x = torch.cat([t[f"{eye}.cls_token"][0], patches[0].flatten(1).T]) + t[f"{eye}.pos_embed"][0]
    for i in range(LAYERS):
        b = f"{eye}.blocks.{i}"
        q, k, v = linear(f"{b}.attn.qkv", norm(f"{b}.norm1", x, 1e-6)).chunk(3, -1)
        x = x + linear(f"{b}.attn.proj", attend(q, k, v, VISION // 64))
        x = x + linear(f"{b}.mlp.fc2", F.gelu(linear(f"{b}.mlp.fc1", norm(f"{b}.norm2", x, 1e-6))))
    seen = norm(f"{eye}.norm", x, 1e-6)

    bert = "blip.text_encoder"
    words = t[f"{bert}.embeddings.word_embeddings.weight"][ids]
    y = words + t[f"{bert}.embeddings.position_embeddings.weight"][: len(ids)]
    y = norm(f"{bert}.embeddings.LayerNorm", y, 1e-12)
    for i in range(LAYERS):
        b = f"{bert}.encoder.layer.{i}"
        for name in ("attention", "crossattention"):
            a = f"{b}.{name}"
            source = y if name == "attention" else seen
            q, k, v = linear(f"{a}.self.query", y), linear(f"{a}.self.key", source), linear(f"{a}.self.value", source)
            y = norm(f"{a}.output.LayerNorm", y + linear(f"{a}.output.dense", attend(q, k, v, HEADS)), 1e-12)
        inner = F.gelu(linear(f"{b}.intermediate.dense", y))
        y = norm(f"{b}.output.LayerNorm", y + linear(f"{b}.output.dense", inner), 1e-12)
    z = y[0]
    for i in (0, 2, 4, 6, 7):
        z = linear(f"mlp.layers.{i}", z)
    return (z.item() - 0.16717362830052426) / 1.0333394966054072


def test_the_score_is_that_of_the_network_written_out(folder: str) -> None:
    tensors, images = checkpoint(), pictures(4)
    expected = [
        rating(tensors, preprocess(image, SIZE), tokens()(prompt).input_ids)
        for image, prompt in zip(images, PROMPTS, strict=True)
    ]
    scores = scorer(folder, batch_size=3)(images, PROMPTS, [{}] * 4)
    assert scores == pytest.approx(expected, rel=1e-5, abs=5e-5)  # sums of terms of about 5, in fp32
    assert 0.05 < max(scores) - min(scores) < 100


def test_a_score_depends_on_image_and_prompt_and_on_nothing_else(folder: str) -> None:
    assert_scored_alone(scorer(folder), pictures(4), PROMPTS, 1e-5)


def test_a_prompt_is_cut_off_after_35_tokens(folder: str) -> None:
    words = " ".join(["a cat on the red mat"] * 6)  # 36 words; 33 fit between [CLS] and [SEP]
    cut = " ".join(words.split()[:33])
    whole, same, shorter = scorer(folder)(pictures(1) * 3, [words, cut, cut.rsplit(" ", 1)[0]], [{}] * 3)
    assert whole == pytest.approx(same, abs=1e-6) and abs(whole - shorter) > 1e-3


def test_half_precision_comes_close(folder: str) -> None:
    exact = scorer(folder)(pictures(2), PROMPTS[:2], [{}] * 2)
    half = scorer(folder, dtype="bfloat16")
    scores = half(pictures(2), PROMPTS[:2], [{}] * 2)
    assert scores == pytest.approx(exact, abs=0.3) and scores != exact
    assert half._network.vision.dtype == half._network.text.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in half._network.head.parameters()} == {torch.float32}


def test_the_middle_of_an_image_is_seen_with_the_pixels_of_clip() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 35, 3), dtype=np.uint8)
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    expected = ((pixels[:, 2:34] / 255 - mean) / std).transpose(2, 0, 1)  # 1.5 columns are rounded to 2
    np.testing.assert_allclose(preprocess(Image.fromarray(pixels), 32).numpy(), expected, atol=1e-5)
    flat = preprocess(Image.new("L", (50, 301), 255), 32)
    assert flat.shape == (3, 32, 32)
    np.testing.assert_allclose(flat[:, 0, 0].numpy(), (1 - mean) / std, atol=1e-5)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("blip.visual_encoder.norm.bias", r"model=.* cannot be loaded .*the Hub id of ImageReward"),
        ("blip.visual_encoder.pos_embed", r"model=.* cannot be loaded .*the Hub id of ImageReward"),
        (
            "blip.text_encoder.embeddings.LayerNorm.weight",
            r"model=.* cannot be loaded .*the Hub id of ImageReward",
        ),
        ("mlp.", r"layers 0, 2, 4, 6, 7 .* got nothing"),
    ],
)
def test_a_checkpoint_with_tensors_missing_is_refused(tmp_path: Path, missing: str, message: str) -> None:
    tensors = {name: value for name, value in checkpoint().items() if not name.startswith(missing)}
    with pytest.raises(RewardError, match=message):
        scorer(save(tmp_path, tensors))(pictures(1), ["a cat"], [{}])


@pytest.mark.usefixtures("hub")
def test_what_cannot_be_found_is_named_with_a_remedy(folder: str, tmp_path: Path) -> None:
    for name in ("nobody/has-this-model", str(tmp_path)):
        with pytest.raises(RewardError, match=f"^model={name} cannot be loaded .* a repository with ImageReward.pt"):
            ImageReward(model=name, tokenizer=folder, device="cpu")(pictures(1), ["a"], [{}])
        with pytest.raises(RewardError, match=f"^tokenizer={name} cannot be loaded .* a BERT tokenizer"):
            ImageReward(model=folder, tokenizer=name, device="cpu")(pictures(1), ["a"], [{}])


def test_scores_of_tensors_have_a_gradient(folder: str) -> None:
    assert_differentiable(scorer(folder), pictures(3), PROMPTS[:3], tolerance=0.2)
