"""Tensors as bytes: named tensors as a safetensors file, and many small ones packed into one for transport."""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from PIL import Image

from gerl.errors import CheckpointError


def pack_tensors(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Pack named tensors of any device and dtype as a safetensors file; equal input gives equal bytes.

    Takes the memory of the file and of one tensor: the library's `save` would hold several copies of a large state.
    """
    # the library puts large dtypes first, so that all are aligned
    empty = safetensors.torch.save({name: torch.empty(0, dtype=t.dtype) for name, t in tensors.items()})
    header, end = dict[str, Any](), 0
    for name, entry in json.loads(empty[8:]).items():
        start, end = end, end + tensors[name].nbytes
        header[name] = entry | {"shape": list(tensors[name].shape), "data_offsets": [start, end]}
    noted = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    file = io.BytesIO()
    file.write(_header({**noted, **header}))
    for name in header:
        file.write(_bytes(tensors[name]))
    return file.getvalue()


def _header(entries: Mapping[str, Any]) -> bytes:
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED)
    return len(text).to_bytes(8, "little") + text


def unpack_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Unpack a safetensors file's content into CPU tensors. Raises `CheckpointError` if it is invalid."""
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{len(data)} bytes are not a safetensors file: {error}") from error


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 (hex) of named tensors, in any order and on any device."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode() + _bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


KINDS = {  # dtypes of the format, by their names there
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
ALIGNED = 8  # bytes: a tensor of a safetensors file is viewed where it lies


class TensorFile:
    """Writer of a safetensors file, tensor by tensor: only one of them is in memory."""

    def __init__(self, path: Path) -> None:
        """Begin a file beside `path`, which `close` puts in its place. Raises `OSError`."""
        self.path, self._part = path, path.with_name(f".{path.name}.part")
        self._values = self._part.open("wb")
        self._header: dict[str, dict[str, Any]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor of any device; raises `KeyError` for a dtype without a name in `KINDS`."""
        kind, start = KINDS[tensor.dtype], self._values.tell()
        self._values.write(_bytes(tensor))
        end = self._values.tell()
        self._header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
        if left := -end % ALIGNED:  # the format has no gaps
            self._values.write(bytes(left))
            self._header[f"padding/{end}"] = {"dtype": "U8", "shape": [left], "data_offsets": [end, end + left]}

    def close(self) -> str:
        """Write the file and return its SHA-256; equal tensors in equal order give equal bytes. Raises `OSError`."""
        self._values.close()
        whole = self._part.with_suffix(".whole")
        with whole.open("wb") as file, self._part.open("rb") as values:
            file.write(_header(self._header))
            shutil.copyfileobj(values, file, 2**24)
        with whole.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.replace(whole, self.path)
        self._part.unlink()
        return digest

    def discard(self) -> None:
        """Remove what is written so far."""
        self._values.close()
        for path in (self._part, self._part.with_suffix(".whole")):
            path.unlink(missing_ok=True)


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


class PackedFiles(dict[str, bytes]):
    """Files by name, pickled out of band: bytes within the pickle would be another copy of each file."""

    def __reduce__(self) -> tuple[Callable[..., "PackedFiles"], tuple[object, ...]]:
        return _files, (list(self), [np.frombuffer(content, np.uint8) for content in self.values()])


def _files(names: list[str], contents: list[np.ndarray]) -> PackedFiles:
    return PackedFiles({name: content.tobytes() for name, content in zip(names, contents, strict=True)})


def tensors_of(images: Sequence[Image.Image]) -> torch.Tensor:
    """Convert PIL images of one size to `[B, 3, H, W]` fp32 in [0, 1]."""
    pixels = [torch.from_numpy(np.array(image.convert("RGB"))) for image in images]
    # contiguous: with channels last, torch 2.13 resizes images of a single column wrongly
    return torch.stack(pixels).permute(0, 3, 1, 2).contiguous().float() / 255
