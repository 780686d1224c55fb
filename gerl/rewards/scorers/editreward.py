"""EditReward: how well an image is edited by an instruction, judged beside its source.

Source: "EditReward" (arXiv 2509.26346) and its code (github.com/TIGER-AI-Lab/EditReward, commit edb027e:
EditReward/inference_vl_edit.py, lines 111 to 195, EditReward/model/qwen2_5_vl_trainer.py, lines 61 to 399): a
Qwen2.5-VL-7B that is asked twice, for how the instruction is followed and for quality, with a head for each, whose
means count alike. The published weights have not been run by this project.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
from PIL import Image
from pydantic import Field

from gerl.config.blocks import Dtype
from gerl.errors import RewardError
from gerl.rewards.scorers.base import Columns, Metadata, Scorer, read, reference_of
from gerl.rewards.scorers.clip import Device, resolve_device, resolve_dtype
from gerl.rewards.scorers.vlm_reward import (
    PIXELS,
    PLACE,
    TOKEN,
    RewardModel,
    check_marks,
    code_folder,
    constants,
    reward_model,
)

NAME = "editreward"
REMEDY = "clone github.com/TIGER-AI-Lab/EditReward, and give its folder as code"
# column: (the authors' name of the question, the head)
QUESTIONS = {
    "following": ("INSTRUCTION_EDIT_FOLLOWING", "rm_heads.head_0"),
    "quality": ("INSTRUCTION_EDIT_QUALITY", "rm_heads.head_1"),
}


@dataclass(frozen=True, kw_only=True)
class EditReward(Scorer):
    """The mean of `following` and `quality`, which are further columns, as is `sigma`, the deviation of their score.

    The source is the row's `metadata_key`: a path, absolute or from the current directory, or a PIL image; the prompt
    is the instruction. `model` is a Hub repository or a local folder with the file `checkpoint`, `base` the Qwen2.5-VL
    it was trained from, of which the weights are not needed. The words of the questions are read from `code`, the
    folder of a clone of the authors' repository; nothing of it is run.
    """

    model: str = "TIGER-Lab/EditReward-Qwen2.5-VL-7B"
    checkpoint: str = "model.safetensors"
    base: str = "Qwen/Qwen2.5-VL-7B-Instruct"
    code: str | None = None
    metadata_key: str = "image"
    pixels: Annotated[int, Field(ge=28 * 28)] = PIXELS
    batch_size: Annotated[int, Field(ge=1)] = 4
    device: Device = "auto"
    dtype: Dtype = "auto"

    def __post_init__(self) -> None:
        _ = self._questions

    @property
    def network(self) -> RewardModel:
        """Loaded when it is first needed, once a process for all that ask for the same one."""
        device = resolve_device(self.device)
        dtype = resolve_dtype(self.dtype, device)
        return reward_model(self.model, self.checkpoint, self.base, TOKEN, self.pixels, device, dtype)

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> Columns:
        for prompt in prompts:
            check_marks(prompt)
        sources = [
            reference_of(NAME, prompt, row, self.metadata_key) for prompt, row in zip(prompts, metadata, strict=True)
        ]
        pictures = [[read(source), image] for source, image in zip(sources, images, strict=True)]
        found = []
        for column, (_, head) in QUESTIONS.items():
            if head not in self.network.heads:
                raise RewardError(f"model={self.model} has no {head}: use a model with a head for each question")
            texts = [self._questions[column].replace(PLACE, prompt) for prompt in prompts]
            found.append(self.network.outputs(pictures, texts, head, self.batch_size))
        both = torch.stack(found)  # [questions, B, mean and logarithm of the deviation]
        means = dict(zip(QUESTIONS, both[..., 0].tolist(), strict=True))
        mean = both.mean(0)
        return {"mean": mean[:, 0].tolist(), **means, "sigma": mean[:, 1].exp().tolist()}

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        check_marks(prompt)
        reference_of(NAME, prompt, metadata, self.metadata_key)

    @cached_property
    def _questions(self) -> dict[str, str]:
        folder = code_folder(self.code, "EditReward", REMEDY) / "dataset"
        end = constants(folder / "data_collator_qwen_edit.py", ["prompt_with_special_token"])[
            "prompt_with_special_token"
        ]
        texts = constants(folder / "prompts.py", [name for name, _ in QUESTIONS.values()])
        found = {column: texts[name] + end for column, (name, _) in QUESTIONS.items()}
        for column, text in found.items():
            if text.count(TOKEN) != 1 or text.count(PLACE) != 1:
                raise RewardError(
                    f"code: the question of {column} in {folder} must have one {TOKEN} and one {PLACE}: {REMEDY}"
                )
        return found
