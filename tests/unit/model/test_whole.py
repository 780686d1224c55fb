"""Weights that are trained themselves: which, and fp32 masters of what computes in half precision."""

from collections.abc import Iterator

import pytest
import tiny
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gerl.errors import ModelError
from gerl.model.whole import alone, chosen, class_of, divide, kept_in_fp32, parameters_of


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
