"""A LoRA that comes near a change of weights, and the weights themselves."""

from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from gerl.export import full_weights as whole
from gerl.export.full_weights import low_rank_factors, write_denoisers
from gerl.model.shards import part_of, write_parts
from gerl.run.checkpoint import PARTS, Checkpoint


@pytest.mark.parametrize("exact", [True, False])
def test_the_largest_singular_values_are_kept(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(whole, "EXACT", 1024 if exact else 0)
    u, v = torch.linalg.qr(torch.randn(40, 40))[0], torch.linalg.qr(torch.randn(60, 40))[0]
    values = 0.5 ** torch.arange(40.0)
    change = u * values @ v.T
    a, b = low_rank_factors(change, 3)
    assert a.shape == (3, 60) and b.shape == (40, 3)
    assert float((change - b @ a).norm()) == pytest.approx(float(values[3:].norm()), rel=1e-3)
    torch.testing.assert_close(a.norm(dim=1), b.norm(dim=0))  # neither is much larger than the other


def test_a_rank_beyond_that_of_the_layer_is_filled_up() -> None:
    change = torch.randn(4, 6)
    a, b = low_rank_factors(change, 9)
    assert a.shape == (9, 6) and b.shape == (4, 9) and not a[4:].any()
    torch.testing.assert_close(b @ a, change)


def test_a_denoiser_is_written_in_the_precision_of_its_files(tmp_path: Path) -> None:
    transformer = tiny.sd3(layers=1).transformer.bfloat16()
    transformer.save_pretrained(tmp_path / "transformer")
    trained = {f"weights/transformer.{n}": part_of(p.float() + 1) for n, p in transformer.named_parameters()}
    write_parts(tmp_path / PARTS, 0, trained)
    write_denoisers(Checkpoint(tmp_path, 1, {}, ()), "raw", tmp_path / "out")
    (file,) = (tmp_path / "out" / "transformer").glob("*.safetensors")
    stored = load_file(file)
    for name, p in transformer.named_parameters():
        assert torch.equal(stored[name], (p.float() + 1).bfloat16())
