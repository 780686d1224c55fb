"""VideoAlign's VideoReward: visual quality, motion quality and text alignment of a video."""

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

# --- VideoAlign's model: a Qwen2-VL on video frames, with a linear head on three special tokens of the text
#
# Source: github.com/KwaiVGI/VideoAlign, commit 219ab9d: the model in trainer.py, lines 59 to 173, its tokens and LoRA
# in train_reward.py, lines 93 to 134, its files in utils.py, lines 163 to 198, the choice and size of frames in
# vision_process.py, lines 26 to 81, 129 to 166, 246 to 254 and 300 to 323, the normalisation in inference.py, lines 59
# to 66. Two differences affect rounding: frames are resized by Pillow, which differs from torchvision by at most one of
# 255 levels, and the last layer is in fp32.

TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")  # in the order of the text and of the head's outputs
SETTINGS = "model_config.json"
LEAST_PIXELS = 128 * 28 * 28  # per frame
LEAST_FRAMES, MOST_FRAMES = 4, 768  # used per video; the number of frames is even
PREFIX = "base_model.model."  # of tensor names, from peft
HEAD = "rm_head.weight"
Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class DataSettings:
    """Frame sampling of a video: `fps` frames per second, each of at most `max_frame_pixels`."""

    fps: Positive
    max_frame_pixels: Annotated[int, Field(gt=0)]
    sample_type: Literal["uniform"]
    prompt_template_type: Literal["detailed_special"]
    num_frames: None = None  # alternative to fps


@dataclass(frozen=True)
class ModelSettings:
    """Head with one output, or with one output per special token."""

    output_dim: Literal[1, 3]
    use_special_tokens: Literal[True]
    reward_token: Literal["special"]


@dataclass(frozen=True)
class LoraSettings:
    """LoRA weights in the checkpoint, stored beside the base weights."""

    lora_enable: bool
    lora_r: Annotated[int, Field(gt=0)]
    lora_alpha: Positive
    use_rslora: bool = False


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation of each output over the authors' videos; neutral if the file has none."""

    VQ_mean: float = 0.0
    VQ_std: Positive = 1.0
    MQ_mean: float = 0.0
    MQ_std: Positive = 1.0
    TA_mean: float = 0.0
    TA_std: Positive = 1.0


@dataclass(frozen=True)
class Settings:
    """Settings of `model_config.json` that are needed for scoring."""

    data: Annotated[DataSettings, Field(alias="data_config")]
    model: Annotated[ModelSettings, Field(alias="model_config")]
    lora: Annotated[LoraSettings, Field(alias="peft_lora_config")]
    norm: Annotated[Normalisation | None, Field(alias="inference_config")] = None


