"""Video, from text or from a picture."""

from typing import Any

import diffusers
import tiny
import torch
import transformers
from tiny import LATENTS, NARROW, dynamic, euler, pipeline
from zoo.base import MEDIUM, Entry, scale, true_cfg
from zoo.conditioned import converted


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

ENTRIES = [
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
]
