"""A torch reward model of your own: loaded once, on the GPU, in batches and in half precision.

Replace `network` and `pixels` with your model and its preprocessing. To try the file with untrained weights, and to
train on it with a quarter of a GPU for the reward:

python examples/torch_reward_model.py my_weights.pt
gerl score my_images prompt="a cat" out=my_scores \
    'reward.scorers={mine: {path: examples/torch_reward_model.py, kwargs: {weights: my_weights.pt}}}'
gerl train \
    'reward.scorers={mine: {path: examples/torch_reward_model.py, gpus: 0.25, kwargs: {weights: my_weights.pt}}}'
"""

import sys
from functools import cache

import numpy as np
import torch
from PIL import Image

SIDE = 64  # pixels of the network's input


def network() -> torch.nn.Module:
    """From images `[B, 3, SIDE, SIDE]` in [0, 1] to scores `[B, 1]`."""
    layers = [torch.nn.Conv2d(3, 16, 4, 4), torch.nn.GELU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 1))


def pixels(image: Image.Image) -> torch.Tensor:
    """`[3, SIDE, SIDE]` in [0, 1]."""
    resized = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1) / 255


class RewardModel:
    """The network on its device, with the `weights` of a file."""

    def __init__(self, weights: str) -> None:
        on_gpu = torch.cuda.is_available()
        self.device = "cuda" if on_gpu else "cpu"
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.model = network()
        state = torch.load(weights, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state)
        self.model.to(self.device, self.dtype).eval()

    @torch.no_grad()
    def scores(self, images: list[Image.Image]) -> list[float]:
        batch = torch.stack([pixels(image) for image in images])
        found = self.model(batch.to(self.device, self.dtype))
        return [float(score) for score in found.flatten()]


# Loaded at the first call: the main process imports this file, too.
loaded = cache(RewardModel)


def compute_score(
    images: list[Image.Image],
    *,
    weights: str,
    batch_size: int = 16,
) -> list[float]:
    model, scores = loaded(weights), []
    for start in range(0, len(images), batch_size):
        scores += model.scores(images[start : start + batch_size])
    return scores


if __name__ == "__main__":
    torch.save(network().state_dict(), sys.argv[1])
