"""Pipelines that write a condition into the latents of each step: the kept part of a picture, a first frame."""

from typing import Any

import diffusers
import tiny
from zoo.base import SHORT, Entry, scale
from zoo.conditioned import THREE_OF_FOUR, as_class, given, masks, pictures
from zoo.text_to_image import sdxl


def sdxl_inpaint() -> Any:
    return as_class(sdxl(), diffusers.StableDiffusionXLInpaintPipeline)


def z_image_inpaint() -> Any:
    return as_class(tiny.z_image(), diffusers.ZImageInpaintPipeline)


def flux_control_inpaint() -> Any:
    pipe = tiny.flux()
    transformer = diffusers.FluxTransformer2DModel.from_config(pipe.transformer.config, in_channels=32, out_channels=16)
    parts = {name: part for name, part in pipe.components.items() if part is not None}
    return diffusers.FluxControlInpaintPipeline(**parts | {"transformer": transformer.eval()})


ENTRIES = [
    Entry(
        "StableDiffusionXLInpaintPipeline",
        "inpainting",
        sdxl_inpaint,
        **scale(1.0, 5.0),
        call={"num_inference_steps": 4, "strength": 0.99},
        inputs=given(image=pictures, mask_image=masks),
        kernel="ddim",
    ),
    Entry(
        "ZImageInpaintPipeline",
        "inpainting",
        z_image_inpaint,
        **scale(0.0, 3.0, negative=False),
        call=THREE_OF_FOUR,
        inputs=given(image=pictures, mask_image=masks),
    ),
    Entry(
        "FluxControlInpaintPipeline",
        "inpainting",
        flux_control_inpaint,
        call=SHORT | THREE_OF_FOUR,
        inputs=given(image=pictures, mask_image=masks, control_image=pictures),
    ),
]
