"""A reward of your own, in one function.

Alone, in place of the experiment's scorers, which stay watched, and beside them (the signs demo's is ocr):

python -m gerl.trainer.main_flowgrpo 'reward.scorers={bright: {path: examples/brightness_reward.py}}'
python -m gerl.trainer.main_flowgrpo '+reward.scorers.bright={path: examples/brightness_reward.py, weight: 0.1}'
"""

from typing import Any

import numpy as np
from PIL import Image


def compute_score(
    images: list[Image.Image], prompts: list[str], metadata: list[dict[str, Any]], **kwargs: Any
) -> list[float]:
    """Mean brightness of each image, in [0, 1]."""
    return [float(np.mean(image) / 255) for image in images]
