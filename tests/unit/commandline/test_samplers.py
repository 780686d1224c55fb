"""`auto` becomes what the scheduler of the model allows, read from its files before the model is loaded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_server import serving
from huggingface_hub import constants

from gerl.commandline.composition import Composed, compose_changes, compose_run
from gerl.config.roles import role_config
from gerl.config.user_files import only_typed
from gerl.errors import ConfigError
from gerl.objects import offered

LIBRARIES = ("torch", "diffusers", "transformers")
COMPOSE = f"""
import sys
from gerl.commandline.composition import compose_run
for path in sys.argv[1:]:
    composed = compose_run(["algorithm=awm_fast", f"model.path={{path}}", "sampling.kernel=auto"])
    print(composed.sampler)
assert not {{*{LIBRARIES}}} & {{*sys.modules}}
"""


def saved(folder: Path, scheduler: str, pipeline: str = "StableDiffusionPipeline", **settings: Any) -> Path:
    """The files of a pipeline that say what its scheduler is."""
    (folder / "scheduler").mkdir(parents=True)
    index = {"_class_name": pipeline, "scheduler": ["diffusers", scheduler]}
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": scheduler} | settings))
    return folder


def composed(*overrides: str | Path) -> Composed:
    return compose_run([f"model.path={o}" if isinstance(o, Path) else o for o in overrides])


def chosen(*overrides: str | Path) -> tuple[str, str, str]:
    sampling = composed(*overrides).config.sampling
    return sampling.kernel, sampling.solver, sampling.sigmas


def test_presets_take_the_sampler_that_the_scheduler_allows(tmp_path: Path) -> None:
    ddim = saved(tmp_path / "ddim", "EulerDiscreteScheduler", _class_name="Another")  # the index counts
    flow = saved(tmp_path / "flow", "UniPCMultistepScheduler", "WanPipeline", prediction_type="flow_prediction")
    assert chosen("model.path=signs", "algorithm=awm_fast") == ("ode", "dpm2", "linear")
    assert chosen(ddim, "algorithm=awm_fast") == ("ode", "euler", "scheduler")
    assert chosen(flow, "algorithm=awm_fast") == ("ode", "dpm2", "scheduler")
    assert chosen(ddim, "algorithm=flow_grpo") == chosen(ddim, "algorithm=dance_grpo") == ("ddim", "euler", "scheduler")
    assert chosen(flow, "algorithm=dance_grpo") == ("dance_sde", "euler", "scheduler")
    assert chosen(ddim, "~sampling.kernel", "algorithm=flow_grpo") == ("ddim", "euler", "scheduler")
    assert chosen(ddim, "~sampling", "algorithm=flow_grpo") == chosen(ddim, "sampling.kernel=auto")
    part = f"model.parts={{scheduler: {saved(tmp_path / 'lcm', 'LCMScheduler')}}}"
    assert chosen(ddim, part, "algorithm=flow_grpo") == ("cps", "euler", "scheduler")
    alone = f"model.parts={{scheduler: {tmp_path / 'lcm' / 'scheduler'}}}"
    assert chosen(ddim, alone, "algorithm=flow_grpo") == ("cps", "euler", "scheduler")


def test_the_choice_is_said_and_written(tmp_path: Path) -> None:
    ddim = saved(tmp_path / "ddim", "DDIMScheduler")
    run = composed(ddim, "algorithm=awm_fast")
    assert run.sampler == "sampling.solver=euler, sigmas=scheduler (auto: DDIMScheduler)"
    written = yaml.safe_load(run.yaml())
    assert written["sampling"]["solver"] == "euler" and "auto" not in json.dumps(written["sampling"])
    assert composed(ddim, "algorithm=awm_fast", "sampling.solver=euler", "sampling.sigmas=scheduler").sampler == ""
    unknown = saved(tmp_path / "unknown", "OfTheirOwn")
    assert "flow matching, since OfTheirOwn is not known" in composed(unknown, "algorithm=flow_grpo").sampler
    again = compose_changes(written, ["trainer.steps=3"])  # resumed
    assert again.sampling == run.config.sampling
    assert compose_changes(written, ["sampling.kernel=auto"]).sampling.kernel == "ddim"


def test_what_does_not_fit_is_refused_with_all_reasons(tmp_path: Path) -> None:
    ddim = saved(tmp_path / "ddim", "DDIMScheduler", thresholding=False)
    with pytest.raises(ConfigError, match=r"DDIMScheduler.*kernel=flow_sde.*ddim or ode; sampling\.solver=dpm2.*euler"):
        composed(ddim, "sampling.kernel=flow_sde", "sampling.solver=dpm2")
    with pytest.raises(ConfigError, match=r"DDIMScheduler.*solver=dpm2.*euler; sampling\.compression=0\.4.*use 1"):
        composed(ddim, "algorithm=mix_grpo_flash")
    with pytest.raises(ConfigError, match=r"DDIMScheduler.*leapalign leaps.*draft"):
        composed(ddim, "algorithm=leapalign")
    clipped = saved(tmp_path / "clipped", "DDIMScheduler", thresholding=True)
    with pytest.raises(ConfigError, match=r"DDIMScheduler.*thresholding to false"):
        composed(clipped, "algorithm=awm_fast")
    flow_map = saved(tmp_path / "map", "FlowMapEulerDiscreteScheduler")
    with pytest.raises(ConfigError, match=r"flow map.*learns from noised images.*neighbor_grpo"):
        composed(flow_map, "algorithm=awm_fast")
    with pytest.raises(ConfigError, match=r"kernel=flow_sde.*use ode; flow_grpo needs steps with noise.*neighbor_grpo"):
        composed(flow_map, "algorithm=flow_grpo")
    assert chosen(flow_map, "algorithm=neighbor_grpo") == ("ode", "euler", "scheduler")


def test_a_role_with_its_own_model_has_its_own_sampler(tmp_path: Path) -> None:
    ddim, lcm = saved(tmp_path / "ddim", "DDIMScheduler"), saved(tmp_path / "lcm", "LCMScheduler")
    turns = "episode.turns=[{role: draw}, {role: edit}]"

    def kernels(role: str) -> tuple[str, str]:
        config = composed(ddim, "algorithm=flow_grpo", turns, f"episode.roles={{edit: {role}}}").config
        return config.sampling.kernel, role_config(config, "edit").sampling.kernel

    assert kernels("{pipeline: StableDiffusionImg2ImgPipeline}") == ("ddim", "ddim")
    assert kernels(f"{{model.path: {lcm}}}") == kernels(f"{{model: {{path: {lcm}}}}}") == ("ddim", "cps")
    assert kernels(f"{{model.path: {lcm}, sampling.noise_level: 1}}") == ("ddim", "cps")
    with pytest.raises(ConfigError, match=r"LCMScheduler.*kernel=ddim is not for it"):
        kernels(f"{{model.path: {lcm}, sampling.kernel: ddim}}")


def test_a_pipeline_in_memory_counts(tmp_path: Path) -> None:
    import tiny

    with offered({}, {str(tmp_path): tiny.sd15()}):
        assert chosen(tmp_path, "algorithm=flow_grpo") == ("ddim", "euler", "scheduler")


def test_a_model_of_the_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    recorded = composed("experiment=sdxl_pickscore")  # gerl knows the scheduler
    assert recorded.config.sampling.solver == "euler" and "EulerDiscreteScheduler" in recorded.sampler
    unknown = composed("model.path=nobody/offline", "algorithm=flow_grpo")  # of which no other test asks
    assert unknown.config.sampling.kernel == "flow_sde"
    assert "cannot be read: model.path='nobody/offline'" in unknown.sampler and "HF_HUB_OFFLINE" in unknown.sampler
    with only_typed(()):  # the configuration of somebody else's run: the Hub is not asked
        unasked = composed("model.path=nobody/other", "algorithm=flow_grpo")
    assert unasked.config.sampling.kernel == "flow_sde" and "HF_HUB_OFFLINE" not in unasked.sampler


def test_files_are_read_from_the_hub_and_its_cache_without_libraries_of_models(tmp_path: Path) -> None:
    saved(tmp_path / "hub" / "owner" / "xl", "EulerDiscreteScheduler", "StableDiffusionXLPipeline")
    local = saved(tmp_path / "local", "FlowMatchEulerDiscreteScheduler", "FluxPipeline")

    def lines(*paths: str | Path) -> list[str]:
        command = [sys.executable, "-c", COMPOSE, *map(str, paths)]
        done = subprocess.run(command, env=hub.environment(tmp_path / "home"), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    with serving(tmp_path / "hub") as hub:
        first = lines(local, "owner/xl", "owner/none")
        asked = len(hub.requests)
        assert lines("owner/xl") == [first[1]] and len(hub.requests) == asked  # from the cache
    assert first[0] == "sampling.kernel=flow_sde, solver=dpm2, sigmas=linear (auto: FlowMatchEulerDiscreteScheduler)"
    assert first[1] == "sampling.kernel=ddim, solver=euler, sigmas=scheduler (auto: EulerDiscreteScheduler)"
    assert "model.path='owner/none'" in first[2] and "no such model" in first[2]
    assert sorted(file.name for file in (tmp_path / "home").rglob("snapshots/*/**/*.json")) == [
        "model_index.json",
        "scheduler_config.json",
    ]
