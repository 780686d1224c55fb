"""Reward models with a Qwen2-VL backbone and a small head: HPSv3 and EditReward."""

import ast
import importlib.util
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from PIL import Image
from pydantic import Field

from gerl.errors import DataError, RewardError
from gerl.rewards.scorers.base import Columns, Metadata, read, reference_of
from reward_models.scorers.networks import (
    NetworkScorer,
    expanded,
    hub_file,
    image_processor,
    in_batches,
    loading,
    read_tensors,
)

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase


# --- Qwen2-VL backbone with a small head instead of the language model head
#
# Source: reward models derived from VideoAlign (github.com/KwaiVGI/VideoAlign, commit 219ab9d, trainer.py, lines 59 to
# 173), including HPSv3 and EditReward: the hidden state of an added token is the input of a head in fp32. Two
# properties of that code affect the scores and are kept: the model is called on embeddings without ids, so that image
# tokens have sequential text positions; and images are resized to a fixed number of pixels.

PIXELS = 256 * 28 * 28  # per image
TOKEN = "<|Reward|>"
PLACE = "{text_prompt}"  # placeholder of the prompt in an instruction
MARKS = re.compile(r"<\|[A-Za-z_]+\|>")
# tensor names in files of transformers before and after 4.52 -> names used here
NAMES = (
    (re.compile(r"^(model\.)?visual\."), "visual."),
    (re.compile(r"^model\.(language_model\.)?"), "language_model."),
)
LINEAR = (0, 3, 5)  # of a head: 1 and 4 are ReLU, 2 is dropout


