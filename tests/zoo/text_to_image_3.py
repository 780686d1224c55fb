"""Text to image: pipelines that take one prompt a call, and those with schedulers of their own."""

from typing import Any

import diffusers
import tiny
from tiny import euler
from zoo.base import MEDIUM, T2I, Entry, scale
from zoo.conditioned import as_class
from zoo.text_to_image import sana
from zoo.text_to_image_2 import qwen_3_vl, tokenizer


def dreamlite(cls: type = diffusers.DreamLitePipeline) -> Any:
    unet = diffusers.DreamLiteUNetModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
        up_block_types=("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"),
        block_out_channels=(16, 32),
        cross_attention_dim=16,
        attention_head_dim=8,
        layers_per_block=1,
        norm_num_groups=8,
        transformer_layers_per_block=1,
    )
    blocks = {f"{half}_block_out_channels": (8, 8) for half in ("encoder", "decoder")}
    blocks |= {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
    vae = diffusers.AutoencoderTiny(**blocks, latent_channels=4)
    more = {"processor": None}  # of pictures to edit
    parts = {"unet": unet.eval(), "scheduler": euler(), "vae": vae.eval(), "text_encoder": qwen_3_vl(layers=2).eval()}
    pipe = cls(**parts, tokenizer=tokenizer(), **more)
    pipe.prompt_template_encode_generate, pipe.prompt_template_encode_generate_start_idx = "{}", 0
    return pipe


def sana_sprint() -> Any:
    return as_class(sana(guidance_embeds=True), diffusers.SanaSprintPipeline, scheduler=diffusers.SCMScheduler())


class Unchecked:
    """In the place of a safety checker of several gigabytes."""

    def to(self, device: Any) -> None:
        del device

    def check_text_safety(self, prompt: str) -> bool:
        return bool(prompt)

    def check_video_safety(self, frames: Any) -> Any:
        return frames


def cosmos2() -> Any:
    sizes = tiny.ONE_LAYER | tiny.LATENTS | {"text_embed_dim": 32, "adaln_lora_dim": 4, "max_size": (4, 16, 16)}
    transformer = diffusers.CosmosTransformer3DModel(**sizes, concat_padding_mask=False, extra_pos_embed_type=None)
    parts = tiny.euler(use_karras_sigmas=True), tiny.video_vae(diffusers.AutoencoderKLWan), tiny.t5()
    return tiny.pipeline(diffusers.Cosmos2TextToImagePipeline, transformer, *parts, safety_checker=Unchecked())


ONE_PROMPT: dict[str, Any] = {"call": MEDIUM, "batch": 1, "text": True, "fails": ("encoders",)}
ONE_PROMPT["limit"] = "One prompt a call. The text encoder stays in memory: `__call__` reads its dtype."

ENTRIES = [
    Entry("DreamLitePipeline", T2I, dreamlite, cfg={"guidance_scale": 3.5}, **ONE_PROMPT),
    Entry("DreamLiteMobilePipeline", T2I, lambda: dreamlite(diffusers.DreamLiteMobilePipeline), **ONE_PROMPT),
    Entry(
        "SanaSprintPipeline",
        T2I,
        sana_sprint,
        call={"intermediate_timesteps": None, "use_resolution_binning": False, "complex_human_instruction": None},
        kernel="cps",
        stock_noise=1.0,
        size=32,
        limit="`sampling.kernel=cps`: with `noise_level=1` it is the pipeline's own sampler, which draws new noise at "
        "each step.",
    ),
    Entry("Cosmos2TextToImagePipeline", T2I, cosmos2, **scale(1.0, 4.5)),
]
