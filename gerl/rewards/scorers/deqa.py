"""DeQA-Score, an image quality model, behind a reward service of gerl that offers it as `deqa`.

Source: "Teaching Large Language Models to Regress Accurate Image Quality Scores using Score Distribution" (arXiv
2501.11561); the scale is that of Flow-GRPO's reward code.
"""

from dataclasses import dataclass

from PIL import Image

from gerl.errors import RewardError
from gerl.rewards.scorers.base import Metadata
from gerl.rewards.scorers.remote import ServiceScorer

WORST, BEST = 1.0, 5.0
ROUNDING = 0.05  # of a mean over five levels in half precision


@dataclass(frozen=True, kw_only=True)
class DeqaScorer(ServiceScorer):
    """The quality 1 to 5 in the first column of the scorer `deqa`, divided by 5; the prompt does not matter."""

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> list[float]:
        qualities = next(iter(self.columns("deqa", images, prompts, [{} for _ in metadata]).values()))
        for i, quality in enumerate(qualities):
            # A service that divides by 5 itself would otherwise go unnoticed.
            if not WORST - ROUNDING <= quality <= BEST + ROUNDING:
                raise RewardError(
                    f"{self.url} gave image {i} of {len(images)} a quality of {quality:g}, expected {WORST:g} to "
                    f"{BEST:g}: configure its scorer deqa to return DeQA-Score's own number"
                )
        return [quality / BEST for quality in qualities]
