"""A reward of your own, in one function.

python -m gerl.trainer.main_flowgrpo 'reward.scorers={bright: {path: examples/brightness_reward.py}}'
"""

from typing import Any

import numpy as np
from PIL import Image


def compute_score(
    images: list[Image.Image], prompts: list[str], metadata: list[dict[str, Any]], **kwargs: Any
) -> list[float]:
    """Mean brightness of each image, in [0, 1]."""
    return [float(np.asarray(image.convert("L")).mean() / 255) for image in images]
