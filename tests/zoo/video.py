"""Video, from text or from a picture."""

from typing import Any

import diffusers
import tiny
import torch
import transformers
from zoo.base import Entry
from zoo.conditioned import image


def wan_2_2() -> Any:
    """Two experts; the one for high noise takes only the first step."""
    pipe = tiny.wan()
    expert = diffusers.WanTransformer3DModel.from_config(pipe.transformer.config)  # other weights
    return diffusers.WanPipeline(**pipe.components | {"transformer_2": expert}, boundary_ratio=0.875)


def ltx() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=32,
    ).eval()
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    ).eval()
    return diffusers.LTXPipeline(
        transformer=transformer,
        scheduler=tiny.euler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=tiny.t5(),
        tokenizer=tiny.tokenizer(),
    )


def hunyuan_video() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=16,
        pooled_projection_dim=16,
        rope_axes_dim=(2, 2, 4),
    ).eval()
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        mid_block_add_attention=False,
    ).eval()
    llama = transformers.LlamaConfig(
        vocab_size=tiny.VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    )
    clip = tiny.clip().config
    clip.max_position_embeddings = 77
    return diffusers.HunyuanVideoPipeline(
        transformer=transformer,
        scheduler=tiny.euler(shift=7.0),
        vae=vae,
        text_encoder=transformers.LlamaModel(llama).eval(),
        tokenizer=tiny.tokenizer(),
        text_encoder_2=transformers.CLIPTextModel(clip).eval(),
        tokenizer_2=tiny.tokenizer(),
    )


def mochi() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=32,
        time_embed_dim=16,
        max_sequence_length=16,
    ).eval()
    torch.nn.init.normal_(transformer.pos_frequencies)  # zero in a fresh model: no positions
    vae = diffusers.AutoencoderKLMochi(
        latent_channels=4,
        latents_mean=(0.0,) * 4,
        latents_std=(1.0,) * 4,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    ).eval()
    return diffusers.MochiPipeline(
        transformer=transformer,
        scheduler=tiny.euler(invert_sigmas=True),
        vae=vae,
        text_encoder=tiny.t5(),
        tokenizer=tiny.tokenizer(),
    )


GUIDED, PLAIN = {"guidance_scale": 4.5}, {"guidance_scale": 1.0}
TRUE_CFG = {"true_cfg_scale": 3.0, "negative_prompt": "NEGATIVE"}
FRAMES = {"num_frames": 5, "max_sequence_length": 16}
TEMPLATE = {"prompt_template": {"template": "<{}>", "crop_start": 1}}

ENTRIES = [
    Entry("WanPipeline", "text to video (Wan 2.1)", tiny.wan, PLAIN, GUIDED, FRAMES),
    Entry(
        "WanPipeline",
        "text to video (Wan 2.2, two experts)",
        wan_2_2,
        {**PLAIN, "guidance_scale_2": 1.0},
        {**GUIDED, "guidance_scale_2": 3.0},
        FRAMES,
    ),
    Entry("LTXPipeline", "text to video", ltx, PLAIN, GUIDED, {**FRAMES, "num_frames": 9}, size=32),
    Entry(
        "LTXImageToVideoPipeline",
        "image to video",
        lambda: diffusers.LTXImageToVideoPipeline(**ltx().components),
        PLAIN,
        GUIDED,
        {**FRAMES, "num_frames": 9},
        image,
        size=32,
    ),
    Entry("HunyuanVideoPipeline", "text to video", hunyuan_video, {}, TRUE_CFG, {**FRAMES, **TEMPLATE}),
    Entry("MochiPipeline", "text to video", mochi, PLAIN, GUIDED, {**FRAMES, "num_frames": 7}),
]
