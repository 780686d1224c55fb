"""Files of a pipeline's components: missing, cut off, or of another model."""

import shutil
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from gerl.config import ModelConfig
from gerl.errors import ModelError
from gerl.export.base import Base
from gerl.export.files import merged_pipeline
from gerl.model.loading import load_pipeline


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sd3")
    tiny.build(tiny.CASES["sd3"]).save_pretrained(folder)
    return folder


def weights(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def without(part: str) -> Callable[[Path], object]:
    def remove(folder: Path) -> None:
        tensors = load_file(weights(folder))
        save_file({name: v for name, v in tensors.items() if part not in name}, weights(folder), {"format": "pt"})

    return remove


def narrow(folder: Path) -> None:
    tensors = load_file(weights(folder))
    name = next(name for name, value in tensors.items() if value.ndim == 2)
    save_file(tensors | {name: tensors[name][:1].clone()}, weights(folder), {"format": "pt"})


DAMAGE: dict[str, Callable[[Path], object]] = {
    "another shape": narrow,
    "cut off": lambda folder: weights(folder).write_bytes(weights(folder).read_bytes()[:-100]),
    "pointer of Git LFS": lambda folder: weights(folder).write_text("version https://git-lfs.github.com/spec/v1\n"),
    "no weights": lambda folder: weights(folder).unlink(),
    "no config.json": lambda folder: (folder / "config.json").unlink(),
    "no folder": shutil.rmtree,
}
PARTS = {"transformer": "to_q", "text_encoder": "fc1", "text_encoder_3": "SelfAttention", "vae": "conv_in"}


def test_each_component_has_all_its_weights(sd3: Path, tmp_path: Path) -> None:
    """Random weights, or none, would take the place of those that are missing; in training and in export."""
    accepted = []
    for component, part in PARTS.items():
        for what, damage in {"have none for": without(part), **DAMAGE}.items():
            copy = tmp_path / f"{component} {what}"
            shutil.copytree(sd3, copy)
            damage(copy / component)
            for read in (
                lambda path: load_pipeline(ModelConfig(path=path), "cpu"),
                lambda path: merged_pipeline({}, Base(path, 1.0)),
            ):
                try:
                    read(str(copy))
                except ModelError as error:
                    if all(word in str(error) for word in (str(copy), component, what)):
                        continue
                    accepted.append((component, what, str(error)))
                else:
                    accepted.append((component, what, "loaded"))
    assert not accepted


def test_names_and_number_of_missing_weights_are_given(sd3: Path, tmp_path: Path) -> None:
    shutil.copytree(sd3, tmp_path / "copy")
    without("layers.0.mlp.fc1")(tmp_path / "copy" / "text_encoder")
    with pytest.raises(ModelError, match=r"none for 2 of them .*layers\.0\.mlp\.fc1\.bias.*download .* text_encoder"):
        load_pipeline(ModelConfig(path=str(tmp_path / "copy")), "cpu")


def test_a_missing_shard_is_named(sd3: Path, tmp_path: Path) -> None:
    shutil.copytree(sd3, tmp_path / "copy")
    folder = tmp_path / "copy" / "transformer"
    model = diffusers.SD3Transformer2DModel.from_pretrained(folder)
    shutil.rmtree(folder)
    model.save_pretrained(folder, max_shard_size="20KB")
    load_pipeline(ModelConfig(path=str(tmp_path / "copy")), "cpu")
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(ModelError, match=f"transformer lacks 1 of .*{last.name}"):
        load_pipeline(ModelConfig(path=str(tmp_path / "copy")), "cpu")


def test_tied_weights_and_buffers_may_be_absent(sd3: Path, tmp_path: Path) -> None:
    """T5's embedding has two names, and is under one in the file; SD3's positions are a buffer."""
    shutil.copytree(sd3, tmp_path / "copy")
    assert "pos_embed.pos_embed" in load_file(weights(sd3 / "transformer"))
    without("pos_embed.pos_embed")(tmp_path / "copy" / "transformer")
    pipe, whole = (load_pipeline(ModelConfig(path=str(path)), "cpu") for path in (tmp_path / "copy", sd3))
    assert torch.equal(pipe.transformer.pos_embed.pos_embed, whole.transformer.pos_embed.pos_embed)
    assert pipe.text_encoder_3.encoder.embed_tokens.weight is pipe.text_encoder_3.shared.weight
    assert "encoder.embed_tokens.weight" not in load_file(weights(sd3 / "text_encoder_3"))
