"""Which pipelines in memory can be trained: those of which the LoRA then fits a plain pipeline, and others say why."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from newer import diffusers, needs
from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, inject_adapter_in_model

from gerl.engine import record
from gerl.errors import ModelError
from gerl.model.denoisers import check_offered, has_adapter, quiet_libraries
from gerl.model.lora import find_targets
from gerl.utils.versions import DTYPE

KINDS: dict[str, Any] = {
    "lora": LoraConfig(r=2, target_modules=["to_q"]),
    "dora": LoraConfig(r=2, target_modules=["to_q"], use_dora=True),
    "loha": LoHaConfig(r=2, target_modules=["to_q"]),
    "lokr": LoKrConfig(r=2, target_modules=["to_q"]),
    "oft": OFTConfig(r=0, oft_block_size=4, target_modules=["to_q"]),
    "ia3": IA3Config(target_modules=["to_q"], feedforward_modules=[]),
}


def with_adapter(kind: str) -> Any:
    pipe = tiny.flux()
    inject_adapter_in_model(KINDS[kind], pipe.transformer, "style")
    for name, p in pipe.transformer.named_parameters():
        if ".style" in name:
            torch.nn.init.normal_(p.data, std=0.1, generator=torch.Generator().manual_seed(0))
    return pipe


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_any_kind_is_refused_and_both_ways_out_work(kind: str) -> None:
    pipe = with_adapter(kind)
    with pytest.raises(
        ModelError, match=r"adapters.*pipe\.unload_lora_weights\(\).*pipe\.fuse_lora\(components=.*transformer"
    ):
        check_offered(pipe)
    pipe.unload_lora_weights()
    check_offered(pipe)

    pipe = with_adapter(kind)
    layer, x = pipe.transformer.transformer_blocks[0].attn.to_q, torch.ones(1, 32)
    with torch.no_grad():
        adapted, plain = layer(x), layer.base_layer(x)
        pipe.fuse_lora()
        check_offered(pipe)  # takes their layers off
        layer = pipe.transformer.transformer_blocks[0].attn.to_q
        assert type(layer) is torch.nn.Linear and not has_adapter(pipe.transformer)
        torch.testing.assert_close(layer(x), adapted)
        assert not torch.allclose(layer(x), plain)


@pytest.mark.parametrize(("build", "component"), [(tiny.flux, "transformer"), (tiny.sd15, "unet")])
def test_fused_projections_are_refused_and_the_way_out_works(build: Callable[[], Any], component: str) -> None:
    pipe = build()
    model = getattr(pipe, component)
    before = find_targets(model, None)
    model.fuse_qkv_projections()
    with pytest.raises(ModelError, match=rf"pipe\.{component}\.unfuse_qkv_projections\(\)"):
        check_offered(pipe)
    assert find_targets(model, None) == before, "no LoRA on a layer that a plain pipeline has not"
    model.unfuse_qkv_projections()
    check_offered(pipe)
    assert find_targets(model, None) == before


def test_layers_of_an_ip_adapter_get_no_lora() -> None:
    pipe = tiny.sd15()
    before = find_targets(pipe.unet, None)
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

    processors = {
        name: IPAdapterAttnProcessor2_0(16, 16) if "attn2" in name else p
        for name, p in pipe.unet.attn_processors.items()
    }
    pipe.unet.set_attn_processor(processors)
    assert any("to_k_ip" in name for name, _ in pipe.unet.named_modules())
    assert find_targets(pipe.unet, None) == before
    assert not any("_ip" in name for name in find_targets(pipe.unet, "to_k"))


def test_an_ip_adapter_is_refused_and_the_way_out_works() -> None:
    pipe = tiny.sd15()
    projection = ImageProjection(image_embed_dim=8, cross_attention_dim=16, num_image_text_embeds=2)
    pipe.unet.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
    with pytest.raises(ModelError, match=r"IP-Adapter.*pipe\.unload_ip_adapter\(\)"):
        check_offered(pipe)
    pipe.unload_ip_adapter()
    check_offered(pipe)


SKIPS = {"spatial_attention_block_skip_range": 2, "current_timestep_callback": lambda: 500}
CACHES = [
    (diffusers.FirstBlockCacheConfig, {}),
    (diffusers.MagCacheConfig, {"num_inference_steps": 4, "calibrate": True}),
    (diffusers.PyramidAttentionBroadcastConfig, SKIPS),
    (diffusers.TaylorSeerCacheConfig, {}),
    (diffusers.FasterCacheConfig, SKIPS),
]


@pytest.mark.parametrize(("kind", "settings"), CACHES)
def test_caches_of_diffusers_are_refused_and_the_way_out_works(kind: Any, settings: dict[str, Any]) -> None:
    pipe = tiny.flux()
    pipe.transformer.enable_cache(kind(**settings))
    with pytest.raises(ModelError, match=r"pipe\.transformer\.disable_cache\(\).*sampling\.cache"):
        check_offered(pipe)
    with pytest.raises(ModelError, match=r"pipe\.transformer\.disable_cache\(\)"):  # the engine without a run
        record(pipe, {"prompt": ["a"], "output_type": "latent"}, kernel="flow_sde", noise_level=0.7)
    pipe.transformer.disable_cache()
    check_offered(pipe)


def test_hooks_that_keep_no_state_are_taken() -> None:
    pipe = tiny.flux()
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    check_offered(pipe)


def test_hooks_of_the_program_are_said(caplog: pytest.LogCaptureFixture) -> None:
    pipe = tiny.flux()
    pipe.transformer.transformer_blocks[0].attn.to_q.register_forward_hook(lambda module, args, output: output)
    with caplog.at_level("WARNING"):
        check_offered(pipe)
    assert "transformer_blocks.0.attn.to_q" in caplog.text and "state between calls" in caplog.text


@needs("diffusers", "0.37", "cannot build it without a model")
def test_a_modular_pipeline_is_refused_with_what_to_give() -> None:
    with pytest.raises(ModelError, match=r"ModularPipeline is not a diffusers pipeline.*\*\*pipe\.components"):
        check_offered(diffusers.FluxModularPipeline())


def test_a_compiled_module_in_place_of_the_denoiser_is_refused_and_the_way_out_works() -> None:
    pipe = tiny.flux()
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with pytest.raises(ModelError, match=r"pipe\.transformer = pipe\.transformer\._orig_mod.*model\.compile"):
        check_offered(pipe)
    pipe.transformer = pipe.transformer._orig_mod
    check_offered(pipe)


def test_sequential_offload_is_refused() -> None:
    pipe = tiny.flux()
    pipe.transformer.to("meta")  # what enable_sequential_cpu_offload() leaves, where there is a GPU
    with pytest.raises(ModelError, match=r"transformer.*model\.offload=blocks"):
        check_offered(pipe)


def test_each_warning_is_passed_on_once(caplog: pytest.LogCaptureFixture) -> None:
    quiet_libraries()
    quiet_libraries()  # as every run of a process does
    assert not any(logging.getLogger(library.__name__).propagate for library in (diffusers, transformers))
    ours = [logging.getLogger(f"{library.__name__}.pipelines.x") for library in (diffusers, transformers)]
    with caplog.at_level(logging.WARNING):
        for log in ours:
            for _ in range(2):
                log.warning("`height` has to be\ndivisible by 16 but is 27.")
                log.info("loading weights")
                log.warning("The following part of your input was truncated because CLIP can only ...: ['x']")
    said = "`height` has to be divisible by 16 but is 27."
    passed_on = [record.getMessage() for record in caplog.records if record.name.startswith("gerl")]
    assert passed_on == [f"diffusers: {said}", f"transformers: {said}"]


def test_components_that_cannot_compute_together_are_refused_with_the_way_to_load_them(tmp_path: Path) -> None:
    for name in ("flux", "sd3", "sd15", "qwen_image"):
        tiny.CASES[name].build().to(torch.bfloat16).save_pretrained(tmp_path / name)
        pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / name)  # transformers keeps the files' precision
        if (
            len(
                {p.dtype for part in pipe.components.values() if hasattr(part, "parameters") for p in part.parameters()}
            )
            > 1
        ):
            with pytest.raises(
                ModelError, match=rf"text_encoder.* in bfloat16 and .* in float32.*{DTYPE}=torch\.bfloat16"
            ):
                check_offered(pipe)
            check_offered(pipe.to(torch.bfloat16))
        check_offered(diffusers.DiffusionPipeline.from_pretrained(tmp_path / name, **{DTYPE: torch.bfloat16}))
    pipe = tiny.flux().to(torch.bfloat16)
    pipe.vae.to(torch.float32)  # as its own pipelines recommend
    check_offered(pipe)
    pipe.text_encoder_2.to(torch.float32)
    with pytest.raises(ModelError, match=r"text_encoder, transformer in bfloat16 and text_encoder_2 in float32"):
        check_offered(pipe)
    pipe.transformer.to(torch.float16)
    with pytest.raises(ModelError, match=r"torch\.float16"):  # that of the denoiser
        check_offered(pipe)
