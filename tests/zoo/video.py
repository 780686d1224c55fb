"""Video, from text or from a picture."""

from typing import Any

import diffusers
import tiny
import torch
import transformers
from diffusers.guiders import AdaptiveProjectedGuidance
from diffusers.pipelines.helios import pipeline_helios
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from diffusers.pipelines.skyreels_v2 import pipeline_skyreels_v2, pipeline_skyreels_v2_diffusion_forcing
from diffusers.pipelines.wan import pipeline_wan_vace
from tiny import LATENTS, NARROW, dynamic, euler, pipeline
from zoo.base import MEDIUM, NEGATIVE, Entry, as_class, scale, true_cfg
from zoo.conditioned import converted, given, pictures
from zoo.text_to_image import drawn, gemma, kandinsky_5

from gerl.model.schedulers import trainable_scheduler


def wan_2_2() -> Any:
    """Two experts; the one for high noise takes only the first step."""
    pipe = tiny.wan()
    expert = diffusers.WanTransformer3DModel.from_config(pipe.transformer.config)  # other weights
    return diffusers.WanPipeline(**pipe.components | {"transformer_2": expert}, boundary_ratio=0.875)


def ltx() -> Any:
    sizes = NARROW | LATENTS | {"cross_attention_dim": 16, "caption_channels": 32}
    blocks = {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5}
    blocks |= {"block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4}
    transformer = diffusers.LTXVideoTransformer3DModel(**sizes)
    vae = diffusers.AutoencoderKLLTXVideo(latent_channels=4, **blocks)
    return pipeline(diffusers.LTXPipeline, transformer, dynamic(), vae, tiny.t5())


def hunyuan_video() -> Any:
    layers = NARROW | LATENTS | {"num_single_layers": 1, "num_refiner_layers": 1, "rope_axes_dim": (2, 2, 4)}
    transformer = diffusers.HunyuanVideoTransformer3DModel(**layers, text_embed_dim=16, pooled_projection_dim=16)
    blocks = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
    vae = diffusers.AutoencoderKLHunyuanVideo(latent_channels=4, **blocks, mid_block_add_attention=False)
    clip = tiny.clip(positions=77)
    llama = transformers.LlamaModel(transformers.LlamaConfig(**tiny.LANGUAGE | {"num_hidden_layers": 3}))
    return pipeline(diffusers.HunyuanVideoPipeline, transformer, euler(shift=7.0), vae, llama, clip)


def mochi() -> Any:
    sizes = dict(in_channels=4, patch_size=2, text_embed_dim=32, time_embed_dim=16, pooled_projection_dim=16)
    transformer = diffusers.MochiTransformer3DModel(**NARROW | {"num_layers": 2}, **sizes, max_sequence_length=16)
    torch.nn.init.normal_(transformer.pos_frequencies)  # zero in a fresh model: no positions
    blocks = {"encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4}
    latents = {"latent_channels": 4, "latents_mean": (0.0,) * 4, "latents_std": (1.0,) * 4}
    vae = diffusers.AutoencoderKLMochi(**latents, **blocks, layers_per_block=(1,) * 5)
    return pipeline(diffusers.MochiPipeline, transformer, euler(invert_sigmas=True), vae, tiny.t5())


GUIDANCE = scale(1.0, 4.5, negative=False)
FRAMES = MEDIUM | {"num_frames": 5}
NINE = MEDIUM | {"num_frames": 9}
TEMPLATE = {"prompt_template": {"template": "<{}>", "crop_start": 1}}


def ltx2() -> Any:
    """A video and its sound, each with a scheduler of its own."""
    heads = {"cross_attention_dim": 16, "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2}
    heads |= {"audio_attention_head_dim": 4, "audio_cross_attention_dim": 8, "caption_channels": 16}
    rope = {"rope_double_precision": False, "rope_type": "split"}
    transformer = diffusers.LTX2VideoTransformer3DModel(**NARROW, **LATENTS, **heads, **rope)
    connected = {
        f"{kind}_connector_{name}": value
        for kind in ("video", "audio")
        for name, value in {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 1,
            "num_learnable_registers": None,
        }.items()
    }
    connectors = LTX2TextConnectors(
        caption_channels=16,
        text_proj_in_factor=2,
        **connected,
        **rope,
        connector_rope_base_seq_len=32,
        rope_theta=10000.0,
        causal_temporal_positioning=False,
    )
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    sound = {"base_channels": 4, "output_channels": 2, "ch_mult": (1,), "num_res_blocks": 1, "in_channels": 2}
    sound |= {"resolution": 32, "latent_channels": 2, "norm_type": "pixel", "causality_axis": "height", "mel_bins": 8}
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        **sound, attn_resolutions=None, mid_block_add_attention=False, sample_rate=16000, mel_hop_length=160
    )
    vocoder = LTX2Vocoder(
        in_channels=16,
        hidden_channels=8,
        out_channels=2,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    )
    more = {"audio_vae": audio_vae, "connectors": connectors, "vocoder": vocoder}
    return pipeline(diffusers.LTX2Pipeline, transformer, euler(), vae, gemma(), **more)


def wan_vace() -> Any:
    pipeline_wan_vace.prompt_clean = str.strip  # its own needs ftfy
    pipe = tiny.wan()
    vace = {"vace_layers": [0, 1], "vace_in_channels": 2 * 4 + 64}
    transformer = diffusers.WanVACETransformer3DModel.from_config(pipe.transformer.config, **vace)
    for parameter in transformer.parameters():
        if not parameter.any():  # what a fresh one has at zero passes nothing on
            torch.nn.init.normal_(parameter, std=0.1)
    return as_class(pipe, diffusers.WanVACEPipeline, transformer=transformer.eval(), transformer_2=None)


def kandinsky_5_i2v() -> Any:
    pipe = kandinsky_5()
    transformer = diffusers.Kandinsky5Transformer3DModel.from_config(pipe.transformer.config, visual_cond=True)
    blocks = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
    vae = diffusers.AutoencoderKLHunyuanVideo(latent_channels=4, **blocks, mid_block_add_attention=False)
    made = as_class(
        pipe, diffusers.Kandinsky5I2VPipeline, vae=vae.eval(), transformer=drawn(transformer, "modulation").eval()
    )
    made.prompt_template, made.prompt_template_encode_start_idx = "{}", 0
    return made


def ltx_condition() -> Any:
    return as_class(ltx(), diffusers.LTXConditionPipeline, scheduler=euler())


def helios() -> Any:
    pipeline_helios.prompt_clean = str.strip  # its own needs ftfy
    sizes = LATENTS | {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32}
    transformer = diffusers.HeliosTransformer3DModel(
        **sizes, text_dim=32, freq_dim=16, cross_attn_norm=True, rope_dim=(4, 4, 4), has_multi_term_memory_patch=True
    )
    scheduler = trainable_scheduler(diffusers.HeliosScheduler(stage_range=[0, 1], stages=1, use_dynamic_shifting=True))
    parts = scheduler, tiny.video_vae(diffusers.AutoencoderKLWan), tiny.t5(multilingual=True)
    return pipeline(diffusers.HeliosPipeline, transformer, *parts)


def motif_video() -> Any:
    """Guidance is a component, whose arithmetic has no derivative where both of its outputs are equal."""
    sizes = NARROW | {"attention_head_dim": 12, "in_channels": 9, "out_channels": 4}
    transformer = diffusers.MotifVideoTransformer3DModel(
        **sizes, num_single_layers=1, patch_size=1, patch_size_t=1, text_embed_dim=16, rope_axes_dim=(4, 4, 4)
    )
    text = transformers.T5Gemma2TextConfig(**tiny.LANGUAGE, num_key_value_heads=2, head_dim=8, dropout_rate=0.0)
    encoder = transformers.T5Gemma2Encoder(transformers.T5Gemma2EncoderConfig(text_config=text))
    guider = AdaptiveProjectedGuidance(adaptive_projected_guidance_momentum=0.5)
    parts = euler(shift=7.0), tiny.video_vae(diffusers.AutoencoderKLWan), encoder
    return pipeline(diffusers.MotifVideoPipeline, transformer, *parts, feature_extractor=None, guider=guider)


def skyreels(cls: type = diffusers.SkyReelsV2Pipeline) -> Any:
    """With the scheduler of the published weights."""
    for module in (pipeline_skyreels_v2, pipeline_skyreels_v2_diffusion_forcing):
        module.prompt_clean = str.strip  # its own needs ftfy
    sizes = LATENTS | {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32}
    transformer = diffusers.SkyReelsV2Transformer3DModel(
        **sizes, text_dim=32, freq_dim=16, cross_attn_norm=True, rope_max_seq_len=32
    )
    solver = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)
    parts = trainable_scheduler(solver), tiny.video_vae(diffusers.AutoencoderKLWan), tiny.t5(multilingual=True)
    return pipeline(cls, transformer, *parts)


# one denoiser call a step: the guidance by skipped blocks and by modalities taken apart is off
SCALES = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0, "audio_guidance_rescale": 0.0}
SCALES |= {"audio_stg_scale": 0.0, "audio_modality_scale": 1.0, "spatio_temporal_guidance_blocks": None}
SOUND = MEDIUM | SCALES | {"num_frames": 5, "frame_rate": 25.0, "use_cross_timestep": False}
LTX2_GUIDANCE: dict[str, Any] = {
    "no_cfg": {"guidance_scale": 1.0, "audio_guidance_scale": 1.0},
    "cfg": {"guidance_scale": 4.0, "audio_guidance_scale": 3.0, **NEGATIVE},
}


