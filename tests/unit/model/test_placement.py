"""Where the frozen parts are and in which precision they compute."""

import builtins
import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import numpy as np
import pytest
import tiny
import torch
from drills import more
from torch.utils._pytree import tree_leaves

from gerl.config import Config, ModelConfig, RolloutConfig, SamplingConfig
from gerl.engine import ReplayedStep, record, replay
from gerl.errors import ConfigError, ModelError
from gerl.model.loading import load_policy
from gerl.model.lora import add_lora
from gerl.model.placement import (
    OffloadedBlocks,
    OffloadedComponents,
    QuantizedRollout,
    channels_last,
    check_attention,
    check_quantized_rollout,
    compile_blocks,
    decode_in_fp32,
    homes_of,
    place,
    quantised,
    set_attention,
)
from gerl.model.sharding import repeated_blocks
from gerl.workers.setup import load_worker_policy


def watched_moves(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Grows by the component of `pipe` and the device, instead of a move."""
    log: list[tuple[str, str]] = []
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            to = partial(lambda name, component, device: log.append((name, str(device))) or component, name, component)
            monkeypatch.setitem(component.__dict__, "to", to)
    return log


def test_encoders_and_vae_are_on_the_device_only_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiny.CASES["sd3"]
    pipe = tiny.build(case)
    add_lora(pipe.transformer, 2, 2.0, None, seed=0)
    call = tiny.call_for(case, guided=True) | {"output_type": "np"}
    plain, _ = record(pipe, call, generators=tiny.generators())
    moves = watched_moves(pipe, monkeypatch)
    place(pipe, {"transformer": pipe.transformer}, "cpu:0", offload="encoders")
    offloaded = ["vae", "text_encoder", "text_encoder_2", "text_encoder_3"]
    assert moves == [("transformer", "cpu:0")] + [(name, "cpu") for name in offloaded]

    moves.clear()
    images, tape = record(pipe, call, generators=tiny.generators(), probe=False)
    # for the prompts and for the negative ones, then the VAE comes and stays
    assert moves == [(name, "cpu:0") for name in [*offloaded[1:] * 2, "vae"]]
    assert np.array_equal(images.images, plain.images)

    (components,) = {
        hook.__self__ for hook in pipe.transformer._forward_pre_hooks.values() if hasattr(hook, "__self__")
    }
    assert components.present is pipe.vae
    replay(pipe, tape, lambda k, step: step.log_prob.mean())
    assert components.present is None  # no encoder runs, and the denoiser has the device for itself


def test_without_offload_everything_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny.build(tiny.CASES["sd15"])
    moves = watched_moves(pipe, monkeypatch)
    place(pipe, {"unet": pipe.unet}, "cpu:0", offload="none")
    assert sorted(moves) == [("text_encoder", "cpu:0"), ("unet", "cpu:0"), ("vae", "cpu:0")]
    assert not pipe.vae.decoder._forward_pre_hooks


def test_a_component_that_is_called_past_its_forward_is_fetched_with_its_inputs() -> None:
    inner = torch.nn.Linear(2, 2)
    component, denoiser = torch.nn.Sequential(torch.nn.Sequential(inner)), torch.nn.Identity()
    offloaded = OffloadedComponents([component], [denoiser], "meta")  # a device that the inputs are not on
    assert offloaded.present is None
    assert inner(torch.ones(2)).is_meta and offloaded.present is component and inner.weight.is_meta
    assert component(torch.ones(2)).is_meta
    assert denoiser(torch.ones(2)).sum() == 2 and offloaded.present is None and not inner.weight.is_meta


def test_a_component_is_dropped_from_the_device_and_not_copied_back() -> None:
    """Its weights stay mapped from their files, which the processes of a machine share."""
    component, denoiser = (
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).eval(),
        torch.nn.Identity(),
    )
    places = {name: tensor.data_ptr() for name, tensor in component.state_dict().items()}
    OffloadedComponents([component], [denoiser], "meta")
    for _ in range(2):
        assert component(torch.ones(3, 2)).is_meta
        assert all(tensor.is_meta for tensor in component.state_dict().values())
        denoiser(torch.ones(2))
        assert places == {name: tensor.data_ptr() for name, tensor in component.state_dict().items()}
    component[0].weight = type("Quantised", (torch.nn.Parameter,), {})(component[0].weight)
    assert homes_of(component) == []


def test_a_compiled_denoiser_sends_offloaded_components_away() -> None:
    component, denoiser = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    offloaded = OffloadedComponents([component], [denoiser], "cpu")
    denoiser.compile(backend="eager")
    x = torch.ones(2)
    for _ in range(2):
        component(x)
        assert offloaded.present is component
        assert torch.equal(denoiser(x), torch.nn.functional.linear(x, denoiser.weight, denoiser.bias))
        assert offloaded.present is None


# --- blocks of the denoiser


class Poisoned(OffloadedBlocks):
    """Away from the device weights are NaN: what computes with them, forward or backward, is found out.

    At most one block's weights may be numbers at a time.
    """

    made: ClassVar[list["Poisoned"]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made.append(self)
        self.entered: list[torch.nn.Module] = []
        for block in self.homes:
            self.poison(block)

    def poison(self, block: torch.nn.Module) -> None:
        for tensor, home in self.homes[block]:
            tensor.data = torch.full_like(home, torch.nan) if home.is_floating_point() else torch.zeros_like(home)

    def enter(self, block: torch.nn.Module) -> None:
        self.entered += [] if block is self.present else [block]
        super().enter(block)

    def leave(self) -> None:
        before = self.present
        super().leave()
        if before is not None:
            self.poison(before)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["sd3", "sd15", "flux", "wan", "z_image"])
def test_blocks_that_come_and_go_compute_the_same(
    name: str, checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images and gradient are bitwise those of a model that stays, also where a block is recomputed in parts."""
    case = tiny.CASES[name]
    tiny.build(case).save_pretrained(tmp_path)
    monkeypatch.setattr("gerl.model.placement.OffloadedBlocks", Poisoned)
    call = tiny.call_for(case, guided=True) | {"output_type": "np"}
    found = []
    for offload in ("none", "blocks"):
        config = ModelConfig(path=str(tmp_path), lora_rank=2, gradient_checkpointing=checkpointing, offload=offload)
        Poisoned.made.clear()
        policy = load_policy(config, 0.9, "cpu", 0)
        torch.manual_seed(2)
        for p in policy.trained.values():
            p.data.normal_(0, 0.2)
        images, tape = record(policy.pipe, call, kernel=case.kernel, generators=tiny.generators())
        ratios: list[float] = []

        def loss(k: int, step: Any, ratios: list[float] = ratios) -> torch.Tensor:
            ratios.append(float((step.log_prob - step.recorded_log_prob).detach().abs().max()))
            return step.log_prob.mean()

        replay(policy.pipe, tape, loss)
        assert max(ratios) == 0.0 and len(Poisoned.made) == (offload == "blocks")
        grads = [torch.zeros(1) if p.grad is None else p.grad for p in policy.trained.values()]
        found.append((tiny.output_of(images), torch.cat([g.flatten() for g in grads])))
    (images, exact), (again, gradient) = found
    assert np.array_equal(np.asarray(images), np.asarray(again)) and torch.equal(gradient, exact) and exact.any()
    (offloaded,) = Poisoned.made
    there = [b for b in offloaded.homes if not any(t.isnan().any() for t, _ in offloaded.homes[b])]
    assert len(there) == 1 and len(offloaded.homes) > 1 and set(offloaded.entered) == set(offloaded.homes)


def test_what_is_added_to_a_block_stays() -> None:
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    model.outer = torch.nn.Linear(2, 2)
    Poisoned([model], "cpu")
    first, second = model.blocks
    first.lora = torch.nn.Linear(2, 2)

    def away() -> list[bool]:
        return [bool(layer.weight.isnan().any()) for layer in (first, second, first.lora, model.outer)]

    assert away() == [True, True, False, False]
    with torch.no_grad():
        first.lora.weight.add_(1)  # as an optimizer does while the block is away
    trained = first.lora.weight.clone()
    first(torch.ones(2))
    assert away() == [False, True, False, False] and torch.equal(first.lora.weight, trained)
    second(torch.ones(2))
    assert away() == [True, False, False, False] and torch.equal(first.lora.weight, trained)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_gpu_holds_one_block_at_a_time(checkpointing: bool) -> None:
    gradients, peaks = [], []
    for offload in ("none", "blocks"):
        config = ModelConfig(dtype="float32", offload=offload, gradient_checkpointing=checkpointing)
        policy = load_policy(config, 0.9, "cuda", 0)
        call = {"prompt": ["a sign"], "height": 32, "width": 96, "num_inference_steps": 3, "guidance_scale": 1.0}
        torch.cuda.reset_peak_memory_stats()
        _, tape = record(policy.pipe, call | {"output_type": "np", "max_sequence_length": 1},
                         generators=[torch.Generator().manual_seed(0)])  # fmt: skip
        replay(policy.pipe, tape, lambda k, step: step.log_prob.mean())
        peaks.append(torch.cuda.max_memory_allocated())
        gradients.append(torch.cat([p.grad.flatten() for p in policy.trained.values() if p.grad is not None]))
        assert all(p.is_cuda for p in policy.trained.values())
        del policy, tape
        torch.cuda.empty_cache()
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)
    assert peaks[1] < peaks[0] or not checkpointing


