"""Video, from text or from a picture."""

from functools import partial
from typing import Any

import tiny
import torch
from diffusers.pipelines.skyreels_v2 import pipeline_skyreels_v2, pipeline_skyreels_v2_diffusion_forcing
from diffusers.pipelines.wan import pipeline_wan_i2v, pipeline_wan_vace
from newer import diffusers, transformers
from tiny import LATENTS, NARROW, dynamic, euler, pipeline
from zoo.base import MEDIUM, NEGATIVE, Entry, as_class, scale, true_cfg
from zoo.conditioned import converted, given, one_picture, pictures
from zoo.text_to_image import QUOTED, drawn, gemma, kandinsky_5, qwen_2_5_vl, tokenizer

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


def hunyuan_vae() -> Any:
    blocks = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
    return diffusers.AutoencoderKLHunyuanVideo(latent_channels=4, **blocks, mid_block_add_attention=False)


def hunyuan_video() -> Any:
    layers = NARROW | LATENTS | {"num_single_layers": 1, "num_refiner_layers": 1, "rope_axes_dim": (2, 2, 4)}
    transformer = diffusers.HunyuanVideoTransformer3DModel(**layers, text_embed_dim=16, pooled_projection_dim=16)
    clip = tiny.clip(positions=77)
    llama = transformers.LlamaModel(transformers.LlamaConfig(**tiny.LANGUAGE | {"num_hidden_layers": 3}))
    return pipeline(diffusers.HunyuanVideoPipeline, transformer, euler(shift=7.0), hunyuan_vae(), llama, clip)


def hunyuan_video_1_5() -> Any:
    """Guidance is a component."""
    sizes = NARROW | {"in_channels": 9, "out_channels": 4, "num_layers": 2, "num_refiner_layers": 1}
    text = {"text_embed_dim": 16, "text_embed_2_dim": 32, "image_embed_dim": 16, "rope_axes_dim": (2, 2, 4)}
    transformer = diffusers.HunyuanVideo15Transformer3DModel(**sizes, **text)
    blocks = {"block_out_channels": (8,) * 5, "layers_per_block": 1}
    vae = diffusers.AutoencoderKLHunyuanVideo15(latent_channels=4, **blocks)
    parts = euler(shift=7.0), vae, qwen_2_5_vl(layers=3).model.language_model, tiny.t5()
    words = partial(tokenizer, "{{ messages[1]['content'] }}")
    guider = diffusers.guiders.ClassifierFreeGuidance(guidance_scale=4.0)
    pipe = pipeline(diffusers.HunyuanVideo15Pipeline, transformer, *parts, words=words, guider=guider)
    pipe.tokenizer_max_length = pipe.tokenizer_2_max_length = 12
    pipe.prompt_template_encode_start_idx, pipe.vision_num_semantic_tokens = 0, 4
    return pipe


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 8}
SIDES = {"height": 16, "width": 16}


def hunyuan_video_1_5_i2v() -> Any:
    config = transformers.SiglipVisionConfig(**VISION)
    encoder = transformers.SiglipVisionModel(config).eval()
    more = {"image_encoder": encoder, "feature_extractor": transformers.SiglipImageProcessorPil(size=SIDES)}
    pipe = hunyuan_video_1_5()
    pipe.transformer.register_to_config(target_size=32)
    made = as_class(pipe, diffusers.HunyuanVideo15ImageToVideoPipeline, **more)
    made.tokenizer_max_length = made.tokenizer_2_max_length = 12
    made.prompt_template_encode_start_idx = 0
    return made


