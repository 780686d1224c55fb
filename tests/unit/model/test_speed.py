"""How a pipeline computes: the same results but for rounding, or a sentence."""

import diffusers
import pytest
import tiny
import torch

from gerl.errors import ConfigError, ModelError
from gerl.model.sharding import repeated_blocks
from gerl.model.speed import channels_last, check_attention, compile_blocks, set_attention


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


@pytest.mark.parametrize("name", ["sd3", "wan"])
def test_a_vae_may_keep_its_channels_last(name: str) -> None:
    pipe = tiny.build(tiny.CASES[name])
    images = drawn(pipe, name)
    channels_last(pipe)
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    kernels = [p for p in pipe.vae.parameters() if p.ndim in layouts]
    assert kernels and all(p.is_contiguous(memory_format=layouts[p.ndim]) for p in kernels)
    assert torch.allclose(drawn(pipe, name), images, atol=1e-4)
