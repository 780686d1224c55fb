"""8-bit copies that draw: other images, the same training, nothing left behind."""

import builtins
from typing import Any

import pytest
import tiny
import torch

from gerl.config import Config, ModelConfig, RolloutConfig, SamplingConfig
from gerl.errors import ConfigError, ModelError
from gerl.model.drawing_weights import DrawingWeights, check_drawing, quantised
from gerl.model.lora import add_lora
from gerl.model.sharding import repeated_blocks
from gerl.workers.setup import load_worker_policy


def denoiser_of(name: str = "sd3", rank: int = 4) -> Any:
    denoiser = tiny.denoiser_of(tiny.build(tiny.CASES[name]))
    add_lora(denoiser, rank, 4.0, None, seed=0)
    return denoiser


def layers(denoiser: torch.nn.Module) -> list[torch.nn.Linear]:
    inside = [m for block in repeated_blocks(denoiser) for m in block.modules()]
    return [m for m in inside if isinstance(m, torch.nn.Linear) and not m.weight.requires_grad]


def test_a_copy_computes_nearly_the_same() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 32), torch.randn(5, 7, 32)
    exact = x @ weight.T
    found = torch.nn.functional.linear(x, quantised(weight, "int8"))
    assert 1e-4 < float((found - exact).norm() / exact.norm()) < 2e-2
    assert torch.equal(torch.nn.functional.linear(x[:1], quantised(weight, "int8")), found[:1])  # each row by itself


def test_the_frozen_layers_of_the_blocks_are_swapped_and_put_back() -> None:
    denoiser = denoiser_of()
    before = {id(m): m.weight for m in layers(denoiser)}
    lora = [p for p in denoiser.parameters() if p.requires_grad]
    drawing = DrawingWeights({"transformer": denoiser}, "int8")
    wide = {id(m) for m in layers(denoiser) if m.in_features % 16 == m.out_features % 16 == 0}
    assert wide and {id(layer) for layer, _ in drawing.copies} == wide
    with drawing.swapped_in():
        assert all((m.weight is before[id(m)]) == (id(m) not in wide) for m in layers(denoiser))
        assert [p for p in denoiser.parameters() if p.requires_grad] == lora
    assert all(m.weight is before[id(m)] for m in layers(denoiser))
    with pytest.raises(KeyError), drawing.swapped_in():
        raise KeyError
    assert all(m.weight is before[id(m)] for m in layers(denoiser))


def test_a_policy_draws_with_them_and_only_then() -> None:
    sampling = SamplingConfig(height=32, width=96, guidance_scale=1.0)
    config = Config(model=ModelConfig(lora_rank=4), sampling=sampling, rollout=RolloutConfig(quantize="int8"))
    policy = load_worker_policy(config, "cpu", None)
    assert policy.drawing is not None
    layer = policy.drawing.copies[0][0]
    own = layer.weight
    with policy.as_sampler():
        assert layer.weight is not own
    assert layer.weight is own


def test_what_cannot_be_done_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"rollout\.quantize=int8: .*use none"):
        DrawingWeights({"unet": torch.nn.Linear(4, 4)}, "int8")  # type: ignore[dict-item]
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"rollout\.quantize=fp8: .*on cpu.*use int8"):
            check_drawing("fp8", "cpu", torch.float32)
    check_drawing("int8", "cpu", torch.float32)
    own = builtins.__import__

    def without_torchao(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("torchao"):
            raise ImportError(name)
        return own(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torchao)
    with pytest.raises(ConfigError, match=r"needs the package torchao: pip install 'gerl\[quantize\]'"):
        quantised(torch.zeros(16, 16), "int8")
