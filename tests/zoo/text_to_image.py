"""Text to image: Stable Diffusion, FLUX, Qwen-Image and others."""

from typing import Any

import diffusers
import tiny
import torch
import transformers
from zoo.base import Entry

T2I = "text to image"
NEGATIVE = {"negative_prompt": "..."}  # replaced by one per sample
LANGUAGE_MODEL = dict(
    vocab_size=tiny.VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def sdxl() -> Any:
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        cross_attention_dim=32,
        attention_head_dim=(2, 4),
        norm_num_groups=4,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 16,
    )
    return diffusers.StableDiffusionXLPipeline(
        unet=unet,
        scheduler=diffusers.DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1),
        vae=tiny.image_vae(quant=True),
        text_encoder=tiny.clip(16),
        tokenizer=tiny.tokenizer(),
        text_encoder_2=tiny.clip(16, 16),
        tokenizer_2=tiny.tokenizer(),
    )


def pixart_sigma() -> Any:
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        cross_attention_dim=16,
        caption_channels=32,
        sample_size=8,
        use_additional_conditions=False,
    )
    return diffusers.PixArtSigmaPipeline(
        transformer=transformer,
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
        vae=tiny.image_vae(),
        text_encoder=tiny.t5(),
        tokenizer=tiny.tokenizer(),
    )


def flux2_parts() -> dict[str, Any]:
    """What FLUX.2 and FLUX.2-klein have in common; the text features of two layers are 16 each."""
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )
    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
    )
    return {"transformer": transformer, "vae": vae, "scheduler": tiny.euler(use_dynamic_shifting=True)}


def flux2() -> Any:
    vision = dict(
        model_type="pixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        head_dim=8, image_size=16, patch_size=8,
    )  # fmt: skip
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **LANGUAGE_MODEL}, vision_config=vision, image_token_index=3
    )
    encoder = transformers.Mistral3ForConditionalGeneration(config)
    return diffusers.Flux2Pipeline(text_encoder=encoder, tokenizer=tiny.tokenizer(64), **flux2_parts())


def flux2_klein() -> Any:
    encoder = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LANGUAGE_MODEL))
    return diffusers.Flux2KleinPipeline(text_encoder=encoder, tokenizer=tiny.tokenizer(64), **flux2_parts())


def gemma() -> Any:
    return transformers.Gemma2Model(transformers.Gemma2Config(**LANGUAGE_MODEL))


def sana(guidance_embeds: bool = False) -> Any:
    transformer = diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=8,
        guidance_embeds=guidance_embeds,
        qk_norm="rms_norm_across_heads" if guidance_embeds else None,
    )
    vae = diffusers.AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types="ResBlock",
        decoder_block_types="ResBlock",
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
        upsample_block_type="interpolate",
        downsample_block_type="stride_conv",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    )
    return diffusers.SanaPipeline(
        transformer=transformer,
        scheduler=tiny.euler(shift=3.0),
        vae=vae,
        text_encoder=gemma(),
        tokenizer=tiny.tokenizer(),
    )


def lumina2() -> Any:
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=4,
        in_channels=4,
        hidden_size=24,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=1,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(8, 8, 8),
        axes_lens=(256, 32, 32),
        cap_feat_dim=16,
    )
    return diffusers.Lumina2Pipeline(
        transformer=transformer,
        scheduler=tiny.euler(use_dynamic_shifting=True),
        vae=tiny.image_vae(),
        text_encoder=gemma(),
        tokenizer=tiny.tokenizer(64),
    )


def cogview4() -> Any:
    transformer = diffusers.CogView4Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
        pos_embed_max_size=8,
        sample_size=8,
        rope_axes_dim=(8, 8),
    )
    return diffusers.CogView4Pipeline(
        transformer=transformer,
        scheduler=tiny.euler(use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"),
        vae=tiny.image_vae(),
        text_encoder=transformers.GlmModel(transformers.GlmConfig(**LANGUAGE_MODEL)),
        tokenizer=tiny.tokenizer(64),
    )


def aura_flow() -> Any:
    transformer = diffusers.AuraFlowTransformer2DModel(
        sample_size=8,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pos_embed_max_size=64,
    )
    return diffusers.AuraFlowPipeline(
        transformer=transformer,
        scheduler=tiny.euler(shift=1.73),
        vae=tiny.image_vae(),
        text_encoder=tiny.t5(multilingual=True),
        tokenizer=tiny.tokenizer(),
    )


def chroma() -> Any:
    transformer = diffusers.ChromaTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )
    return diffusers.ChromaPipeline(
        transformer=transformer,
        scheduler=tiny.euler(use_dynamic_shifting=True),
        vae=tiny.image_vae(),
        text_encoder=tiny.t5(),
        tokenizer=tiny.tokenizer(),
    )


def entry(name: str, build: Any, plain: dict[str, Any], guided: dict[str, Any] | None, **more: Any) -> Entry:
    """An entry of this file: which differ in little but their builder."""
    return Entry(name, T2I, build, plain, guided, **more)


def scale(value: float) -> dict[str, Any]:
    return {"guidance_scale": value}


SHORT = {"max_sequence_length": 8}
LONG = {"max_sequence_length": 64}
TWO_LAYERS = {"text_encoder_out_layers": (0, 1)}

ENTRIES: list[Entry] = [
    entry("StableDiffusionPipeline", tiny.sd15, scale(1.0), scale(5.0), kernel="ddim"),
    entry("StableDiffusionXLPipeline", sdxl, scale(1.0), {**scale(5.0), **NEGATIVE}, kernel="ddim"),
    entry(
        "PixArtSigmaPipeline",
        pixart_sigma,
        scale(1.0),
        {**scale(4.5), **NEGATIVE},
        call={"max_sequence_length": 16, "use_resolution_binning": False, "clean_caption": False},
        kernel="ddim",
    ),
    entry("StableDiffusion3Pipeline", tiny.sd3, scale(1.0), scale(4.5), call=SHORT),
    entry("FluxPipeline", tiny.flux, {}, {"true_cfg_scale": 3.0, **NEGATIVE}, call=SHORT),
    entry("Flux2Pipeline", flux2, {}, None, call=LONG | TWO_LAYERS),
    entry("Flux2KleinPipeline", flux2_klein, scale(1.0), scale(4.0), call=LONG | TWO_LAYERS),
    entry("QwenImagePipeline", tiny.qwen_image, {}, {"true_cfg_scale": 4.0, **NEGATIVE}),
    entry("ZImagePipeline", tiny.z_image, scale(0.0), scale(3.0)),
    entry(
        "SanaPipeline",
        sana,
        scale(1.0),
        {**scale(4.5), **NEGATIVE},
        call={"max_sequence_length": 16, "use_resolution_binning": False, "complex_human_instruction": None},
        size=32,
    ),
    entry(
        "Lumina2Pipeline", lumina2, scale(1.0), {**scale(4.0), **NEGATIVE}, call={"max_sequence_length": 64}, size=32
    ),
    entry("CogView4Pipeline", cogview4, scale(1.0), {**scale(3.5), **NEGATIVE}, call={"max_sequence_length": 64}),
    entry("AuraFlowPipeline", aura_flow, scale(1.0), {**scale(3.5), **NEGATIVE}, call={"max_sequence_length": 16}),
    entry("ChromaPipeline", chroma, scale(1.0), {**scale(5.0), **NEGATIVE}, call={"max_sequence_length": 16}),
]
