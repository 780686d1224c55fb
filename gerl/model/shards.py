"""Sharded tensors, and files of them that any number of processes can read.

The format is that of `torch.distributed.checkpoint` in the layout of safetensors: each process writes one file with its
shards and their offsets. Processes do not communicate, so that those of an interrupted run can still write.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from gerl.errors import CheckpointError
from gerl.utils.files import reason
from gerl.utils.versions import require

TORCH = "2.9"  # the first whose `HuggingFaceStorageWriter` writes a file per process


@dataclass(frozen=True)
class Part:
    """Shard of a tensor held by this process: `values` at `offset` of the complete tensor of shape `shape`."""

    values: torch.Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def copy(self) -> "Part":
        """Return a copy in main memory."""
        return Part(self.values.to("cpu", copy=True), self.offset, self.shape)


def part_of(tensor: torch.Tensor) -> Part:
    """Return this process's shard of `tensor`, sharing its memory; a scalar becomes a list of one."""
    plain = tensor.detach()
    if not isinstance(plain, DTensor):
        plain = plain.view(1) if plain.ndim == 0 else plain  # a scalar has no slice that could be read
        return Part(plain, (0,) * plain.ndim, tuple(plain.shape))
    (chunk,) = plain.__create_chunk_list__()
    return Part(plain.to_local(), tuple(chunk.offsets), tuple(plain.shape))


def write_parts(folder: Path, number: int, parts: Mapping[str, Part]) -> None:
    """Write the shards of process `number` to a separate file in `folder`. Raises `OSError`."""
    require("torch", TORCH, "a checkpoint of all weights")
    folder.mkdir(parents=True, exist_ok=True)
    items = [
        WriteItem(
            MetadataIndex(name, part.offset),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(part.offset), part.values.size()),
                TensorProperties(dtype=part.values.dtype),
                torch.Size(part.shape),
            ),
        )
        for name, part in parts.items()
        if part.values.numel()  # the last processes have an empty shard of a small tensor
    ]
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    writer.write_data(SavePlan(items, storage_data={"shard_index": number + 1}), _Writing(parts)).wait()


class Shards:
    """Files in a folder written by `write_parts`. Raises `CheckpointError` if they cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = HuggingFaceStorageReader(str(folder))
        try:
            metadata: Metadata = self._reader.read_metadata()
        # safetensors, JSON and torch raise various errors for missing or invalid files
        except Exception as error:  # noqa: BLE001
            raise CheckpointError(f"{folder} cannot be read: {reason(error)}") from None
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._known: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def shapes(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name on the meta device, without values."""
        return {n: torch.empty(k.size, dtype=k.properties.dtype, device="meta") for n, k in self._known.items()}

    def read_into(self, parts: Mapping[str, Part]) -> None:
        """Fill the values of `parts`, independent of how many processes wrote the files."""
        items = []
        for name, part in parts.items():
            if not part.values.numel():
                continue
            if name not in self._known:
                raise CheckpointError(f"{self.folder} has no tensor {name}")
            wanted = ChunkStorageMetadata(torch.Size(part.offset), part.values.size())
            reads = create_read_items_for_chunk_list(name, self._known[name], [wanted])
            if sum(item.lengths.numel() for item in reads) != part.values.numel():
                raise CheckpointError(f"{self.folder} has only a part of {name}")
            items += reads
        self._reader.read_data(LoadPlan(items), _Reading(parts)).wait()

    def whole(self, name: str) -> torch.Tensor:
        """Return a complete tensor on the CPU."""
        if name not in self._known:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        entry = self._known[name]
        values = torch.empty(entry.size, dtype=entry.properties.dtype)
        self.read_into({name: part_of(values)})
        return values


class _Writing(DefaultSavePlanner):
    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__()
        self.parts = parts

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.parts[write_item.index.fqn].values.contiguous()


class _Reading(DefaultLoadPlanner):
    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__()
        self.parts = parts

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.parts[index.fqn].values
