"""Pipelines that cannot be trained, each for its reason, which is also its error."""

from typing import Any

import diffusers
import numpy as np
import tiny
from PIL import Image
from zoo.base import T2I, TWO_LAYERS, Entry
from zoo.conditioned import as_class, converted
from zoo.text_to_image import flux2_klein, sana


def image(n: int) -> dict[str, Any]:
    """The one reference image of all prompts."""
    return {"image": Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3))}


def sana_sprint() -> Any:
    return as_class(sana(guidance_embeds=True), diffusers.SanaSprintPipeline, scheduler=diffusers.SCMScheduler())


def cosmos2() -> Any:
    sizes = tiny.ONE_LAYER | tiny.LATENTS | {"text_embed_dim": 32, "adaln_lora_dim": 4, "max_size": (4, 16, 16)}
    transformer = diffusers.CosmosTransformer3DModel(**sizes, concat_padding_mask=False, extra_pos_embed_type=None)
    parts = tiny.euler(use_karras_sigmas=True), tiny.video_vae(diffusers.AutoencoderKLWan), tiny.t5()
    return tiny.pipeline(diffusers.Cosmos2TextToImagePipeline, transformer, *parts, safety_checker=Unchecked())


class Unchecked:
    """In the place of a safety checker of several gigabytes."""

    def to(self, device: Any) -> None:
        del device

    def check_text_safety(self, prompt: str) -> bool:
        return bool(prompt)


ENTRIES: list[Entry] = [
    converted(
        flux2_klein,
        diffusers.Flux2KleinKVPipeline,
        "editing",
        call=TWO_LAYERS,
        inputs=image,
        limit="Keys and values of reference images live from the first denoising step on (`Flux2KVCache` in "
        "`__call__`), and no argument switches this off: use `Flux2KleinPipeline` with its weights.",
        refused="reads at step 1 what an earlier step left in a Flux2KVCache",
    ),
    Entry(
        "SanaSprintPipeline",
        T2I,
        sana_sprint,
        call={"intermediate_timesteps": None, "use_resolution_binning": False, "complex_human_instruction": None},
        size=32,
        limit="`SCMScheduler` steps a consistency model (TrigFlow), for which gerl has no transition kernel.",
        refused="the pipeline's scheduler is SCMScheduler, which has no transition kernel",
    ),
    Entry(
        "Cosmos2TextToImagePipeline",
        T2I,
        cosmos2,
        limit="The sigmas are those of EDM and go up to 80 (`sigma_max` in `__init__`): gerl has transition kernels "
        "for flow matching, where they lie in [0, 1], and DDIM.",
        refused="sigmas of flow matching lie in",
    ),
]
