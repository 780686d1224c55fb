"""A reward with a gradient, of your own: how well the lettering of a sign agrees with a drawing of the text asked for.

    python -m gerl.trainer.main_flowgrpo algorithm=drtune algorithm.late=4 algorithm.margin=1 \
        sampling.num_inference_steps=10 rollout.prompts_per_step=24 trainer.steps=15 validation.every=5 \
        actor.lr=3e-3 actor.lr_schedule=constant algorithm.kl_coef=0.03 \
        '+reward.scorers.legible={path: examples/legibility_reward.py}' reward.scorers.ocr.weight=0

For the signs model that ships with gerl, whose lettering always has the same size and place but for a pixel. An OCR,
which has no gradient, is watched besides: it says whether what the drawing wants can also be read. Nothing here asks
for the colour of the board: without `algorithm.kl_coef` a fifth of the boards lost theirs (one run, seed 0).
"""

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT, OVERSAMPLING = 96, 32, 4
SIZE, ADVANCE = 20, 14.5  # of a character, in pixels
BORDER = 3  # pixels around the board that do not count
LUMA = (0.299, 0.587, 0.114)


@cache
def drawing(text: str) -> torch.Tensor:
    """The lettering of a sign with `text`, [HEIGHT, WIDTH] in [0, 1]: where there is paint."""
    image = Image.new("L", (WIDTH * OVERSAMPLING, HEIGHT * OVERSAMPLING))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(SIZE * OVERSAMPLING)
    left, base = WIDTH / 2 - ADVANCE * (len(text) - 1) / 2, HEIGHT / 2 + 0.36 * SIZE
    for i, character in enumerate(text):
        place = ((left + i * ADVANCE) * OVERSAMPLING, base * OVERSAMPLING)
        draw.text(place, character, font=font, fill=255, anchor="ms", stroke_width=OVERSAMPLING / 2, stroke_fill=255)
    return torch.from_numpy(np.asarray(image.resize((WIDTH, HEIGHT), Image.Resampling.BOX), np.float32) / 255)


def compute_score(images: torch.Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> torch.Tensor:
    """Scores [B] in [0, 1] of images [B, 3, 32, 96]: the correlation of their brightness with the drawing of the text.

    Of the drawing's places within a pixel the best counts; lettering may be light or dark. Without text it is 0.
    """
    grey = torch.einsum("bchw,c->bhw", images, images.new_tensor(LUMA))
    texts = [prompt.split('"')[1].upper() if prompt.count('"') > 1 else "" for prompt in prompts]
    wanted = torch.stack([drawing(text) for text in texts]).to(images)
    found = []
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            moved = wanted.roll((down, right), (1, 2))
            found.append(correlation(grey, moved).abs())
    return torch.stack(found).amax(0)


def correlation(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Pearson's correlation of two batches of pictures [B, H, W] without their borders, [B]; 0 where one is uniform."""
    inner = (slice(None), slice(BORDER, -BORDER), slice(BORDER, -BORDER))
    one, other = ((x[inner] - x[inner].mean((1, 2), keepdim=True)).flatten(1) for x in (one, other))
    return F.cosine_similarity(one, other, dim=1, eps=1e-4)


compute_score.takes_tensors = True  # type: ignore[attr-defined]
