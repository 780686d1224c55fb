"""VideoAlign's VideoReward: how good a video looks, how well it moves, and how well it follows its prompt.

Source: "Improving Video Generation with Human Feedback" (arXiv 2501.13918) and its code
(github.com/KwaiVGI/VideoAlign, commit 219ab9d: inference.py, lines 103 to 180, prompt_template.py, lines 24 to 61 and
121 to 122); `video_head.py` has the model. A Qwen2-VL-2B with a LoRA; the published weights have not been run by this
project.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from PIL import Image
from pydantic import Field

from gerl.config.blocks import Dtype
from gerl.errors import RewardError
from gerl.rewards.scorers.base import Columns, Metadata, Scorer
from gerl.rewards.scorers.clip_tower import Device, resolve_device, resolve_dtype
from gerl.rewards.scorers.hpsv3 import PLACE
from gerl.rewards.scorers.video_head import TOKENS, VideoRewardModel, video_reward_model
from gerl.rewards.scorers.vlm_head import MARKS, check_marks
from gerl.rewards.scorers.wording import code_folder, constants

PACKAGE = "VideoAlign"
TEMPLATE = "DETAILED_PROMPT_WITH_SPECIAL_TOKEN"
REMEDY = "clone github.com/KwaiVGI/VideoAlign, and give its folder as code"


@dataclass(frozen=True, kw_only=True)
class VideoAlign(Scorer):
    """The sum of `vq`, `mq` and `ta`, further columns: visual quality, motion quality and alignment with the text.

    Each is normalised with the mean and the deviation in the model's `model_config.json`. Of a video with `fps` frames
    a second (16 as Wan 2.1 draws them) two a second are seen, or as many as that file says. `model` is a Hub repository
    or a local folder with that file and `checkpoint`, `base` the Qwen2-VL it was trained from, of which the weights are
    not needed. The words of the question are read from `code`, the folder of a clone of the authors' repository;
    nothing of it is run.
    """

    model: str = "KwaiVGI/VideoReward"
    checkpoint: str = "checkpoint-11352/model.pth"
    base: str = "Qwen/Qwen2-VL-2B-Instruct"
    code: str | None = None
    fps: Annotated[float, Field(gt=0)] = 16.0
    batch_size: Annotated[int, Field(ge=1)] = 4
    device: Device = "auto"
    dtype: Dtype = "auto"
    takes_frames = True

    def __post_init__(self) -> None:
        _ = self._question

    @property
    def shares(self) -> str:
        return f"videoalign {self.model} {self.checkpoint} {self.base} {self.device} {self.dtype}"

    @property
    def network(self) -> VideoRewardModel:
        """Loaded when it is first needed, once a process for all that ask for the same one."""
        device = resolve_device(self.device)
        return video_reward_model(self.model, self.checkpoint, self.base, device, resolve_dtype(self.dtype, device))

    def __call__(
        self, images: Sequence[Image.Image | Sequence[Image.Image]], prompts: list[str], metadata: list[Metadata]
    ) -> Columns:
        """The grades [B]; what is graded are lists of the frames of videos."""
        videos = [_frames(image) for image in images]
        for prompt in prompts:
            check_marks(prompt)
        texts = [self._question.replace(PLACE, prompt) for prompt in prompts]
        grades = self.network.outputs(videos, texts, self.fps, self.batch_size)
        parts = dict(zip(("vq", "mq", "ta"), grades.T.tolist(), strict=True))
        return {"overall": grades.sum(-1).tolist(), **parts}

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        check_marks(prompt)

    @cached_property
    def _question(self) -> str:
        file = code_folder(self.code, PACKAGE, REMEDY) / "prompt_template.py"
        text = constants(file, [TEMPLATE])[TEMPLATE]
        if MARKS.findall(text) != TOKENS or text.count(PLACE) != 1:
            raise RewardError(
                f"code: {TEMPLATE} in {file} must have one each of {', '.join(TOKENS)} and {PLACE}: {REMEDY}"
            )
        return text


def _frames(video: Image.Image | Sequence[Image.Image]) -> Sequence[Image.Image]:
    if isinstance(video, Image.Image):
        raise RewardError("videoalign grades videos and got an image: use hpsv3 or another image scorer")
    return video
