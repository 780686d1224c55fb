"""VideoAlign's VideoReward: how good a video looks, how well it moves, and how well it follows its prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Literal

import torch
from PIL import Image
from pydantic import Field, TypeAdapter, ValidationError

from gerl.errors import RewardError
from gerl.rewards.scorers.base import Columns, Metadata
from reward_models.scorers.networks import hub_file, in_batches, read_tensors
from reward_models.scorers.vlm_reward import VlmNetwork, VlmScorer, base_parts, build_backbone

# --- The model of VideoAlign: frames of a video go through a Qwen2-VL, three tokens of the text end in a linear layer.
#
# Source: github.com/KwaiVGI/VideoAlign, commit 219ab9d: the model in trainer.py, lines 59 to 173, its tokens and LoRA
# in train_reward.py, lines 93 to 134, its files in utils.py, lines 163 to 198, the choice and size of frames in
# vision_process.py, lines 26 to 81, 129 to 166, 246 to 254 and 300 to 323, the normalisation in inference.py, lines 59
# to 66. Two things differ and change what rounding does: frames are resized by Pillow, which differs from torchvision
# by at most one of 255 levels, and the last layer is in fp32.

TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")  # in the order of the text and of the numbers
SETTINGS = "model_config.json"
LEAST_PIXELS = 128 * 28 * 28  # of a frame
LEAST_FRAMES, MOST_FRAMES = 4, 768  # seen of a video, in pairs
PREFIX = "base_model.model."  # of the names of tensors, from peft
HEAD = "rm_head.weight"
Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class DataSettings:
    """How a video is seen: `fps` frames a second, each of at most `max_frame_pixels`."""

    fps: Positive
    max_frame_pixels: Annotated[int, Field(gt=0)]
    sample_type: Literal["uniform"]
    prompt_template_type: Literal["detailed_special"]
    num_frames: None = None  # instead of fps


@dataclass(frozen=True)
class ModelSettings:
    """A head with one number, or with one for each of the tokens."""

    output_dim: Literal[1, 3]
    use_special_tokens: Literal[True]
    reward_token: Literal["special"]


@dataclass(frozen=True)
class LoraSettings:
    """The LoRA that lies in the checkpoint beside the weights it was trained on."""

    lora_enable: bool
    lora_r: Annotated[int, Field(gt=0)]
    lora_alpha: Positive
    use_rslora: bool = False


@dataclass(frozen=True)
class Normalisation:
    """Mean and deviation of each number among the videos of the authors; neutral where a file has none."""

    VQ_mean: float = 0.0
    VQ_std: Positive = 1.0
    MQ_mean: float = 0.0
    MQ_std: Positive = 1.0
    TA_mean: float = 0.0
    TA_std: Positive = 1.0


@dataclass(frozen=True)
class Settings:
    """The parts of `model_config.json` that are needed to grade."""

    data: Annotated[DataSettings, Field(alias="data_config")]
    model: Annotated[ModelSettings, Field(alias="model_config")]
    lora: Annotated[LoraSettings, Field(alias="peft_lora_config")]
    norm: Annotated[Normalisation | None, Field(alias="inference_config")] = None


@dataclass(frozen=True, eq=False)
class VideoRewardModel(VlmNetwork):
    """A model for videos with its head for grades."""

    head: torch.nn.Linear
    settings: Settings

    def outputs(
        self, videos: Sequence[Sequence[Image.Image]], texts: Sequence[str], fps: float, batch_size: int
    ) -> torch.Tensor:
        """Grades [B, 3], normalised, fp32 on the CPU, of videos with `fps` frames a second.

        A text has the three tokens once, in their order; it follows its video.
        """

        def grades(videos: Sequence[Sequence[Image.Image]], texts: Sequence[str]) -> torch.Tensor:
            seen = [[video[k] for k in chosen_frames(len(video), fps, self.settings.data.fps)] for video in videos]
            found = self.head(self.hidden_at(self._inputs(seen, texts), TOKENS)).unflatten(0, (-1, len(TOKENS)))
            return found.diagonal(dim1=1, dim2=2) if found.shape[-1] == len(TOKENS) else found.squeeze(-1)

        norm = self.settings.norm or Normalisation()
        means = torch.tensor([norm.VQ_mean, norm.MQ_mean, norm.TA_mean])
        deviations = torch.tensor([norm.VQ_std, norm.MQ_std, norm.TA_std])
        return (in_batches(batch_size, grades, videos, texts) - means) / deviations

    def _inputs(self, videos: Sequence[Sequence[Image.Image]], texts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tokens, padded on the right, and pixels: a video's mark stands once for each patch of its pairs of frames."""
        pixels, grids = zip(*(self._patches(video) for video in videos), strict=True)
        grid = torch.stack(grids)
        lengths = [[int(size)] for size in grid.prod(-1) // self.processor.merge_size**2]
        device, dtype = self.backbone.device, self.backbone.dtype
        return {
            **self.message_tokens("video", lengths, texts),
            "pixel_values_videos": torch.cat(pixels).to(device, dtype),
            "video_grid_thw": grid.to(device),
        }

    def _patches(self, frames: Sequence[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
        """Patches [F / 2 * N, values] of pairs of frames, and their grid: pairs, rows and columns.

        The processor for images is used, since that for videos needs torchvision. It makes of an image two frames that
        are the same; here the second is that of the next image.
        """
        most = self.settings.data.max_frame_pixels
        size = {"shortest_edge": LEAST_PIXELS, "longest_edge": most}
        seen = self.processor(images=[frame.convert("RGB") for frame in frames], size=size, return_tensors="pt")
        side, pair = self.processor.patch_size, self.processor.temporal_patch_size
        patches = seen["pixel_values"].reshape(len(frames) // pair, pair, -1, 3, pair, side, side)
        mixed = torch.stack([patches[:, k, :, :, k] for k in range(pair)], dim=3)  # [pairs, N, 3, pair, side, side]
        _, rows, columns = seen["image_grid_thw"][0].tolist()
        return mixed.flatten(0, 1).flatten(1), torch.tensor([len(frames) // pair, rows, columns])


def chosen_frames(count: int, fps: float, wanted: float) -> list[int]:
    """Which of the `count` frames of a video of `fps` are seen, as evenly spread as whole numbers allow.

    Some `wanted` a second, an even number of them, at least 4 where there are as many. Raises `RewardError` for a
    video of one frame.
    """
    if count < 2:
        raise RewardError(f"a video of {count} frame cannot be graded for motion: sample videos with at least 2")
    number = min(max(count / fps * wanted, LEAST_FRAMES), min(MOST_FRAMES, count) // 2 * 2)
    return torch.linspace(0, count - 1, round(number / 2) * 2).round().long().tolist()


@cache
def video_reward_model(model: str, file: str, base: str, device: torch.device, dtype: torch.dtype) -> VideoRewardModel:
    """The model with the weights in the `file` of `model`, a Hub id or a folder; `base` names its sizes and tokens.

    Loaded once a process.

    Raises:
        RewardError: something cannot be loaded, is of another kind of model, or the weights do not fit.
    """
    from peft import LoraConfig

    settings = read_settings(model)
    config, tokenizer, processor = base_parts(base, TOKENS)
    tensors = read_tensors("model", hub_file("model", model, file))
    tensors = {name.removeprefix(PREFIX): value for name, value in tensors.items()}
    weight = tensors.get(HEAD)
    shape = (settings.model.output_dim, config.get_text_config().hidden_size)
    if weight is None or weight.shape != shape:
        found = "no such weight" if weight is None else list(weight.shape)
        raise RewardError(f"model={model}: expected {HEAD} of the shape {list(shape)}, got {found}: give VideoReward")
    head = torch.nn.Linear(shape[1], shape[0], bias=False)
    head.load_state_dict({"weight": weight.float()})
    lora = settings.lora
    adapter = LoraConfig(r=lora.lora_r, lora_alpha=lora.lora_alpha, use_rslora=lora.use_rslora)
    backbone = build_backbone(model, config, tensors, adapter if lora.lora_enable else None)
    return VideoRewardModel(backbone.to(device, dtype).eval(), tokenizer, processor, head.to(device), settings)


def read_settings(model: str) -> Settings:
    """Read `model_config.json` of `model`, a Hub id or a folder; raises `RewardError` for a model of another kind."""
    text = Path(hub_file("model", model, SETTINGS)).read_text(encoding="utf-8")
    try:
        return TypeAdapter(Settings).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise RewardError(
            f"model={model}: {key} in its {SETTINGS} is unsupported ({first['msg']}): give VideoReward or a model "
            "trained in the same way"
        ) from None


# --- VideoAlign's VideoReward: how good a video looks, how well it moves, and how well it follows its prompt.
#
# Source: "Improving Video Generation with Human Feedback" (arXiv 2501.13918) and its code
# (github.com/KwaiVGI/VideoAlign, commit 219ab9d: inference.py, lines 103 to 180, prompt_template.py, lines 24 to 61 and
# 121 to 122): a Qwen2-VL-2B with a LoRA; the published weights have not been run by this
# project.


@dataclass(frozen=True, kw_only=True)
class VideoAlign(VlmScorer):
    """The sum of `vq`, `mq` and `ta`, further columns: visual quality, motion quality and alignment with the text.

    Each is normalised with the mean and the deviation in the model's `model_config.json`. Of a video with `fps` frames
    a second (16 as Wan 2.1 generates them) two a second are seen, or as many as that file says.
    """

    model: str = "KwaiVGI/VideoReward"
    checkpoint: str = "checkpoint-11352/model.pth"
    base: str = "Qwen/Qwen2-VL-2B-Instruct"
    fps: Annotated[float, Field(gt=0)] = 16.0
    batch_size: Annotated[int, Field(ge=1)] = 4

    takes_frames = True
    identity = ("videoalign", "model", "checkpoint", "base")
    package, tokens = "VideoAlign", TOKENS
    remedy = "clone github.com/KwaiVGI/VideoAlign, and give its folder as code"

    @cached_property
    def instructions(self) -> dict[str, str]:
        return {"overall": self.wording(("prompt_template.py", "DETAILED_PROMPT_WITH_SPECIAL_TOKEN"))}

    @property
    def network(self) -> VideoRewardModel:
        """Loaded when it is first needed, once a process for all that ask for the same one."""
        return video_reward_model(self.model, self.checkpoint, self.base, *self.placement)

    def __call__(
        self, images: Sequence[Image.Image | Sequence[Image.Image]], prompts: list[str], metadata: list[Metadata]
    ) -> Columns:
        """The grades [B]; what is graded are lists of the frames of videos."""
        videos = [_frames(image) for image in images]
        grades = self.network.outputs(videos, self.texts("overall", prompts), self.fps, self.batch_size)
        parts = dict(zip(("vq", "mq", "ta"), grades.T.tolist(), strict=True))
        return {"overall": grades.sum(-1).tolist(), **parts}


def _frames(video: Image.Image | Sequence[Image.Image]) -> Sequence[Image.Image]:
    if isinstance(video, Image.Image):
        raise RewardError("videoalign grades videos and got an image: use hpsv3 or another image scorer")
    return video
