"""Clean latents of image files, encoded once by the pipeline's VAE and cached."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from gerl.config import ModelConfig
from gerl.engine.latents import Inverse, record_decoding
from gerl.engine.rows import batch_size
from gerl.errors import ModelError
from gerl.model.hub import model_folder
from gerl.model.prompts import PromptCache, identity
from gerl.utils.condition_images import read_picture
from gerl.utils.seeding import derive_seed

PROBED = 64  # pixels per side of the image used to find the scale of the latents


class ImageLatents:
    """Cache of VAE encodings and clean latents of image files; `gb`, `folder`: as of `PromptCache`."""

    def __init__(self, gb: float, folder: Path | None = None) -> None:
        self.kept = PromptCache(gb, folder)
        self.inverses: dict[str, Inverse] = {}  # keyed by the arguments that determine the latents' shape
        self.sizes: dict[str, tuple[int, int]] = {}  # height and width in pixels, same keys

    def read(
        self, pipe: DiffusionPipeline, call: Mapping[str, object], paths: Sequence[str]
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Return clean latents and images of files, as `of` does; raises `DataError` if one cannot be read."""
        return self.of(pipe, call, [(path, read_picture(path)) for path in paths])

    def of(
        self, pipe: DiffusionPipeline, call: Mapping[str, object], named: Sequence[tuple[str, Image.Image]]
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Return the clean latents `[B, ...]` fp32 of named images, and the encoded images `[B, H, W, 3]` uint8.

        `call`: the pipeline arguments for a single sample, which determine the size. An image is resized to that size
        on its shorter side and center-cropped on the longer one. Raises `ModelError` if the mapping from the pipeline's
        latents to its VAE is unknown, or the VAE overflows.
        """
        # what determines the latents' shape: all arguments except the prompt; of images only their sizes
        others = {name: getattr(value, "size", value) for name, value in sorted(call.items()) if "prompt" not in name}
        shape = f"{batch_size(call)} {others}"
        if shape not in self.inverses:
            inverse = Inverse(pipe, record_decoding(pipe, call))
            self.sizes[shape], self.inverses[shape] = _size(pipe, call, inverse), inverse
        inverse, (height, width) = self.inverses[shape], self.sizes[shape]
        images = [fitted(image, height, width) for _, image in named]
        pairs = zip([name for name, _ in named], images, strict=True)
        latents = [inverse.of(self._encoded(pipe, name, image, len(inverse.shape))) for name, image in pairs]
        return torch.cat(latents), np.stack(images)

    def _encoded(self, pipe: DiffusionPipeline, name: str, image: np.ndarray, dimensions: int) -> torch.Tensor:
        """Return z of an image, a reproducible sample of the VAE posterior."""
        digest = sha256(image.tobytes()).hexdigest()
        key = f"image {digest} {image.shape}"
        z = self.kept.find(key)
        if z is None:
            generator = torch.Generator().manual_seed(derive_seed("encoded image", digest))
            z = encoded(pipe, image, dimensions, generator).float().cpu()
            if not bool(torch.isfinite(z).all()):
                raise ModelError(
                    f"the VAE of {type(pipe).__name__} overflows on {name}: use model.dtype=bfloat16 or float32"
                )
            self.kept.keep(key, z)
        assert isinstance(z, torch.Tensor)
        return z.to(pipe._execution_device)


def latents_folder(cache: Path, model: ModelConfig, dtype: torch.dtype) -> Path:
    """Return the folder inside `cache` for VAE outputs of `model` in `dtype`."""
    return cache.expanduser() / "images" / identity(model_folder(model.path, model.parts), ("vae",), dtype)


def fitted(image: Image.Image, height: int, width: int) -> np.ndarray:
    """Return an image resized and center-cropped to `[height, width, 3]` uint8."""
    scale = max(height / image.height, width / image.width)
    size = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    resized = image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return np.asarray(resized.crop((left, top, left + width, top + height)))


@torch.no_grad()
def encoded(pipe: DiffusionPipeline, image: np.ndarray, dimensions: int, generator: torch.Generator) -> torch.Tensor:
    """Encode an image `[H, W, 3]` uint8 to latents as the pipeline decodes them; `dimensions`: 5 for video VAEs."""
    vae = pipe.vae
    encoder = getattr(vae, "encoder", None)
    dtype = next((p.dtype for p in encoder.parameters()), vae.dtype) if encoder is not None else vae.dtype
    pixels = torch.from_numpy(image.copy()).to(pipe._execution_device).permute(2, 0, 1)[None]
    x = (pixels.float() / 127.5 - 1).to(dtype)
    output = vae.encode(x[:, :, None] if dimensions == 5 else x)
    if hasattr(output, "latent_dist"):
        return output.latent_dist.sample(generator)
    return output.latents if hasattr(output, "latents") else output.latent


def _size(pipe: DiffusionPipeline, call: Mapping[str, object], inverse: Inverse) -> tuple[int, int]:
    """Return height and width in pixels of the images of a call."""
    size = call.get("height"), call.get("width")
    if isinstance(size[0], int) and isinstance(size[1], int):
        return size[0], size[1]
    grey = np.full((PROBED, PROBED, 3), 128, np.uint8)
    z = encoded(pipe, grey, len(inverse.shape), torch.Generator().manual_seed(0))
    height, width = (PROBED // z.shape[d] * inverse.shape[d] for d in (-2, -1))
    return height, width
