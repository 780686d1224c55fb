"""Latents of image files: how an image is brought to a size, and that it is encoded once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from PIL import Image

from gerl.config import ModelConfig
from gerl.engine.rows import select_call
from gerl.errors import DataError, ModelError
from gerl.model.latents import ImageLatents, fitted, latents_folder


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    generator = np.random.default_rng(0)
    paths = []
    for i in range(2):
        Image.fromarray(generator.integers(0, 255, (20, 24 + i, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
        paths.append(str(tmp_path / f"{i}.png"))
    return paths


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny.sd3()


def call(**keys: Any) -> dict[str, Any]:
    given = tiny.call_for(tiny.CASES["sd3"], guided=False, steps=2) | {"output_type": "np"} | keys
    return select_call({k: v for k, v in given.items() if v is not None}, [0])


@pytest.fixture
def encodings(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of what the VAE encodes."""
    found: list[torch.Size] = []
    encode = pipe.vae.encode
    monkeypatch.setattr(pipe.vae, "encode", lambda x: (found.append(x.shape), encode(x))[1], raising=False)
    return found


def test_latents_are_scaled_and_shifted_as_the_pipeline_wants_them(pipe: Any, files: list[str]) -> None:
    clean, pixels = ImageLatents(1.0).read(pipe, call(), files)
    assert clean.shape == (2, 4, 8, 8) and pixels.shape == (2, 16, 16, 3) and pixels.dtype == np.uint8
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        said = pipe.vae.encode(x).latent_dist
    noise = ((clean / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor) - said.mean) / said.std
    assert 0.85 < float(noise.std()) < 1.15 and abs(float(noise.mean())) < 0.15  # a sample of the posterior
    again, _ = ImageLatents(1.0).read(pipe, call(), files[1:])
    torch.testing.assert_close(again, clean[1:])  # the same each time, whatever it is encoded with


def test_an_image_is_encoded_once(pipe: Any, files: list[str], encodings: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    images = ImageLatents(1.0, folder)
    first, _ = images.read(pipe, call(), files)
    second, _ = images.read(pipe, call(), files)
    assert len(encodings) == 2 and torch.equal(first, second)
    other_run = ImageLatents(1.0, folder)
    assert torch.equal(other_run.read(pipe, call(), files)[0], first) and len(encodings) == 2
    assert other_run.read(pipe, call(height=24, width=24), files)[0].shape[-1] == 12
    assert len(encodings) == 4  # another size
    for kept in folder.iterdir():
        kept.write_bytes(kept.read_bytes()[:-40])
    assert torch.equal(ImageLatents(1.0, folder).read(pipe, call(), files)[0], first) and len(encodings) == 6
    ImageLatents(0.0).read(pipe, call(), files * 2)
    assert len(encodings) == 10  # without memory or folder nothing is kept


def test_another_vae_or_precision_has_another_folder(pipe: Any, tmp_path: Path) -> None:
    places = []
    for number, dtype in enumerate((torch.float32, torch.float32, torch.bfloat16)):
        pipe.vae.save_pretrained(tmp_path / "model" / "vae")
        if number == 1:
            changed = tiny.image_vae()
            changed.save_pretrained(tmp_path / "model" / "vae")
        (tmp_path / "model" / "model_index.json").write_text("{}")
        model = ModelConfig(path=str(tmp_path / "model"))
        places.append(latents_folder(tmp_path, model, dtype))
        assert places[-1] == latents_folder(tmp_path, model, dtype)
    assert len(set(places)) == 3


def test_without_a_size_it_is_the_pipelines_own(pipe: Any, files: list[str]) -> None:
    clean, pixels = ImageLatents(1.0).read(pipe, call(height=None, width=None), files[:1])
    assert pixels.shape == (1, 32, 32, 3) and clean.shape == (1, 4, 16, 16)  # sample_size of the transformer


@pytest.mark.parametrize(("width", "height"), [(40, 10), (10, 40), (20, 10), (9, 4)])
def test_the_middle_of_an_image_is_kept_and_nothing_is_stretched(width: int, height: int) -> None:
    ramp = np.zeros((height, width, 3), np.uint8)
    ramp[..., 0], ramp[..., 1] = np.linspace(0, 255, width)[None], np.linspace(0, 255, height)[:, None]
    got = fitted(Image.fromarray(ramp), 10, 20)
    assert got.shape == (10, 20, 3)
    share = min(1.0, height * 2 / width), min(1.0, width / (2 * height))  # of the width and the height that are left
    for channel, axis, kept in ((0, 1, share[0]), (1, 0, share[1])):
        line = got[..., channel].mean(1 - axis)
        low, high = 255 * (1 - kept) / 2, 255 * (1 + kept) / 2
        assert abs(line.mean() - 127.5) < 5 and low - 30 < line[0] < low + 30 and high - 30 < line[-1] < high + 30
    same = np.random.default_rng(0).integers(0, 255, (10, 20, 3), dtype=np.uint8)
    assert np.array_equal(fitted(Image.fromarray(same), 10, 20), same)


def test_a_damaged_file_and_a_vae_that_overflows_are_named(pipe: Any, files: list[str]) -> None:
    whole = Path(files[0]).read_bytes()
    Path(files[0]).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"0\.png cannot be read"):
        ImageLatents(1.0).read(pipe, call(), files)
    broken = tiny.sd3()
    broken.vae.encoder.conv_in.weight.data.fill_(torch.inf)
    with pytest.raises(ModelError, match=r"1\.png.*model\.dtype"):
        ImageLatents(1.0).read(broken, call(), files[1:])
