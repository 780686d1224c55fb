"""HPSv3: how much people prefer an image for its prompt, and how sure of it the model is.

Source: "HPSv3: Towards Wide-Spectrum Human Preference Score" (arXiv 2508.03789) and its code (package hpsv3 1.0.0 of
github.com/MizzenAI/HPSv3: inference.py, lines 97 to 147, model/qwen2vl_trainer.py, lines 59 to 247 and 706 to 722): a
Qwen2-VL-7B whose head gives the mean and the logarithm of the deviation of a score. The published weights have not been
run by this project.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from PIL import Image
from pydantic import Field

from gerl.config.blocks import Dtype
from gerl.errors import RewardError
from gerl.rewards.scorers.base import Columns, Metadata, Scorer
from gerl.rewards.scorers.clip_tower import Device, resolve_device, resolve_dtype
from gerl.rewards.scorers.vlm_head import PIXELS, RewardModel, check_marks, reward_model
from gerl.rewards.scorers.wording import code_folder, constants

TOKEN = "<|Reward|>"
PLACE = "{text_prompt}"
PACKAGE = "hpsv3"
REMEDY = "run pip install --no-deps hpsv3, or give the folder of a clone of github.com/MizzenAI/HPSv3 as code"


@dataclass(frozen=True, kw_only=True)
class HpsV3(Scorer):
    """The mean of the score, and as a further column `sigma`, its deviation.

    `model` is a Hub repository or a local folder with the file `checkpoint`, `base` the Qwen2-VL it was trained from,
    of which the weights are not needed. The words of the instruction are read from the authors' package, or from the
    folder `code` of a clone; nothing of it is run.
    """

    model: str = "MizzenAI/HPSv3"
    checkpoint: str = "HPSv3.safetensors"
    base: str = "Qwen/Qwen2-VL-7B-Instruct"
    code: str | None = None
    pixels: Annotated[int, Field(ge=28 * 28)] = PIXELS
    batch_size: Annotated[int, Field(ge=1)] = 8
    device: Device = "auto"
    dtype: Dtype = "auto"

    def __post_init__(self) -> None:
        _ = self._instruction

    @property
    def shares(self) -> str:
        return f"hpsv3 {self.model} {self.checkpoint} {self.base} {self.pixels} {self.device} {self.dtype}"

    @property
    def network(self) -> RewardModel:
        """Loaded when it is first needed, once a process for all that ask for the same one."""
        device = resolve_device(self.device)
        dtype = resolve_dtype(self.dtype, device)
        return reward_model(self.model, self.checkpoint, self.base, TOKEN, self.pixels, device, dtype)

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> Columns:
        for prompt in prompts:
            check_marks(prompt)
        texts = [self._instruction.replace(PLACE, prompt) for prompt in prompts]
        outputs = self.network.outputs([[image] for image in images], texts, "rm_head", self.batch_size)
        if outputs.shape[1:] != (2,):
            raise RewardError(f"model={self.model}: its head returns {outputs.shape[1]} numbers, HPSv3's returns 2")
        return {"mu": outputs[:, 0].tolist(), "sigma": outputs[:, 1].exp().tolist()}

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        check_marks(prompt)

    @cached_property
    def _instruction(self) -> str:
        file = code_folder(self.code, PACKAGE, REMEDY) / "dataset" / "data_collator_qwen.py"
        text = "".join(constants(file, ["INSTRUCTION", "prompt_with_special_token"]).values())
        if text.count(TOKEN) != 1 or text.count(PLACE) != 1:
            raise RewardError(f"code: the instruction in {file} must have one {TOKEN} and one {PLACE}: {REMEDY}")
        return text
