"""`python -m gerl.export format=hub` and `push=`: the folder, and what a stand-in for the hub receives of it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
import yaml
from drills import more
from hub_server import TOKEN, Server, serving
from PIL import Image
from safetensors import safe_open

from gerl.export.base import Base
from gerl.export.card import base_model, signals_at, without_paths
from gerl.export.command import main

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "README.md", "pytorch_lora_weights.safetensors", "comfyui/mine.safetensors", "comfyui/workflow.json",
    "pictures/before.png", "pictures/after.png", "pictures/reward.png",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(train: Callable[..., Any], workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of two steps that was validated before and after, with a rate that changes the pictures."""
    keys = {"validation__data": workplace / "val.txt", "validation__every": 1, "actor__lr": 0.05}
    keys |= {"reward__trial": "false", "checkpoint__every": 1}
    return train(tmp_path_factory.mktemp("hub") / "run", **keys)


@pytest.fixture(scope="module")
def folder(finished: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "mine"
    assert main([f"run={finished.folder}", f"out={out}", "format=hub", "step=2"]) == 0
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_card_names_the_signals_of_its_step(tmp_path: Path) -> None:
    row = {"step": 4, "signal": "watched", "column": "ocr", "text": "ocr fell from 0.5 to 0.2 | a, most for 'x'; stop"}
    rows = [row, row | {"step": 2}, row | {"signal": "advice", "text": "with algorithm.kl_coef=1"}]
    (tmp_path / "guard.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert signals_at(tmp_path, 4) == ["ocr fell from 0.5 to 0.2 \\| a"] and signals_at(tmp_path, 3) == []


def test_the_lora_of_the_folder_draws_what_the_run_drew(finished: Any, folder: Path, model: Path) -> None:
    assert set(contents(folder)) == FILES
    call = {"prompt": "a red fox", "height": 16, "width": 16, "num_inference_steps": 2, "max_sequence_length": 8}
    call |= {"output_type": "pt", "guidance_scale": 1.0}
    drawn = []
    for lora in (None, folder, finished.checkpoint(2) / "lora"):
        pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(model)
        pipe.set_progress_bar_config(disable=True)
        if lora is not None:
            pipe.load_lora_weights(lora)
        drawn.append(tiny.output_of(pipe(**call, generator=torch.Generator().manual_seed(1))))
    base, exported, own = drawn
    torch.testing.assert_close(exported, own, rtol=0, atol=0)
    assert (exported - base).abs().max() > 1e-3


def test_headers_say_what_it_is(folder: Path, model: Path) -> None:
    for name in ("pytorch_lora_weights.safetensors", "comfyui/mine.safetensors"):
        with safe_open(folder / name, "pt") as file:
            header = file.metadata()
        assert header["base_model"] == model.name and header["run"] == "run" and header["steps"] == "2"
        assert json.loads(header["reward"]) == {"bright": 1.0} and header["trigger_words"] == "none"
        assert header["algorithm"] == "flow_grpo" and header["weights"] == "ema" and header["gerl_version"]


def test_the_card_has_the_numbers_of_the_run_and_no_paths(finished: Any, folder: Path) -> None:
    text = (folder / "README.md").read_text()
    header = yaml.safe_load(text.split("---\n")[1])
    assert header["library_name"] == "diffusers" and header["pipeline_tag"] == "text-to-image"
    assert {"lora", "gerl", "reward:bright"} <= set(header["tags"])
    assert "base_model" not in header and "license" not in header and "was not found" in text
    first, last = (json.loads((finished.folder / f"validation/step_{n:06d}.json").read_text()) for n in (0, 2))
    before, after = (sum(v["rewards"]) / len(v["rewards"]) for v in (first, last))
    gain = sum(b - a for a, b in zip(first["rewards"], last["rewards"], strict=True)) / len(first["rewards"])
    assert f"| reward | {before:.3f} | {after:.3f} | {gain:+.3f} ± " in text
    assert "Only bright was optimised" in text and "`actor.lr` | `0.05`" in text and "2 steps" in text
    assert str(finished.folder.parent) not in text and os.sep + "tmp" not in text and str(Path.home()) + "/" not in text
    for name in ("before", "after", "reward"):
        assert f"(pictures/{name}.png)" in text
        with Image.open(folder / "pictures" / f"{name}.png") as picture:
            assert picture.size[0] > 100
    assert contents(folder)["pictures/before.png"] != contents(folder)["pictures/after.png"]
    graph = json.loads((folder / "comfyui/workflow.json").read_text())
    assert graph["lora"]["inputs"]["lora_name"] == "mine.safetensors" and graph["sampler"]["inputs"]["steps"] == 4
    assert "```python\n" in text and "load_lora_weights('mine')" in text


def test_a_step_without_a_validation_has_no_numbers(finished: Any, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(finished.folder, copy)
    (copy / "validation/step_000002.json").unlink()
    assert main([f"run={copy}", f"out={tmp_path / 'out'}", "format=hub", "step=2"]) == 0
    text = (tmp_path / "out/README.md").read_text()
    assert "no validation at step 2" in text and not (tmp_path / "out/pictures/after.png").exists()


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        (
            {"license": "other", "license_name": "my-terms", "license_link": "https://terms"},
            "`my-terms` (https://terms)",
        ),
        ({"license": "mit"}, "under `mit`."),
    ],
)
def test_the_licence_of_a_base_that_says_it(
    finished: Any, model: Path, tmp_path: Path, fields: dict[str, str], shown: str
) -> None:
    import shutil

    base = tmp_path / "base"
    shutil.copytree(model, base)
    (base / "README.md").write_text(f"---\n{yaml.safe_dump(fields)}---\nIt.\n")
    assert main([f"run={finished.folder}", f"out={tmp_path / 'out'}", "format=hub", f"model={base}"]) == 0
    text = (tmp_path / "out/README.md").read_text()
    header = yaml.safe_load(text.split("---\n")[1])
    assert fields.items() <= header.items() and shown in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/prompts.txt", "prompts.txt"),
        ("hf:/home/me/set[train]", "hf:set[train]"),
        ("['/a/b.txt', 'c/d']", "['b.txt', 'c/d']"),
        ("owner/name and https://host/a/b", "owner/name and https://host/a/b"),
        ("~/x/y.py", "y.py"),
    ],
)
def test_paths_of_this_machine_are_not_shown(text: str, shown: str) -> None:
    assert without_paths(text) == shown


