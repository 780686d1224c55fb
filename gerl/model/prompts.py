"""A pipeline's call: its arguments, cached encodings of its prompts, and prompts longer than a tokenizer's limit."""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

import contextlib
import difflib
import inspect
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial, update_wrapper
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from gerl.config import ModelConfig, SamplingConfig
from gerl.engine.rows import Tree, detached_copy, tensor_bytes
from gerl.engine.transitions import FLOW, family
from gerl.errors import GerlError, ModelError
from gerl.model.hub import model_folder
from gerl.protocol import CutPrompts
from gerl.utils.files import write_file
from gerl.utils.tensors import pack_tensors

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, SchedulerMixin
    from transformers import PreTrainedTokenizerBase


# --- Arguments of a call, built from the configuration


def pipeline_call(
    pipe: DiffusionPipeline, sampling: SamplingConfig, prompts: list[str], **overrides: object
) -> dict[str, object]:
    """Return the pipeline's keyword arguments for `prompts`. Raises `ModelError` for an argument it does not accept."""
    arguments = _arguments(sampling, **overrides)
    _check_prompt(pipe)
    _check_names(type(pipe), arguments)
    for name in arguments:  # not every pipeline repeats a single text for all prompts
        if "prompt" in name and isinstance(arguments[name], str):
            arguments[name] = [arguments[name]] * len(prompts)
    return {"prompt": prompts, "output_type": "np", **arguments}


def check_arguments(kind: type, sampling: SamplingConfig, **overrides: object) -> None:
    """Raise `ModelError` if pipelines of class `kind` do not accept an argument of a rollout.

    `overrides`: further arguments; those that are None are not passed.
    """
    _check_names(kind, _arguments(sampling, sigmas=training_sigmas(sampling), **overrides))


def _arguments(sampling: SamplingConfig, **overrides: object) -> dict[str, object]:
    """Return the arguments of a call except prompts and output type."""
    arguments: dict[str, object] = {
        "height": sampling.height,
        "width": sampling.width,
        "guidance_scale": sampling.guidance_scale,
        "num_inference_steps": sampling.num_inference_steps,
        **sampling.call,
    }
    arguments |= {name: value for name, value in overrides.items() if value is not None}
    return {name: value for name, value in arguments.items() if value is not None}


def _check_prompt(pipe: DiffusionPipeline) -> None:
    """Raise `ModelError` if the pipeline takes no prompt, naming the pipelines inside it."""
    from diffusers import DiffusionPipeline  # imported lazily: the driver of a run does not need diffusers

    if "prompt" in inspect.signature(type(pipe).__call__).parameters:
        return
    inner = {name: part for name, part in vars(pipe).items() if isinstance(part, DiffusionPipeline)}
    parts = [f"{name} ({type(part).__name__})" for name, part in inner.items()]
    others = f"it consists of the pipelines {', '.join(parts)}; train one of them that does"
    remedy = others if parts else "choose a pipeline that does"
    raise ModelError(f"{type(pipe).__name__} takes no argument 'prompt', which gerl needs to pass a prompt: {remedy}")


def _check_names(kind: type, names: Iterable[str]) -> None:
    accepted = inspect.signature(kind.__call__).parameters
    unknown = next((name for name in names if name not in accepted), None)
    if unknown is None:
        return
    place = "set sampling.sigmas=scheduler" if unknown == "sigmas" else "remove it from sampling or sampling.call"
    near = difflib.get_close_matches(unknown, accepted, n=1, cutoff=0.7)
    meant = f", did you mean {near[0]!r}?" if near else ":"
    raise ModelError(f"{kind.__name__} takes no argument {unknown!r}{meant} {place}")


def unguided(kind: type, sampling: SamplingConfig) -> str | None:
    """Return a warning if true guidance has a scale above 1 but lacks the negative prompt it needs, else None."""
    parameters, name = inspect.signature(kind.__call__).parameters, "true_cfg_scale"
    if name not in parameters or any(sampling.call.get(k) is not None for k in parameters if "negative_prompt" in k):
        return None
    scale = sampling.call.get(name, parameters[name].default)
    if not isinstance(scale, int | float) or scale <= 1:
        return None
    setting = (
        f"sampling.call.{name}={scale:g}" if name in sampling.call else f"the {name} of {kind.__name__}, {scale:g},"
    )
    return (
        f"{setting} has no effect without a negative prompt, so images are sampled without guidance: add "
        f"sampling.call.negative_prompt=' ' for guidance, or sampling.call.{name}=1"
    )


