"""`python -m gerl.export`: the library each format is for draws the images of the run with it; refused input."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
import zoo.text_to_image
import zoo.video
from peft import PeftModel
from safetensors.torch import load, load_file

from gerl.commandline.composition import Composed
from gerl.config import Config, ModelConfig, SamplingConfig
from gerl.export.command import main
from gerl.model.paths import WEIGHTS
from gerl.run.checkpoint import save_checkpoint
from gerl.utils.tensors import pack_tensors
from gerl.workers.worker import PolicyWorker

RANK, ALPHA = 3, 7.5  # not 1 by one another, so that a reader that forgets alpha is found out
MODEL = "diffusion_pytorch_model.safetensors"
SAME = {"rtol": 1e-5, "atol": 1e-5}  # images differ by up to 4; where alpha is folded into the weights, fp32 rounds


CASES = {
    **tiny.CASES,
    "sdxl": tiny.Case(zoo.text_to_image.sdxl, {}, {"guidance_scale": 1.0}, kernel="ddim"),
    "wan_2": tiny.Case(zoo.video.wan_2_2, {}, tiny.CASES["wan"].no_cfg, tiny.CASES["wan"].call),
}


@dataclass(frozen=True)
class Place:
    """A run with a checkpoint, its model, and the latents it draws with the weights of each kind."""

    name: str
    model: Path
    run: Path
    worker: PolicyWorker
    latents: dict[str, torch.Tensor]

    def stock(self, folder: Path | None = None) -> Any:
        """The base model, or the pipeline in `folder`, in plain diffusers."""
        pipe = diffusers.DiffusionPipeline.from_pretrained(folder or self.model)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def draw(self, pipe: Any) -> torch.Tensor:
        call = tiny.call_for(CASES[self.name], guided=False, steps=2) | {"prompt": tiny.PROMPTS[:2]}
        latents = tiny.output_of(pipe(**call, generator=tiny.generators(2)))
        assert isinstance(latents, torch.Tensor)
        return latents

    def export(self, out: Path, *arguments: str, expect: int = 0) -> Path:
        assert main([f"run={self.run}", f"out={out}", *arguments]) == expect
        return out


def checkpoint(worker: PolicyWorker, run: Path, step: int, val_reward: float | None = None) -> Path:
    tensors, numbers = worker.actor.state()
    state = {"step": step, "val_reward": val_reward, "worker": asdict(numbers)}
    return save_checkpoint(run / "checkpoints", step, {"state.safetensors": pack_tensors(tensors)}, state)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Place]:
    """The place of a pipeline of `CASES`, made once."""
    made: dict[str, Place] = {}

    def make(name: str, targets: str | None = None) -> Place:
        if name in made:
            return made[name]
        root = tmp_path_factory.mktemp(name)
        tiny.build(CASES[name]).save_pretrained(root / "model")
        model = ModelConfig(path=str(root / "model"), lora_rank=RANK, lora_alpha=ALPHA, lora_targets=targets)
        config = Config(model=model, sampling=SamplingConfig(kernel=CASES[name].kernel))
        worker = PolicyWorker(config, rank=0, device="cpu", threads=1, total_updates=1)
        worker.setup()
        policy = worker.policy
        torch.manual_seed(1)
        for parameter, p in policy.trained.items():
            p.data.normal_(0, 0.2)
            policy.ema.average[parameter].normal_(0, 0.2)
        checkpoint(worker, root / "run", 10)
        (root / "run" / "config.yaml").write_text(Composed(config, "plain", root / "run").yaml())
        found = Place(name, root / "model", root / "run", worker, {})
        found.latents["base"] = found.draw(found.stock())
        found.latents["raw"] = found.draw(policy.pipe)
        with policy.ema.swapped_in():
            found.latents["ema"] = found.draw(policy.pipe)
        assert (found.latents["raw"] - found.latents["ema"]).abs().max() > 0.1
        assert (found.latents["base"] - found.latents["ema"]).abs().max() > 0.1
        made[name] = found
        return found

    return make


# --- each format in the library it is for


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_diffusers(place: Callable[..., Place], weights: str, tmp_path: Path) -> None:
    sd3 = place("sd3")
    out = sd3.export(tmp_path / "out", f"weights={weights}")
    assert [path.name for path in out.iterdir()] == [WEIGHTS]
    pipe = sd3.stock()
    pipe.load_lora_weights(out)
    torch.testing.assert_close(sd3.draw(pipe), sd3.latents[weights], **SAME)


def test_the_averaged_weights_of_diffusers_are_the_lora_of_the_checkpoint(
    place: Callable[..., Place], tmp_path: Path
) -> None:
    sd3 = place("sd3")
    ours = load_file(sd3.export(tmp_path / "out") / WEIGHTS)
    theirs = load(sd3.worker.policy.lora_file())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", ["sd3", "sd15"])
def test_peft(place: Callable[..., Place], name: str, tmp_path: Path) -> None:
    case = place(name)
    denoiser = "unet" if name == "sd15" else "transformer"
    out = case.export(tmp_path / "out", "format=peft") / denoiser
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(case.model)
    pipe = case.stock()
    PeftModel.from_pretrained(getattr(pipe, denoiser), str(out))
    torch.testing.assert_close(case.draw(pipe), case.latents["ema"], **SAME)
    again = case.stock()
    getattr(again, denoiser).load_lora_adapter(out, prefix="base_model.model", use_safetensors=True)
    torch.testing.assert_close(case.draw(again), case.latents["ema"], **SAME)


@pytest.mark.parametrize(
    ("name", "targets"),
    # diffusers reads single blocks of FLUX only in the size of FLUX itself, see test_lora_formats.py
    [("flux", "^transformer_blocks"), ("qwen_image", None), ("wan", None), ("z_image", None), ("sd15", None),
     ("sdxl", None)],
)  # fmt: skip
def test_kohya_in_diffusers(place: Callable[..., Place], name: str, targets: str | None, tmp_path: Path) -> None:
    case = place(name, targets)
    out = case.export(tmp_path / "out", "format=kohya")
    (file,) = out.iterdir()
    assert file.stem.startswith(f"{case.run.name}_step"), "all LoRAs of ComfyUI are in one folder"
    names = load_file(file)
    assert {name.split(".", 1)[1] for name in names} == {"lora_down.weight", "lora_up.weight", "alpha"}
    assert all(name.startswith("lora_unet_") for name in names)
    pipe = case.stock()
    pipe.load_lora_weights(file)
    torch.testing.assert_close(case.draw(pipe), case.latents["ema"], **SAME)


@pytest.mark.parametrize("name", ["sd3", "sd15"])
def test_merged(place: Callable[..., Place], name: str, tmp_path: Path) -> None:
    case = place(name)
    out = case.export(tmp_path / "out", "format=merged")
    pipe = case.stock(out)
    torch.testing.assert_close(case.draw(pipe), case.latents["ema"], **SAME)
    base = case.stock()
    assert type(pipe) is type(base) and dict(pipe.scheduler.config) == dict(base.scheduler.config)
    assert all(torch.equal(v, base.vae.state_dict()[k]) for k, v in pipe.vae.state_dict().items())
    assert not any("lora" in name for name, _ in tiny.denoiser_of(pipe).named_parameters())


def test_merged_keeps_the_precision_of_each_component(place: Callable[..., Place], tmp_path: Path) -> None:
    sd3 = place("sd3")
    half = sd3.stock()
    half.transformer.to(torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    (tmp_path / "half/vae/diffusion_pytorch_model.fp16.safetensors").write_bytes(pack_tensors({"x": torch.ones(1)}))
    out = sd3.export(tmp_path / "out", "format=merged", f"model={tmp_path / 'half'}")
    exact = load_file(sd3.export(tmp_path / "exact", "format=merged") / "transformer" / MODEL)
    merged = load_file(out / "transformer" / MODEL)
    assert {t.dtype for t in merged.values()} == {torch.bfloat16}
    assert {t.dtype for t in load_file(out / "vae" / MODEL).values()} == {torch.float32}
    # rounding to bf16 once: within half a unit in the last place (2 ** -9) of each weight
    layer = "transformer_blocks.0.attn.to_q.weight"
    torch.testing.assert_close(merged[layer].float(), exact[layer], rtol=2**-7, atol=2e-3)


def test_two_denoisers(place: Callable[..., Place], tmp_path: Path) -> None:
    wan = place("wan_2")
    outs = {format: wan.export(tmp_path / format, f"format={format}") for format in ("diffusers", "peft", "kohya")}
    of_diffusers, of_peft, of_kohya = wan.stock(), wan.stock(), wan.stock()
    of_diffusers.load_lora_weights(outs["diffusers"])
    of_diffusers.transformer_2.load_lora_adapter(outs["diffusers"], prefix="transformer_2", use_safetensors=True)
    for name in ("transformer", "transformer_2"):
        PeftModel.from_pretrained(getattr(of_peft, name), str(outs["peft"] / name))
        (file,) = outs["kohya"].glob(f"*_{name}.safetensors")
        of_kohya.load_lora_weights(file, load_into_transformer_2=name == "transformer_2")
    merged = wan.stock(wan.export(tmp_path / "merged", "format=merged"))
    for pipe in (of_diffusers, of_peft, of_kohya, merged):
        torch.testing.assert_close(wan.draw(pipe), wan.latents["ema"], **SAME)
    first = wan.stock()
    first.load_lora_weights(outs["diffusers"])
    assert (wan.draw(first) - wan.latents["ema"]).abs().max() > 1e-3  # the second has its part in the images


# --- which checkpoint


@pytest.fixture
def run_of_three(place: Callable[..., Place], tmp_path: Path) -> Path:
    """A run with checkpoints of three steps, the second with the best held-out reward."""
    sd3, run = place("sd3"), tmp_path / "run"
    for step, reward in ((10, 0.5), (20, 0.9), (30, None)):
        checkpoint(sd3.worker, run, step, reward)
    (run / "config.yaml").write_bytes((sd3.run / "config.yaml").read_bytes())
    return run


def damage(run: Path, step: int) -> None:
    file = run / "checkpoints" / f"step_{step}" / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def test_the_best_checkpoint_is_taken_else_the_newest(
    run_of_three: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of_three
    caplog.set_level("INFO", logger="gerl")

    def exported(*arguments: str) -> str:
        caplog.clear()
        assert main([*arguments, f"out={tmp_path / 'out'}", "overwrite=true"]) == 0
        return caplog.text

    assert "step 20, the best: held-out reward 0.900" in exported(f"run={run}")
    assert "step 10, as requested" in exported(f"run={run}", "step=10")
    assert "step 30, as requested" in exported(f"run={run / 'checkpoints' / 'step_30'}")
    damage(run, 20)
    said = exported(f"run={run}")
    assert "step_20 is damaged" in said and "step 10, the best: held-out reward 0.500" in said
    damage(run, 10)
    assert "step 30, the latest" in exported(f"run={run}")


def test_a_checkpoint_that_cannot_be_used(
    run_of_three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = run_of_three, tmp_path / "out"

    def refused(*arguments: str) -> str:
        assert main([f"out={out}", *arguments]) in (1, 2) and not out.exists()
        return capsys.readouterr().err

    assert "step=15" in (said := refused(f"run={run}", "step=15")) and "10, 20, 30" in said
    assert "is the checkpoint of step 20" in refused(f"run={run / 'checkpoints' / 'step_20'}", "step=10")
    for step in (10, 20, 30):
        damage(run, step)
    assert "step_20 is damaged: state.safetensors has changed since it was written" in refused(f"run={run}", "step=20")
    assert "all its checkpoints are damaged, of step 10, 20, 30" in refused(f"run={run}")
    (run / "checkpoints" / "step_30" / "manifest.json").unlink()
    assert "step_30 is damaged: 'manifest.json' is missing" in refused(f"run={run / 'checkpoints' / 'step_30'}")
    assert "has no checkpoints: give a run folder" in refused(f"run={tmp_path}")
    assert "does not exist: give a run folder" in refused(f"run={tmp_path / 'nowhere'}")


# --- wrong input


def test_a_folder_with_files_is_left_alone(
    place: Callable[..., Place], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sd3, out = place("sd3"), tmp_path / "out"
    out.mkdir()
    for name in ("notes.txt", WEIGHTS):
        (out / name).write_text("mine")
    sd3.export(out, expect=2)
    assert "the folder is not empty; choose another, or add overwrite=true" in capsys.readouterr().err
    assert (out / WEIGHTS).read_text() == "mine"
    sd3.export(out, "overwrite=true")
    assert (out / "notes.txt").read_text() == "mine" and len(load_file(out / WEIGHTS)) > 1
    assert sorted(path.name for path in out.iterdir()) == ["notes.txt", WEIGHTS]
    before = {path: path.read_bytes() for path in sd3.model.rglob("*") if path.is_file()}
    for place_of_it, why in (
        (sd3.model, "it is inside the base model"),
        (sd3.run / "checkpoints" / "step_10" / "lora", "it is inside the checkpoint"),
        (out / WEIGHTS, "it is a file; give a folder"),
    ):
        sd3.export(place_of_it, "format=merged", "overwrite=true", expect=2)
        assert why in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in sd3.model.rglob("*") if path.is_file()}


def test_the_base_model_is_needed_only_where_it_is_read(
    place: Callable[..., Place], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sd3 = place("sd3")
    (run := tmp_path / "run").mkdir()
    (run / "checkpoints").symlink_to(sd3.run / "checkpoints")
    gone = (sd3.run / "config.yaml").read_text().replace(str(sd3.model), str(tmp_path / "gone"))
    (run / "config.yaml").write_text(gone)

    def refused(code: int, *arguments: str) -> str:
        assert main([f"run={run}", f"out={tmp_path / 'no'}", *arguments]) == code and not (tmp_path / "no").exists()
        return capsys.readouterr().err

    for format in ("diffusers", "peft"):
        assert main([f"run={run}", f"out={tmp_path / format}", f"format={format}"]) == 0
    for format in ("kohya", "merged"):
        said = refused(1, f"format={format}")
        assert "is not a pipeline: there is no folder" in said and "model=FOLDER" in said
        for other, why in (("wan", "the LoRA does not fit transformer of"), ("sd15", "has no transformer")):
            assert why in refused(1, f"format={format}", f"model={place(other).model}")
        assert main([f"run={run}", f"out={tmp_path / format}", f"format={format}", f"model={sd3.model}"]) == 0
    (run / "config.yaml").write_text("model: {}")
    assert "is not the configuration of a run (KeyError: 'path')" in refused(2)
    (run / "config.yaml").unlink()
    assert "config.yaml cannot be read (No such file or directory)" in refused(2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "run is missing: give run="),
        (["run=x"], "out is missing: give out="),
        (["run=x", "out=y", "zz=1"], "zz: the export has no such key; it has run, out, format"),
        (["run=x", "out=y", "format=onnx"], "format=onnx: choose diffusers or peft or kohya or merged"),
        (["run=x", "out=y", "step=last"], "step=last: it must be the number of a trainer step"),
    ],
)
def test_the_command_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
