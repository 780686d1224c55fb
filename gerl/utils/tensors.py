"""Named tensors as the bytes of a safetensors file, and back."""

import safetensors
import safetensors.torch
import torch

from gerl.errors import CheckpointError


def pack_tensors(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Named tensors of any device and dtype as the content of a safetensors file."""
    # Clones: safetensors refuses tensors that share memory, such as tied weights.
    plain = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    return safetensors.torch.save(plain, metadata)


def unpack_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file's content, on the CPU; `CheckpointError` if it is none."""
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{len(data)} bytes are not a safetensors file: {error}") from error