def training_sigmas(sampling: SamplingConfig) -> list[float] | None:
    """Return the noise levels of `sampling.sigmas` before the scheduler's shift; None selects the scheduler's own."""
    n = sampling.num_inference_steps
    return None if sampling.sigmas == "scheduler" else [1 - i * (1 - 1 / n) / (n - 1) for i in range(n)]


def check_sigmas(scheduler: SchedulerMixin, sampling: SamplingConfig) -> None:
    """Raise `ModelError` if `scheduler` does not support the noise levels of `sampling.sigmas`."""
    if training_sigmas(sampling) is not None and family(scheduler) not in (*FLOW, "flow_map"):
        raise ModelError(
            f"sampling.sigmas={sampling.sigmas} requires flow matching, whose noise levels are in [0, 1]: this "
            f"pipeline has the scheduler {type(scheduler).__name__}, use sampling.sigmas=scheduler"
        )


# --- Cache of prompt encodings: outputs of a pipeline's `encode_*` methods, kept in memory and optionally on disk.
#
# Each prompt (with its negative prompt) is encoded alone, and the outputs are joined as the pipeline would for a batch.
# The layout for joining is found by comparing both once per method and set of other arguments; if no layout reproduces
# the batch, the method is called each time. So results never depend on the state of the cache.

logger = logging.getLogger(__name__)
ENCODES = re.compile(r"_?encode_(prompt|text)")
GB = 10**9
NEAR = 2e-2  # relative tolerance between joined and batched outputs: half precision rounds differently by batch size
# Nested lists in place of an encoding's tuples, lists and dictionaries; for each tensor or list its batch dimension, or
# one of these constants. A mask is None for a single row, and 1 up to the row's length in a batch; its dtype follows.
Layout = object
SHARED, ITEMS, MASK = "shared", "items", "mask "

Row = dict[str, object]  # the arguments of one prompt, each a list with one text


def detach(pipe: DiffusionPipeline) -> None:
    """Restore the `encode_*` methods of `pipe`."""
    for name in [name for name in pipe.__dict__ if ENCODES.match(name)]:
        del pipe.__dict__[name]


class PromptCache:
    """Cache of encoded prompts, up to `gb` in memory and in `folder` on disk; None for memory only."""

    def __init__(self, gb: float, folder: Path | None = None) -> None:
        self.most, self.folder = int(gb * GB), folder
        self.answers: OrderedDict[str, Tree] = OrderedDict()  # on the CPU, least recently used first
        self.bytes = 0
        self.layouts: dict[str, Layout | None] = {}  # None: outputs cannot be joined

    def attach(self, pipe: DiffusionPipeline) -> None:
        """Replace the `encode_*` methods of `pipe` by cached ones."""
        for name in dir(type(pipe)):
            if ENCODES.match(name) and callable(method := getattr(pipe, name)):
                pipe.__dict__[name] = update_wrapper(partial(self.answer, pipe, name, method), method)

    def answer(
        self, pipe: DiffusionPipeline, name: str, method: Callable[..., Tree], *args: object, **kwargs: object
    ) -> Tree:
        """Return the output of `method`, named `name`, from cached encodings if possible."""
        bound = inspect.signature(method).bind(*args, **kwargs).arguments
        bound |= bound.pop("kwargs", {})
        rows, rest = divided(bound)
        if rows is None or (spelled := _spelled(rest)) is None:
            return method(*args, **kwargs)
        kind = f"{name} {spelled}"
        device = torch.device(str(rest.get("device") or pipe._execution_device))
        whole = partial(method, *args, **kwargs)

        def single(text: str) -> Tree:
            answer = self.find(f"{kind} {text}")
            if answer is None:
                output = method(**rest, **json.loads(text))  # fresh lists: some methods modify their arguments
                answer = tree_map(lambda v: v.detach().cpu() if torch.is_tensor(v) else v, output)
                self.keep(f"{kind} {text}", answer)
            return tree_map(lambda v: v.to(device) if torch.is_tensor(v) else v, answer)

        texts = [json.dumps(row, sort_keys=True) for row in rows]
        answers = {text: single(text) for text in dict.fromkeys(texts)}
        parts = [answers[text] for text in texts]
        if len(parts) == 1:
            return detached_copy(parts[0])
        layout = self.layout_of(f"{kind} padded={len({_sizes(part) for part in parts}) > 1}", parts, device, whole)
        return whole() if layout is None else detached_copy(joined(layout, parts, device, _lengths(parts)))

    def layout_of(
        self, kind: str, parts: Sequence[Tree], device: torch.device, whole: Callable[[], Tree]
    ) -> Layout | None:
        """Return the layout that joins outputs of this kind; None if they cannot be joined."""
        if kind not in self.layouts:
            stored = None if self.folder is None else read_answer(self.folder, f"layout {kind}")
            self.layouts[kind] = found_layout(whole(), parts, device) if stored is None else stored
            if self.layouts[kind] is None:
                logger.info("prompts are re-encoded in each call of %s", kind.split()[0])
            elif self.folder is not None and stored is None:
                write_answer(self.folder, f"layout {kind}", self.layouts[kind])
        return self.layouts[kind]

    def find(self, key: str) -> Tree | None:
        """Return the cached encoding of `key`; None if missing."""
        if key in self.answers:
            self.answers.move_to_end(key)
            return self.answers[key]
        answer = None if self.folder is None else read_answer(self.folder, key)
        if answer is not None:
            self._remember(key, answer)
        return answer

    def keep(self, key: str, answer: Tree) -> None:
        """Cache an encoding on the CPU under `key`, evicting the least recently used ones."""
        self._remember(key, answer)
        if self.folder is not None:
            write_answer(self.folder, key, answer)

    def _remember(self, key: str, answer: Tree) -> None:
        self.answers[key] = answer
        self.bytes += tensor_bytes([answer])
        while self.bytes > self.most and self.answers:
            self.bytes -= tensor_bytes([self.answers.popitem(last=False)[1]])