@dataclass(frozen=True, eq=False)
class VideoRewardModel(VlmNetwork):
    """Video reward model: backbone and head."""

    head: torch.nn.Linear
    settings: Settings

    def outputs(
        self, videos: Sequence[Sequence[Image.Image]], texts: Sequence[str], fps: float, batch_size: int
    ) -> torch.Tensor:
        """Return scores `[B, 3]`, normalised, fp32 on the CPU, of videos with `fps` frames per second.

        Each text follows its video and has the three special tokens once, in order.
        """

        def grades(videos: Sequence[Sequence[Image.Image]], texts: Sequence[str]) -> torch.Tensor:
            seen = [[video[k] for k in chosen_frames(len(video), fps, self.settings.data.fps)] for video in videos]
            values = self.head(self.hidden_at(self._inputs(seen, texts), TOKENS)).unflatten(0, (-1, len(TOKENS)))
            return values.diagonal(dim1=1, dim2=2) if values.shape[-1] == len(TOKENS) else values.squeeze(-1)

        norm = self.settings.norm or Normalisation()
        means = torch.tensor([norm.VQ_mean, norm.MQ_mean, norm.TA_mean])
        deviations = torch.tensor([norm.VQ_std, norm.MQ_std, norm.TA_std])
        return (in_batches(batch_size, grades, videos, texts) - means) / deviations

    def _inputs(self, videos: Sequence[Sequence[Image.Image]], texts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return right-padded tokens and pixels; a video's placeholder is repeated once per merged patch."""
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
        """Return patches `[F / 2 * N, values]` of pairs of frames, and their grid: pairs, rows and columns.

        Uses the image processor, because the video processor needs torchvision. It duplicates each image into two
        frames; here the second is replaced by the next frame.
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
    """Select frames of a video with `count` frames at `fps`, evenly spaced up to rounding; return their indices.

    Selects `wanted` frames per second, rounded to an even number, and at least 4 if available. Raises `RewardError` for
    a video of one frame.
    """
    if count < 2:
        raise RewardError(f"a video of {count} frame cannot be graded for motion: sample videos with at least 2")
    number = min(max(count / fps * wanted, LEAST_FRAMES), min(MOST_FRAMES, count) // 2 * 2)
    return torch.linspace(0, count - 1, round(number / 2) * 2).round().long().tolist()


@cache
def video_reward_model(model: str, file: str, base: str, device: torch.device, dtype: torch.dtype) -> VideoRewardModel:
    """Load the weights in `file` of `model`, a Hub id or folder; `base` provides configuration and tokenizer.

    Loaded once per process.

    Raises:
        RewardError: something cannot be loaded, the model is of another kind, or the weights do not match.
    """
    from peft import LoraConfig

    settings = read_settings(model)
    config, tokenizer, processor = base_parts(base, TOKENS)
    tensors = read_tensors("model", hub_file("model", model, file))
    tensors = {name.removeprefix(PREFIX): value for name, value in tensors.items()}
    weight = tensors.get(HEAD)
    shape = (settings.model.output_dim, config.get_text_config().hidden_size)
    if weight is None or weight.shape != shape:
        actual = "no such weight" if weight is None else list(weight.shape)
        raise RewardError(f"model={model}: expected {HEAD} of the shape {list(shape)}, got {actual}: give VideoReward")
    head = torch.nn.Linear(shape[1], shape[0], bias=False)
    head.load_state_dict({"weight": weight.float()})
    lora = settings.lora
    adapter = LoraConfig(r=lora.lora_r, lora_alpha=lora.lora_alpha, use_rslora=lora.use_rslora)
    backbone = build_backbone(model, config, tensors, adapter if lora.lora_enable else None)
    return VideoRewardModel(backbone.to(device, dtype).eval(), tokenizer, processor, head.to(device), settings)


def read_settings(model: str) -> Settings:
    """Read `model_config.json` of `model`, a Hub id or folder; raises `RewardError` for another kind of model."""
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


# --- VideoAlign's VideoReward: visual quality, motion quality and text alignment of a video
#
# Source: "Improving Video Generation with Human Feedback" (arXiv 2501.13918) and its code
# (github.com/KwaiVGI/VideoAlign, commit 219ab9d: inference.py, lines 103 to 180, prompt_template.py, lines 24 to 61 and
# 121 to 122): a Qwen2-VL-2B with a LoRA; the published weights have not been run by this project.


@dataclass(frozen=True, kw_only=True)
class VideoAlign(VlmScorer):
    """Sum of `vq`, `mq` and `ta`, which are further columns: visual quality, motion quality and text alignment.

    Each is normalised with the mean and standard deviation in the model's `model_config.json`. `fps` is the frame rate
    of the videos (16 for Wan 2.1); two frames per second are used, or the number given in that file.
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
        """Video reward model, loaded on first use, once per process."""
        return video_reward_model(self.model, self.checkpoint, self.base, *self.placement)

    def __call__(
        self, images: Sequence[Image.Image | Sequence[Image.Image]], prompts: list[str], metadata: list[Metadata]
    ) -> Columns:
        """Return the scores `[B]`; each entry of `images` is the list of frames of a video."""
        videos = [_frames(image) for image in images]
        grades = self.network.outputs(videos, self.texts("overall", prompts), self.fps, self.batch_size)
        parts = dict(zip(("vq", "mq", "ta"), grades.T.tolist(), strict=True))
        return {"overall": grades.sum(-1).tolist(), **parts}


def _frames(video: Image.Image | Sequence[Image.Image]) -> Sequence[Image.Image]:
    if isinstance(video, Image.Image):
        raise RewardError("videoalign grades videos and got an image: use hpsv3 or another image scorer")
    return video