# --- precision


def test_layers_that_a_model_keeps_in_fp32_stay_so(tmp_path: Path) -> None:
    tiny.build(tiny.CASES["wan"]).save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(path=str(tmp_path), dtype="bfloat16", lora_rank=2), 0.9, "cpu", 0)
    transformer = policy.pipe.transformer
    kept = {name for name, p in transformer.named_parameters() if p.dtype == torch.float32 and "lora_" not in name}
    listed = transformer._keep_in_fp32_modules
    assert kept == {name for name, _ in transformer.named_parameters() if any(part in name for part in listed)}
    assert any("scale_shift_table" in name for name in kept) and any("time_embedder" in name for name in kept)
    assert transformer.dtype == policy.pipe.text_encoder.dtype == torch.bfloat16
    call = tiny.call_for(tiny.CASES["wan"], guided=True) | {"output_type": "np"}
    images, tape = record(policy.pipe, call, generators=tiny.generators())
    assert images.frames.dtype == np.float32 and np.isfinite(images.frames).all()
    replay(policy.pipe, tape, lambda k, step: step.log_prob.mean())
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in policy.trained.values())


def test_a_vae_that_asks_for_it_decodes_in_fp32() -> None:
    latents = torch.randn(2, 4, 4, 4)
    for vae, forced in ((tiny.image_vae(quant=True), True), (tiny.image_vae(), False)):
        vae.register_to_config(force_upcast=forced)
        exact = vae.decode(latents.bfloat16().float()).sample
        pipe = tiny.build(tiny.CASES["sd15"])
        pipe.register_modules(vae=vae.bfloat16())
        decode_in_fp32(pipe)
        images = vae.decode(latents.bfloat16()).sample
        assert images.dtype == (torch.float32 if forced else torch.bfloat16) and vae.dtype == torch.bfloat16
        rounding = (images - exact).abs().max()
        assert rounding < 0.05 and (rounding > 1e-3 or forced)
        assert vae.encode(torch.zeros(1, 3, 8, 8, dtype=torch.bfloat16)).latent_dist.mode().dtype == torch.bfloat16
        if forced:
            vae.to(torch.float32).to(torch.bfloat16)  # as pipelines do that upcast it themselves
            assert vae.decode(latents.bfloat16()).sample.dtype == torch.float32


