"""A LoRA file counts as written when plain diffusers takes all of it."""

import pytest
import tiny
import torch
from safetensors.torch import load, save

from gerl.errors import ModelError
from gerl.model.lora import add_lora, lora_file
from gerl.model.lora_check import check_loads


@pytest.mark.parametrize("name", list(tiny.CASES))
def test_what_a_run_writes_is_taken(name: str) -> None:
    denoiser = tiny.denoiser_of(tiny.build(tiny.CASES[name]))
    add_lora(denoiser, 4, 8.0, None, seed=0)
    check_loads(lora_file({"transformer": denoiser}), {"transformer": denoiser})


def test_a_tensor_without_a_layer_or_of_another_size_is_not() -> None:
    denoiser = tiny.denoiser_of(tiny.build(tiny.CASES["flux"]))
    add_lora(denoiser, 4, 8.0, None, seed=0)
    tensors = load(lora_file({"transformer": denoiser}))
    fused = {key.replace("to_q", "to_qkv"): value for key, value in tensors.items()}
    wide = {key: torch.cat([value, value], 1) if "lora_A" in key else value for key, value in tensors.items()}
    for wrong in (fused, wide):
        with pytest.raises(ModelError, match=r"plain (diffusers does not load|FluxTransformer2DModel does not accept)"):
            check_loads(save(wrong), {"transformer": denoiser})
