"""What built-in scorers need on this machine, and which of them are offered to be watched."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.file_download import repo_folder_name

from gerl.protocol import Prompt
from gerl.rewards.scorers import SCORERS, scorer_class
from gerl.rewards.scorers.weights import COLUMNS, MEASURED, OFFERED, PACKAGES, WEIGHTS, missing, offers

ROOT = Path(__file__).resolve().parents[4]
CLIP, PICKSCORE, PROCESSOR = (
    "openai/clip-vit-large-patch14",
    "yuvalkirstain/PickScore_v1",
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
)
SIGN = Prompt(0, 'a sign that reads "OPEN"')


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of the Hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(cache: Path, repository: str, file: str, text: str = "") -> None:
    """Store a file in the cache as a download would."""
    folder = cache / repo_folder_name(repo_id=repository, repo_type="model")
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True, exist_ok=True)
    (folder / "snapshots" / "abc" / file).write_text(text)


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_table_has_the_defaults_of_the_scorers(name: str) -> None:
    defaults = {field.name: field.default for field in fields(scorer_class(name))}  # type: ignore[arg-type]
    assert {kwarg: default for kwarg, (default, _) in WEIGHTS[name].items()}.items() <= defaults.items()
    named = {"model", "processor", "tokenizer", "checkpoint", "base", "repository", "head", "colour_model", "backend"}
    assert {kwarg for kwarg in named & defaults.keys() if defaults[kwarg] is not None} == WEIGHTS[name].keys()


def test_every_name_is_that_of_a_scorer() -> None:
    assert {*PACKAGES, *COLUMNS, *MEASURED} <= WEIGHTS.keys() <= SCORERS.keys()
    assert {"ocr", "clipscore"} <= set(OFFERED) <= WEIGHTS.keys()


def test_weights_are_there_as_one_file_or_with_all_parts(cache: Path) -> None:
    assert missing("clipscore", {}) == CLIP
    put(cache, CLIP, "config.json")
    assert missing("clipscore", {}) == CLIP
    index = json.dumps({"weight_map": {"a": "one.bin", "b": "two.bin", "c": "one.bin"}})
    put(cache, CLIP, "pytorch_model.bin.index.json", index)
    put(cache, CLIP, "one.bin")
    assert missing("clipscore", {}) == CLIP
    put(cache, CLIP, "two.bin")
    assert missing("clipscore", {}) == ""
    put(cache, PICKSCORE, "model.safetensors")
    assert missing("pickscore", {}) == f"preprocessor_config.json of {PROCESSOR}"
    put(cache, PROCESSOR, "preprocessor_config.json")
    assert missing("pickscore", {}) == ""


def test_kwargs_choose_other_weights(cache: Path, tmp_path: Path) -> None:
    put(cache, CLIP, "model.safetensors")
    assert missing("clipscore", {"model": "someone/other"}) == "someone/other"
    assert missing("clipscore", {"model": "no such/id/at all"}) == "no such/id/at all"
    (tmp_path / "mine").mkdir()
    assert missing("clipscore", {"model": str(tmp_path / "mine")}) == str(tmp_path / "mine")
    (tmp_path / "mine" / "model.safetensors").touch()
    assert missing("clipscore", {"model": str(tmp_path / "mine")}) == ""
    assert missing("aesthetic", {"head": "my_head.pth"}) == "what head=my_head.pth needs"


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "colour", ("json", "nosuchpackage"))
    assert missing("colour", {}) == "the package nosuchpackage"


def test_scorers_that_need_no_download_and_can_score_the_prompts_are_offered(cache: Path) -> None:
    assert offers([SIGN, Prompt(1, "a cat")], gpu=False) == []
    ocr = "'+reward.scorers.ocr={weight: 0, during: validation}'"
    assert offers([SIGN], gpu=False) == [ocr]
    put(cache, CLIP, "model.safetensors")
    clip = "'+reward.scorers.clipscore={weight: 0, during: validation, gpus: 0.1}'"
    assert offers([SIGN], gpu=True) == [ocr, clip]
    edits = [Prompt(0, "make it red", {"image": "cat.png"})]
    similarity = "'+reward.scorers.image_similarity={weight: 0, during: validation}'"
    assert offers(edits, gpu=False)[0] == similarity
    assert similarity not in offers([*edits, SIGN], gpu=False)


def test_neither_torch_nor_a_scorer_is_imported() -> None:
    code = (
        "import sys; from gerl.protocol import Prompt; from gerl.rewards.scorers.weights import offers; "
        "offers([Prompt(0, 'a sign that reads \"OPEN\"', {'tag': 'x', 'image': 'y'})], True); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    found = done.stdout.split()
    assert "huggingface_hub" in found
    assert not {"torch", "transformers", "reward_models.scorers.clip"} & set(found)