def denoiser_of(name: str = "sd3", rank: int = 4) -> Any:
    denoiser = tiny.denoiser_of(tiny.build(tiny.CASES[name]))
    add_lora(denoiser, rank, 4.0, None, seed=0)
    return denoiser


def layers(denoiser: torch.nn.Module) -> list[torch.nn.Linear]:
    inside = [m for block in repeated_blocks(denoiser) for m in block.modules()]
    return [m for m in inside if isinstance(m, torch.nn.Linear) and not m.weight.requires_grad]


needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs the package torchao")


@needs_torchao
def test_a_copy_computes_nearly_the_same() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 32), torch.randn(5, 7, 32)
    exact = x @ weight.T
    found = torch.nn.functional.linear(x, quantised(weight, "int8"))
    assert 1e-4 < float((found - exact).norm() / exact.norm()) < 2e-2
    assert torch.equal(torch.nn.functional.linear(x[:1], quantised(weight, "int8")), found[:1])  # each row by itself


@needs_torchao
def test_the_frozen_layers_of_the_blocks_are_swapped_and_put_back() -> None:
    denoiser = denoiser_of()
    before = {id(m): m.weight for m in layers(denoiser)}
    lora = [p for p in denoiser.parameters() if p.requires_grad]
    drawing = QuantizedRollout({"transformer": denoiser}, "int8")
    wide = {id(m) for m in layers(denoiser) if m.in_features % 16 == m.out_features % 16 == 0}
    assert wide and {id(layer) for layer, _ in drawing.copies} == wide
    with drawing.swapped_in():
        assert all((m.weight is before[id(m)]) == (id(m) not in wide) for m in layers(denoiser))
        assert [p for p in denoiser.parameters() if p.requires_grad] == lora
    assert all(m.weight is before[id(m)] for m in layers(denoiser))
    with pytest.raises(KeyError), drawing.swapped_in():
        raise KeyError
    assert all(m.weight is before[id(m)] for m in layers(denoiser))


