"""Reward models on a vision language model of the Qwen2-VL family that ends in a small network, such as HPSv3."""

import ast
import importlib.util
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from PIL import Image
from pydantic import Field

from gerl.config.blocks import Dtype
from gerl.errors import DataError, RewardError
from gerl.rewards.scorers.base import Columns, Metadata, Scorer
from gerl.rewards.scorers.clip import Device, expanded, loading, read_tensors, resolve_device, resolve_dtype

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase


# --- A vision language model of the Qwen2-VL family that ends in a small network instead of words.
#
# Source: the reward models that go back to VideoAlign (github.com/KwaiVGI/VideoAlign, commit 219ab9d, trainer.py, lines
# 59 to 173), HPSv3 and EditReward among them: the hidden state of a token that was added goes through a head in fp32.
# Two things of theirs count and are kept: the model is called on embeddings without ids, so that tokens of an image
# have the positions of a text, one after the other; and an image is resized to a fixed number of pixels.

PIXELS = 256 * 28 * 28  # of an image
MARKS = re.compile(r"<\|[A-Za-z_]+\|>")
# Names of tensors in files of transformers before and after 4.52, and here.
NAMES = (
    (re.compile(r"^(model\.)?visual\."), "visual."),
    (re.compile(r"^model\.(language_model\.)?"), "language_model."),
)
LINEAR = (0, 3, 5)  # of a head: 1 and 4 are ReLU, 2 is dropout


def check_marks(prompt: str) -> None:
    """Raise `DataError` for a prompt with something in it that the model takes for a token of the conversation."""
    if found := MARKS.search(prompt):
        raise DataError(f"{prompt!r} contains {found[0]!r}, a special token of the reward model: remove it")


