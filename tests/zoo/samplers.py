"""Pipelines with samplers of their own: EDM, latent consistency, flow maps, DDIM from pure noise."""

from typing import Any

import tiny
from newer import diffusers
from zoo.base import MEDIUM, T2I, Entry, as_class, scale
from zoo.conditioned import given, pictures
from zoo.text_to_image import Unchecked, sana, sdxl

from gerl.model.schedulers import trainable_scheduler

OWN_NOISE = (
    "`sampling.kernel=cps`: with `noise_level=1` it is the pipeline's own sampler, which draws new noise at each step."
)


def with_scheduler(pipe: Any, scheduler: Any) -> Any:
    """`pipe` as it is loaded with another scheduler."""
    pipe.scheduler = trainable_scheduler(scheduler)
    return pipe


def cosmos1(kind: type = diffusers.CosmosTextToWorldPipeline, **more: Any) -> Any:
    sizes = tiny.ONE_LAYER | tiny.LATENTS | {"text_embed_dim": 32, "adaln_lora_dim": 4, "max_size": (4, 16, 16)} | more
    transformer = diffusers.CosmosTransformer3DModel(**sizes, concat_padding_mask=False, extra_pos_embed_type=None)
    scheduler = diffusers.EDMEulerScheduler(final_sigmas_type="sigma_min")
    blocks = {"encoder_block_out_channels": (8,) * 4, "decode_block_out_channels": (8,) * 4}
    vae = diffusers.AutoencoderKLCosmos(
        latent_channels=4,
        **blocks,
        attention_resolutions=(8,),
        resolution=64,
        num_layers=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )
    return tiny.pipeline(kind, transformer, scheduler, vae, tiny.t5(), safety_checker=Unchecked())


def playground() -> Any:
    return with_scheduler(sdxl(), diffusers.EDMDPMSolverMultistepScheduler())


def latent_consistency() -> Any:
    unet = diffusers.UNet2DConditionModel(
        **tiny.UNET, cross_attention_dim=16, attention_head_dim=2, time_cond_proj_dim=8
    )
    unchecked = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    parts = diffusers.LCMScheduler(), tiny.image_vae(quant=True), tiny.clip()
    return tiny.pipeline(diffusers.LatentConsistencyModelPipeline, unet, *parts, **unchecked)


def any_flow() -> Any:
    sizes = tiny.LATENTS | {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32}
    transformer = diffusers.AnyFlowTransformer3DModel(**sizes, text_dim=32, freq_dim=16, rope_max_seq_len=32)
    parts = diffusers.FlowMapEulerDiscreteScheduler(shift=3.0), tiny.video_vae(diffusers.AutoencoderKLWan)
    return tiny.pipeline(diffusers.AnyFlowPipeline, transformer, *parts, tiny.t5(multilingual=True))


def cogvideox() -> Any:
    sizes = tiny.NARROW | tiny.LATENTS | {"attention_head_dim": 16, "time_embed_dim": 8, "text_embed_dim": 32}
    sizes |= {"sample_width": 2, "sample_height": 2, "sample_frames": 9, "max_text_seq_length": 16}
    transformer = diffusers.CogVideoXTransformer3DModel(**sizes, use_rotary_positional_embeddings=True)
    blocks = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 2}
    vae = diffusers.AutoencoderKLCogVideoX(latent_channels=4, **blocks)
    scheduler = diffusers.CogVideoXDPMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing", snr_shift_scale=1.0
    )
    return with_scheduler(tiny.pipeline(diffusers.CogVideoXPipeline, transformer, None, vae, tiny.t5()), scheduler)


FRAMES = MEDIUM | {"num_frames": 9}
EDM_GUIDANCE = scale(0.0, 4.5)

ENTRIES = [
    Entry("CosmosTextToWorldPipeline", "text to video", cosmos1, **EDM_GUIDANCE, call=FRAMES, size=32),
    Entry(
        "CosmosVideoToWorldPipeline",
        "image to video",
        lambda: cosmos1(diffusers.CosmosVideoToWorldPipeline, in_channels=5),
        **EDM_GUIDANCE,
        call=FRAMES,
        inputs=given(image=lambda n: pictures(1, 32)),
        size=32,
        batch=1,
        text=True,
    ),
    Entry("StableDiffusionXLPipeline", f"{T2I} (EDM, Playground 2.5)", playground, **scale(1.0, 4.5)),
    Entry(
        "LatentConsistencyModelPipeline",
        T2I,
        latent_consistency,
        kernel="cps",
        stock_noise=1.0,
        limit=OWN_NOISE,
    ),
    Entry(
        "StableDiffusionPipeline",
        f"{T2I} (LCM-LoRA)",
        lambda: with_scheduler(tiny.sd15(), diffusers.LCMScheduler()),
        **scale(1.0, 4.5),
        kernel="cps",
        stock_noise=1.0,
        limit=OWN_NOISE,
    ),
    Entry(
        "StableDiffusionPipeline",
        f"{T2I} (TCD-LoRA)",
        lambda: with_scheduler(tiny.sd15(), diffusers.TCDScheduler()),
        **scale(1.0, 4.5),
        kernel="cps",
        limit="`sampling.kernel=cps`.",
    ),
    Entry(
        "SanaPipeline",
        f"{T2I} (consistency model of flow matching)",
        lambda: as_class(sana(), diffusers.SanaPipeline, scheduler=diffusers.FlowMatchLCMScheduler(shift=3.0)),
        **scale(1.0, 4.5),
        call={"use_resolution_binning": False, "complex_human_instruction": None},
        kernel="cps",
        stock_noise=1.0,
        size=32,
        limit=OWN_NOISE,
    ),
    Entry(
        "AnyFlowPipeline",
        "text to video",
        any_flow,
        **scale(1.0, 4.5),
        call=MEDIUM | {"num_frames": 5},
        kernel="ode",
        fails=("noised", "judged"),
        limit="`sampling.kernel=ode`: an output is the average velocity of a step, which predicts no clean latents to "
        "noise again. Algorithms that need no noise (`neighbor_grpo`).",
    ),
    Entry("CogVideoXPipeline", "text to video", cogvideox, **scale(1.0, 4.5), call=FRAMES, kernel="ddim", size=32),
]
