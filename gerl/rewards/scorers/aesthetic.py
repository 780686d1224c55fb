"""Aesthetic score: how much people like the look of an image, whatever its prompt.

Source: LAION's improved aesthetic predictor (github.com/christophschuhmann/improved-aesthetic-predictor), a linear head
on the CLIP ViT-L/14 feature, trained on ratings from 1 to 10. The published head loads here; with the published CLIP
weights it has not been run.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import safetensors.torch
import torch
from PIL import Image

from gerl.errors import RewardError
from gerl.rewards.scorers.base import Metadata
from gerl.rewards.scorers.clip_tower import ClipScorer, loading

HEAD = "sac+logos+ava1-l14-linearMSE.pth"
LAYERS = (0, 2, 4, 6, 7)  # the linear ones of the original module: 1, 3 and 5 are dropout


@dataclass(frozen=True, kw_only=True)
class AestheticScore(ClipScorer):
    """The head's rating of the normalised image feature, about 1 to 10; `head` is its file, .pth or .safetensors."""

    head: str | None = None

    def __post_init__(self) -> None:
        if self.head is None or not Path(self.head).expanduser().is_file():
            raise RewardError(
                f"the aesthetic scorer's kwarg head={self.head} names no file: download {HEAD} (3.7 MB) from "
                "github.com/christophschuhmann/improved-aesthetic-predictor and give its path"
            )

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        features = self.tower.image_features(images, self.batch_size)
        with torch.inference_mode():
            return self._head(features).squeeze(-1).tolist()

    @cached_property
    def _head(self) -> torch.nn.Sequential:
        assert self.head is not None  # see __post_init__
        return linear_head(read_tensors("head", self.head), self.tower.dim, f"head={self.head}")


def linear_head(tensors: dict[str, torch.Tensor], width: int, source: str) -> torch.nn.Sequential:
    """The head [B, width] -> [B, 1] in fp32: linear layers with nothing between them, as the dropout is off.

    `tensors` has the names of the original: `layers.0.weight`, `layers.0.bias`, ... `layers.7.bias`.

    Raises:
        RewardError: other tensors (such as those of a head with activations), or sizes that do not fit together.
    """
    if set(tensors) != {f"layers.{i}.{kind}" for i in LAYERS for kind in ("weight", "bias")}:
        raise RewardError(
            f"{source}: expected weight and bias of layers {', '.join(map(str, LAYERS))} of a linear head, "
            f"got {', '.join(sorted(tensors)) or 'nothing'}; give the published file"
        )
    weights = [tensors[f"layers.{i}.weight"].float() for i in LAYERS]
    sizes = [width, *(weight.shape[0] for weight in weights)]
    if [weight.shape[-1] for weight in weights] != sizes[:-1] or sizes[-1] != 1:
        raise RewardError(
            f"{source}: a head from {width} to 1 number was expected, got layers of the shapes "
            f"{', '.join(str(tuple(weight.shape)) for weight in weights)}; give the head that belongs to the model"
        )
    head = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    with torch.no_grad():
        for layer, i, weight in zip(head, LAYERS, weights, strict=True):
            assert isinstance(layer, torch.nn.Linear)
            layer.weight.copy_(weight)
            layer.bias.copy_(tensors[f"layers.{i}.bias"])
    return head.eval()


def read_tensors(kwarg: str, path: str) -> dict[str, torch.Tensor]:
    """The tensors in the file `path`, on the CPU: safetensors, or PyTorch's format read as data without running code.

    Raises:
        RewardError: there is no such file, or it cannot be read as what its suffix says.
        pickle.UnpicklingError: a PyTorch file holds more than tensors.
    """
    file = Path(path).expanduser()
    with loading(kwarg, path, "such weights"):
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        # Published on a GPU, which the machine at hand may lack.
        state = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise RewardError(f"{kwarg}={path} holds {type(state).__name__}, not named tensors; give a state dict")
    return dict(state)
