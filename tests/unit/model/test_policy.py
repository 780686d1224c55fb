import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
import torch.distributed as dist
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from replaying import randomise
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from gerl.errors import ModelError
from gerl.model.lora import add_lora
from gerl.model.lora_files import lora_file, read_lora
from gerl.model.paths import WEIGHTS
from gerl.model.policy import EMA, alone, attach, chosen, class_of, divide, kept_in_fp32, parameters_of, switch


def parameters(*values: float) -> dict[str, torch.nn.Parameter]:
    return {f"p{i}": torch.nn.Parameter(torch.full((2, 3), value)) for i, value in enumerate(values)}


@pytest.mark.parametrize(
    ("updates", "limit", "decay"),
    [(0, 0.9, 0.1), (7, 0.9, 8 / 17), (80, 0.9, 0.9), (10_000, 0.9, 0.9), (0, 0.0, 0.0), (80, 0.0, 0.0)],
)
def test_warmed_up_decay(updates: int, limit: float, decay: float) -> None:  # T35: 0.1, 0.4706, 0.9
    weights = parameters(0.0, 1.0)
    ema = EMA(weights, limit)
    ema.updates = updates
    for p, new in zip(weights.values(), (1.0, -2.0), strict=True):
        p.data.fill_(new)
    ema.update()
    torch.testing.assert_close(ema.average["p0"], torch.full((2, 3), 1 - decay))
    torch.testing.assert_close(ema.average["p1"], torch.full((2, 3), decay - 2 * (1 - decay)))
    assert ema.updates == updates + 1


def test_the_average_of_a_sequence() -> None:
    weights = parameters(0.0)
    ema = EMA(weights, 0.15)
    expected = 0.0
    for n, value in enumerate([1.0, -2.0, 5.0]):
        weights["p0"].data.fill_(value)
        ema.update()
        d = min((1 + n) / (10 + n), 0.15)
        expected = d * expected + (1 - d) * value
    assert ema.average["p0"][0, 0].item() == pytest.approx(expected)
    assert not ema.average["p0"].requires_grad


def test_swap_and_restore_are_bitwise() -> None:  # T35: on the CPU a view instead of a copy would lose the weights
    torch.manual_seed(0)
    weights = {name: torch.nn.Parameter(torch.randn(5)) for name in "ab"}
    ema = EMA(weights, 0.9)
    for p in weights.values():
        p.data.add_(torch.randn(5))
    ema.update()
    trained = {name: p.detach().clone() for name, p in weights.items()}
    average = {name: value.clone() for name, value in ema.average.items()}
    pointers = {name: p.data_ptr() for name, p in weights.items()}
    with ema.swapped_in():
        for name, p in weights.items():
            assert torch.equal(p, average[name]) and not torch.equal(p, trained[name])
    for name, p in weights.items():
        assert torch.equal(p, trained[name]) and torch.equal(ema.average[name], average[name])
        assert p.requires_grad and p.data_ptr() == pointers[name]
    with pytest.raises(KeyError), ema.swapped_in():
        raise KeyError
    assert all(torch.equal(p, trained[name]) for name, p in weights.items())


def test_load_continues_exactly() -> None:
    torch.manual_seed(0)
    weights = {"a": torch.nn.Parameter(torch.randn(4))}
    first = EMA(weights, 0.9)
    for _ in range(3):
        weights["a"].data.add_(torch.randn(4))
        first.update()
    second = EMA(weights, 0.9)
    second.load({"a": first.average["a"].clone()}, first.updates)
    weights["a"].data.add_(1.0)
    first.update()
    second.update()
    assert torch.equal(first.average["a"], second.average["a"]) and first.updates == second.updates == 4
    with pytest.raises(KeyError):
        second.load({"b": first.average["a"]}, 1)


@pytest.fixture
def mesh() -> Iterator[dist.DeviceMesh]:
    found = alone("cpu")
    yield found
    dist.destroy_process_group()


def test_all_weights_or_those_that_an_expression_finds() -> None:
    pipe = tiny.build(tiny.CASES["flux"])
    denoisers = {"transformer": pipe.transformer}
    everything = chosen("full", denoisers)
    assert len(everything) == len(list(pipe.transformer.parameters()))
    queries = chosen(r"^transformer\.transformer_blocks.*to_q", denoisers)
    assert queries and set(queries) < set(everything) and all("to_q" in name for name in queries)
    found = parameters_of(denoisers, queries)
    assert list(found) == queries
    assert found[queries[0]] is pipe.transformer.get_parameter(queries[0].removeprefix("transformer."))
    with pytest.raises(ModelError, match=r"model\.train='zebra' matches none of the .*transformer\..*lora, full"):
        chosen("zebra", denoisers)


def test_a_model_without_repeated_blocks_is_refused(mesh: dist.DeviceMesh) -> None:
    with pytest.raises(ModelError, match=r"model\.train: odd \(Linear\) has no repeated blocks"):
        divide({"odd": torch.nn.Linear(2, 2)}, mesh, torch.bfloat16)


@pytest.mark.parametrize("name", ["sd3", "flux", "wan"])
def test_half_precision_computes_as_diffusers_and_trains_fp32_weights(name: str, mesh: dist.DeviceMesh) -> None:
    """Images are those of a model in bf16, but for parameters that it would keep in fp32 beside its layers."""
    case = tiny.CASES[name]
    latents: list[torch.Tensor] = []
    for divided in (False, True):
        pipe = tiny.build(case)
        denoiser = tiny.denoiser_of(pipe)
        kind, kept = type(denoiser), kept_in_fp32(denoiser)
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module) and (component is not denoiser or not divided):
                component.to(torch.bfloat16)
        if divided:
            denoiser.requires_grad_(True)
            divide({"d": denoiser}, mesh, torch.bfloat16)
            assert denoiser.dtype == torch.bfloat16 and class_of(denoiser) is kind
            parameters = list(denoiser.parameters())
            assert all(isinstance(p, DTensor) and p.dtype == torch.float32 and p.requires_grad for p in parameters)
        else:
            for module in kept:
                module.float()
        call = tiny.call_for(case, guided=False, steps=2) | {"prompt": tiny.PROMPTS[:2]}
        latents.append(torch.as_tensor(tiny.output_of(pipe(**call, generator=tiny.generators(2)))))
    assert latents[0].dtype == latents[1].dtype
    if name == "wan":
        assert kept and (latents[0] - latents[1]).abs().max() < 0.05 * latents[0].abs().max()
    else:
        assert torch.equal(*latents)


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
        assert found is None or {halves.scale for halves in found["transformer"].values()} == {3.0}


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
