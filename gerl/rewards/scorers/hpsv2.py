"""HPS v2 and v2.1: which image people prefer for a prompt.

Source: "Human Preference Score v2" (arXiv 2306.09341) and its code (github.com/tgxs002/HPSv2), whose score is the
cosine without a scale: a CLIP ViT-H/14, fine-tuned on choices between images of one prompt. Only scores of the same
prompt and version compare. The authors' package brings an old copy of open_clip; here open_clip itself runs the model.
The published checkpoints have not been run by this project.
"""

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import Field

from gerl.config.blocks import Dtype
from gerl.errors import RewardError
from gerl.rewards.scorers.base import Metadata, Scorer, require
from gerl.rewards.scorers.clip import Device, expanded, loading, resolve_device, resolve_dtype
from gerl.rewards.scorers.imagereward import PIXEL_MEAN, PIXEL_STD
from gerl.rewards.scorers.tensor_preprocessing import longer_side, normalised

if TYPE_CHECKING:
    import open_clip


@dataclass(frozen=True, kw_only=True)
class HpsV2(Scorer):
    """cosine(image, prompt), about 0.2 to 0.4 for v2.1; a prompt is cut off after 77 tokens, an image never cropped.

    `model` is a Hub repository or a local folder with the file `checkpoint` (v2.0: HPS_v2_compressed.pt),
    `architecture` open_clip's name for its sizes. The authors' code computes in float16 on a GPU.
    """

    model: str = "xswu/HPSv2"
    checkpoint: str = "HPS_v2.1_compressed.pt"
    architecture: str = "ViT-H-14"
    batch_size: Annotated[int, Field(ge=1)] = 32
    device: Device = "auto"
    dtype: Dtype = "auto"

    differentiable = True

    def __post_init__(self) -> None:
        _open_clip()

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(images), self.batch_size):
            rows = slice(start, start + self.batch_size)
            scores += self.network.cosines(images[rows], prompts[rows]).tolist()
        return scores

    def tensor_scores(self, images: torch.Tensor, prompts: list[str], metadata: list[Metadata]) -> torch.Tensor:
        return self.network.tensor_cosines(images, prompts)

    @property
    def shares(self) -> str:
        return f"hpsv2 {self.model} {self.checkpoint} {self.architecture} {self.device} {self.dtype}"

    @property
    def network(self) -> "HpsNetwork":
        """Loaded when it is first needed, once a process for all that ask for the same one."""
        device = resolve_device(self.device)
        return _network(self.model, self.checkpoint, self.architecture, device, resolve_dtype(self.dtype, device))


@dataclass(frozen=True, eq=False)
class HpsNetwork:
    """A CLIP model of open_clip with its tokenizer."""

    clip: "open_clip.CLIP"
    tokenizer: "open_clip.HFTokenizer | open_clip.SimpleTokenizer"
    device: torch.device
    dtype: torch.dtype

    def cosines(self, images: list[Image.Image], prompts: list[str]) -> torch.Tensor:
        """Cosine [B] of each image's feature with that of its prompt, fp32 on the CPU, without gradients."""
        size = self.clip.visual.image_size[0]
        pixels = torch.stack([preprocess(image, size) for image in images])
        unique = list(dict.fromkeys(prompts))  # the images of a group share their prompt
        with torch.inference_mode():
            image = self.clip.encode_image(pixels.to(self.device, self.dtype))
            text = self.clip.encode_text(self.tokenizer(unique).to(self.device))
        text = text[[unique.index(prompt) for prompt in prompts]]
        return F.cosine_similarity(image.float(), text.float()).cpu()

    def tensor_cosines(self, images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """`cosines` of images [B, 3, H, W] in [0, 1], on the model's device, with graph."""
        pixels = normalised(longer_side(images, self.clip.visual.image_size[0]), PIXEL_MEAN, PIXEL_STD)
        image = self.clip.encode_image(pixels.to(self.device, self.dtype))
        with torch.no_grad():
            text = self.clip.encode_text(self.tokenizer(prompts).to(self.device))
        return F.cosine_similarity(image.float(), text.float())


@cache
def _network(model: str, checkpoint: str, architecture: str, device: torch.device, dtype: torch.dtype) -> HpsNetwork:
    from transformers.utils import cached_file

    sizes = _open_clip().get_model_config(architecture)
    if sizes is None:
        raise RewardError(f"architecture={architecture}: open_clip has no such model; the published one is ViT-H-14")
    with loading("model", model, f"a repository with {checkpoint}"):
        file = cached_file(expanded(model), checkpoint)
        tensors = torch.load(file, map_location="cpu", weights_only=True)["state_dict"]
        clip = _open_clip().CLIP(**sizes)
        clip.load_state_dict(tensors)
    return HpsNetwork(
        clip.to(device, dtype).eval().requires_grad_(False), _open_clip().get_tokenizer(architecture), device, dtype
    )


def _open_clip() -> ModuleType:
    """The package; raises `RewardError` naming the pip extra if it, or the torchvision it needs, cannot be imported."""
    try:
        return require("open_clip", "clip")
    except RuntimeError as error:  # of torchvision, where it was built for another torch
        raise RewardError(
            f"this scorer needs the package open_clip, whose torchvision does not match torch {torch.__version__} "
            f"({error}): run pip install 'gerl[clip]', then install the torchvision built for that torch"
        ) from error


def preprocess(image: Image.Image, size: int) -> torch.Tensor:
    """Pixels [3, size, size]: the longer side resized to `size`, black beside the shorter one, normalised as for CLIP.

    Resizes numbers, with antialiasing, as the authors' code does with torchvision >= 0.17; PIL would round to bytes.
    """
    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1) / 255
    shape = [max(1, round(side * size / max(image.size))) for side in pixels.shape[1:]]
    if shape != list(pixels.shape[1:]):
        pixels = F.interpolate(pixels[None], shape, mode="bicubic", antialias=True)[0]
    height, width = (size - side for side in shape)
    pixels = F.pad(pixels, (width // 2, width - width // 2, height // 2, height - height // 2))
    return (pixels - torch.from_numpy(PIXEL_MEAN)[:, None, None]) / torch.from_numpy(PIXEL_STD)[:, None, None]