# --- the upload


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "hub").mkdir()
    with serving(tmp_path / "hub") as server:
        yield server


def push(hub: Server, home: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code of the real command, and what it says."""
    command = [sys.executable, "-m", "gerl.export", *arguments]
    own = hub.environment(
        home, **{"HF_TOKEN": TOKEN, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment}
    )
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_parts_of_the_base_are_said_without_folders(model: Path) -> None:
    parts = {"text_encoder_3": None, "vae": "/home/someone/vae", "transformer": "owner/name"}
    shown = base_model(Base(str(model), 1.0, parts=parts)).shown
    assert "text_encoder_3 left out" in shown and "owner/name" in shown and "someone" not in shown


def test_the_hub_receives_the_folder(finished: Any, folder: Path, hub: Server, tmp_path: Path) -> None:
    given = f"run={finished.folder}", "push=owner/mine", "step=2"
    code, said = push(hub, tmp_path, *given, "private=true", f"out={tmp_path / 'mine'}")
    assert code == 0 and hub.address("owner/mine") in said, said
    received = contents(hub.root / "owner/mine")
    assert received == contents(tmp_path / "mine") and set(received) == FILES and hub.private == {"owner/mine"}
    own = contents(folder)
    assert all(received[name] == own[name] for name in FILES - {"README.md"})
    assert "load_lora_weights('owner/mine')" in received["README.md"].decode()

    code, said = push(hub, tmp_path, *given)
    assert code == 2 and "owner/mine: it already exists and has 7 files" in said and "overwrite=true" in said
    (hub.root / "owner/mine/README.md").write_text("old")
    code, said = push(hub, tmp_path, *given, "overwrite=true")
    assert code == 0 and contents(hub.root / "owner/mine") == received, said


@more
def test_what_keeps_an_upload_from_working_is_said_before_anything_is_made(
    finished: Any, hub: Server, tmp_path: Path
) -> None:
    given, out = [f"run={finished.folder}", "step=2"], f"out={tmp_path / 'out'}"
    wrong = [
        (["push=owner/mine"], {"HF_TOKEN": ""}, "hf auth login"),
        (["push=owner/mine"], {"HF_TOKEN": "hf_other"}, "rejects the token"),
        (["push=owner/mine"], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        (["push=owner/mine"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached"),
    ]
    for arguments, environment, message in wrong:
        code, said = push(hub, tmp_path / "home", *given, out, *arguments, **environment)
        assert code == 2 and said.startswith("error: push=owner/mine: ") and message in said, said
        assert said.count("\n") == 1 and not (tmp_path / "out").exists()
    code, said = push(hub, tmp_path / "home", *given, out, "push=other/mine")
    assert code == 1 and "denies write access" in said.splitlines()[-1]
    assert set(contents(tmp_path / "out")) == FILES  # what was made stays
    (hub.root / "owner/open").mkdir(parents=True)
    code, said = push(hub, tmp_path / "home", *given, "push=owner/open", "private=true")
    assert code == 2 and "public" in said