def folder_of(cache: Path, model: ModelConfig, dtype: torch.dtype) -> Path:
    """Return the folder inside `cache` for text encoder outputs of `model` in `dtype`."""
    parts = ("text_encoder", "tokenizer", "processor")
    from gerl.model.start_lora import content_digest  # imported lazily: the driver does not need diffusers

    # text encoders may have a part of the LoRA
    merged = [content_digest(model.lora)] if model.merge_lora and model.lora is not None else []
    folder = model_folder(model.path, model.parts)
    return cache.expanduser() / identity(folder, parts, dtype, model.quantize_encoders, *merged)


def divided(bound: dict[str, object]) -> tuple[list[Row] | None, dict[str, object]]:
    """Split arguments into those of each prompt, None if no argument holds prompts, and the others."""
    lists = {k: v for k, v in bound.items() if isinstance(v, list) and v and all(isinstance(e, str) for e in v)}
    rest = {k: v for k, v in bound.items() if k not in lists}
    counts = {len(v) for v in lists.values()}
    if any("prompt" in name or "text" in name for name in lists) and len(counts) == 1:
        return [{k: [v[i]] for k, v in lists.items()} for i in range(counts.pop())], rest
    texts = {k: v for k, v in rest.items() if isinstance(v, str) and ("prompt" in k or "text" in k)}
    if lists or not texts:
        return None, rest
    return [dict(texts)], {k: v for k, v in rest.items() if k not in texts}


def _spelled(arguments: dict[str, object]) -> str | None:
    """Return the arguments as JSON, without the device; None if one is not a string, number, dtype or None."""
    plain = {k: str(v) if isinstance(v, torch.dtype) else v for k, v in arguments.items() if k != "device"}
    simple = all(v is None or isinstance(v, str | int | float) for v in plain.values())
    return json.dumps(plain, sort_keys=True) if simple else None


# --- Joining of encodings


def found_layout(whole: Tree, parts: Sequence[Tree], device: torch.device) -> Layout | None:
    """Return the layout that gives `whole`, the output for a batch, from the rows' outputs; None if no layout does."""
    try:
        layout = _layout(whole, parts)
        ours, theirs = tree_leaves(joined(layout, parts, device, _lengths(parts))), tree_leaves(whole)
    except (ValueError, RuntimeError):
        return None
    alike = len(ours) == len(theirs) and all(_near(a, b) for a, b in zip(ours, theirs, strict=True))
    return layout if alike else None


