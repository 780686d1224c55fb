"""Pipelines that are given pictures: inpainting, image to image, ControlNet and editing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tiny
import torch
from newer import diffusers, transformers
from PIL import Image
from tiny import euler, pipeline
from zoo.base import SHORT, TWO_LAYERS, Entry, as_class, scale, true_cfg
from zoo.text_to_image import (
    PICTURE_IDS,
    PICTURE_TOKENS,
    PictureProcessor,
    drawn,
    flux2,
    flux2_klein,
    picture_processor,
    qwen_3_vl,
    qwen_image_2_1,
    sdxl,
    tokenizer,
)

from gerl.protocol import References

I2I = "image to image"


def pictures(n: int, size: int = 16) -> list[Image.Image]:
    """Different ones, of noise."""
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)) for _ in range(n)]


def masks(n: int) -> list[Image.Image]:
    """White, where the picture is to be painted anew: the left half, the upper half, and so on in turn."""
    halves = [np.zeros((16, 16), dtype=np.uint8) for _ in range(n)]
    for i, half in enumerate(halves):
        (half if i % 2 == 0 else half.T)[:, :8] = 255
    return [Image.fromarray(half) for half in halves]


def given(**makers: Callable[[int], list[Image.Image]]) -> Callable[[int], dict[str, Any]]:
    """The inputs of an entry: for each argument what its maker makes."""
    return lambda n: {name: make(n) for name, make in makers.items()}


def one_picture(_: int) -> dict[str, Any]:
    """The same for every sample."""
    return {"image": pictures(1, 32)[0]}


def two_references(_: int) -> dict[str, Any]:
    """The same for every sample, and as small as FLUX.2 takes them."""
    return {"image": References(pictures(2, 64))}


def one_reference(_: int) -> dict[str, Any]:
    """The same for every sample, of which FLUX.2-klein KV keeps keys and values."""
    return {"image": pictures(1, 64)}


def megapixels(n: int) -> dict[str, Any]:
    """Qwen-Image-Edit scales every picture to this area; the VAE is fastest on upright ones."""
    return {"image": [picture.resize((256, 4096)) for picture in pictures(n)]}


def converted(source: Callable[[], Any], cls: type, task: str, **more: Any) -> Entry:
    """The entry of class `cls`, which takes a picture, with the components of the pipeline that `source` builds."""
    return Entry(cls.__name__, task, lambda: as_class(source(), cls), **{"inputs": given(image=pictures)} | more)


def sd3_inpaint() -> Any:
    pipe = tiny.sd3(layers=1)  # of 16 channels, the only number that this class takes
    transformer = diffusers.SD3Transformer2DModel.from_config(pipe.transformer.config, in_channels=16, out_channels=16)
    return as_class(
        pipe, diffusers.StableDiffusion3InpaintPipeline, transformer=transformer.eval(), vae=tiny.image_vae(16)
    )


def controlled(pipe: Any, cls: type, model: Any, **changes: Any) -> Any:
    """With a ControlNet of class `model`; the layers that a fresh one has at zero are drawn anew."""
    controlnet = model.from_config(pipe.transformer.config, **changes)
    for p in controlnet.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.1)
    return as_class(pipe, cls, controlnet=controlnet.eval())


def sd3_controlnet() -> Any:
    pipe = tiny.sd3(layers=2)  # the last one takes nothing from a ControlNet
    cls = diffusers.StableDiffusion3ControlNetPipeline
    return controlled(pipe, cls, diffusers.SD3ControlNetModel, extra_conditioning_channels=0)


def flux_controlnet() -> Any:
    return controlled(tiny.flux(), diffusers.FluxControlNetPipeline, diffusers.FluxControlNetModel)


def with_small_latents(pipe: Any) -> Any:
    """Eight pixels a latent instead of two."""
    return as_class(pipe, type(pipe), vae=tiny.vae(diffusers.AutoencoderKLFlux2, blocks=4, width=8))


def qwen_edit(cls: type) -> Any:
    pipe = tiny.qwen_image()
    words = pipe.tokenizer
    words.add_special_tokens({"additional_special_tokens": PICTURE_TOKENS})
    config = pipe.text_encoder.config
    config.text_config.vocab_size = len(words)
    config.update(PICTURE_IDS)
    # 64 pixels a latent, so that a megapixel is few of them
    vae = tiny.video_vae(base_dim=2, dim_mult=[1] * 7, num_res_blocks=0, temperal_downsample=[False] * 6).eval()
    pixels = {"min_pixels": 28 * 28, "max_pixels": 6 * 28 * 28}
    processor = PictureProcessor(transformers.Qwen2VLImageProcessorPil(**pixels), words)
    text_encoder = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    edit = as_class(pipe, cls, vae=vae, text_encoder=text_encoder, processor=processor)
    picture = "<|vision_start|><|image_pad|>" if cls is diffusers.QwenImageEditPipeline else ""
    edit.prompt_template_encode, edit.prompt_template_encode_start_idx = picture + "{}", 0  # shorter
    return edit


def joy_image_edit() -> Any:
    from diffusers.pipelines.joyimage import image_processor

    image_processor.BUCKETS[1024] = [(32, 32)]  # all images have this size
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "text_dim": 16, "num_layers": 2, "rope_dim_list": (4, 6, 6)}
    transformer = diffusers.JoyImageEditTransformer3DModel(in_channels=4, **sizes)
    parts = euler(shift=4.0), tiny.video_vae(diffusers.AutoencoderKLWan), qwen_3_vl()
    more = {"words": tokenizer, "processor": picture_processor()}
    pipe = pipeline(diffusers.JoyImageEditPipeline, drawn(transformer, "modulate_table"), *parts, **more)
    pipe.prompt_template_encode = dict.fromkeys(pipe.prompt_template_encode, "{}")
    pipe.prompt_template_encode_start_idx = dict.fromkeys(pipe.prompt_template_encode, 0)
    return pipe


KONTEXT = SHORT | {"max_area": 16 * 16, "_auto_resize": False}
THREE_OF_FOUR = {"num_inference_steps": 4, "strength": 0.75}
GUIDANCE = scale(1.0, 4.5, negative=False)
TRUE_CFG = true_cfg(3.0)
PAINTED: dict[str, Any] = {"call": SHORT | THREE_OF_FOUR, "inputs": given(image=pictures, mask_image=masks)}
CONTROLLED: dict[str, Any] = {"call": SHORT, "inputs": given(control_image=pictures)}
REFERENCES: dict[str, Any] = {"call": TWO_LAYERS, "inputs": two_references, "size": 32}


def sdxl_inpaint() -> Any:
    return as_class(sdxl(), diffusers.StableDiffusionXLInpaintPipeline)


def z_image_inpaint() -> Any:
    return as_class(tiny.z_image(), diffusers.ZImageInpaintPipeline)


def flux_control_inpaint() -> Any:
    pipe = tiny.flux()
    transformer = diffusers.FluxTransformer2DModel.from_config(pipe.transformer.config, in_channels=32, out_channels=16)
    parts = {name: part for name, part in pipe.components.items() if part is not None}
    return diffusers.FluxControlInpaintPipeline(**parts | {"transformer": transformer.eval()})


ENTRIES: list[Entry] = [
    converted(tiny.flux, diffusers.FluxInpaintPipeline, "inpainting", **TRUE_CFG, **PAINTED),
    Entry("StableDiffusion3InpaintPipeline", "inpainting", sd3_inpaint, **GUIDANCE, **PAINTED),
    Entry("FluxControlNetPipeline", "ControlNet", flux_controlnet, **TRUE_CFG, **CONTROLLED),
    Entry("StableDiffusion3ControlNetPipeline", "ControlNet", sd3_controlnet, **GUIDANCE, **CONTROLLED),
    converted(
        partial(tiny.sd3, layers=1),
        diffusers.StableDiffusion3Img2ImgPipeline,
        I2I,
        **GUIDANCE,
        call=SHORT | THREE_OF_FOUR,
    ),
    converted(
        tiny.z_image, diffusers.ZImageImg2ImgPipeline, I2I, **scale(0.0, 3.0, negative=False), call=THREE_OF_FOUR
    ),
    converted(tiny.flux, diffusers.FluxKontextPipeline, "editing", **TRUE_CFG, call=KONTEXT),
    Entry("Flux2Pipeline", "editing", lambda: with_small_latents(flux2()), **REFERENCES),
    Entry("Flux2KleinPipeline", "editing", lambda: with_small_latents(flux2_klein()), **GUIDANCE, **REFERENCES),
    converted(flux2_klein, diffusers.Flux2KleinKVPipeline, "editing", call=TWO_LAYERS, inputs=one_reference),
    *(
        Entry(cls.__name__, "editing", partial(qwen_edit, cls), **TRUE_CFG, inputs=megapixels, batch=batch, size=256)
        for cls, batch in ((diffusers.QwenImageEditPipeline, 2), (diffusers.QwenImageEditPlusPipeline, 1))
    ),
    *(
        converted(tiny.qwen_image, cls, task, **TRUE_CFG, **PAINTED | given_)
        for cls, task, given_ in (
            (diffusers.QwenImageImg2ImgPipeline, I2I, {"inputs": given(image=pictures)}),
            (diffusers.QwenImageInpaintPipeline, "inpainting", {}),
        )
    ),
    Entry(
        "QwenImage21Pipeline",
        "editing",
        qwen_image_2_1,
        **TRUE_CFG,
        call={"output_resolution": 64},
        inputs=two_references,
        size=64,
    ),
    Entry("JoyImageEditPipeline", "editing", joy_image_edit, **scale(1.0, 4.0), inputs=given(image=pictures), size=32),
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
