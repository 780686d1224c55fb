"""Tokens divided among ranks: two real processes over gloo draw and train as one that computes whole calls."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
from diffusers import ModelMixin
from diffusers.hooks import HookRegistry
from drills import more
from ranks import run_ranks

from gerl.config import ModelConfig, SamplingConfig
from gerl.errors import ModelError
from gerl.model.loading import check_model
from gerl.model.sharding import UNUSABLE, Together, check_context

ROOT = Path(__file__).resolve().parents[3]
RANKS = 2
CASES = ["flux", "qwen_image", "wan"]  # those of the tiny pipelines for whose denoiser diffusers has a plan
FAILING = {"LTXPipeline": "LTXVideoTransformer3DModel", "LTX2Pipeline": "LTX2VideoTransformer3DModel"}
WAYS = ["call", "joint", "detach_uncond", "shards", "checkpointing"]
Found = dict[str, list[dict[str, dict[str, Any]]]]  # by case, rank and way
SIZES: dict[str, Any] = {"num_layers": 1, "num_attention_heads": 3, "attention_head_dim": 8}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank says of each tiny pipeline."""
    ranks = run_ranks("context_ranks", tmp_path_factory.mktemp("ranks"), RANKS, *CASES, *FAILING)
    rows = [row for own in ranks for row in own]
    return {name: [row["off"] for row in rows if row["case"] == name] for name in (*CASES, *FAILING)}


@more
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_tokens_draw_and_train_as_one(name: str, way: str, found: Found) -> None:
    assert len(found[name]) == RANKS
    for rank in found[name]:
        alone = rank[way].pop("alone")
        assert alone > 0.05  # the part of one rank is not the whole
        # in fp64 the sum is exact; in fp32, where another order of sums rounds otherwise, it is as near as that goes
        assert max(rank[way].values()) < (1e-6 if way == "call" else 2e-5), rank[way]


@pytest.mark.parametrize("name", FAILING)
def test_a_denoiser_is_refused_although_it_has_a_plan_as_long_as_that_fails(name: str, found: Found) -> None:
    assert all("size" in rank["plan"]["raised"] or "shape" in rank["plan"]["raised"] for rank in found[name])


def test_the_cases_are_those_with_a_plan() -> None:
    assert sorted(UNUSABLE) == sorted(FAILING.values())
    planned = [n for n, c in tiny.CASES.items() if getattr(tiny.denoiser_of(tiny.build(c)), "_cp_plan", None)]
    assert sorted(planned) == sorted(CASES)


def helios() -> ModelMixin:
    sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 16, "text_dim": 8}
    return diffusers.HeliosTransformer3DModel(**sizes, freq_dim=8)


def ltx() -> ModelMixin:
    return diffusers.LTXVideoTransformer3DModel(num_layers=1, num_attention_heads=2, attention_head_dim=8)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: tiny.denoiser_of(tiny.sd3()), r"no plan.*SD3Transformer2DModel \(transformer\)"),
        (ltx, r"LTXVideoTransformer3DModel \(transformer\) among ranks, although it has a plan: its text masks"),
        (helios, r"HeliosTransformer3DModel \(transformer\) gathers its sequence in every block"),
        (
            lambda: diffusers.QwenImageTransformer2DModel(**SIZES, axes_dims_rope=(2, 2, 4)),
            r"divide the 3 attention heads of QwenImageTransformer2DModel \(transformer: num_attention_heads\)",
        ),
    ],
    ids=["no plan", "unusable", "gathers in blocks", "heads"],
)
def test_denoisers_that_cannot_share_their_tokens_are_refused_by_name(
    build: Callable[[], ModelMixin], sentence: str
) -> None:
    with pytest.raises(ModelError, match=rf"cluster\.context=2: .*{sentence}.*(or 1|cluster\.context=1)$"):
        check_context(["transformer"], {"transformer": build()}, 2)


def test_what_a_controlnet_adds_is_not_divided() -> None:
    with pytest.raises(ModelError, match=r"cluster\.context=2: .*controlnet"):
        check_context(["transformer", "controlnet"], {}, 2)


def test_a_pipeline_is_refused_before_its_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny.flux()
    pipe.save_pretrained(tmp_path)
    monkeypatch.delattr(ModelMixin, "from_pretrained")
    model, sampling = ModelConfig(path=str(tmp_path)), SamplingConfig()
    check_model(model, sampling, context=2)
    with pytest.raises(ModelError, match=r"cluster\.context=4: it must divide the 2 attention heads of Flux"):
        check_model(model, sampling, context=4)


def test_tokens_that_do_not_divide_are_refused_in_a_sentence(found: Found) -> None:
    for rank in found["flux"]:
        assert re.search(
            r"^cluster\.context=2: .*FluxTransformer2DModel.*encoder_hidden_states \[4, 7, 32\].*max_sequence_length",
            rank["odd text"]["refused"],
        )


@pytest.mark.parametrize("mask", [None, torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])], ids=["no mask", "mask"])
def test_texts_with_a_mask_get_tokens_that_do_not_count(mask: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    denoiser = tiny.denoiser_of(tiny.qwen_image())
    given = {"hidden_states": torch.randn(2, 4, 16), "encoder_hidden_states": torch.randn(2, 5, 16)}
    given |= {"timestep": torch.tensor([0.5, 0.2])}
    options = {"encoder_hidden_states_mask": mask, "img_shapes": [[(1, 2, 2)]] * 2, "return_dict": False}
    with torch.no_grad():
        expected = denoiser(**given, **options)[0]
        HookRegistry.check_if_exists_or_initialize(denoiser).register_hook(Together(denoiser, 2), "together")
        lengths: list[int] = []
        denoiser.txt_in.register_forward_hook(lambda module, args, output: lengths.append(output.shape[1]))
        torch.testing.assert_close(denoiser(**given, **options)[0], expected, atol=1e-6, rtol=1e-6)
    assert lengths == [6]
