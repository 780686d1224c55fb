"""Folders of pipelines with components replaced or left out, and with variants only."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from diffusers import DiffusionPipeline

from gerl.config import ModelConfig, SamplingConfig
from gerl.errors import ConfigError, ModelError
from gerl.export.files import stored_dtypes
from gerl.model.hub import model_folder
from gerl.model.loading import check_model, load_pipeline
from gerl.model.parts import variants_in
from gerl.utils.versions import DTYPE


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sd3")
    tiny.build(tiny.CASES["sd3"]).save_pretrained(folder)
    return folder


def drawn(pipe: Any) -> torch.Tensor:
    return tiny.output_of(pipe(**tiny.call_for(tiny.CASES["sd3"], True), generator=tiny.generators()))


def loaded(folder: Path, **keys: Any) -> Any:
    return load_pipeline(ModelConfig(path=str(folder), **keys), "cpu")


def test_parts_are_replaced_and_left_out_as_plain_diffusers_does(sd3: Path, tmp_path: Path) -> None:
    """A component's own folder, or a pipeline with it; the tokenizer of a text encoder goes with it."""
    other = DiffusionPipeline.from_pretrained(sd3)
    with torch.no_grad():
        for p in (*other.vae.parameters(), *other.text_encoder.parameters()):
            p.mul_(1.1)
    other.save_pretrained(tmp_path / "other")
    parts = {"vae": str(tmp_path / "other" / "vae"), "text_encoder": str(tmp_path / "other"), "text_encoder_3": None}
    pipe = loaded(sd3, parts=parts)
    assert pipe.text_encoder_3 is pipe.tokenizer_3 is None
    changed = {"vae": other.vae, "text_encoder": other.text_encoder, "text_encoder_3": None, "tokenizer_3": None}
    plain = DiffusionPipeline.from_pretrained(sd3, **changed)
    assert torch.equal(drawn(pipe), drawn(plain)) and not torch.equal(drawn(pipe), drawn(loaded(sd3)))
    plain.save_pretrained(tmp_path / "without")
    assert json.loads((tmp_path / "without" / "model_index.json").read_text())["text_encoder_3"] == [None, None]
    assert torch.equal(drawn(loaded(tmp_path / "without")), drawn(plain))
    again = loaded(tmp_path / "without", parts={"text_encoder_3": str(sd3), "tokenizer_3": str(sd3)})
    assert again.text_encoder_3 is not None and again.tokenizer_3 is not None


def test_wrong_parts_are_refused_before_anything_is_loaded(sd3: Path) -> None:
    wrong = [
        ({"vaee": "x"}, r"model\.parts\.vaee: .*did you mean model\.parts\.vae\?"),
        ({"zebra": None}, r"model\.parts\.zebra: .*use one of .*transformer"),
        ({"vae": "./nowhere"}, r"model\.parts\.vae='\./nowhere': .*correct the path"),
        ({"vae": str(sd3 / "text_encoder")}, "vae has no weights"),
    ]
    for parts, words in wrong:
        with pytest.raises(ModelError, match=words):
            check_model(ModelConfig(path=str(sd3), parts=parts), SamplingConfig())
    with pytest.raises(ConfigError, match=r"model\.parts\.vae='': .*null"):
        ModelConfig(parts={"vae": ""})


def test_a_variant_is_read_where_there_is_nothing_else(
    sd3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gerl")
    half = DiffusionPipeline.from_pretrained(sd3, **{DTYPE: torch.float16})
    expected = drawn(DiffusionPipeline.from_pretrained(sd3, **{DTYPE: torch.float16}).to(torch.float32))
    for name, size in (("whole", "1GB"), ("shards", "20KB")):
        half.save_pretrained(tmp_path / name, variant="fp16", max_shard_size=size)
        assert not list((tmp_path / name).glob("*/*model.safetensors"))
        caplog.clear()
        assert torch.equal(drawn(loaded(tmp_path / name)), expected)
        assert [r.getMessage() for r in caplog.records if "variant fp16" in r.getMessage()] != []
        assert set(stored_dtypes(model_folder(str(tmp_path / name))).values()) == {torch.float16, torch.float32}
    half.save_pretrained(sd3, variant="fp16")
    caplog.clear()
    assert model_folder(str(sd3)) == sd3 and "variant" not in caplog.text


def test_variants_are_known_by_their_files() -> None:
    files = ["unet/model.fp16.safetensors", "unet/model.bf16.safetensors", "vae/a.fp16.bin", "vae/a.bin", "v1.ckpt"]
    files += ["te/model.safetensors.index.ema.json", "te/model.ema-00001-of-00002.safetensors", "te/config.json"]
    assert variants_in(files) == {"unet": "fp16", "te": "ema"}
