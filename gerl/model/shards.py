"""Tensors of which several processes hold a part each, and files of them that any number of processes can read.

The files are those of `torch.distributed.checkpoint` in the layout of safetensors: each process writes one, with its
parts and where they begin. Nothing is agreed upon between the processes, so that those of a run that ends can write.
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


@dataclass(frozen=True)
class Part:
    """The part of a tensor that a process holds: `values`, which begin at `offset` of the whole one, of `shape`."""

    values: torch.Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def copy(self) -> "Part":
        """A copy in main memory."""
        return Part(self.values.to("cpu", copy=True), self.offset, self.shape)


def part_of(tensor: torch.Tensor) -> Part:
    """The part of `tensor` that is here, which shares its memory; for a number a list of one."""
    plain = tensor.detach()
    if not isinstance(plain, DTensor):
        plain = plain.view(1) if plain.ndim == 0 else plain  # of a number there is no slice that could be read
        return Part(plain, (0,) * plain.ndim, tuple(plain.shape))
    (chunk,) = plain.__create_chunk_list__()
    return Part(plain.to_local(), tuple(chunk.offsets), tuple(plain.shape))


def write_parts(folder: Path, number: int, parts: Mapping[str, Part]) -> None:
    """Write the parts of process `number` into `folder`, in a file of their own; raises `OSError`."""
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
        if part.values.numel()  # of a small tensor there is nothing left for the last processes
    ]
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    writer.write_data(SavePlan(items, storage_data={"shard_index": number + 1}), _Writing(parts)).wait()


class Shards:
    """The files of a folder that `write_parts` has filled; raises `CheckpointError` where they cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = HuggingFaceStorageReader(str(folder))
        try:
            metadata: Metadata = self._reader.read_metadata()
        # what safetensors, JSON and torch raise for files that are missing or others
        except Exception as error:  # noqa: BLE001
            raise CheckpointError(f"{folder} cannot be read: {reason(error)}") from None
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._known: dict[str, TensorStorageMetadata] = {
            name: known
            for name, known in metadata.state_dict_metadata.items()
            if isinstance(known, TensorStorageMetadata)
        }

    def shapes(self) -> dict[str, torch.Tensor]:
        """The tensors without their values, by name."""
        return {
            name: torch.empty(known.size, dtype=known.properties.dtype, device="meta")
            for name, known in self._known.items()
        }

    def read_into(self, parts: Mapping[str, Part]) -> None:
        """Fill the values of `parts`, whoever wrote them."""
        items = []
        for name, part in parts.items():
            if not part.values.numel():
                continue
            if name not in self._known:
                raise CheckpointError(f"{self.folder} has no tensor {name}")
            wanted = ChunkStorageMetadata(torch.Size(part.offset), part.values.size())
            found = create_read_items_for_chunk_list(name, self._known[name], [wanted])
            if sum(item.lengths.numel() for item in found) != part.values.numel():
                raise CheckpointError(f"{self.folder} has only a part of {name}")
            items += found
        self._reader.read_data(LoadPlan(items), _Reading(parts)).wait()

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        if name not in self._known:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        known = self._known[name]
        values = torch.empty(known.size, dtype=known.properties.dtype)
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
