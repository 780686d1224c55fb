"""Prompts that a pipeline's tokenizers cut, found without encoding them and without knowing the pipeline.

One short prompt goes through the pipeline as far as the first call of the denoiser, and the calls of tokenizers are
noted: which one reads it, in which template, up to how many tokens. Whether it would cut another prompt is then a
matter of counting that one's tokens. Pipelines cut silently, or with a warning per prompt that nobody counts.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from gerl.protocol import CutPrompts

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

PROBE = "zebra"  # a prompt that no template has in it, and that lower case and cleaning leave as it is
FILE = "tokenizers.json"  # where the readings are kept beside encoded prompts


@dataclass(frozen=True)
class Reading:
    """How the component `tokenizer` reads a prompt: `before + prompt + after`, of which `most` tokens are kept.

    `most` is None where it reads any length.
    """

    tokenizer: str
    before: str
    after: str
    most: int | None


class _Reached(Exception):
    """The denoiser is about to be called."""


def readings(
    pipe: DiffusionPipeline, run: Callable[[], object], call: Mapping[str, object], denoisers: Sequence[torch.nn.Module]
) -> list[Reading]:
    """The readings of the prompt `PROBE` in `run`, which calls `pipe` with it; `call`: its further arguments."""
    tokenizers = {id(found): name for name, found in _tokenizers(pipe).items()}
    parameters = inspect.signature(type(pipe).__call__).parameters
    default = parameters["max_sequence_length"].default if "max_sequence_length" in parameters else None
    longest = call.get("max_sequence_length", default)
    found: list[Reading] = []

    def note(tokenizer: PreTrainedTokenizerBase, text: object, given: Mapping[str, Any]) -> None:
        texts = [text] if isinstance(text, str) else text
        for one in texts if isinstance(texts, list | tuple) else []:
            if isinstance(one, str) and one.count(PROBE) == 1 and id(tokenizer) in tokenizers:
                before, after = one.split(PROBE)
                cuts = given.get("truncation") not in (None, False, "do_not_truncate")
                most = (given.get("max_length") or tokenizer.model_max_length) if cuts else None
                found.append(Reading(tokenizers[id(tokenizer)], before, after, most))

    def reached(*_: object) -> None:
        raise _Reached

    hooks = [denoiser.register_forward_pre_hook(reached) for denoiser in denoisers]
    try:
        with _noting(note), contextlib.suppress(_Reached):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    # some tokenize a second time without limit, to warn of what was cut
    limited = {r.tokenizer for r in found if r.most is not None}
    kept = [r for r in dict.fromkeys(found) if r.most is not None or r.tokenizer not in limited]
    if not isinstance(longest, int) or any(r.most == longest for r in kept):
        return kept
    for i, r in enumerate(kept):  # no tokenizer is given the limit: the pipeline cuts later, as far as the prompt goes
        end = longest + _around(_tokenizers(pipe)[r.tokenizer], r)
        kept[i] = replace(r, most=end if r.most is None else min(r.most, end))
    return kept


def cut_prompts(pipe: DiffusionPipeline, found: Sequence[Reading], prompts: Sequence[str]) -> CutPrompts:
    """Which of `prompts` the tokenizers cut, as indices."""
    by_tokenizer: dict[str, tuple[int, list[int]]] = {}
    for reading in found:
        if reading.most is None:
            by_tokenizer.setdefault(reading.tokenizer, (0, []))
            continue
        tokenizer = _tokenizers(pipe)[reading.tokenizer]
        around = _around(tokenizer, reading)
        # a token is at least a byte: most prompts need not be counted
        long = [i for i, text in enumerate(prompts) if len(text.encode()) > reading.most - around]
        lengths = _lengths(tokenizer, reading.before, reading.after, [prompts[i] for i in long])
        cut = [i for i, length in zip(long, lengths, strict=True) if length > reading.most]
        most, before = by_tokenizer.get(reading.tokenizer, (0, []))
        by_tokenizer[reading.tokenizer] = max(most, reading.most - around), sorted({*before, *cut})
    return CutPrompts({name: value for name, value in by_tokenizer.items() if value[1]}, len(by_tokenizer))


def kept_readings(folder: Path | None) -> list[Reading] | None:
    """The readings that `keep_readings` wrote; None where there are none that can be read."""
    try:
        text = None if folder is None else (folder / FILE).read_text(encoding="utf-8")
        return None if text is None else [Reading(**entry) for entry in json.loads(text)]
    except (OSError, ValueError, TypeError):
        return None


def keep_readings(folder: Path | None, found: Sequence[Reading]) -> None:
    """Keep readings beside the encoded prompts of `data.cache`, with which the text encoders need not be loaded."""
    if folder is not None:
        with contextlib.suppress(OSError):  # then they are found anew
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FILE).write_text(json.dumps([asdict(reading) for reading in found]), encoding="utf-8")


def _tokenizers(pipe: DiffusionPipeline) -> dict[str, PreTrainedTokenizerBase]:
    """The tokenizers of a pipeline by component, also those inside of processors."""
    parts = {name: getattr(part, "tokenizer", part) for name, part in pipe.components.items()}
    found: dict[str, PreTrainedTokenizerBase] = {}
    for name, part in parts.items():
        if isinstance(part, PreTrainedTokenizerBase) and all(part is not other for other in found.values()):
            found[name] = part
    return found


def _around(tokenizer: PreTrainedTokenizerBase, reading: Reading) -> int:
    """The tokens of a text without a prompt in it."""
    return _lengths(tokenizer, reading.before, reading.after, [""])[0]


def _lengths(tokenizer: PreTrainedTokenizerBase, before: str, after: str, prompts: Sequence[str]) -> list[int]:
    """Tokens of each prompt in its template, those that begin and end a text included."""
    if not prompts:
        return []
    read = tokenizer([before + prompt + after for prompt in prompts], padding=False, truncation=False)
    return [len(ids) for ids in read["input_ids"]]


@contextlib.contextmanager
def _noting(note: Callable[[PreTrainedTokenizerBase, object, Mapping[str, Any]], None]) -> Iterator[None]:
    """A block in which `note` hears of each call of a tokenizer: its text and keyword arguments."""
    original = PreTrainedTokenizerBase.__call__
    inside = False

    def call(self: PreTrainedTokenizerBase, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if not inside:
            inside = True  # what is noted is counted by the same method
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
