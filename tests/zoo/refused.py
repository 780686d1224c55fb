"""Pipelines that cannot be trained, each for its reason, which is also its error."""

from typing import Any

import diffusers
import numpy as np
import tiny
from PIL import Image
from zoo.base import Entry
from zoo.text_to_image import LONG, TWO_LAYERS, flux2_klein, sana


def flux2_klein_kv() -> Any:
    parts = flux2_klein().components
    return diffusers.Flux2KleinKVPipeline(**parts)


def image(n: int) -> dict[str, Any]:
    """The one reference image of all prompts."""
    return {"image": Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3))}


def sana_sprint() -> Any:
    parts = sana(guidance_embeds=True).components | {"scheduler": diffusers.SCMScheduler()}
    return diffusers.SanaSprintPipeline(**parts)


def cosmos2() -> Any:
    transformer = diffusers.CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        text_embed_dim=32,
        adaln_lora_dim=4,
        max_size=(4, 16, 16),
        concat_padding_mask=False,
        extra_pos_embed_type=None,
    )
    vae = diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return diffusers.Cosmos2TextToImagePipeline(
        transformer=transformer,
        scheduler=tiny.euler(use_karras_sigmas=True),
        vae=vae,
        text_encoder=tiny.t5(),
        tokenizer=tiny.tokenizer(),
        safety_checker=Unchecked(),
    )


class Unchecked:
    """In the place of a safety checker of several gigabytes."""

    def to(self, device: Any) -> None:
        del device

    def check_text_safety(self, prompt: str) -> bool:
        return bool(prompt)


ENTRIES: list[Entry] = [
    Entry(
        "Flux2KleinKVPipeline",
        "editing",
        flux2_klein_kv,
        call=LONG | TWO_LAYERS,
        inputs=image,
        limit="Keys and values of reference images live from the first denoising step on (`Flux2KVCache` in "
        "`__call__`), and no argument switches this off: use `Flux2KleinPipeline` with its weights.",
        refused="reads at step 1 what an earlier step left in a Flux2KVCache",
    ),
    Entry(
        "SanaSprintPipeline",
        "text to image",
        sana_sprint,
        call={"intermediate_timesteps": None, "use_resolution_binning": False, "complex_human_instruction": None},
        size=32,
        limit="`SCMScheduler` steps a consistency model (TrigFlow), for which gerl has no transition kernel.",
        refused="the pipeline's scheduler is SCMScheduler, which has no transition kernel",
    ),
    Entry(
        "Cosmos2TextToImagePipeline",
        "text to image",
        cosmos2,
        limit="The sigmas are those of EDM and go up to 80 (`sigma_max` in `__init__`): gerl has transition kernels "
        "for flow matching, where they lie in [0, 1], and DDIM.",
        refused="sigmas of flow matching lie in",
    ),
]
