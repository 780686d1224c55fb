"""Pipelines that cannot be trained, each for its reason, which is also its error."""

from typing import Any

import diffusers
import numpy as np
from PIL import Image
from zoo.base import TWO_LAYERS, Entry
from zoo.conditioned import converted
from zoo.text_to_image import flux2_klein


def image(n: int) -> dict[str, Any]:
    """The one reference image of all prompts."""
    return {"image": Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3))}


ENTRIES: list[Entry] = [
    converted(
        flux2_klein,
        diffusers.Flux2KleinKVPipeline,
        "editing",
        call=TWO_LAYERS,
        inputs=image,
        limit="Keys and values of reference images live from the first denoising step on (`Flux2KVCache` in "
        "`__call__`), and no argument switches this off: use `Flux2KleinPipeline` with its weights.",
        refused="reads at step 1 what an earlier step stored in a Flux2KVCache.* Flux2KleinPipeline has no cache",
    ),
]
