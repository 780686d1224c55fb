"""Reward for rendered text: the output of an OCR model compared with the target text.

Source: the text-rendering reward of Flow-GRPO (arXiv 2505.05470), which is `match: contains`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from gerl.errors import DataError, RewardError
from gerl.protocol import ORIGINAL, Prompt
from gerl.rewards.scorers.base import Columns, Metadata, Scorer, require
from gerl.utils.quotes import comparable, quoted_texts

logger = logging.getLogger(__name__)

PACKAGES = {"rapidocr": ("cv2", "onnxruntime", "rapidocr"), "paddleocr": ("paddle", "paddleocr")}
EXTRAS = {"rapidocr": "ocr", "paddleocr": "paddleocr"}
Match = Literal["exact", "contains"]
FRAME_STEP = 4  # every fourth frame of a video is read

NAMED = 3  # ambiguous prompts named in the log


def normalised(text: str, strict: bool = False) -> str:
    """Normalise text for comparison, see `comparable`; `strict`: only lower case and no whitespace, as in Flow-GRPO."""
    return "".join(text.split()).lower() if strict else comparable(text)


def is_exact(recognised: str, target: str, strict: bool = False) -> bool:
    """Whether `recognised` equals `target` as `normalised`."""
    return normalised(recognised, strict) == normalised(target, strict)


def text_reward(recognised: str, target: str, match: Match = "exact", strict: bool = False) -> float:
    """Return 1 - min(edit distance, n) / n with n the length of `target`, in [0, 1]: 1 only for an exact match.

    With `contains` also 1 if `target` is part of `recognised`: Flow-GRPO's rule for images. Both are compared
    as `normalised`, and `target` must not be empty then.
    """
    from rapidfuzz.distance import Levenshtein  # here: other rewards do without

    recognised, target = normalised(recognised, strict), normalised(target, strict)
    if match == "contains" and target in recognised:
        return 1.0
    return 1 - min(Levenshtein.distance(recognised, target), len(target)) / len(target)


def video_reward(recognised: list[str], target: str, strict: bool = False) -> float:
    """Return the mean of the positive `text_reward` values over frames, so that text may come and go; 0 if none."""
    rewards = [reward for text in recognised if (reward := text_reward(text, target, strict=strict)) > 0]
    return sum(rewards) / len(rewards) if rewards else 0.0


def paddle_text(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the text in the results of PaddleOCR 3's `predict` for one image, joined without a separator.

    A result of the whole pipeline has the key `rec_texts`, a list from top to bottom; one of the recogniser alone has
    `rec_text`.

    Raises:
        RewardError: a result has neither key, so the installed version has another interface.
    """
    texts: list[str] = []
    for result in results:
        if "rec_texts" in result:
            texts += result["rec_texts"]
        elif "rec_text" in result:
            texts.append(result["rec_text"])
        else:
            raise RewardError(
                f"PaddleOCR returned a result with {', '.join(map(str, result)) or 'no keys'} and without "
                "rec_texts: install paddleocr 3, or use backend=rapidocr"
            )
    return "".join(texts)