def _layout(whole: Tree, parts: Sequence[Tree]) -> Layout:
    one, n = parts[0], len(parts)
    if isinstance(whole, torch.Tensor) and isinstance(one, torch.Tensor):
        if whole.ndim != one.ndim:
            raise ValueError
        largest = [max(sizes) for sizes in zip(*(p.shape for p in parts if torch.is_tensor(p)), strict=True)]
        if list(whole.shape) == largest:
            return SHARED
        for d in range(whole.ndim):
            if list(whole.shape) == [*largest[:d], n * one.shape[d], *largest[d + 1 :]]:
                return d
        return SHARED
    if isinstance(whole, torch.Tensor) and one is None:
        return MASK + str(whole.dtype).removeprefix("torch.")
    if isinstance(whole, list) and isinstance(one, list) and len(whole) == n * len(one) and one:
        return ITEMS
    children, spec = _opened(whole)
    opened = [_opened(part) for part in parts]
    if spec.is_leaf() or any(other != spec for _, other in opened):
        return SHARED
    columns = zip(*(other for other, _ in opened), strict=True)
    return [_layout(child, column) for child, column in zip(children, columns, strict=True)]


def _opened(tree: Tree) -> tuple[list[Tree], TreeSpec]:
    """Flatten one level of a list, tuple or dictionary."""
    return tree_flatten(tree, is_leaf=lambda node: node is not tree)


def joined(layout: Layout, parts: Sequence[Tree], device: torch.device, lengths: Sequence[int]) -> Tree:
    """Join the encodings `parts` on `device`, padded with zeros to the longest; `lengths`: those of masks."""
    one = parts[0]
    if isinstance(layout, int):
        tensors = [p for p in parts if isinstance(p, torch.Tensor)]
        largest = [max(sizes) for sizes in zip(*(p.shape for p in tensors), strict=True)]
        largest[layout] = tensors[0].shape[layout]

        def padded(tensor: torch.Tensor) -> torch.Tensor:
            padding = [more for d in reversed(range(tensor.ndim)) for more in (0, largest[d] - tensor.shape[d])]
            return torch.nn.functional.pad(tensor, padding).unsqueeze(layout + 1)

        return torch.cat([padded(tensor) for tensor in tensors], layout + 1).flatten(layout, layout + 1)
    if layout == SHARED:
        return max(parts, key=lambda part: sum(sizes.numel() for sizes in _sizes(part)))
    if layout == ITEMS:
        return [value for values in zip(*parts, strict=True) for value in values]
    if isinstance(layout, str):
        places = torch.arange(max(lengths))
        mask = torch.stack([places < length for length in lengths])
        return mask.to(device, getattr(torch, layout.removeprefix(MASK)))
    assert isinstance(layout, list)
    columns = zip(*(_opened(part)[0] for part in parts), strict=True)
    inside = [joined(inner, column, device, lengths) for inner, column in zip(layout, columns, strict=True)]
    return tree_unflatten(inside, _opened(one)[1])


