"""Tensors as bytes: named tensors as a safetensors file, and many small ones packed into one for transport."""

import json
from collections.abc import Callable, Sequence

import numpy as np
import safetensors
import safetensors.torch
import torch
from PIL import Image

from gerl.errors import CheckpointError


def pack_tensors(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Pack named tensors of any device and dtype as a safetensors file; equal input gives equal bytes."""
    # clones: safetensors rejects tensors that share memory, such as tied weights
    plain = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    return _in_order(safetensors.torch.save(plain, metadata))


def _in_order(content: bytes) -> bytes:
    """Sort the metadata of the file, which safetensors writes in hash-map order."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    metadata = header.pop("__metadata__", None)
    if metadata is None:
        return content
    text = json.dumps({"__metadata__": dict(sorted(metadata.items())), **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned to 8 bytes
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def unpack_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Unpack a safetensors file's content into CPU tensors. Raises `CheckpointError` if it is invalid."""
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{len(data)} bytes are not a safetensors file: {error}") from error


class PackedTensors(dict[int, torch.Tensor]):
    """Tensors `[B, T]` of one dtype by number, pickled as one: each would include the storage it is a view of."""

    def __reduce__(self) -> tuple[Callable[..., "PackedTensors"], tuple[object, ...]]:
        if not self:
            return PackedTensors, ()
        whole = torch.cat([tensor.detach() for tensor in self.values()])
        return _unpacked, (list(self), [len(tensor) for tensor in self.values()], whole.numpy())


def _unpacked(numbers: list[int], lengths: list[int], whole: np.ndarray) -> PackedTensors:
    tensors = torch.from_numpy(whole.copy()).split(lengths)  # the memory of Ray's store is read-only
    return PackedTensors(zip(numbers, tensors, strict=True))


def tensors_of(images: Sequence[Image.Image]) -> torch.Tensor:
    """Convert PIL images of one size to `[B, 3, H, W]` fp32 in [0, 1]."""
    pixels = [torch.from_numpy(np.array(image.convert("RGB"))) for image in images]
    # contiguous: with channels last, torch 2.13 resizes images of a single column wrongly
    return torch.stack(pixels).permute(0, 3, 1, 2).contiguous().float() / 255
