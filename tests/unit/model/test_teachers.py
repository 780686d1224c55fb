"""Teachers as they are loaded: LoRAs in every layout beside the trained one, pipelines, and what is refused."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from gerl.config import Config, ModelConfig, SamplingConfig, algorithm_config
from gerl.config.algorithms import Teacher
from gerl.errors import ModelError
from gerl.export.base import Base
from gerl.export.files import lora_files, write_files
from gerl.model.loading import check_teachers, load_policy, load_teachers
from gerl.model.lora import ADAPTER, adapted_layers, find_targets
from gerl.model.lora_files import Lora
from gerl.model.policy import Policy
from gerl.workers.setup import load_worker_policy


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny.sd3().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan")
    tiny.wan().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same LoRA in three layouts; on layers that the student has, and on one that it has not."""
    torch.manual_seed(1)
    denoiser = tiny.sd3().transformer
    targets = [*find_targets(denoiser, None)[:5], "norm_out.linear"]
    sizes = {layer: denoiser.get_parameter(f"{layer}.weight").shape for layer in targets}
    lora = Lora({layer: (0.2 * torch.randn(3, n), 0.2 * torch.randn(m, 3)) for layer, (m, n) in sizes.items()}, 7.5)
    found = {}
    for layout in ("diffusers", "peft", "kohya"):
        found[layout] = tmp_path_factory.mktemp(layout)
        write_files(lora_files(layout, {"transformer": lora}, Base(str(base), 7.5)), found[layout])
    return found


def policy_of(base: Path, *teachers: Teacher, **keys: Any) -> Policy:
    model = ModelConfig(path=str(base), lora_rank=4, lora_alpha=4.0, **keys)
    policy = load_policy(model, 0.9, "cpu", 0, teachers=teachers)
    load_teachers(policy, model, "cpu", None)
    return policy


def draw(policy: Policy) -> torch.Tensor:
    call = tiny.call_for(tiny.CASES["sd3"], guided=False, steps=2) | {"prompt": tiny.PROMPTS[:2]}
    found = tiny.output_of(policy.pipe(**call, generator=tiny.generators(2)))
    assert isinstance(found, torch.Tensor)
    return found


def test_every_layout_teaches_the_same(base: Path, folders: dict[str, Path]) -> None:
    alone = policy_of(base)
    policy = policy_of(base, *(Teacher(lora=str(folder), data_source=name) for name, folder in folders.items()))
    assert policy.fingerprint == alone.fingerprint  # or a run could not be carried on with another teacher
    assert list(policy.trained) == list(alone.trained) and policy.lora_file() == alone.lora_file()
    assert torch.equal(draw(policy), draw(alone))
    drawn = []
    for number in range(3):
        with policy.teacher(number):
            drawn.append(draw(policy))
    assert all(torch.allclose(drawn[0], other, atol=1e-5) for other in drawn)
    started = policy_of(base, lora=str(folders["diffusers"]), merge_lora=True)
    torch.testing.assert_close(drawn[0], draw(started), atol=1e-4, rtol=1e-3)  # as that LoRA says
    assert not torch.allclose(drawn[0], draw(policy), atol=1e-3)


def test_a_lora_that_teaches_twice_is_there_once(base: Path, folders: dict[str, Path]) -> None:
    source = str(folders["peft"])
    policy = policy_of(base, Teacher(lora=source), Teacher(lora=source, data_source="a", guidance=2.0))
    assert {t.adapter for t in policy.teachers} == {"teacher_0"}
    assert {name for layer in adapted_layers(policy.denoisers.values()) for name in layer.lora_A} == {
        ADAPTER,
        "teacher_0",
    }


def test_a_pipeline_teaches_with_the_students_noise_levels(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tiny.sd3(layers=1)
    other.scheduler = tiny.euler(shift=5.0)
    other.save_pretrained(tmp_path)
    c = Config(
        model=ModelConfig(path=str(base), lora_rank=4),
        algorithm=algorithm_config("opd", teachers=[{"path": str(tmp_path)}, {"data_source": "a", "guidance": 2}]),
    )
    with caplog.at_level(logging.INFO, logger="gerl"):
        policy = load_worker_policy(c, "cpu", None)
    assert f"teacher: {tmp_path}" in caplog.text
    assert "teacher: the base model, guidance_scale=2.0 for prompts of a" in caplog.text
    (pipe, none) = (t.pipe for t in policy.teachers)
    assert pipe is not None and none is None and len(pipe.transformer.transformer_blocks) == 1
    assert pipe.scheduler.config.shift == 3.0 and pipe.scheduler is not policy.pipe.scheduler
    assert not any(p.requires_grad for p in pipe.transformer.parameters())
    with policy.teacher(0) as found:
        assert found is pipe
    with policy.teacher(1) as found:
        assert found is policy.pipe
    whole = replace(c, model=replace(c.model, train="full", dtype="float32"))
    assert [t.pipe is None for t in load_worker_policy(whole, "cpu", None).teachers] == [False, True]


def test_what_cannot_teach_is_found_before_weights_are_loaded(
    base: Path, wan: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    narrow = tmp_path / "narrow"
    denoiser = tiny.wan().transformer
    size = denoiser.get_parameter("blocks.0.attn1.to_q.weight").shape
    lora = Lora({"blocks.0.attn1.to_q": (torch.randn(2, size[1]), torch.randn(size[0], 2))}, 2.0)
    write_files(lora_files("diffusers", {"transformer": lora}, Base(str(wan), 2.0)), narrow)
    shutil.copytree(base, tmp_path / "run" / "checkpoints")
    cases = {
        "lora='nowhere'.*no file or folder": Teacher(lora="nowhere"),
        r"lora='.*narrow'.* no linear layer blocks\.0\.attn1\.to_q": Teacher(lora=str(narrow)),
        "lora='.*run'.*is a run: use one of its checkpoints": Teacher(lora=str(tmp_path / "run")),
        "lora='.*' is a pipeline, not a LoRA: use it as path": Teacher(lora=str(base)),
        "path='nowhere'.*not a pipeline": Teacher(path="nowhere"),
        "path='.*' is a WanPipeline, and the student a StableDiffusion3Pipeline": Teacher(path=str(wan)),
        "true_cfg_scale": Teacher(call={"true_cfg_scale": 4.0}),
    }
    model = ModelConfig(path=str(base))
    for pattern, teacher in cases.items():
        with pytest.raises(ModelError, match=rf"^algorithm\.teachers: .*{pattern}") as caught:
            check_teachers([teacher], model, SamplingConfig())
        assert "model.lora" not in str(caught.value) and "model.path" not in str(caught.value)
    good = [Teacher(lora=str(folders["kohya"])), Teacher(path=str(base), guidance=3.0), Teacher(guidance=2.0)]
    check_teachers(good, model, SamplingConfig())


def test_a_pipeline_that_predicts_something_else_is_refused(tmp_path: Path) -> None:
    pipe = tiny.sd15()
    pipe.save_pretrained(tmp_path / "student")
    shutil.copytree(tmp_path / "student", tmp_path / "other")
    file = tmp_path / "other" / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"prediction_type": "v_prediction"}))
    with pytest.raises(ModelError, match=r"prediction_type=v_prediction.*the student's has epsilon"):
        policy_of(tmp_path / "student", Teacher(path=str(tmp_path / "other")))