@dataclass(frozen=True, eq=False)
class VlmNetwork:
    """Backbone without its language model head, with tokenizer and image processor."""

    backbone: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    processor: "BaseImageProcessor"

    def message_tokens(
        self, kind: str, lengths: Sequence[Sequence[int]], texts: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Return right-padded `input_ids` and `attention_mask` `[B, L]`: images or videos, text, generation prompt.

        kind: image or video. lengths: for each message, the number of tokens of each of its images or videos.
        """
        mark = str(self.tokenizer.convert_ids_to_tokens(getattr(self.backbone.config, f"{kind}_token_id")))
        written = []
        for row, text in zip(lengths, texts, strict=True):
            content: list[dict[str, str]] = [{"type": kind} for _ in row]
            message = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
            chat = str(self.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))
            left = iter(row)
            written.append(re.sub(re.escape(mark), lambda _, left=left: mark * next(left), chat))  # type: ignore[misc]
        tokens = self.tokenizer(written, padding=True, padding_side="right", return_tensors="pt")
        return {name: tokens[name].to(self.backbone.device) for name in ("input_ids", "attention_mask")}

    def hidden_at(self, inputs: Mapping[str, torch.Tensor], tokens: Sequence[str]) -> torch.Tensor:
        """Return the hidden states `[N, width]`, fp32, of all `tokens` in `inputs`, ordered by message and position."""
        ids = inputs["input_ids"]
        positions = torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
        hidden = self.backbone(**inputs, position_ids=positions).last_hidden_state
        at = torch.tensor([self.tokenizer.convert_tokens_to_ids(token) for token in tokens], device=ids.device)
        return hidden[torch.isin(ids, at)].float()


@dataclass(frozen=True, eq=False)
class RewardModel(VlmNetwork):
    """Image reward model with named heads on the hidden state of `TOKEN`; images have `pixels` pixels each."""

    heads: Mapping[str, torch.nn.Sequential]
    pixels: int

    def outputs(
        self, pictures: Sequence[Sequence[Image.Image]], texts: Sequence[str], head: str, batch_size: int
    ) -> torch.Tensor:
        """Return the outputs `[B, N]` of `head`, fp32 on the CPU; texts have one reward token, after the images."""

        def numbers(pictures: Sequence[Sequence[Image.Image]], texts: Sequence[str]) -> torch.Tensor:
            values: torch.Tensor = self.heads[head](self.hidden_at(self._inputs(pictures, texts), [TOKEN]))
            return values

        return in_batches(batch_size, numbers, pictures, texts)

    def _inputs(self, pictures: Sequence[Sequence[Image.Image]], texts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return right-padded tokens and pixels; each image's placeholder is repeated once per merged patch."""
        size = {"shortest_edge": self.pixels, "longest_edge": self.pixels}
        flat = [picture.convert("RGB") for row in pictures for picture in row]
        seen = self.processor(images=flat, size=size, return_tensors="pt")
        patches = iter((seen["image_grid_thw"].prod(-1) // self.processor.merge_size**2).tolist())
        device, dtype = self.backbone.device, self.backbone.dtype
        return {
            **self.message_tokens("image", [[next(patches) for _ in row] for row in pictures], texts),
            "pixel_values": seen["pixel_values"].to(device, dtype),
            "image_grid_thw": seen["image_grid_thw"].to(device),
        }


@cache
def reward_model(
    model: str, file: str, base: str, pixels: int, device: torch.device, dtype: torch.dtype
) -> RewardModel:
    """Load the weights in `file` of `model`, a Hub id or folder; `base` provides configuration and tokenizer.

    `base` is the Qwen2-VL or Qwen2.5-VL that was fine-tuned; its weights are not needed. Loaded once per process.

    Raises:
        RewardError: something cannot be loaded, or the weights do not match.
    """
    config, tokenizer, processor = base_parts(base, [TOKEN])
    tensors = read_tensors("model", hub_file("model", model, file))
    backbone = build_backbone(model, config, tensors)
    heads = {
        name: head.to(device) for name, head in _heads(model, tensors, config.get_text_config().hidden_size).items()
    }
    return RewardModel(backbone.to(device, dtype).eval(), tokenizer, processor, heads, pixels)


def base_parts(base: str, tokens: Sequence[str]) -> tuple[Any, "PreTrainedTokenizerBase", "BaseImageProcessor"]:
    """Load the configuration, tokenizer (with added `tokens`) and image processor of `base`, a Hub id or folder."""
    import transformers

    with loading("base", base, "a Qwen2-VL or Qwen2.5-VL model of transformers"):
        source = expanded(base)
        config = transformers.AutoConfig.from_pretrained(source)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        processor = image_processor(base)
    if config.model_type not in ("qwen2_vl", "qwen2_5_vl") or tokenizer.chat_template is None:
        raise RewardError(
            f"base={base} is a {config.model_type} model: give an instruction-tuned Qwen2-VL or Qwen2.5-VL one"
        )
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    return config, tokenizer, processor


def build_backbone(
    model: str, config: Any, tensors: Mapping[str, torch.Tensor], lora: "LoraConfig | None" = None
) -> "PreTrainedModel":
    """Build the backbone with the weights in `tensors`, named as in any version of transformers.

    lora: settings of the LoRA weights, if `tensors` contains them.
    """
    import accelerate
    import transformers

    weights: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if not name.startswith(("rm_head", "lm_head.")):
            new = next((pattern.sub(with_, name) for pattern, with_ in NAMES if pattern.match(name)), name)
            weights[new] = value
    words = weights.get("language_model.embed_tokens.weight")
    if words is not None:  # a token was added, and unused rows were removed
        config.get_text_config().vocab_size = len(words)
    with accelerate.init_empty_weights(include_buffers=False):
        backbone = transformers.AutoModel.from_config(config)
    if lora is not None:
        import peft

        lora.target_modules = {name.split(".lora_A.")[0] for name in weights if ".lora_A." in name}
        peft.inject_adapter_in_model(lora, backbone, low_cpu_mem_usage=True)
    wanted, why = backbone.state_dict(), ""
    if differ := sorted(weights.keys() ^ wanted.keys()):
        why = f"{differ[0]} and {len(differ) - 1} more tensors are only in one of them"
    elif other := [name for name in weights if weights[name].shape != wanted[name].shape]:
        why = f"{other[0]} has the shape {list(weights[other[0]].shape)}, expected {list(wanted[other[0]].shape)}"
    if why:
        raise RewardError(f"model={model} does not match the model of base: {why}; give the base that was fine-tuned")
    backbone.load_state_dict(weights, assign=True)
    return backbone


def _heads(model: str, tensors: Mapping[str, torch.Tensor], width: int) -> dict[str, torch.nn.Sequential]:
    """Build the heads `[B, width]` -> `[B, N]` in fp32 from `tensors`, by name (`rm_head`, `rm_heads.head_0`)."""
    by_head: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("rm_head"):
            head, number, kind = name.rsplit(".", 2)
            by_head.setdefault(head, {})[f"{number}.{kind}"] = value.float()
    heads = {}
    for head, parts in by_head.items():
        if set(parts) != {f"{i}.{kind}" for i in LINEAR for kind in ("weight", "bias")}:
            raise RewardError(
                f"model={model}: {head} has {', '.join(sorted(parts))}, expected weight and bias of layers "
                f"{', '.join(map(str, LINEAR))}; give the published file"
            )
        sizes = [parts["0.weight"].shape[1], *(len(parts[f"{i}.bias"]) for i in LINEAR)]
        if sizes[0] != width:
            raise RewardError(f"model={model}: {head} takes {sizes[0]} numbers and the model of base returns {width}")
        layers: list[torch.nn.Module] = []
        for i, (into, out) in zip(LINEAR, itertools.pairwise(sizes), strict=True):
            layer = torch.nn.Linear(into, out)
            layer.load_state_dict({kind: parts[f"{i}.{kind}"] for kind in ("weight", "bias")})
            layers += [layer, torch.nn.ReLU()]
        heads[head] = torch.nn.Sequential(*layers[:-1]).eval()
    if not heads:
        raise RewardError(f"model={model} has no rm_head, which does the grading: give a reward model")
    return heads


# --- Scorers on these models. The scores are accurate only with the training instruction, which belongs to the authors
# and is not part of gerl. It is read from the authors' code, which is parsed and never run: their packages need
# versions of other packages that conflict with gerl's.


@dataclass(frozen=True, kw_only=True)
class VlmScorer(NetworkScorer):
    """Base class of scorers on a Qwen2-VL reward model.

    `model` is a Hub repository or a local folder with the file `checkpoint`, `base` the model it was fine-tuned from,
    whose weights are not needed. The instruction is read from `code`, the folder of a clone of the authors' repository,
    or from their installed package; neither is run.
    """

    model: str
    checkpoint: str
    base: str
    code: str | None = None

    package, remedy = "", ""  # the folder in the authors' repository, and where to get it
    tokens: ClassVar[tuple[str, ...]] = (TOKEN,)  # of an instruction

    def __post_init__(self) -> None:
        _ = self.instructions

    @cached_property
    def instructions(self) -> dict[str, str]:
        """Instructions by output column, with `PLACE` for the prompt."""
        raise NotImplementedError

    def wording(self, *places: tuple[str, str]) -> str:
        """Return the concatenated texts of `places`, pairs of a file of the authors' code and a constant in it.

        Raises `RewardError` if a text is missing, or the result does not have each token and `PLACE` exactly once.
        """
        folder = self._code()
        text = "".join(constant(folder / file, name) for file, name in places)
        if [mark for mark in MARKS.findall(text) if mark in self.tokens] != [*self.tokens] or text.count(PLACE) != 1:
            raise RewardError(
                f"code: the instruction in {folder / places[0][0]} must have one {', one '.join(self.tokens)} and one "
                f"{PLACE}: {self.remedy}"
            )
        return text

    def _code(self) -> Path:
        """Return the folder `code`, or the folder of the installed package."""
        if self.code is not None:
            folder = Path(self.code).expanduser()
            if not folder.is_dir():
                raise RewardError(f"code={self.code}: there is no such folder: {self.remedy}")
            return folder / self.package if (folder / self.package).is_dir() else folder
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise RewardError(f"the authors' wording of {self.package}'s instruction is missing: {self.remedy}")
        return Path(spec.submodule_search_locations[0])

    def texts(self, column: str, prompts: Sequence[str]) -> list[str]:
        """Return the instruction of `column` for each prompt."""
        for prompt in prompts:
            check_marks(prompt)
        return [self.instructions[column].replace(PLACE, prompt) for prompt in prompts]

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        check_marks(prompt)


def check_marks(prompt: str) -> None:
    """Raise `DataError` if a prompt contains a special token of the chat template."""
    if mark := MARKS.search(prompt):
        raise DataError(f"{prompt!r} contains {mark[0]!r}, a special token of the reward model: remove it")


def constant(file: Path, name: str) -> str:
    """Return the string constant `name` of a Python file without running it; raises `RewardError` if missing."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise RewardError(
            f"code: {file} cannot be read ({type(error).__name__}: {error}): give the authors' code"
        ) from None
    for node in tree.body:
        match node:
            case ast.Assign(targets, ast.Constant(str() as text)) if name in [getattr(t, "id", None) for t in targets]:
                return text
    raise RewardError(f"code: {file} has no text {name}: use the version of the authors' code that has it")


@dataclass(frozen=True, kw_only=True)
class ImageVlmScorer(VlmScorer):
    """Base class of image scorers; images are resized to `pixels` pixels each."""

    pixels: Annotated[int, Field(ge=28 * 28)] = PIXELS

    @property
    def network(self) -> RewardModel:
        """Reward model, loaded on first use, once per process."""
        return reward_model(self.model, self.checkpoint, self.base, self.pixels, *self.placement)


# --- HPSv3: human preference for an image given its prompt, with uncertainty
#
# Source: "HPSv3: Towards Wide-Spectrum Human Preference Score" (arXiv 2508.03789) and its code (package hpsv3 1.0.0 of
# github.com/MizzenAI/HPSv3: inference.py, lines 97 to 147, model/qwen2vl_trainer.py, lines 59 to 247 and 706 to 722): a
# Qwen2-VL-7B whose head outputs the mean and the logarithm of the standard deviation of a score. The published weights
# have not been run by this project.


@dataclass(frozen=True, kw_only=True)
class HpsV3(ImageVlmScorer):
    """Mean of the score; its standard deviation is the further column `sigma`."""

    model: str = "MizzenAI/HPSv3"
    checkpoint: str = "HPSv3.safetensors"
    base: str = "Qwen/Qwen2-VL-7B-Instruct"
    batch_size: Annotated[int, Field(ge=1)] = 8

    identity = ("hpsv3", "model", "checkpoint", "base", "pixels")
    package = "hpsv3"
    remedy = "run pip install --no-deps hpsv3, or give the folder of a clone of github.com/MizzenAI/HPSv3 as code"

    @cached_property
    def instructions(self) -> dict[str, str]:
        file = "dataset/data_collator_qwen.py"
        return {"mu": self.wording((file, "INSTRUCTION"), (file, "prompt_with_special_token"))}

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> Columns:
        texts = self.texts("mu", prompts)
        outputs = self.network.outputs([[image] for image in images], texts, "rm_head", self.batch_size)
        if outputs.shape[1:] != (2,):
            raise RewardError(f"model={self.model}: its head returns {outputs.shape[1]} numbers, HPSv3's returns 2")
        return {"mu": outputs[:, 0].tolist(), "sigma": outputs[:, 1].exp().tolist()}


# --- EditReward: quality of an edit given source image and instruction
#
# Source: "EditReward" (arXiv 2509.26346) and its code (github.com/TIGER-AI-Lab/EditReward, commit edb027e:
# EditReward/inference_vl_edit.py, lines 111 to 195, EditReward/model/qwen2_5_vl_trainer.py, lines 61 to 399): a
# Qwen2.5-VL-7B that is queried twice, for instruction following and for quality, with a separate head each; the two
# means are averaged. The published weights have not been run by this project.

# column: (the authors' name of the question, the head)
QUESTIONS = {
    "following": ("INSTRUCTION_EDIT_FOLLOWING", "rm_heads.head_0"),
    "quality": ("INSTRUCTION_EDIT_QUALITY", "rm_heads.head_1"),
}


@dataclass(frozen=True, kw_only=True)
class EditReward(ImageVlmScorer):
    """Mean of the columns `following` and `quality`; the column `sigma` is the standard deviation of the score.

    The source is the row's `metadata_key`: a path, absolute or relative to the current directory, or a PIL image; the
    prompt is the instruction of the edit.
    """

    model: str = "TIGER-Lab/EditReward-Qwen2.5-VL-7B"
    checkpoint: str = "model.safetensors"
    base: str = "Qwen/Qwen2.5-VL-7B-Instruct"
    metadata_key: str = "image"
    batch_size: Annotated[int, Field(ge=1)] = 4

    package = "EditReward"
    remedy = "clone github.com/TIGER-AI-Lab/EditReward, and give its folder as code"

    @cached_property
    def instructions(self) -> dict[str, str]:
        end = ("dataset/data_collator_qwen_edit.py", "prompt_with_special_token")
        return {column: self.wording(("dataset/prompts.py", name), end) for column, (name, _) in QUESTIONS.items()}

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> Columns:
        rows = zip(prompts, metadata, images, strict=True)
        pictures = [[read(self._source(prompt, row)), image] for prompt, row, image in rows]
        parts = []
        for column, (_, head) in QUESTIONS.items():
            texts = self.texts(column, prompts)
            if head not in self.network.heads:
                raise RewardError(f"model={self.model} has no {head}: use a model with a head for each question")
            parts.append(self.network.outputs(pictures, texts, head, self.batch_size))
        both = torch.stack(parts)  # [questions, B, mean and logarithm of the standard deviation]
        means = dict(zip(QUESTIONS, both[..., 0].tolist(), strict=True))
        mean = both.mean(0)
        return {"mean": mean[:, 0].tolist(), **means, "sigma": mean[:, 1].exp().tolist()}

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        super().check_prompt(prompt, metadata)
        self._source(prompt, metadata)

    def _source(self, prompt: str, metadata: Metadata) -> Any:
        return reference_of("editreward", prompt, metadata, self.metadata_key)
