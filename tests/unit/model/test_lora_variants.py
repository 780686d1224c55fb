import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from replaying import randomise
from safetensors.torch import load_file, save_file

from gerl.errors import ModelError
from gerl.model.lora import add_lora, lora_file
from gerl.model.lora_variants import attach, switch
from gerl.model.lora_weights import read_lora
from gerl.model.paths import WEIGHTS

CASE = tiny.CASES["sd3"]


def latents(pipe: Any) -> torch.Tensor:
    """What the pipeline draws, before it is rounded to pixels."""
    call = tiny.call_for(CASE, guided=False, steps=2)
    return pipe(**{**call, "output_type": "latent"}, generator=tiny.generators()).images


def trained(dtype: torch.dtype, seed: int, rank: int) -> tuple[Any, bytes]:
    """A pipeline with a LoRA that gerl put on it, which has learnt something, and the LoRA's file."""
    pipe = tiny.build(CASE).to(dtype=dtype)
    randomise(add_lora(pipe.transformer, rank, 3.0 * rank, None, seed=0).values(), seed=seed)
    return pipe, lora_file({"transformer": pipe.transformer})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_lora_of_gerl_draws_what_it_drew_in_training_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    runs = {f"step.{rank}": trained(dtype, seed, rank) for seed, rank in ((1, 4), (2, 2))}
    files = {name: tmp_path / f"{name}.safetensors" for name in runs}
    for name, (_, content) in runs.items():
        files[name].write_bytes(content)
    pipe = tiny.build(CASE).to(dtype=dtype)
    base = latents(pipe)
    attach(pipe, files)
    assert torch.equal(latents(pipe), base)
    for name in (*runs, *runs, None):
        switch(pipe, name)
        expected = base if name is None else latents(runs[name][0])
        assert torch.equal(latents(pipe), expected)
        assert name is None or not torch.equal(expected, base)


def test_a_lora_of_another_program_beside_one_of_gerl(tmp_path: Path) -> None:
    source, content = trained(torch.float32, 1, 4)
    (tmp_path / WEIGHTS).write_bytes(content)
    other = tiny.build(CASE)  # another rank, fewer layers, a text encoder
    for model, targets in ((other.transformer, ["to_q", "to_out.0"]), (other.text_encoder, ["q_proj", "v_proj"])):
        model.add_adapter(LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False))
    layers = {
        f"{name}_lora_layers": get_peft_model_state_dict(getattr(other, name))
        for name in ("transformer", "text_encoder")
    }
    diffusers.StableDiffusion3Pipeline.save_lora_weights(tmp_path, weight_name="other.safetensors", **layers)
    assert read_lora(tmp_path / "other.safetensors") is None and read_lora(tmp_path / WEIGHTS) is not None
    plain = tiny.build(CASE)
    plain.load_lora_weights(tmp_path, weight_name="other.safetensors")
    expected = {"other": latents(plain), "gerl": latents(source)}
    for order in (("gerl", "other"), ("other", "gerl")):
        pipe = tiny.build(CASE)
        base = latents(pipe)
        attach(pipe, {name: tmp_path / {"gerl": WEIGHTS, "other": "other.safetensors"}[name] for name in order})
        for name in order:
            switch(pipe, name)
            assert torch.equal(latents(pipe), expected[name]) and not torch.equal(expected[name], base)
        switch(pipe, None)
        assert torch.equal(latents(pipe), base)


def test_settings_that_change_what_a_lora_computes_are_left_to_diffusers(tmp_path: Path) -> None:
    _, content = trained(torch.float32, 1, 4)
    (tmp_path / WEIGHTS).write_bytes(content)
    tensors = load_file(tmp_path / WEIGHTS)
    header = {"transformer.r": 4, "transformer.lora_alpha": 12.0}
    for extra, ours in (
        ({}, True),
        ({"transformer.use_rslora": True}, False),
        ({"transformer.lora_alpha": None}, False),
    ):
        save_file(tensors, tmp_path / "x.safetensors", {"lora_adapter_metadata": json.dumps({**header, **extra})})
        found = read_lora(tmp_path / "x.safetensors")
        assert (found is not None) is ours
        assert found is None or found["transformer"].scale == 3.0


ALPHA = '{"transformer.lora_alpha": 4}'
PAIR = (torch.ones(2, 4), torch.ones(4, 2))


@pytest.mark.parametrize(
    ("header", "pair", "message"),
    [
        *((header, PAIR, "not a JSON object") for header in ("[]", "5", "null")),
        *((header, PAIR, "is not a readable LoRA") for header in ("", "[" * 5000, "1" * 5000)),
        *(
            (f'{{"transformer.lora_alpha": {alpha}}}', PAIR, "lora_alpha is")
            for alpha in ('"x"', "[1]", "true", "0", "-1", "NaN", "1e999", "1" * 400)
        ),
        (ALPHA, (torch.ones(2, 4), torch.ones(4, 3)), "layer has the ranks 2 and 3"),
        (ALPHA, (torch.ones(0, 4), torch.ones(4, 0)), "layer has the ranks 0 and 0"),
        (ALPHA, (torch.ones(2, 4).int(), torch.ones(4, 2).int()), r"layer has numbers of type torch\.int32"),
        (ALPHA, (torch.ones(2, 4), torch.full((4, 2), torch.nan)), "layer has non-finite values"),
    ],
)
def test_a_damaged_lora_is_one_sentence(
    tmp_path: Path, header: str, pair: tuple[torch.Tensor, torch.Tensor], message: str
) -> None:
    file = tmp_path / "x.safetensors"
    tensors = {f"transformer.layer.lora_{half}.weight": value for half, value in zip("AB", pair, strict=True)}
    save_file(tensors, file, {"lora_adapter_metadata": header})
    with pytest.raises(ModelError, match=message) as error:
        read_lora(file)
    assert str(file) in str(error.value) and "give a complete .safetensors file" in str(error.value)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"

    def refused(match: str, pipe: Any = None) -> None:
        with pytest.raises(ModelError, match=match):
            attach(pipe or tiny.build(CASE), {"x": file})

    file.write_bytes(b"no")
    refused(r"x\.safetensors is not a readable LoRA")
    save_file({"transformer.nowhere.lora_A.weight": torch.ones(2, 3)}, file)
    refused(r"x\.safetensors (cannot be loaded as a LoRA of|has no weights for) StableDiffusion3Pipeline")
    save_file({"unet.nowhere.lora_A.weight": torch.ones(2, 3), "unet.nowhere.lora_B.weight": torch.ones(3, 2)}, file)
    refused(r"has no weights for StableDiffusion3Pipeline: use the model it was trained on|cannot be loaded")
    file.write_bytes(trained(torch.float32, 1, 4)[1])
    refused("the LoRA does not fit transformer of FluxPipeline .*x.safetensors", tiny.build(tiny.CASES["flux"]))
    refused("has a LoRA of transformer, which StableDiffusionPipeline does not have", tiny.build(tiny.CASES["sd15"]))
