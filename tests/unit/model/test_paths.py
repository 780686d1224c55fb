"""`model.path`: what is taken for a folder or a hub id, and what anything else gets."""

from pathlib import Path

import pytest
import tiny

from gerl.errors import ModelError
from gerl.model.paths import INDEX, WEIGHTS, check_size, resolve, size_multiple


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "mine"
    (folder / "vae").mkdir(parents=True)
    (folder / INDEX).write_text("{}")
    return folder


def test_a_folder_a_hub_id_or_what_ships(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(pipeline)) == str(pipeline)
    assert resolve("stabilityai/stable-diffusion-3.5-medium") == "stabilityai/stable-diffusion-3.5-medium"
    assert Path(resolve("signs")).parts[-3:] == ("gerl", "assets", "signs")
    monkeypatch.chdir(pipeline.parent)
    assert Path(resolve("mine")).samefile(pipeline) and Path(resolve("./mine")).samefile(pipeline)


@pytest.mark.parametrize("path", ["./missing", "/nowhere/at/all", "../missing", "~/missing-gerl-pipeline", "a/b/c"])
def test_a_missing_folder(path: str) -> None:
    with pytest.raises(ModelError, match=r"model\.path='.*there is no folder /.*correct the path"):
        resolve(path)


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("", "model.path is empty: give a folder"),
        ("sings", "Hub id such as 'owner/name', or 'signs'"),
        ("https://huggingface.co/owner/name", "model.path=owner/name"),
        ("https://huggingface.co/owner/na-me.5/tree/main", "model.path=owner/na-me.5"),
        ("huggingface.co/owner/name", "model.path=owner/name"),
        ("https://civitai.com/models/1", "a Hub id such as owner/name, or a folder"),
        ("models/base.safetensors", "from_single_file('models/base.safetensors').save_pretrained('FOLDER')"),
        ("base.ckpt", "from_single_file"),
    ],
)
def test_what_is_neither_has_a_remedy(path: str, remedy: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(path)
    assert "model.path" in str(caught.value) and remedy in str(caught.value), caught.value


def test_a_folder_or_file_that_is_no_pipeline(pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("x")
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / WEIGHTS).write_bytes(b"")
    remedies = {
        tmp_path / "notes": "it is a file; give the folder",
        tmp_path / "lora": "use the pipeline that it was trained on",
        pipeline.parent: f"did you mean {str(pipeline)!r}",
        pipeline / "vae": "has no model_index.json; use one",
    }
    for path, remedy in remedies.items():
        with pytest.raises(ModelError) as caught:
            resolve(str(path))
        assert remedy in str(caught.value), caught.value


def test_the_multiple_of_a_size_is_that_of_the_pipeline(tmp_path: Path) -> None:
    wrong = []
    for build in (tiny.sd3, tiny.flux, tiny.qwen_image, tiny.sd15):
        pipe, folder = build(), tmp_path / build.__name__
        pipe.save_pretrained(folder)
        packed = 1 if build is tiny.sd15 else 2
        if size_multiple(folder) != pipe.vae_scale_factor * packed:
            wrong.append((build.__name__, size_multiple(folder), pipe.vae_scale_factor))
    assert wrong == []
    assert size_multiple(tmp_path) is None and size_multiple(Path("owner/name")) is None


def test_a_size_that_cannot_be_sampled_is_refused() -> None:
    for size in ((32, 40), (None, None), (None, 8)):
        check_size("signs", *size)
    for key, size in (("height", (33, 32)), ("width", (None, 7))):
        with pytest.raises(ModelError, match=rf"sampling\.{key}=.* multiples of 8 .*use \d+ or \d+"):
            check_size("signs", *size)
