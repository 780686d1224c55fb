"""A pipeline and a denoiser that diffusers does not have, loaded from a folder with their code."""

import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
from diffusers.utils import dynamic_modules_utils
from huggingface_hub import constants
from replaying import Recorded, gradients, randomise, rolled_out
from safetensors.torch import save_file

from gerl.config import ModelConfig, SamplingConfig
from gerl.config.user_files import only_typed
from gerl.errors import ModelError, TrustError
from gerl.export.base import Base
from gerl.export.files import merged_pipeline
from gerl.model.loading import check_code, load_pipeline, load_policy, read_pipeline
from gerl.model.lora_files import load_lora
from gerl.model.paths import WEIGHTS
from gerl.model.prompts import pipeline_call

MODEL = '''
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config


class Mixer(torch.nn.Module):
    """Has no word of attention in its name."""

    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


class MyTransformer(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, width=12, depth=2):
        super().__init__()
        self.time_embedding = torch.nn.Linear(1, width)
        self.layers = torch.nn.ModuleList([Mixer(width) for _ in range(depth)])

    def forward(self, x, t, text):
        x = x + self.time_embedding(t[:, None]) + text
        for layer in self.layers:
            x = layer(x)
        return x
'''
PIPELINE = """
import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor


class MyPipeline(DiffusionPipeline):
    def __init__(self, transformer, scheduler):
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)

    def encode_prompt(self, prompt):
        return torch.tensor([[float(len(p))] for p in prompt], device=self.device) / 10

    @torch.no_grad()
    def __call__(self, prompt, num_inference_steps=4, generator=None, output_type="np"):
        text = self.encode_prompt(prompt)
        latents = randn_tensor((len(prompt), 12), generator=generator, device=self.device)
        self.scheduler.set_timesteps(num_inference_steps, device=self.device)
        for t in self.scheduler.timesteps:
            velocity = self.transformer(latents, t.expand(len(prompt)) / 1000, text)
            latents = self.scheduler.step(velocity, t, latents, return_dict=False)[0]
        images = latents.unflatten(1, (2, 2, 3)).sigmoid().cpu().numpy()
        return ImagePipelineOutput(images=images)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of such a pipeline; what diffusers copies and imports of it is forgotten after the test."""
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "mine"
    (path / "transformer").mkdir(parents=True)
    (path / "my_pipeline.py").write_text(PIPELINE)
    (path / "transformer" / "my_transformer.py").write_text(MODEL)
    (path / "transformer" / "config.json").write_text(json.dumps({"_class_name": "MyTransformer", "width": 12}))
    namespace: dict[str, Any] = {"__name__": "my_transformer"}
    exec(MODEL, namespace)
    torch.manual_seed(0)
    weights = namespace["MyTransformer"]().state_dict()
    save_file(weights, path / "transformer" / "diffusion_pytorch_model.safetensors")
    tiny.euler(shift=2.0).save_pretrained(path / "scheduler")
    index = {
        "_class_name": ["my_pipeline", "MyPipeline"],
        "_diffusers_version": diffusers.__version__,
        "transformer": ["my_transformer", "MyTransformer"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    (path / "model_index.json").write_text(json.dumps(index))
    yield path
    for name in [name for name in sys.modules if name.startswith(("diffusers_modules", "my_"))]:
        del sys.modules[name]


def test_the_page_shows_this_pipeline() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    assert f"```python{PIPELINE}```" in page


def test_it_is_trained_and_exported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gerl"):
        policy = load_policy(ModelConfig(path=str(folder), lora_rank=2), 0.0, "cpu", 0)
    assert caplog.messages[0].endswith("/mine': running the code in my_pipeline.py, transformer/my_transformer.py")
    assert caplog.messages[-1].endswith("cannot read a LoRA of transformer: use load_lora(pipe, Path(FOLDER))")
    assert type(policy.pipe).__name__ == "MyPipeline" and list(policy.denoisers) == ["transformer"]
    layers = {name.split(".lora_")[0] for name in policy.trained}
    assert layers == {f"transformer.layers.{i}.{part}" for i in (0, 1) for part in ("inner", "outer")}
    randomise(policy.trained.values(), 0.3)

    call = pipeline_call(policy.pipe, SamplingConfig(num_inference_steps=4), tiny.PROMPTS)
    r = rolled_out(Recorded(policy.pipe, list(policy.trained.values()), call, "flow_sde"))
    assert r.output.shape == (4, 2, 2, 3)
    grads, deviation, seen = gradients(r)
    assert (deviation, seen) == (0.0, [0, 1, 2]) and all(g.any() for g in grads)

    policy.ema.update()
    (folder / WEIGHTS).write_bytes(policy.lora_file())
    stock = read_pipeline(str(folder), torch.float32)
    images = [pipe(**call, generator=tiny.generators()).images for pipe in (policy.pipe, stock)]
    assert abs(images[0] - images[1]).max() > 1e-3
    load_lora(stock, folder)
    assert (stock(**call, generator=tiny.generators()).images == images[0]).all()


def test_checkpointing_that_it_cannot_do_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.gradient_checkpointing=true: MyTransformer "):
        load_policy(ModelConfig(path=str(folder), gradient_checkpointing=True), 0.0, "cpu", 0)


def test_code_that_is_not_trusted_does_not_run(folder: Path) -> None:
    (folder / "my_pipeline.py").write_text("raise AssertionError\n")
    digest = hashlib.sha256((folder / "my_pipeline.py").read_bytes()).hexdigest()
    loads: list[Callable[[], object]] = [
        lambda: read_pipeline(str(folder), torch.float32),
        lambda: check_code(str(folder), {}),
        lambda: merged_pipeline({}, Base(str(folder), 1.0)),
    ]
    for load in loads:
        with only_typed(()), pytest.raises(TrustError, match=rf"{digest}.*trust=true") as error:
            load()
        assert "transformer/my_transformer.py" in str(error.value)
    with only_typed({str(folder)}):
        check_code(str(folder), {})


def test_no_other_module_is_imported(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unasked.py").write_text("raise AssertionError('it was run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    index = json.loads((folder / "model_index.json").read_text()) | {"_class_name": "SanaPipeline"}
    (folder / "model_index.json").write_text(json.dumps(index | {"transformer": ["unasked", "MyTransformer"]}))
    loads: list[Callable[[], object]] = [
        lambda: read_pipeline(str(folder), torch.float32),
        lambda: merged_pipeline({}, Base(str(folder), 1.0)),
    ]
    for load in loads:
        with pytest.raises(ModelError, match=r"transformer is of the module unasked.* transformer/unasked\.py is miss"):
            load()


def test_missing_code_is_named(folder: Path) -> None:
    (folder / "my_pipeline.py").unlink()
    with pytest.raises(ModelError, match=r"my_pipeline\.py.* missing"):
        load_pipeline(ModelConfig(path=str(folder)), "cpu")


def test_a_pipeline_without_scheduler_is_refused(folder: Path) -> None:
    for file in ("my_pipeline.py", "model_index.json"):
        (folder / file).write_text((folder / file).read_text().replace("scheduler", "sampler"))
    (folder / "scheduler").rename(folder / "sampler")
    with pytest.raises(ModelError, match="MyPipeline has no component 'scheduler'"):
        load_pipeline(ModelConfig(path=str(folder)), "cpu")


@pytest.mark.parametrize("part", ["pipeline", "component"])
def test_no_code_from_the_hub_is_run(folder: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = folder.parent / "hub"
    snapshot = cache / "models--owner--name" / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (cache / "models--owner--name" / "refs").mkdir()
    (cache / "models--owner--name" / "refs" / "main").write_text("0" * 40)
    if part == "component":
        index = json.loads((snapshot / "model_index.json").read_text())
        (snapshot / "model_index.json").write_text(json.dumps(index | {"_class_name": "SanaPipeline"}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"model\.path='owner/name' contains custom code, .* --local-dir FOLDER"):
        load_pipeline(ModelConfig(path="owner/name"), "cpu")
