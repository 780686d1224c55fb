"""Encoded prompts on disk: a safetensors file each, and the identity of what encoded them."""

import contextlib
import json
import logging
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import diffusers
import torch
import transformers
from safetensors import SafetensorError, safe_open

from gerl.engine.batching import Tree
from gerl.utils.files import reason
from gerl.utils.tensors import pack_tensors

logger = logging.getLogger(__name__)
SAMPLE, PLACES = 2**12, 16  # bytes at so many places of a file that tell it from another


def identity(folder: Path, parts: Iterable[str], *settings: object) -> str:
    """A name for what encodes: the components `parts` of a pipeline's `folder`, settings, and libraries."""
    versions = [module.__version__ for module in (torch, diffusers, transformers)]
    digest = sha256(json.dumps([*map(str, settings), *versions]).encode())
    for part in parts:
        for file in sorted(path for path in (folder / part).rglob("*") if path.is_file()):
            size = file.stat().st_size
            digest.update(f"{file.relative_to(folder)} {size}".encode())
            with file.open("rb") as content:
                for place in range(PLACES):
                    content.seek(max(0, size - SAMPLE) * place // (PLACES - 1))
                    digest.update(content.read(SAMPLE))
    return digest.hexdigest()[:16]


def read_answer(folder: Path, key: str) -> Tree | None:
    """The answer that `write_answer` kept under `key`, on the CPU; None where there is none that can be read."""
    file = folder / _name(key)
    if not file.exists():
        return None
    try:
        with safe_open(file, "pt") as content:
            metadata = content.metadata() or {}
            if metadata.get("key") == key:
                return _restored(json.loads(metadata["tree"]), lambda name: content.get_tensor(name))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        logger.warning("%s cannot be read, re-encoding its prompt: %s", file, error)
    return None


def write_answer(folder: Path, key: str, answer: Tree) -> None:
    """Keep `answer`, of tensors, numbers, texts and None in lists, tuples and dictionaries; others are left out."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        tree = json.dumps(_spelled(answer, tensors))
    except TypeError:
        return
    file = folder / _name(key)
    part = file.with_name(f"{uuid4().hex}.part")  # several workers may write the same
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_bytes(pack_tensors(tensors, {"key": key, "tree": tree}))
        part.replace(file)
    except OSError as error:
        logger.warning("%s cannot be written, the prompt will be re-encoded next time: %s", file, reason(error))
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _name(key: str) -> str:
    return sha256(key.encode()).hexdigest() + ".safetensors"


def _spelled(tree: Tree, tensors: dict[str, torch.Tensor]) -> object:
    """`tree` as JSON, its tensors as names of `tensors`, which gets them; raises `TypeError` for other values."""
    if isinstance(tree, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = tree
        return {"tensor": name}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_spelled(value, tensors) for value in tree]}  # type: ignore[attr-defined]
    if type(tree) is dict:
        return {"dict": [[name, _spelled(value, tensors)] for name, value in tree.items()]}
    if tree is None or type(tree) in (str, int, float, bool):
        return {"value": tree}
    raise TypeError(f"{type(tree).__name__} is not stored on disk")


def _restored(spelled: dict[str, Any], tensor: Callable[[str], torch.Tensor]) -> Tree:
    ((kind, value),) = spelled.items()
    match kind:
        case "tensor":
            return tensor(value)
        case "list":
            return [_restored(v, tensor) for v in value]
        case "tuple":
            return tuple(_restored(v, tensor) for v in value)
        case "dict":
            return {name: _restored(v, tensor) for name, v in value}
        case _:
            return value