def _near(a: object, b: object) -> bool:
    """Whether two values are equal up to rounding."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return type(a) is type(b) and a == b
    if a.shape != b.shape:
        return False
    if not b.is_floating_point():
        return bool((a.to(b.dtype) == b).all())
    return bool(torch.linalg.vector_norm((a - b).float()) <= NEAR * torch.linalg.vector_norm(b.float()))


def _sizes(part: Tree) -> tuple[torch.Size, ...]:
    return tuple(v.shape for v in tree_leaves(part) if torch.is_tensor(v))


def _lengths(parts: Sequence[Tree]) -> list[int]:
    """Return the sizes of the parts in the first dimension in which they differ; zeros if they do not differ."""
    for sizes in zip(*(_sizes(part) for part in parts), strict=False):
        for lengths in zip(*sizes, strict=False):
            if len(set(lengths)) > 1:
                return list(lengths)
    return [0] * len(parts)


# --- Encodings on disk: one safetensors file each, in a folder named after the encoder

SAMPLE, PLACES = 2**12, 16  # bytes read at each of 16 positions in a file, for its fingerprint


def identity(folder: Path, prefixes: tuple[str, ...], *settings: object) -> str:
    """Return an id of an encoder: components of a pipeline's `folder` by prefix, settings, and library versions."""
    versions = [version(package) for package in ("torch", "diffusers", "transformers")]
    digest = sha256(json.dumps([*map(str, settings), *versions]).encode())
    for file in sorted(path for prefix in prefixes for path in folder.glob(f"{prefix}*/**/*") if path.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)} {size}".encode())
        with file.open("rb") as content:
            for place in range(PLACES):
                content.seek(max(0, size - SAMPLE) * place // (PLACES - 1))
                digest.update(content.read(SAMPLE))
    return digest.hexdigest()[:16]


def _file(folder: Path, key: str) -> Path:
    return folder / f"{sha256(key.encode()).hexdigest()}.safetensors"


def read_answer(folder: Path, key: str) -> Tree | None:
    """Return the encoding that `write_answer` stored under `key`, on the CPU; None if missing or unreadable."""
    file = _file(folder, key)
    if not file.exists():
        return None
    try:
        with safe_open(file, "pt") as content:
            metadata = content.metadata() or {}
            if metadata.get("encodes") == key:
                stored = set(content.keys())
                values = json.loads(metadata["values"])
                leaves = [content.get_tensor(str(i)) if str(i) in stored else v for i, v in enumerate(values)]
                return tree_unflatten(leaves, treespec_loads(metadata["structure"]))
    except (OSError, SafetensorError, ValueError, KeyError, NotImplementedError) as error:
        logger.warning("%s cannot be read, re-encoding its prompt: %s", file, error)
    return None


def write_answer(folder: Path, key: str, answer: Tree) -> None:
    """Store `answer` under `key` if it has only tensors, numbers, texts and None in lists, tuples and dictionaries."""
    leaves, structure = tree_flatten(answer)
    tensors = {str(i): leaf for i, leaf in enumerate(leaves) if torch.is_tensor(leaf)}
    try:
        values = json.dumps([None if torch.is_tensor(leaf) else leaf for leaf in leaves])
        metadata = {"encodes": key, "values": values, "structure": treespec_dumps(structure)}
    except (TypeError, NotImplementedError):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(_file(folder, key), pack_tensors(tensors, metadata))
    except (OSError, GerlError) as error:
        logger.warning("the encoding of a prompt is not stored, it will be computed again next time: %s", error)


# --- Prompts that a pipeline's tokenizers truncate, found without encoding them and without knowing the pipeline.
#
# One short prompt is passed through the pipeline up to the first denoiser call, while the calls of tokenizers are
# recorded: which tokenizer reads it, with which template and up to how many tokens. For other prompts, counting tokens
# is then enough. Pipelines truncate silently, or with one warning per prompt.

PROBE = "zebra"  # a prompt that occurs in no template and that lower-casing and cleaning do not change


@dataclass(frozen=True)
class Reading:
    """The text `before + prompt + after` that a tokenizer reads, truncated to `most` tokens; None: no limit."""

    tokenizer: str
    before: str
    after: str
    most: int | None


class _Reached(Exception):
    """Raised just before the first denoiser call."""


def readings(
    pipe: DiffusionPipeline, run: Callable[[], object], call: Mapping[str, object], denoisers: Sequence[torch.nn.Module]
) -> list[Reading]:
    """Record how tokenizers read the prompt `PROBE` in `run`, which calls `pipe` with it; `call`: other arguments."""
    tokenizers = {id(collected): name for name, collected in _tokenizers(pipe).items()}
    parameters = inspect.signature(type(pipe).__call__).parameters
    default = parameters["max_sequence_length"].default if "max_sequence_length" in parameters else None
    longest = call.get("max_sequence_length", default)
    collected: list[Reading] = []

    def note(tokenizer: PreTrainedTokenizerBase, text: object, given: Mapping[str, Any]) -> None:
        texts = [text] if isinstance(text, str) else text
        for one in texts if isinstance(texts, list | tuple) else []:
            if isinstance(one, str) and one.count(PROBE) == 1 and id(tokenizer) in tokenizers:
                before, after = one.split(PROBE)
                cuts = given.get("truncation") not in (None, False, "do_not_truncate")
                most = (given.get("max_length") or tokenizer.model_max_length) if cuts else None
                collected.append(Reading(tokenizers[id(tokenizer)], before, after, most))

    def reached(*_: object) -> None:
        raise _Reached

    hooks = [denoiser.register_forward_pre_hook(reached) for denoiser in denoisers]
    try:
        with _noting(note), contextlib.suppress(_Reached):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    # some pipelines tokenize again without limit, to warn about truncation
    limited = {r.tokenizer for r in collected if r.most is not None}
    limits = [r for r in dict.fromkeys(collected) if r.most is not None or r.tokenizer not in limited]
    if not isinstance(longest, int) or any(r.most == longest for r in limits):
        return limits
    for i, r in enumerate(limits):  # tokenizers do not get the limit: the pipeline truncates later, from the prompt on
        end = longest + _token_lengths(_tokenizers(pipe)[r.tokenizer], r, [""])[0]
        limits[i] = replace(r, most=end if r.most is None else min(r.most, end))
    return limits


def cut_prompts(pipe: DiffusionPipeline, read: Sequence[Reading], prompts: Sequence[str]) -> CutPrompts:
    """Return the indices of the `prompts` that the tokenizers truncate."""
    by_tokenizer: dict[str, tuple[int, list[int]]] = {}
    for reading in read:
        if reading.most is None:
            by_tokenizer.setdefault(reading.tokenizer, (0, []))
            continue
        tokenizer = _tokenizers(pipe)[reading.tokenizer]
        around = _token_lengths(tokenizer, reading, [""])[0]  # without a prompt
        # a token is at least one byte, so most prompts need no counting
        long = [i for i, text in enumerate(prompts) if len(text.encode()) > reading.most - around]
        lengths = _token_lengths(tokenizer, reading, [prompts[i] for i in long])
        cut = [i for i, length in zip(long, lengths, strict=True) if length > reading.most]
        most, before = by_tokenizer.get(reading.tokenizer, (0, []))
        by_tokenizer[reading.tokenizer] = max(most, reading.most - around), sorted({*before, *cut})
    return CutPrompts({name: value for name, value in by_tokenizer.items() if value[1]}, len(by_tokenizer))


def kept_readings(folder: Path | None) -> list[Reading] | None:
    """Return the readings written by `keep_readings`; None if missing or unreadable."""
    stored: Any = None if folder is None else read_answer(folder, "readings")
    return None if stored is None else [Reading(*values) for values in stored]


def keep_readings(folder: Path | None, collected: Sequence[Reading]) -> None:
    """Store readings beside the encoded prompts of `data.cache`, so that text encoders need not be loaded."""
    if folder is not None:
        write_answer(folder, "readings", [astuple(reading) for reading in collected])


def _tokenizers(pipe: DiffusionPipeline) -> dict[str, PreTrainedTokenizerBase]:
    """Return the tokenizers of a pipeline by component, including those inside processors."""
    from transformers import PreTrainedTokenizerBase  # imported lazily, as diffusers

    parts = {name: getattr(part, "tokenizer", part) for name, part in pipe.components.items()}
    tokenizers: dict[str, PreTrainedTokenizerBase] = {}
    for name, part in parts.items():
        if isinstance(part, PreTrainedTokenizerBase) and all(part is not other for other in tokenizers.values()):
            tokenizers[name] = part
    return tokenizers


def _token_lengths(tokenizer: PreTrainedTokenizerBase, reading: Reading, prompts: Sequence[str]) -> list[int]:
    """Return the number of tokens of each prompt in its template, with start and end tokens."""
    if not prompts:
        return []
    texts = [reading.before + prompt + reading.after for prompt in prompts]
    return [len(ids) for ids in tokenizer(texts, padding=False, truncation=False)["input_ids"]]


@contextlib.contextmanager
def _noting(note: Callable[[PreTrainedTokenizerBase, object, Mapping[str, Any]], None]) -> Iterator[None]:
    """Call `note` with text and keyword arguments of each tokenizer call in the block."""
    from transformers import PreTrainedTokenizerBase  # imported lazily, as diffusers

    original = PreTrainedTokenizerBase.__call__
    inside = False

    def call(self: PreTrainedTokenizerBase, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if not inside:
            inside = True  # `note` itself may call this method to count tokens
            try:
                note(self, args[0] if args else kwargs.get("text"), kwargs)
            finally:
                inside = False
        return original(self, *args, **kwargs)

    PreTrainedTokenizerBase.__call__ = call
    try:
        yield
    finally:
        PreTrainedTokenizerBase.__call__ = original
