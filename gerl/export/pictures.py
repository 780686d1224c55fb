"""The pictures of a model card: the same held-out prompts before and after, and the curve of the reward."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from gerl.pages.images import grid, still
from gerl.run.charts import Rows, series
from gerl.run.validation import Validation

SHOWN, COLUMNS = 8, 4  # prompts in a grid


def shown_prompts(first: Validation, last: Validation) -> list[int]:
    """Up to `SHOWN` prompts that have a picture in both, spread evenly over the file whatever they gained."""
    shown = set(first.shown) & set(last.shown)
    same = [i for i in first.first_rows if i in shown and first.prompts[i] == last.prompts[i]]
    count = min(SHOWN, len(same))
    return [same[k * len(same) // count] for k in range(count)]


def prompt_grid(validation: Validation, prompts: Sequence[int]) -> bytes:
    """The pictures of `prompts` with their rewards, as a PNG."""
    rewards = [validation.rewards[i] for i in prompts]
    captions = ["not scored" if reward is None else f"reward {reward:.3f}" for reward in rewards]
    images = [still(validation.pixels[validation.shown.index(i)]) for i in prompts]
    return _png(grid(images, captions, columns=COLUMNS, min_width=192))


def reward_curve(rows: Rows, errors: Mapping[int, float]) -> bytes | None:
    """The reward of the training and of the held-out prompts over the steps, as a PNG; None if none was measured.

    errors: step -> standard error of the held-out mean.
    """
    training, held_out = series(rows, "reward/mean"), series(rows, "val/reward/mean")
    if not any(np.isfinite(values).any() for _, values in (training, held_out)):
        return None
    from matplotlib.figure import Figure  # in here: a wrong argument is said before it is imported

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*training, linewidth=1, alpha=0.6, label="training prompts of the step")
    steps, means = held_out
    bars = [errors.get(int(step), np.nan) for step in steps]
    axes.errorbar(steps, means, bars, linewidth=2, marker="o", markersize=4, capsize=3, label="held-out prompts")
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.grid(axis="y", linewidth=0.4)
    axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "png", optimize=True)
    return buffer.getvalue()