ENTRIES: list[Entry] = [
    Entry("WanPipeline", "text to video (Wan 2.1)", tiny.wan, **GUIDANCE, call=FRAMES),
    Entry(
        "WanPipeline",
        "text to video (Wan 2.2, two experts)",
        wan_2_2,
        {"guidance_scale": 1.0, "guidance_scale_2": 1.0},
        {"guidance_scale": 4.5, "guidance_scale_2": 3.0},
        FRAMES,
    ),
    Entry("LTXPipeline", "text to video", ltx, **GUIDANCE, call=NINE, size=32),
    converted(ltx, diffusers.LTXImageToVideoPipeline, "image to video", **GUIDANCE, call=NINE, size=32),
    Entry("HunyuanVideoPipeline", "text to video", hunyuan_video, **true_cfg(3.0), call=FRAMES | TEMPLATE),
    Entry("MochiPipeline", "text to video", mochi, **GUIDANCE, call=MEDIUM | {"num_frames": 7}),
    Entry("LTX2Pipeline", "text to video with sound", ltx2, **LTX2_GUIDANCE, call=SOUND, size=32),
    Entry(
        "LTX2ImageToVideoPipeline",
        "image to video with sound",
        lambda: as_class(ltx2(), diffusers.LTX2ImageToVideoPipeline),
        **LTX2_GUIDANCE,
        call=SOUND | {"image_crf": 0},
        inputs=given(image=pictures),
        size=32,
    ),
    Entry(
        "WanVACEPipeline",
        "text to video",
        wan_vace,
        **scale(1.0, 4.5),
        call=MEDIUM | {"num_frames": 5},
        batch=1,
        text=True,
    ),
    Entry(
        "Kandinsky5I2VPipeline",
        "image to video",
        kandinsky_5_i2v,
        **scale(1.0, 3.5),
        call={"num_frames": 17},
        inputs=given(image=pictures),
        size=32,
    ),
    Entry(
        "LTXConditionPipeline",
        "image to video",
        ltx_condition,
        **scale(1.0, 4.5, negative=False),
        call=MEDIUM | {"num_frames": 9},
        inputs=given(image=lambda n: pictures(1, 32)),
        size=32,
        batch=1,
    ),
    Entry("HeliosPipeline", "text to video", helios, **scale(1.0, 4.5), call=MEDIUM | {"num_frames": 9}),
    Entry("MotifVideoPipeline", "text to video", motif_video, cfg=NEGATIVE, call=MEDIUM | {"num_frames": 9}),
    Entry("SkyReelsV2Pipeline", "text to video", skyreels, **scale(1.0, 4.5), call=MEDIUM | {"num_frames": 9}),
    Entry(
        "SkyReelsV2DiffusionForcingPipeline",
        "text to video",
        lambda: skyreels(diffusers.SkyReelsV2DiffusionForcingPipeline),
        **scale(1.0, 4.5),
        call=MEDIUM | {"num_frames": 9},
        limit="Policy gradients, not algorithms that noise images again: every latent frame has a scheduler of its "
        "own, and `__call__` steps one after the other.",
        fails=("noised",),
    ),
]
