import copy
import hashlib
import json
import pickle
import tracemalloc
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

from gerl.errors import CheckpointError
from gerl.utils.tensors import KINDS, PackedFiles, PackedTensors, TensorFile, pack_tensors, unpack_tensors
from gerl.utils.versions import has


def test_tensors_round_trip_bitwise() -> None:
    base = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    tensors = {
        "f32": base,
        "shared": base,
        "transposed": base.t(),
        "bf16": base.bfloat16(),
        "step": torch.tensor(3, dtype=torch.int64),
        "rng": torch.arange(5, dtype=torch.uint8),
        "grad": torch.ones(2, requires_grad=True),
    }
    back = unpack_tensors(pack_tensors(tensors, {"kind": "test"}))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)
    with pytest.raises(CheckpointError, match="safetensors"):
        unpack_tensors(b"not tensors")


def test_equal_tensors_are_equal_bytes() -> None:
    tensors = {f"t{i}": torch.arange(i + 1) for i in range(5)}
    metadata = {f"key {i} \u00e4": f"value {i}" for i in range(8)}  # in the file their order would be one of 8!
    files = {pack_tensors(tensors, order) for order in (metadata, dict(reversed(metadata.items()))) for _ in range(5)}
    (content,) = files
    assert unpack_tensors(content).keys() == tensors.keys()
    size = int.from_bytes(content[:8], "little")
    assert size % 8 == 0 and json.loads(content[8 : 8 + size])["__metadata__"] == metadata
    assert unpack_tensors(pack_tensors({}, metadata)) == {}


def test_a_packed_file_is_the_librarys_and_takes_its_memory_once() -> None:
    kinds = [dtype for dtype in KINDS if dtype != torch.complex64 or has("safetensors", "0.7")]
    tensors = {str(dtype): torch.arange(3).to(dtype) for dtype in kinds} | {"empty": torch.empty(0, 2)}
    assert pack_tensors(tensors) == safetensors.torch.save(tensors)
    large = {"a": torch.zeros(2**22), "b": torch.zeros(2**22)}
    tracemalloc.start()
    size = len(pack_tensors(large))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 2**25 < size <= peak < 1.5 * size


def test_rows_travel_as_one() -> None:
    """Also where they are parts of one tensor: pickle would take all of it along with each of them."""
    whole = torch.randn(1000, 8)
    rows = PackedTensors(zip(range(5, 505), whole.split(2), strict=True))
    pickled = pickle.dumps(rows)
    assert len(pickled) < 1.2 * whole.nbytes
    back = pickle.loads(pickled)
    assert list(back) == list(rows) and all(torch.equal(back[i], values) for i, values in rows.items())
    back[5].add_(1)  # they may be written
    assert pickle.loads(pickle.dumps(PackedTensors())) == {}


def test_files_travel_beside_the_pickle() -> None:
    files, buffers = PackedFiles({"state": bytes(range(256)) * 1000, "empty": b""}), list[pickle.PickleBuffer]()
    pickled = pickle.dumps(("others", files), protocol=5, buffer_callback=buffers.append)
    assert len(pickled) < 400 and sum(buffer.raw().nbytes for buffer in buffers) == 256_000
    back = pickle.loads(pickled, buffers=[memoryview(buffer.raw()) for buffer in buffers])
    assert (
        back == pickle.loads(pickle.dumps(("others", files))) == copy.deepcopy(("others", files)) == ("others", files)
    )
    assert all(type(content) is bytes for content in back[1].values())


def test_a_file_is_written_tensor_by_tensor(tmp_path: Path) -> None:
    tensors = {
        "flags": torch.tensor([True, False, True]),  # three bytes: what follows is aligned
        "f64": torch.arange(3.0, dtype=torch.float64),
        "bf16": torch.arange(5).bfloat16(),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "step": torch.tensor(3),
        "empty": torch.zeros(0, 4),
    }
    digests = set()
    for name in ("a", "b"):
        file = TensorFile(tmp_path / f"{name}.safetensors")
        for key, tensor in tensors.items():
            file.add(key, tensor)
        assert not file.path.exists()
        digests.add(file.close())
        back = load_file(file.path)
        assert all(
            torch.equal(back[key], tensor) and back[key].dtype == tensor.dtype for key, tensor in tensors.items()
        )
    assert digests == {hashlib.sha256((tmp_path / "a.safetensors").read_bytes()).hexdigest()}
    file = TensorFile(tmp_path / "c.safetensors")
    file.add("a", torch.ones(3))
    file.discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]