def kandinsky_6() -> Any:
    """A video and its sound."""
    from diffusers.pipelines.kandinsky6 import pipeline_kandinsky6_ti2va

    pipeline_kandinsky6_ti2va._PROMPT_TEMPLATE, pipeline_kandinsky6_ti2va._QWEN_CROP_START = "{}", 0
    sizes = dict(in_visual_dim=4, out_visual_dim=4, in_text_dim=16, in_text_dim2=16, time_dim=16, model_dim=16)
    sizes |= {"in_audio_dim": 4, "out_audio_dim": 4, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 2}
    published = {name: True for name in ("text_token_padding", "ca_rope", "cross_gates", "fix_modulation")}
    transformer = diffusers.Kandinsky6Transformer3DModel(
        **sizes, **published, axes_dims=(4, 2, 2), visual_token_type_num_embeddings=2
    )
    audio = {"mel_bins": 8, "latent_channels": 4, "hidden_channels": 8, "layers_per_block": 1}
    stages = {"upsample_initial_channel": 64, "resblock_kernel_sizes": (3,), "resblock_dilation_sizes": ((1,),)}
    more = {"audio_vae": diffusers.MMAudioVAE(**audio), "vocoder": diffusers.MMAudioVocoder(num_mels=8, **stages)}
    parts = drawn(transformer, "modulation"), euler(shift=5.0), hunyuan_vae(), qwen_2_5_vl(), tiny.clip(positions=77)
    return pipeline(diffusers.Kandinsky6TI2VAPipeline, *parts, words=tokenizer, **more)


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
QUOTED_FRAMES = {"prompt": QUOTED, "num_frames": 5}
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
    connectors = diffusers.pipelines.ltx2.LTX2TextConnectors(
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
    vocoder = diffusers.pipelines.ltx2.LTX2Vocoder(
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


def kandinsky_5_video(cls: type) -> Any:
    pipe = kandinsky_5()
    transformer = diffusers.Kandinsky5Transformer3DModel.from_config(pipe.transformer.config, visual_cond=True)
    made = as_class(pipe, cls, vae=hunyuan_vae().eval(), transformer=drawn(transformer, "modulation").eval())
    made.prompt_template, made.prompt_template_encode_start_idx = "{}", 0
    return made


def wan_i2v() -> Any:
    pipeline_wan_i2v.prompt_clean = str.strip  # its own needs ftfy
    pipe = tiny.wan()
    transformer = diffusers.WanTransformer3DModel.from_config(pipe.transformer.config, in_channels=12, image_dim=16)
    encoder = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION))
    processor = transformers.CLIPImageProcessorPil(size=SIDES, crop_size=SIDES)
    parts = {"transformer": transformer.eval(), "image_encoder": encoder.eval(), "image_processor": processor}
    return as_class(pipe, diffusers.WanImageToVideoPipeline, **parts)


def sana_video() -> Any:
    cross = dict(num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=16)
    transformer = diffusers.SanaVideoTransformer3DModel(**NARROW | {"attention_head_dim": 12}, **LATENTS, **cross)
    parts = euler(shift=8.0), tiny.video_vae(diffusers.AutoencoderKLWan), gemma()
    return pipeline(diffusers.SanaVideoPipeline, transformer, *parts)


def sana_wm() -> Any:
    sizes = dict(in_channels=4, num_layers=2, hidden_size=32, num_attention_heads=2, linear_head_dim=16)
    transformer = diffusers.SanaWMTransformer3DModel(
        **sizes, caption_channels=16, chunk_plucker_channels=12, softmax_every_n=2
    )
    parts = drawn(transformer, "plucker"), euler(), ltx2().vae, gemma()
    return pipeline(diffusers.SanaWMPipeline, *parts)


def ltx_condition() -> Any:
    return as_class(ltx(), diffusers.LTXConditionPipeline, scheduler=euler())


def helios() -> Any:
    from diffusers.pipelines.helios import pipeline_helios

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
    guider = diffusers.guiders.AdaptiveProjectedGuidance(adaptive_projected_guidance_momentum=0.5)
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
    Entry("HunyuanVideo15Pipeline", "text to video", hunyuan_video_1_5, cfg=NEGATIVE, call=QUOTED_FRAMES, size=32),
    Entry("Kandinsky6TI2VAPipeline", "text to video with sound", kandinsky_6, **scale(1.0, 5.0), call=FRAMES),
    Entry(
        "Kandinsky6TI2VAPipeline",
        "image to video with sound",
        kandinsky_6,
        **scale(1.0, 5.0),
        call=FRAMES,
        inputs=given(image=pictures),
    ),
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
        lambda: kandinsky_5_video(diffusers.Kandinsky5I2VPipeline),
        **scale(1.0, 3.5),
        call={"num_frames": 17},
        inputs=given(image=pictures),
        size=32,
    ),
    Entry(
        "Kandinsky5T2VPipeline",
        "text to video",
        lambda: kandinsky_5_video(diffusers.Kandinsky5T2VPipeline),
        **scale(1.0, 5.0),
        call={"num_frames": 13},
        size=32,
    ),
    Entry(
        "WanImageToVideoPipeline",
        "image to video",
        wan_i2v,
        **scale(1.0, 4.5),
        call=FRAMES,
        inputs=one_picture,
    ),
    Entry(
        "HunyuanVideo15ImageToVideoPipeline",
        "image to video",
        hunyuan_video_1_5_i2v,
        cfg=NEGATIVE,
        call=QUOTED_FRAMES,
        inputs=one_picture,
    ),
    Entry(
        "SanaVideoPipeline",
        "text to video",
        sana_video,
        **scale(1.0, 6.0),
        call=MEDIUM | {"frames": 5, "use_resolution_binning": False, "complex_human_instruction": None},
        size=32,
    ),
    Entry(
        "SanaWMPipeline",
        "image to video",
        sana_wm,
        **scale(1.0, 5.0),
        call=FRAMES | {"action": "w-4", "intrinsics": [32.0, 32.0, 16.0, 16.0], "chi_prompt": ["-"]},
        inputs=one_picture,
        batch=1,
        text=True,
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
        fails=("noised", "judged"),
    ),
]
