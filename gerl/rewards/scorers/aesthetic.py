"""Aesthetic score: how much people like the look of an image, whatever its prompt.

Source: LAION's improved aesthetic predictor (github.com/christophschuhmann/improved-aesthetic-predictor, commit
6934dd8, simple_inference.py, lines 40 to 117), a linear head on the CLIP ViT-L/14 feature, trained on ratings from 1 to
10. The published head loads here; with the published CLIP weights it has not been run.
"""

import hashlib
import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import safetensors.torch
import torch
from PIL import Image

from gerl.errors import RewardError
from gerl.rewards.scorers.base import Metadata
from gerl.rewards.scorers.clip_tower import ClipScorer, expanded, loading

# The heads that have a name, and the SHA-256 of their files, taken from those in the authors' repository.
HEADS = {"sac+logos+ava1-l14-linearMSE": "21dd590f3ccdc646f0d53120778b296013b096a035a2718c9cb0d511bff0f1e0"}
LAYERS = (0, 2, 4, 6, 7)  # the linear ones of the original module: 1, 3 and 5 are dropout


@dataclass(frozen=True, kw_only=True)
class AestheticScore(ClipScorer):
    """The head's rating of the normalised image feature, about 1 to 10.

    `head` is the name of a published one (3.7 MB), or the path of a file, .pth or .safetensors. A named one is
    downloaded once from `repository`, a Hub id or a local folder, and refused unless it is the authors' file.
    """

    head: str = "sac+logos+ava1-l14-linearMSE"
    repository: str = "camenduru/improved-aesthetic-predictor"  # the authors have it on GitHub only

    differentiable = True

    def __post_init__(self) -> None:
        if self.head not in HEADS and not Path(self.head).expanduser().is_file():
            raise RewardError(
                f"the aesthetic scorer's kwarg head={self.head} is neither a file nor a published head: give the "
                f"path of one, or {' or '.join(HEADS)}"
            )

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        features = self.tower.image_features(images, self.batch_size)
        self._head.to(features.device)
        with torch.inference_mode():
            return self._head(features).squeeze(-1).tolist()

    def tensor_scores(self, images: torch.Tensor, prompts: list[str], metadata: list[Metadata]) -> torch.Tensor:
        features = self.tower.features_of(images)
        scores: torch.Tensor = self._head.to(features.device)(features).squeeze(-1)
        return scores

    @cached_property
    def _head(self) -> torch.nn.Sequential:
        file = self.head if self.head not in HEADS else published(self.head, self.repository)
        return linear_head(read_tensors("head", file), self.tower.dim, f"head={self.head}")


def published(head: str, repository: str) -> str:
    """The file of a head of `HEADS`, from the Hub or its cache, or from the folder `repository`.

    Raises:
        RewardError: it cannot be had from there, or is another file than the authors'.
    """
    from transformers.utils import cached_file

    name = f"{head}.pth"
    with loading("repository", repository, f"a repository with {name}"):
        file = cached_file(expanded(repository), name)
    with Path(file).open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != HEADS[head]:
        raise RewardError(
            f"repository={repository}: its {name} has the SHA-256 {found}, not {HEADS[head]} of the authors' file: "
            "use another repository, or set head to the path of the file if this is intended"
        )
    return str(file)


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
            f"{source}: expected a head from {width} to 1 number, got layers of the shapes "
            f"{', '.join(str(tuple(weight.shape)) for weight in weights)}; give the head that belongs to the model"
        )
    head = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    with torch.no_grad():
        for layer, i, weight in zip(head, LAYERS, weights, strict=True):
            assert isinstance(layer, torch.nn.Linear)
            layer.weight.copy_(weight)
            layer.bias.copy_(tensors[f"layers.{i}.bias"])
    return head.eval().requires_grad_(False)


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
        raise RewardError(f"{kwarg}={path} contains {type(state).__name__}, not named tensors; give a state dict")
    return dict(state)