@dataclass(frozen=True)
class OcrScorer(Scorer):
    """`text_reward` of the text that PP-OCR reads on the image, or `video_reward` over every fourth frame.

    A second column, `exact`, is 1 for an exact match, else 0; for a video the fraction of the read frames. `match`:
    whether the recognised text must equal the target, or may contain it (images only: Flow-GRPO compares the whole text
    of video frames). Punctuation counts: "135," is not "135". Case, whitespace, invisible characters and code points of
    one letter, apostrophe or dash do not; with `strict` only case and whitespace do not, as in published numbers.

    The image is treated as one line of text (about 4 ms for a small sign); `detect` first detects text line by line and
    joins it from top to bottom, for pages and photos. A target of several lines is then compared as one text, and other
    text in the image lowers the reward: use `contains` if a scene may have other text. The target is the row's
    `metadata_key`, else the first text in double quotes, straight or typographic, in the prompt (that of the row, if
    `data.template` makes another of it); the log says what was taken, and names ambiguous prompts. `threads` is the
    number of CPU threads of the OCR model; `min_width` is the minimum width in pixels, at a height of 48, to which
    rapidocr pads a line. The wheel of `rapidocr` includes its weights; `paddleocr` is the original, in English,
    downloads its weights, and also runs on the CPU.
    """

    threads: Annotated[int, Field(ge=1)] = 1
    metadata_key: str = "text"
    match: Match = "exact"
    strict: bool = False
    detect: bool = False
    # PP-OCR's default is 320. With 48 a 64x32 sign takes a third of the time at similar accuracy: 100 of 100 clean
    # signs, 99 (320: 100) blurred, 97 (320: 100) under strong noise.
    min_width: Annotated[int, Field(ge=48)] = 48
    backend: Literal["rapidocr", "paddleocr"] = "rapidocr"
    takes_frames = True

    def __post_init__(self) -> None:
        for module in ("rapidfuzz", *PACKAGES[self.backend]):  # rapidocr imports the other two only on use
            require(module, EXTRAS[self.backend])

    def __call__(
        self, images: Sequence[Image.Image | Sequence[Image.Image]], prompts: list[str], metadata: list[Metadata]
    ) -> Columns:
        """Return the rewards `[B]` and the column `exact` `[B]`; an image may be a list of video frames."""
        targets = [self.target(prompt, row) for prompt, row in zip(prompts, metadata, strict=True)]
        pairs = [self._score(image, target) for image, target in zip(images, targets, strict=True)]
        return {"ocr": [reward for reward, _ in pairs], "exact": [exact for _, exact in pairs]}

    def _score(self, image: Image.Image | Sequence[Image.Image], target: str) -> tuple[float, float]:
        if isinstance(image, Image.Image):
            text = self.read(image)
            return text_reward(text, target, self.match, self.strict), float(is_exact(text, target, self.strict))
        if not image:
            raise RewardError("the ocr scorer got a video without frames: expected at least one")
        texts = [self.read(frame) for frame in image[::FRAME_STEP]]
        exact = sum(is_exact(text, target, self.strict) for text in texts)
        return video_reward(texts, target, self.strict), exact / len(texts)

    def check_prompts(self, prompts: list[Prompt]) -> None:
        super().check_prompts(prompts)
        read = [(prompt, *self._quoted(prompt.text, prompt.metadata)) for prompt in prompts]
        quoted = [(prompt, texts[0], problem) for prompt, texts, problem in read if texts]
        unclear = [(prompt, text, problem) for prompt, text, problem in quoted if problem]
        if quoted:
            logger.log(
                logging.WARNING if unclear else logging.INFO,
                "the ocr scorer looks for the first quoted text of %d prompts, such as %r%s",
                *(len(quoted), quoted[0][1], self._named(unclear)),
            )

    def _named(self, unclear: Sequence[tuple[Prompt, str, str]]) -> str:
        """Return the end of the line if there are ambiguous prompts: their number, the first ones, and what to do."""
        if not unclear:
            return ""
        first = [f"prompt {prompt.id} ({text!r} was taken; {problem})" for prompt, text, problem in unclear[:NAMED]]
        more = [f"{len(unclear) - NAMED} more"] if len(unclear) > NAMED else []
        named = ", ".join(first + more)
        return f"; {len(unclear)} of them are ambiguous: {named}; a row's {self.metadata_key!r} says which is meant"

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        self.target(prompt, metadata)

    def _quoted(self, prompt: str, metadata: Metadata) -> tuple[list[str], str]:
        """Return the quoted texts of a row without a target, and what is ambiguous about them."""
        if metadata.get(self.metadata_key) is not None:
            return [], ""
        original = quoted_texts(str(metadata.get(ORIGINAL, "")))
        return original if any(original[0][:1]) else quoted_texts(prompt)

    def target(self, prompt: str, metadata: Metadata) -> str:
        """Return the target text; raises `DataError` if there is none."""
        value = metadata.get(self.metadata_key)
        text = str(value) if value is not None else next(iter(self._quoted(prompt, metadata)[0]), "")
        if not normalised(text, self.strict):
            raise DataError(
                f"{prompt!r} has no text for the ocr scorer to look for: put it in double quotes, as in "
                f"'a sign that reads \"482\"', or in the row's {self.metadata_key!r}"
            )
        return text

    def read(self, image: Image.Image) -> str:
        """Return the text on the image, lines joined without a separator; empty if there is none."""
        if self.backend == "paddleocr":
            return paddle_text(self._paddle.predict(np.asarray(image.convert("RGB"))[..., ::-1].copy()))  # BGR
        # one image per call: in a batch the recogniser pads to the widest image, so a score would depend on the others
        texts: tuple[str, ...] | None = self._engine(image.convert("RGB")).txts
        return "".join(texts or ())

    @cached_property
    def _engine(self) -> Any:
        rapidocr = require("rapidocr", "ocr")
        return rapidocr.RapidOCR(
            params={
                # its logger has a separate handler; below this level it reports every model file and every blank image
                "Global.log_level": "error",
                "Global.use_det": self.detect,
                "Global.use_cls": False,
                "Rec.rec_img_shape": [3, 48, self.min_width],  # channels, height, minimum width
                "EngineConfig.onnxruntime.intra_op_num_threads": self.threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )

    @cached_property
    def _paddle(self) -> Any:
        paddleocr = require("paddleocr", EXTRAS["paddleocr"])
        place: dict[str, object] = {"device": "cpu", "cpu_threads": self.threads}
        if not self.detect:
            return paddleocr.TextRecognition(**place)
        # without these three it would rotate and unwarp pages, which needs further models
        return paddleocr.PaddleOCR(
            lang="en",
            use_doc_orientation_classify=False,
            use_doc_unwarping=False,
            use_textline_orientation=False,
            **place,
        )
