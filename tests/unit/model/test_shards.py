"""Parts of tensors in files: written by some processes, read by any number of others."""

from pathlib import Path

import pytest
import torch

from gerl.errors import CheckpointError
from gerl.model.shards import Part, Shards, part_of, write_parts

A = torch.arange(30.0).view(5, 6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`a` by rows, a number, and a tensor too small for the second process."""
    small = torch.ones(1, dtype=torch.bfloat16)
    write_parts(
        tmp_path / "s", 0, {"a": Part(A[:3], (0, 0), (5, 6)), "n": part_of(torch.tensor(3.0)), "b": part_of(small)}
    )
    write_parts(tmp_path / "s", 1, {"a": Part(A[3:], (3, 0), (5, 6)), "b": Part(small[1:], (1,), (1,))})
    return tmp_path / "s"


def test_whole_tensors_and_other_parts(folder: Path) -> None:
    shards = Shards(folder)
    assert {name: (t.dtype, list(t.shape)) for name, t in shards.shapes().items()} == {
        "a": (torch.float32, [5, 6]),
        "b": (torch.bfloat16, [1]),
        "n": (torch.float32, [1]),
    }
    assert torch.equal(shards.whole("a"), A) and shards.whole("n").item() == 3 and shards.whole("b").item() == 1
    across, number = torch.zeros(2, 6), torch.tensor(0.0)
    shards.read_into({"a": Part(across, (2, 0), (5, 6)), "n": part_of(number), "b": Part(across[:0, 0], (1,), (1,))})
    assert torch.equal(across, A[2:4]) and number == 3


def test_what_is_not_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensor c"):
        Shards(folder).whole("c")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Shards(tmp_path / "nothing")
    (first, _) = sorted(folder.iterdir())
    first.unlink()
    with pytest.raises(CheckpointError, match="only a part of a"):
        Shards(folder).whole("a")


def test_a_copy_does_not_follow(folder: Path) -> None:
    values = torch.zeros(2)
    part = part_of(values)
    copy = part.copy()
    values += 1
    assert part.values.sum() == 2 and copy.values.sum() == 0
