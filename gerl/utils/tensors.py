"""Tensors as bytes: named ones as a safetensors file, and several packed as one for transport."""

import json
from collections.abc import Callable

import numpy as np
import safetensors
import safetensors.torch
import torch

from gerl.errors import CheckpointError


def pack_tensors(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Named tensors of any device and dtype as the content of a safetensors file, the same bytes for the same input."""
    # Clones: safetensors refuses tensors that share memory, such as tied weights.
    plain = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    return _in_order(safetensors.torch.save(plain, metadata))


def _in_order(content: bytes) -> bytes:
    """The file with its metadata sorted: safetensors writes them in an order of chance, a hash map's."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    metadata = header.pop("__metadata__", None)
    if metadata is None:
        return content
    text = json.dumps({"__metadata__": dict(sorted(metadata.items())), **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def unpack_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file's content, on the CPU; `CheckpointError` if it is none."""
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{len(data)} bytes are not a safetensors file: {error}") from error


class PackedTensors(dict[int, torch.Tensor]):
    """Tensors `[B, T]` of one dtype by number, pickled as one.

    Each alone would take with it all that it is a view of, and some kilobytes more.
    """

    def __reduce__(self) -> tuple[Callable[..., "PackedTensors"], tuple[object, ...]]:
        if not self:
            return PackedTensors, ()
        whole = torch.cat([tensor.detach() for tensor in self.values()])
        return _unpacked, (list(self), [len(tensor) for tensor in self.values()], whole.numpy())


def _unpacked(numbers: list[int], lengths: list[int], whole: np.ndarray) -> PackedTensors:
    tensors = torch.from_numpy(whole.copy()).split(lengths)  # what comes out of Ray's store is not to be written
    return PackedTensors(zip(numbers, tensors, strict=True))