@dataclass(frozen=True, eq=False)
class RewardModel:
    """The model without its head for words, the heads by name, and what turns messages into tokens."""

    backbone: "PreTrainedModel"
    heads: Mapping[str, torch.nn.Sequential]
    tokenizer: "PreTrainedTokenizerBase"
    processor: "BaseImageProcessor"
    token: str  # of the reward; its hidden state is what a head gets
    pixels: int

    def outputs(
        self, pictures: Sequence[Sequence[Image.Image]], texts: Sequence[str], head: str, batch_size: int
    ) -> torch.Tensor:
        """The numbers [B, N] of `head`, fp32 on the CPU; texts [B] have one reward token and follow their pictures."""
        at = [self.tokenizer.convert_tokens_to_ids(self.token)]
        found = []
        for start in range(0, len(texts), batch_size):
            rows = slice(start, start + batch_size)
            inputs = self._inputs(pictures[rows], texts[rows])
            with torch.inference_mode():
                found.append(self.heads[head](hidden_at(self.backbone, inputs, at)).cpu())
        return torch.cat(found)

    def _inputs(self, pictures: Sequence[Sequence[Image.Image]], texts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tokens, padded on the right, and pixels: in place of each image's mark stand as many as it has patches."""
        size = {"shortest_edge": self.pixels, "longest_edge": self.pixels}
        flat = [picture.convert("RGB") for row in pictures for picture in row]
        seen = self.processor(images=flat, size=size, return_tensors="pt")
        mark = str(self.tokenizer.convert_ids_to_tokens(self.backbone.config.image_token_id))
        patches = iter((seen["image_grid_thw"].prod(-1) // self.processor.merge_size**2).tolist())
        device, dtype = self.backbone.device, self.backbone.dtype
        lengths = [[next(patches) for _ in row] for row in pictures]
        return {
            **message_tokens(self.tokenizer, "image", mark, lengths, texts, device),
            "pixel_values": seen["pixel_values"].to(device, dtype),
            "image_grid_thw": seen["image_grid_thw"].to(device),
        }


def message_tokens(
    tokenizer: "PreTrainedTokenizerBase",
    kind: Literal["image", "video"],
    mark: str,
    lengths: Sequence[Sequence[int]],
    texts: Sequence[str],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` [B, L], padded on the right: pictures of a `kind`, then the text, an answer due.

    lengths: of each message's pictures, how often the `mark` stands in its place.
    """
    written = []
    for row, text in zip(lengths, texts, strict=True):
        content: list[dict[str, str]] = [{"type": kind} for _ in row]
        message = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
        chat = str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))
        left = iter(row)
        written.append(re.sub(re.escape(mark), lambda _, left=left: mark * next(left), chat))  # type: ignore[misc]
    tokens = tokenizer(written, padding=True, padding_side="right", return_tensors="pt")
    return {name: tokens[name].to(device) for name in ("input_ids", "attention_mask")}


def hidden_at(backbone: "PreTrainedModel", inputs: Mapping[str, torch.Tensor], tokens: Sequence[int]) -> torch.Tensor:
    """The hidden states [N, width], fp32, of all `tokens` in `inputs`, message by message in their order."""
    ids = inputs["input_ids"]
    positions = torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
    hidden = backbone(**inputs, position_ids=positions).last_hidden_state
    return hidden[torch.isin(ids, torch.tensor(tokens, device=ids.device))].float()


@cache
def reward_model(
    model: str, file: str, base: str, token: str, pixels: int, device: torch.device, dtype: torch.dtype
) -> RewardModel:
    """The model with the weights in the `file` of `model`, a Hub id or a folder; `base` names its sizes and tokens.

    Of `base`, the Qwen2-VL or Qwen2.5-VL that was trained further, the weights are not needed. Loaded once a process.

    Raises:
        RewardError: something cannot be loaded, or the weights do not fit.
    """
    config, tokenizer, processor = base_parts(base, [token])
    tensors = read_tensors("model", hub_file(model, file))
    backbone = build_backbone(model, config, tensors)
    heads = _heads(model, tensors, config.get_text_config().hidden_size)
    for head in heads.values():
        head.to(device)
    return RewardModel(backbone.to(device, dtype).eval(), heads, tokenizer, processor, token, pixels)


def base_parts(base: str, tokens: list[str]) -> tuple[Any, "PreTrainedTokenizerBase", "BaseImageProcessor"]:
    """Configuration, tokenizer with the added `tokens`, and image processor of `base`, a Hub id or a folder."""
    import transformers

    with loading("base", base, "a Qwen2-VL or Qwen2.5-VL model of transformers"):
        source = expanded(base)
        config = transformers.AutoConfig.from_pretrained(source)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        processor = transformers.AutoImageProcessor.from_pretrained(source, backend="pil")
    if config.model_type not in ("qwen2_vl", "qwen2_5_vl") or tokenizer.chat_template is None:
        raise RewardError(
            f"base={base} is a {config.model_type} model: give an instruction-tuned Qwen2-VL or Qwen2.5-VL one"
        )
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return config, tokenizer, processor


def hub_file(model: str, file: str) -> str:
    """The path of `file` of `model`, a Hub id or a folder."""
    from transformers.utils import cached_file

    with loading("model", model, f"a repository with {file}"):
        return str(cached_file(expanded(model), file))


def build_backbone(
    model: str, config: Any, tensors: Mapping[str, torch.Tensor], lora: "LoraConfig | None" = None
) -> "PreTrainedModel":
    """The backbone with the weights among `tensors`, under the names of any version of transformers.

    lora: where `tensors` has the weights of one, its settings.
    """
    import accelerate
    import transformers

    own: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if not name.startswith(("rm_head", "lm_head.")):
            new = next((pattern.sub(with_, name) for pattern, with_ in NAMES if pattern.match(name)), name)
            own[new] = value
    words = own.get("language_model.embed_tokens.weight")
    if words is not None:  # a token was added, and the rows that no token uses were cut off
        config.get_text_config().vocab_size = len(words)
    with accelerate.init_empty_weights(include_buffers=False):
        backbone = transformers.AutoModel.from_config(config)
    if lora is not None:
        import peft

        lora.target_modules = {name.split(".lora_A.")[0] for name in own if ".lora_A." in name}
        peft.inject_adapter_in_model(lora, backbone, low_cpu_mem_usage=True)
    wanted = backbone.state_dict()
    if differ := sorted(own.keys() ^ wanted.keys()):
        raise RewardError(
            f"model={model} does not match the model of base: {differ[0]} and {len(differ) - 1} more tensors are "
            "only in one of them; give the base that was fine-tuned"
        )
    if other := [name for name in own if own[name].shape != wanted[name].shape]:
        raise RewardError(
            f"model={model} does not match the model of base: {other[0]} has the shape "
            f"{list(own[other[0]].shape)}, expected {list(wanted[other[0]].shape)}; give the base that was "
            "fine-tuned"
        )
    backbone.load_state_dict(own, assign=True)
    return backbone


def _heads(model: str, tensors: Mapping[str, torch.Tensor], width: int) -> dict[str, torch.nn.Sequential]:
    """The heads [B, width] -> [B, N] in fp32 among `tensors`, each by its name (`rm_head`, `rm_heads.head_0`)."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("rm_head"):
            head, number, kind = name.rsplit(".", 2)
            found.setdefault(head, {})[f"{number}.{kind}"] = value.float()
    heads = {}
    for head, parts in found.items():
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


# --- HPSv3: how much people prefer an image for its prompt, and how sure of it the model is.
#
# Source: "HPSv3: Towards Wide-Spectrum Human Preference Score" (arXiv 2508.03789) and its code (package hpsv3 1.0.0 of
# github.com/MizzenAI/HPSv3: inference.py, lines 97 to 147, model/qwen2vl_trainer.py, lines 59 to 247 and 706 to 722): a
# Qwen2-VL-7B whose head gives the mean and the logarithm of the deviation of a score. The published weights have not
# been run by this project.

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


# --- The wording of instructions that a published reward model was trained with, read from its authors' code.
#
# Their models grade well only if asked in these very words, which are theirs and not part of gerl. The file is parsed
# and never run: their packages need versions of others that do not go with gerl.


def code_folder(code: str | None, package: str, remedy: str) -> Path:
    """The folder `code`, or that of the installed `package`; without one raises `RewardError`, with the `remedy`."""
    if code is not None:
        folder = Path(code).expanduser()
        if not folder.is_dir():
            raise RewardError(f"code={code}: there is no such folder: {remedy}")
        return folder / package if (folder / package).is_dir() else folder
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise RewardError(f"the authors' wording of {package}'s instruction is missing: {remedy}")
    return Path(found.submodule_search_locations[0])


def constants(file: Path, names: Collection[str]) -> dict[str, str]:
    """The texts that a Python file assigns to `names` at its top level, without running it.

    Raises:
        RewardError: there is no such file, it is no Python, or it has no text of such a name.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise RewardError(
            f"code: {file} cannot be read ({type(error).__name__}: {error}): give the authors' code"
        ) from None
    found = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if missing := [name for name in names if name not in found]:
        raise RewardError(f"code: {file} has no text {missing[0]}: use the version of the authors' code that has it")
    return {name: found[name] for name in names}