@needs_torchao
def test_a_policy_draws_with_them_and_only_then() -> None:
    sampling = SamplingConfig(height=32, width=96, guidance_scale=1.0)
    config = Config(model=ModelConfig(lora_rank=4), sampling=sampling, rollout=RolloutConfig(quantize="int8"))
    policy = load_worker_policy(config, "cpu", None)
    assert policy.quantized is not None
    layer = policy.quantized.copies[0][0]
    own = layer.weight
    with policy.as_sampler():
        assert layer.weight is not own
    assert layer.weight is own


@needs_torchao
def test_what_cannot_be_done_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"rollout\.quantize=int8: .*use none"):
        QuantizedRollout({"unet": torch.nn.Linear(4, 4)}, "int8")  # type: ignore[dict-item]
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"rollout\.quantize=fp8: .*on cpu.*use int8"):
            check_quantized_rollout("fp8", "cpu", torch.float32)
    check_quantized_rollout("int8", "cpu", torch.float32)
    own = builtins.__import__

    def without_torchao(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("torchao"):
            raise ImportError(name)
        return own(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torchao)
    with pytest.raises(ConfigError, match=r"needs the package torchao: pip install 'gerl\[quantize\]'"):
        quantised(torch.zeros(16, 16), "int8")


def drawn(pipe: diffusers.DiffusionPipeline, name: str) -> torch.Tensor:
    call = tiny.call_for(tiny.CASES[name], guided=False) | {"generator": tiny.generators()}
    return torch.as_tensor(tiny.output_of(pipe(**call)))


def test_an_attention_backend_gives_the_same_images() -> None:
    pipe = tiny.build(tiny.CASES["flux"])
    images = drawn(pipe, "flux")
    check_attention("_native_math", "cpu", torch.float32)
    set_attention({"transformer": pipe.transformer}, "_native_math")
    chosen = {p._attention_backend for p in (getattr(m, "processor", None) for m in pipe.transformer.modules()) if p}
    assert {str(backend.value) for backend in chosen} == {"_native_math"}
    assert torch.allclose(drawn(pipe, "flux"), images, atol=1e-5)
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    assert _AttentionBackendRegistry.get_active_backend()[0].value == "native"  # for the other models of this process


@pytest.mark.parametrize("name", ["sage", "flash", "xformers", "fast", "_native_cudnn"])
def test_a_backend_that_cannot_train_here_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.attention={name}"):
        check_attention(name, "cpu", torch.float32)


def test_attention_that_has_no_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models import attention_dispatch
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    own = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]
    del attention_dispatch

    def for_inference(query: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return own(query=query, **kwargs).detach()

    kind = AttentionBackendName._NATIVE_MATH
    monkeypatch.setitem(_AttentionBackendRegistry._backends, kind, for_inference)
    monkeypatch.setitem(_AttentionBackendRegistry._supported_arg_names, kind, {"query", "key", "value", "attn_mask"})
    with pytest.raises(ConfigError, match=r"model\.attention=_native_math .*no gradient"):
        check_attention("_native_math", "cpu", torch.float32)


def test_a_denoiser_without_a_choice_of_attention_is_refused() -> None:
    pipe = tiny.build(tiny.CASES["sd3"])
    with pytest.raises(ModelError, match=r"model\.attention=native: transformer .*use null"):
        set_attention({"transformer": pipe.transformer}, "native")


def test_blocks_are_compiled_one_by_one() -> None:
    denoiser = tiny.build(tiny.CASES["sd3"]).transformer
    compile_blocks(denoiser, "eager")
    assert denoiser._compiled_call_impl is None
    assert all(block._compiled_call_impl is not None for block in repeated_blocks(denoiser))


@more
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_a_compiled_rollout_rounds_as_its_update_does() -> None:
    pipe = tiny.build(tiny.CASES["sd3"])
    lora = tiny.add_lora(pipe)
    pipe.to(torch.bfloat16)
    compile_blocks(pipe.transformer, "inductor")
    call = tiny.call_for(tiny.CASES["sd3"], False)
    _, tape = record(pipe, call, generators=tiny.generators(), probe=False)
    deviations: list[torch.Tensor] = []

    def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
        deviations.append((step.log_prob.detach() - step.recorded_log_prob).abs().max())
        return step.log_prob.sum()

    replay(pipe, tape, on_step)
    assert deviations and max(deviations) == 0
    assert any(p.grad is not None and bool(p.grad.any()) for p in lora)


def test_without_gradient_a_compiled_block_keeps_no_graph_of_the_one_before_it() -> None:
    plain, pipe = (tiny.build(tiny.CASES["sd3"]) for _ in range(2))
    call = tiny.call_for(tiny.CASES["sd3"], False)
    inputs: list[torch.Tensor] = []
    for one in (plain, pipe):
        tiny.add_lora(one)
    compile_blocks(pipe.transformer, "eager")
    second = repeated_blocks(pipe.transformer)[1]
    second.register_forward_pre_hook(lambda _, *given: inputs.extend(tree_leaves(given)), with_kwargs=True)
    images = [one(**call, generator=tiny.generators()).images for one in (plain, pipe)]
    torch.testing.assert_close(images[1], images[0])
    marked = [v for v in inputs if torch.is_tensor(v) and v.requires_grad]
    assert marked and all(v.is_leaf for v in marked) and not images[1].requires_grad


@pytest.mark.parametrize("name", ["sd3", "wan"])
def test_a_vae_may_keep_its_channels_last(name: str) -> None:
    pipe = tiny.build(tiny.CASES[name])
    images = drawn(pipe, name)
    channels_last(pipe)
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    kernels = [p for p in pipe.vae.parameters() if p.ndim in layouts]
    assert kernels and all(p.is_contiguous(memory_format=layouts[p.ndim]) for p in kernels)
    assert torch.allclose(drawn(pipe, name), images, atol=1e-4)
