import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tensor_scores import assert_differentiable
from tiny_clip import SIZE, assert_scored_alone, pictures
from torchvision_ops import importable_open_clip

from gerl.errors import RewardError
from gerl.utils.tensors import tensors_of
from reward_models.scorers.clip import HpsV2
from reward_models.scorers.networks import longer_side, normalised

PROMPTS = ["a cat", "Two dogs on  a mat", "a cat", "fish &amp; chips " * 9]
CHECKPOINT = "HPS_v2.1_compressed.pt"
WIDTH, HEADS, LAYERS, CONTEXT, VOCABULARY, DIM = 32, 2, 2, 20, 49408, 16
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIZES = {
    "embed_dim": DIM,
    "vision_cfg": {"image_size": SIZE, "layers": LAYERS, "width": WIDTH, "head_width": WIDTH // HEADS, "patch_size": 8},
    "text_cfg": {
        "context_length": CONTEXT, "vocab_size": VOCABULARY, "width": WIDTH, "heads": HEADS, "layers": LAYERS
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A folder as the Hub has it, with random weights of a size that open_clip knows as tiny; open_clip is there."""
    folder = tmp_path_factory.mktemp("hps")
    with importable_open_clip():
        open_clip = importlib.import_module("open_clip")
        (folder / "tiny.json").write_text(json.dumps(SIZES))
        open_clip.add_model_config(folder / "tiny.json")
        torch.manual_seed(0)
        tensors = open_clip.CLIP(**SIZES).state_dict()
        # Large enough that other inputs have other features; of the precision of the published file.
        tensors = {
            name: (value.normal_(std=0.4) if value.ndim > 1 else value).half() for name, value in tensors.items()
        }
        torch.save({"state_dict": tensors}, folder / CHECKPOINT)
        yield str(folder)


def scorer(folder: str, **kwargs: Any) -> HpsV2:
    return HpsV2(model=folder, architecture="tiny", device="cpu", **kwargs)


def transformers_clip(folder: str) -> transformers.CLIPModel:
    """The same weights in the CLIP of transformers."""
    sizes = dict(hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS, hidden_act="gelu")
    sizes["num_attention_heads"] = HEADS
    text = dict(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, eos_token_id=VOCABULARY - 1, **sizes)
    vision = dict(image_size=SIZE, patch_size=8, **sizes)
    model = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=DIM)
    ).eval()
    source = torch.load(Path(folder) / CHECKPOINT, weights_only=True)["state_dict"]
    target: dict[str, torch.Tensor] = {
        "logit_scale": source["logit_scale"],
        "visual_projection.weight": source["visual.proj"].T,
        "text_projection.weight": source["text_projection"].T,
        "vision_model.embeddings.class_embedding": source["visual.class_embedding"],
        "vision_model.embeddings.patch_embedding.weight": source["visual.conv1.weight"],
        "vision_model.embeddings.position_embedding.weight": source["visual.positional_embedding"],
        "text_model.embeddings.token_embedding.weight": source["token_embedding.weight"],
        "text_model.embeddings.position_embedding.weight": source["positional_embedding"],
    }
    norms = [
        ("vision_model.pre_layrnorm", "visual.ln_pre"),
        ("vision_model.post_layernorm", "visual.ln_post"),
        ("text_model.final_layer_norm", "ln_final"),
    ]
    for tower, prefix in (("vision_model", "visual."), ("text_model", "")):
        for i in range(LAYERS):
            layer, block = f"{tower}.encoder.layers.{i}", f"{prefix}transformer.resblocks.{i}"
            norms += [(f"{layer}.layer_norm{k}", f"{block}.ln_{k}") for k in (1, 2)]
            norms += [(f"{layer}.mlp.fc1", f"{block}.mlp.c_fc"), (f"{layer}.mlp.fc2", f"{block}.mlp.c_proj")]
            norms += [(f"{layer}.self_attn.out_proj", f"{block}.attn.out_proj")]
            for kind in ("weight", "bias"):
                for name, part in zip("qkv", source[f"{block}.attn.in_proj_{kind}"].chunk(3), strict=True):
                    target[f"{layer}.self_attn.{name}_proj.{kind}"] = part
    for name, original in norms:
        for kind in ("weight", "bias"):
            target[f"{name}.{kind}"] = source[f"{original}.{kind}"]
    model.load_state_dict(target)
    return model


def seen(image: Image.Image) -> torch.Tensor:
    """The pixels that the model gets of an image."""
    return normalised(longer_side(tensors_of([image]), SIZE), MEAN, STD)[0]


def test_the_score_is_the_cosine_that_transformers_computes(folder: str) -> None:
    model, images = transformers_clip(folder), pictures(4)
    ids = importlib.import_module("open_clip").get_tokenizer("tiny")(PROMPTS)
    pixels = torch.stack([seen(image) for image in images])
    with torch.no_grad():
        output = model(input_ids=ids, pixel_values=pixels)
    expected = (output.image_embeds * output.text_embeds).sum(-1).tolist()
    scores = scorer(folder, batch_size=3)(images, PROMPTS, [{}] * 4)
    assert all(isinstance(score, float) for score in scores)
    assert scores == pytest.approx(expected, abs=1e-5)
    assert max(scores) - min(scores) > 0.1


def test_a_prompt_is_read_as_clip_does(folder: str) -> None:
    ids = scorer(folder).network.tokenizer(["a cat", " A \n CAT", "cat " * 30])
    start, end = VOCABULARY - 2, VOCABULARY - 1
    assert ids[0].tolist() == ids[1].tolist() == [start, 320, 2368, end] + [0] * (CONTEXT - 4)
    assert ids[2].tolist() == [start] + [2368] * (CONTEXT - 2) + [end]


def test_a_score_depends_on_image_and_prompt_and_on_nothing_else(folder: str) -> None:
    assert_scored_alone(scorer(folder), pictures(4), PROMPTS)


def test_scorers_of_the_same_weights_share_them_and_half_precision_comes_close(folder: str) -> None:
    exact, half = scorer(folder), scorer(folder, dtype="bfloat16")
    assert exact.network is scorer(folder, batch_size=1).network is not half.network
    assert {parameter.dtype for parameter in half.network.clip.parameters()} == {torch.bfloat16}
    scores = half(pictures(4), PROMPTS, [{}] * 4)
    expected = exact(pictures(4), PROMPTS, [{}] * 4)
    assert scores == pytest.approx(expected, abs=0.05) and scores != expected


@pytest.mark.parametrize("shape", [(90, 60), (61, 90), (20, 31), (SIZE, SIZE), (90, 1)])
def test_pixels_are_those_of_the_operations_of_the_authors(folder: str, shape: tuple[int, int]) -> None:
    functional = importlib.import_module("torchvision.transforms.functional")
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    whole = functional.to_tensor(Image.fromarray(pixels))
    height, width = (max(1, round(side * SIZE / max(shape))) for side in shape)
    whole = functional.resize(whole, [height, width], functional.InterpolationMode.BICUBIC)
    left, top = (SIZE - width) // 2, (SIZE - height) // 2
    whole = functional.pad(whole, [left, top, SIZE - width - left, SIZE - height - top])
    expected = functional.normalize(whole, MEAN, STD)
    torch.testing.assert_close(seen(Image.fromarray(pixels)), expected, atol=1e-5, rtol=0)


def test_the_whole_image_is_seen_between_black_bars() -> None:
    pixels = seen(Image.new("L", (64, 33), 255))  # 32 x 16.5 rounds to 16 rows
    black, white = (torch.tensor([(value - m) / s for m, s in zip(MEAN, STD, strict=True)]) for value in (0, 1))
    assert pixels.shape == (3, SIZE, SIZE)
    for rows, colour in ((slice(0, 8), black), (slice(8, 24), white), (slice(24, 32), black)):
        torch.testing.assert_close(pixels[:, rows], colour[:, None, None].expand_as(pixels[:, rows]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("broken", ["logit_scale", "visual.proj", "state_dict"])
def test_a_checkpoint_with_something_missing_is_refused(folder: str, tmp_path: Path, broken: str) -> None:
    checkpoint = torch.load(Path(folder) / CHECKPOINT, weights_only=True)
    del (checkpoint if broken == "state_dict" else checkpoint["state_dict"])[broken]
    torch.save(checkpoint, tmp_path / "mine.pt")
    with pytest.raises(RewardError, match=rf"model=.* cannot be loaded .*{broken}.* a repository with mine.pt"):
        scorer(str(tmp_path), checkpoint="mine.pt")(pictures(1), ["a"], [{}])


@pytest.mark.usefixtures("hub")
def test_what_cannot_be_found_is_named_with_a_remedy(folder: str) -> None:
    for kwargs in ({"model": "nobody/has-this-model"}, {"checkpoint": "mine.pt"}):
        with pytest.raises(RewardError, match=r"^model=.* cannot be loaded .* a repository with (HPS_v2.1|mine)"):
            HpsV2(**{"model": folder, "architecture": "tiny", **kwargs})(pictures(1), ["a"], [{}])
    with pytest.raises(RewardError, match=r"architecture=huge: .*ViT-H"):
        HpsV2(model=folder, architecture="huge")(pictures(1), ["a"], [{}])


def test_a_torchvision_for_another_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open_clip.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "open_clip", raising=False)
    with pytest.raises(RewardError, match=r"torchvision does not match torch .* 'gerl.clip.'"):
        HpsV2()


def test_scores_of_tensors_have_a_gradient(folder: str) -> None:
    assert_differentiable(scorer(folder), pictures(4), PROMPTS, tolerance=1e-5)
