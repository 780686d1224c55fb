"""Text to image: Stable Diffusion, FLUX, Qwen-Image and others."""

from typing import Any

import diffusers
import tiny
import transformers
from tiny import JOINT, LATENTS, NARROW, dynamic, euler, image_vae, pipeline
from zoo.base import LONG, MEDIUM, SHORT, T2I, TWO_LAYERS, Entry, scale, true_cfg

LANGUAGE: dict[str, Any] = tiny.LANGUAGE | {"intermediate_size": 16, "num_key_value_heads": 1, "head_dim": 8}
LANGUAGE |= tiny.SPECIAL


def sdxl() -> Any:
    blocks = tiny.UNET | {"transformer_layers_per_block": (1, 2), "attention_head_dim": (2, 4)}
    added = {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 6 * 8 + 16}
    unet = diffusers.UNet2DConditionModel(
        **blocks, **added, cross_attention_dim=32, use_linear_projection=True, addition_embed_type="text_time"
    )
    parts = tiny.ddim(), image_vae(quant=True), tiny.clip(), tiny.clip(projected=True)
    return pipeline(diffusers.StableDiffusionXLPipeline, unet, *parts)


def pixart_sigma() -> Any:
    sizes = NARROW | {"cross_attention_dim": 16, "caption_channels": 32, "sample_size": 8}
    transformer = diffusers.PixArtTransformer2DModel(**sizes, use_additional_conditions=False)
    scheduler = diffusers.DDIMScheduler(clip_sample=False)
    return pipeline(diffusers.PixArtSigmaPipeline, transformer, scheduler, image_vae(), tiny.t5())


def flux2_parts() -> tuple[Any, ...]:
    """What FLUX.2 and FLUX.2-klein have in common; the text features of two layers are 16 each."""
    sizes = JOINT | {"in_channels": 16, "joint_attention_dim": 32, "timestep_guidance_channels": 16}
    transformer = diffusers.Flux2Transformer2DModel(**sizes | {"axes_dims_rope": (4, 4, 4, 4)})
    return transformer, dynamic(), tiny.vae(diffusers.AutoencoderKLFlux2, width=8)


def flux2() -> Any:
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "head_dim": 8, "image_size": 16, "patch_size": 8}
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **LANGUAGE}, vision_config=vision, image_token_index=3
    )
    encoder = transformers.Mistral3ForConditionalGeneration(config)
    return pipeline(diffusers.Flux2Pipeline, *flux2_parts(), encoder, words=lambda: tiny.tokenizer(64))


def flux2_klein() -> Any:
    encoder = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LANGUAGE))
    return pipeline(diffusers.Flux2KleinPipeline, *flux2_parts(), encoder, words=lambda: tiny.tokenizer(64))


def gemma() -> Any:
    return transformers.Gemma2Model(transformers.Gemma2Config(**LANGUAGE))


def sana(guidance_embeds: bool = False) -> Any:
    cross = dict(num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=16)
    norm = "rms_norm_across_heads" if guidance_embeds else None
    transformer = diffusers.SanaTransformer2DModel(
        **NARROW, **LATENTS, **cross, sample_size=8, guidance_embeds=guidance_embeds, qk_norm=norm
    )
    blocks = {"block_types": "ResBlock", "layers_per_block": (1, 1, 1), "qkv_multiscales": ((), (), ())}
    blocks |= {"block_out_channels": (8, 8, 8)}
    halves = {f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in blocks.items()}
    scaling = {"upsample_block_type": "interpolate", "downsample_block_type": "stride_conv"}
    vae = diffusers.AutoencoderDC(**halves, **scaling, latent_channels=4, attention_head_dim=2)
    return pipeline(diffusers.SanaPipeline, transformer, euler(shift=3.0), vae, gemma())


def lumina2() -> Any:
    sizes = dict(hidden_size=24, num_layers=1, num_refiner_layers=1, num_attention_heads=1, num_kv_heads=1)
    rope = dict(axes_dim_rope=(8, 8, 8), axes_lens=(256, 32, 32))
    transformer = diffusers.Lumina2Transformer2DModel(
        **sizes, **rope, sample_size=4, in_channels=4, multiple_of=16, cap_feat_dim=16
    )
    parts = dynamic(), image_vae(), gemma()
    return pipeline(diffusers.Lumina2Pipeline, transformer, *parts, words=lambda: tiny.tokenizer(64))


def cogview4() -> Any:
    sizes = dict(text_embed_dim=16, time_embed_dim=8, condition_dim=4, pos_embed_max_size=8, sample_size=8)
    transformer = diffusers.CogView4Transformer2DModel(**NARROW, **LATENTS, **sizes, rope_axes_dim=(8, 8))
    scheduler = euler(use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear")
    parts = scheduler, image_vae(), transformers.GlmModel(transformers.GlmConfig(**LANGUAGE))
    return pipeline(diffusers.CogView4Pipeline, transformer, *parts, words=lambda: tiny.tokenizer(64))


def aura_flow() -> Any:
    layers = dict(num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8, num_attention_heads=2)
    sizes = dict(sample_size=8, joint_attention_dim=32, caption_projection_dim=16, pos_embed_max_size=64)
    transformer = diffusers.AuraFlowTransformer2DModel(**layers, **sizes)
    parts = euler(shift=1.73), image_vae(), tiny.t5(multilingual=True)
    return pipeline(diffusers.AuraFlowPipeline, transformer, *parts)


def chroma() -> Any:
    approximator = dict(approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1)
    transformer = diffusers.ChromaTransformer2DModel(**JOINT, **approximator, in_channels=16, joint_attention_dim=32)
    return pipeline(diffusers.ChromaPipeline, transformer, dynamic(), image_vae(), tiny.t5())


UNBINNED = MEDIUM | {"use_resolution_binning": False, "clean_caption": False}

ENTRIES: list[Entry] = [
    Entry("StableDiffusionPipeline", T2I, tiny.sd15, **scale(1.0, 5.0, negative=False), kernel="ddim"),
    Entry("StableDiffusionXLPipeline", T2I, sdxl, **scale(1.0, 5.0), kernel="ddim"),
    Entry("PixArtSigmaPipeline", T2I, pixart_sigma, **scale(1.0, 4.5), call=UNBINNED, kernel="ddim"),
    Entry("StableDiffusion3Pipeline", T2I, tiny.sd3, **scale(1.0, 4.5, negative=False), call=SHORT),
    Entry("FluxPipeline", T2I, tiny.flux, **true_cfg(3.0), call=SHORT),
    Entry("Flux2Pipeline", T2I, flux2, call=TWO_LAYERS),
    Entry("Flux2KleinPipeline", T2I, flux2_klein, **scale(1.0, 4.0, negative=False), call=TWO_LAYERS),
    Entry("QwenImagePipeline", T2I, tiny.qwen_image, **true_cfg(4.0)),
    Entry("ZImagePipeline", T2I, tiny.z_image, **scale(0.0, 3.0, negative=False)),
    Entry("SanaPipeline", T2I, sana, **scale(1.0, 4.5), call=UNBINNED | {"complex_human_instruction": None}, size=32),
    Entry("Lumina2Pipeline", T2I, lumina2, **scale(1.0, 4.0), call=LONG, size=32),
    Entry("CogView4Pipeline", T2I, cogview4, **scale(1.0, 3.5), call=LONG),
    Entry("AuraFlowPipeline", T2I, aura_flow, **scale(1.0, 3.5), call=MEDIUM),
    Entry("ChromaPipeline", T2I, chroma, **scale(1.0, 5.0), call=MEDIUM),
]
