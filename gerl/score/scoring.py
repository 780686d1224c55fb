"""Images that are there, in batches to the scorers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from gerl.cluster import Cluster, Pending
from gerl.config import ClusterConfig, RewardConfig
from gerl.pages.images import thumbnail
from gerl.protocol import Images, Sample, Scores
from gerl.rewards.manager import RewardManager
from gerl.rewards.rows import row_of
from gerl.score.gallery import ScoredImage
from gerl.score.inputs import Item, read_pixels

WIDTH = 256  # pixels, to which wider images are reduced in the gallery


def score(
    reward: RewardConfig, items: Sequence[Item], batch_size: int
) -> Iterator[tuple[list[int], list[ScoredImage]]]:
    """Score batches of images; yields the indices of a batch and the images with their scores.

    The images of a prompt are a group: where a scorer compares them, they are in one batch, which may then be larger.
    """
    with Cluster(ClusterConfig(launcher="local")) as here:
        manager = RewardManager(reward, here)
        groups: dict[str, list[int]] = {}
        for i, item in enumerate(items):
            groups.setdefault(item.prompt.text, []).append(i)
        ids = {text: number for number, text in enumerate(groups)}
        together = list(groups.values()) if manager.groupwise else [[i] for i in range(len(items))]
        for batch in _batches(together, batch_size):
            chosen = [items[i] for i in batch]
            prompts = [replace(item.prompt, id=ids[item.prompt.text]) for item in chosen]
            images = Images(0, [read_pixels(item) for item in chosen], 0.0)
            samples = [Sample(prompt, i, 0, 0) for i, prompt in zip(batch, prompts, strict=True)]
            scores = _scores(manager, samples, images)
            yield batch, [_scored(item, images.pixels[i], scores, i) for i, item in enumerate(chosen)]


def _scores(manager: RewardManager, samples: list[Sample], images: Images) -> Scores:
    read = [Pending("image reader", value=images)]
    (scores,) = manager.open([samples], read.__getitem__).finish()
    return scores


def _batches(together: Iterable[list[int]], size: int) -> Iterator[list[int]]:
    """Batches of at least one of `together` and, beyond that, at most `size` indices."""
    batch: list[int] = []
    for members in together:
        if batch and len(batch) + len(members) > size:
            yield batch
            batch = []
        batch = batch + members
    if batch:
        yield batch


def _scored(item: Item, pixels: np.ndarray, scores: Scores, i: int) -> ScoredImage:
    return ScoredImage(item.path, item.name, item.prompt.text, thumbnail(pixels, WIDTH), *row_of(scores, i))
