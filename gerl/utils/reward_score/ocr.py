"""Reward for rendered text: what a real OCR model reads, compared with what should be written.

Source: the text-rendering reward of Flow-GRPO (arXiv 2505.05470).
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from PIL import Image
from pydantic import ConfigDict, Field
from rapidfuzz.distance import Levenshtein

from gerl.errors import DataError
from gerl.protocol import Prompt
from gerl.utils.reward_score.base import require

QUOTED = re.compile(r'["“]([^"“”]*)["”]')


def normalised(text: str) -> str:
    """The text in lower case and without whitespace: what is compared."""
    return "".join(text.split()).lower()


def text_reward(recognised: str, target: str) -> float:
    """1 - min(edit distance, n) / n with n the length of `target`, in [0, 1]; 1 where `target` is part of `recognised`.

    Case and whitespace do not count. `target` must have a character that is not whitespace.
    """
    recognised, target = normalised(recognised), normalised(target)
    if target in recognised:
        return 1.0
    distance = Levenshtein.distance(recognised, target)
    return 1 - min(distance, len(target)) / len(target)


@dataclass(frozen=True)
class OcrScorer:
    """`text_reward` of what PP-OCR reads on the image; its weights are inside the rapidocr wheel.

    The image is taken as one line of text (about 4 ms for a small sign); with `detect` text is first searched for, line
    by line, and joined from top to bottom: for pages and photos. The target is the row's `metadata_key`, else the first
    text in double quotes of the prompt. `threads` are the CPU threads of the OCR model; `min_width` is the least width
    in pixels, at a height of 48, that a line is padded to.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    threads: Annotated[int, Field(ge=1)] = 1
    metadata_key: str = "text"
    detect: bool = False
    # PP-OCR's own default is 320. At 48 a 64x32 sign takes a third of the time and is read about as well: 100 of 100
    # clean ones, 99 (320: 100) blurred ones, 97 (320: 100) under strong noise.
    min_width: Annotated[int, Field(ge=48)] = 48

    def __post_init__(self) -> None:
        for module in ("cv2", "onnxruntime", "rapidocr"):  # rapidocr imports the other two only when it is used
            require(module, "ocr")

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        targets = [self.target(prompt, row) for prompt, row in zip(prompts, metadata, strict=True)]
        return [text_reward(self.read(image), target) for image, target in zip(images, targets, strict=True)]

    def check_prompts(self, prompts: list[Prompt]) -> None:
        for prompt in prompts:
            try:
                self.target(prompt.text, prompt.metadata)
            except DataError as error:
                raise DataError(f"prompt {prompt.id}: {error}") from None

    def target(self, prompt: str, metadata: dict[str, Any]) -> str:
        """The text that should be written; raises `DataError` if there is none."""
        given = metadata.get(self.metadata_key)
        quoted = QUOTED.search(prompt)
        text = str(given) if given is not None else quoted.group(1) if quoted else ""
        if not normalised(text):
            raise DataError(
                f"{prompt!r} has no text for the ocr scorer to look for: put it in double quotes, as in "
                f"'a sign that reads \"482\"', or in the row's {self.metadata_key!r}"
            )
        return text

    def read(self, image: Image.Image) -> str:
        """The text on the image, lines joined without a separator; empty if there is none."""
        # One image a call: in a batch the recogniser pads to the widest, so a score would depend on its neighbours.
        texts: tuple[str, ...] | None = self._engine(image.convert("RGB")).txts
        return "".join(texts or ())

    @cached_property
    def _engine(self) -> Any:
        rapidocr = require("rapidocr", "ocr")
        return rapidocr.RapidOCR(
            params={
                # Its logger has its own handler; below this level it reports every model file and every blank image.
                "Global.log_level": "error",
                "Global.use_det": self.detect,
                "Global.use_cls": False,
                "Rec.rec_img_shape": [3, 48, self.min_width],  # channels, height, least width
                "EngineConfig.onnxruntime.intra_op_num_threads": self.threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )
