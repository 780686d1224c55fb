"""Loading a pipeline from a folder and preparing it for training."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
from safetensors.torch import load
from zoo import text_to_image

from gerl.config import ModelConfig, SamplingConfig
from gerl.engine import record
from gerl.errors import ConfigError, ModelError, VersionError
from gerl.model import loading
from gerl.model.denoisers import find_denoisers
from gerl.model.loading import leave_out_safety_checker, load_pipeline, load_policy, prepare, weights_fingerprint
from gerl.model.prompts import pipeline_call
from gerl.utils import versions
from gerl.utils.versions import has

Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Folders of tiny pipelines, as `save_pretrained` writes them; SD 1.5 with PNDM, as it is shipped."""
    made: Folders = {}
    for name in ("sd3", "sd15"):
        pipe = tiny.build(tiny.CASES[name])
        if name == "sd15":
            pipe.scheduler = diffusers.PNDMScheduler(
                beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, skip_prk_steps=True, steps_offset=1
            )
        made[name] = tmp_path_factory.mktemp(name)
        pipe.save_pretrained(made[name])
    return made


def modules(pipe: Any) -> dict[str, torch.nn.Module]:
    return {name: c for name, c in pipe.components.items() if isinstance(c, torch.nn.Module)}


def loaded(path: Path | str, **config: Any) -> Any:
    return load_pipeline(ModelConfig(path=str(path), **config), "cpu")


# --- load_pipeline


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_a_pipeline_is_loaded_frozen_and_in_eval_mode(folders: Folders, dtype: str, expected: torch.dtype) -> None:
    pipe = loaded(folders["sd3"], dtype=dtype)
    assert type(pipe) is diffusers.StableDiffusion3Pipeline
    assert set(modules(pipe)) == {"transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"}
    for module in modules(pipe).values():
        assert not module.training and not any(m.training for m in module.modules())
        assert not any(p.requires_grad for p in module.parameters())
    assert pipe.transformer.dtype == pipe.vae.dtype == expected
    assert isinstance(pipe.scheduler, diffusers.FlowMatchEulerDiscreteScheduler) and pipe.scheduler.config.shift == 3.0


def test_the_loaded_pipeline_draws_what_the_saved_one_draws(folders: Folders) -> None:
    saved = tiny.build(tiny.CASES["sd3"])
    call = tiny.call_for(tiny.CASES["sd3"], True)
    images = [tiny.output_of(pipe(**call, generator=tiny.generators())) for pipe in (saved, loaded(folders["sd3"]))]
    assert torch.equal(*images)


def test_pndm_becomes_ddim_of_the_same_noise_schedule(folders: Folders, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gerl"):
        pipe = loaded(folders["sd15"])
    assert "replaced PNDMScheduler by DDIMScheduler" in caplog.text
    assert type(pipe.scheduler) is diffusers.DDIMScheduler
    stock = diffusers.DiffusionPipeline.from_pretrained(folders["sd15"]).scheduler
    assert type(stock) is diffusers.PNDMScheduler
    assert torch.equal(pipe.scheduler.alphas_cumprod, stock.alphas_cumprod)
    assert pipe.scheduler.config.steps_offset == 1
    # DDIM's default would clip the predicted latents to [-1, 1], which PNDM does not
    assert pipe.scheduler.config.clip_sample is False


# --- what is no pipeline


WEIGHTS, INDEX = "unet/diffusion_pytorch_model.safetensors", "model_index.json"
DAMAGE: dict[str, Callable[[Path], object]] = {
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "cut weights": lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:1000]),
    "no component": lambda folder: shutil.rmtree(folder / "vae"),
    "unknown class": lambda folder: (folder / INDEX).write_text(
        json.dumps(json.loads((folder / INDEX).read_text()) | {"_class_name": "NoSuchPipeline"})
    ),
    "no json": lambda folder: (folder / INDEX).write_text("{"),
    "empty json": lambda folder: (folder / INDEX).write_text("{}"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_pipeline_is_named(folders: Folders, tmp_path: Path, how: str) -> None:
    shutil.copytree(folders["sd15"], tmp_path / "copy")
    DAMAGE[how](tmp_path / "copy")
    with pytest.raises(ModelError, match=r"model\.path='.*copy' cannot be loaded as a diffusers pipeline: .") as caught:
        loaded(tmp_path / "copy")
    assert "\n" not in str(caught.value)


# --- find_denoisers


class Parts(diffusers.DiffusionPipeline):
    def __init__(self, first: Any, second: Any, controlnet: Any, vae: Any) -> None:
        super().__init__()
        self.register_modules(first=first, second=second, controlnet=controlnet, vae=vae)


def test_a_denoiser_is_a_model_with_blocks_that_is_called_with_a_timestep() -> None:
    for name in ("flux", "qwen_image", "z_image", "wan"):
        assert list(find_denoisers(tiny.build(tiny.CASES[name]))) == ["transformer"]
    pipe = tiny.build(tiny.CASES["wan"])
    pipe.register_modules(transformer_2=tiny.wan().transformer)  # Wan 2.2
    assert list(find_denoisers(pipe)) == ["transformer", "transformer_2"]
    sd15, adapter = tiny.sd15(), diffusers.MotionAdapter(block_out_channels=(32,), motion_norm_num_groups=4)
    controlnet = diffusers.ControlNetModel.from_unet(sd15.unet)
    assert list(find_denoisers(Parts(sd15.unet, tiny.sd3().transformer, controlnet, sd15.vae))) == ["first", "second"]
    with pytest.raises(
        ModelError, match=r"Parts has no denoiser: none of its components .*first.* is a diffusers model"
    ):
        find_denoisers(Parts(adapter, None, controlnet, sd15.vae))


# --- load_policy


def policy(folders: Folders, name: str = "sd3", seed: int = 0, **config: Any) -> loading.Policy:
    return load_policy(ModelConfig(path=str(folders[name]), lora_rank=2, lora_alpha=3.0, **config), 0.9, "cpu", seed)


def test_the_lora_depends_on_the_seed_and_nothing_else(folders: Folders) -> None:
    torch.manual_seed(1)
    first = policy(folders, seed=5)
    again = policy(folders, seed=5)
    torch.manual_seed(2)
    third, other = policy(folders, seed=5), policy(folders, seed=6)
    assert list(first.trained) == list(again.trained) == list(other.trained)
    for name, p in first.trained.items():
        assert name.startswith("transformer.") and p.dtype == torch.float32 and p.requires_grad
        assert torch.equal(p, again.trained[name]) and torch.equal(p, third.trained[name])
        assert torch.equal(p, other.trained[name]) == ("lora_B" in name)  # B is zero, A is drawn
        assert (p == 0).all() == ("lora_B" in name)


def test_a_policy_trains_the_lora_only(folders: Folders) -> None:
    p = policy(folders, dtype="bfloat16")
    trained = {f"transformer.{name}" for name, q in p.pipe.transformer.named_parameters() if q.requires_grad}
    assert trained == set(p.trained) and p.denoisers == {"transformer": p.pipe.transformer}
    assert {q.dtype for q in p.trained.values()} == {torch.float32} and p.pipe.transformer.dtype == torch.bfloat16
    assert p.version == 0 and p.ema.decay == 0.9 and set(p.ema.average) == set(p.trained)
    others = [q for name, module in modules(p.pipe).items() if name != "transformer" for q in module.parameters()]
    assert not any(q.requires_grad for q in others)
    assert policy(folders, "sd15").denoisers.keys() == {"unet"}


def test_targets_by_regular_expression(folders: Folders) -> None:
    p = policy(folders, lora_targets=r"attn\.to_q$")
    layers = {name.split(".lora_")[0] for name in p.trained}
    assert layers == {f"transformer.transformer_blocks.{i}.attn.to_q" for i in (0, 1)}
    with pytest.raises(ConfigError, match=r"model\.lora_targets='\(unclosed' is not a valid regular expression"):
        policy(folders, lora_targets="(unclosed")
    with pytest.raises(ModelError, match=r"model\.lora_targets='no_such_layer' .*36 .*names"):
        loading.check_model(ModelConfig(path=str(folders["sd3"]), lora_targets="no_such_layer"), SamplingConfig())


def compiled(model: torch.nn.Module) -> bool:
    return any(part._compiled_call_impl is not None for part in model.modules())


def test_checkpointing_and_compilation_are_switched_on(folders: Folders) -> None:
    plain = policy(folders, "sd15")
    assert not plain.pipe.unet.is_gradient_checkpointing and not compiled(plain.pipe.unet)
    p = policy(folders, "sd15", gradient_checkpointing=True, compile="eager")
    assert p.pipe.unet.is_gradient_checkpointing and compiled(p.pipe.unet)


def test_the_exported_lora_is_the_average(folders: Folders) -> None:
    p = policy(folders)
    at_first = load(p.lora_file())
    assert len(at_first) == len(p.trained)
    for q in p.trained.values():
        q.data.add_(1.0)
    trained = {name: q.detach().clone() for name, q in p.trained.items()}
    unchanged = load(p.lora_file())
    assert all(torch.equal(value, at_first[name]) for name, value in unchanged.items())
    p.ema.update()  # the first update takes 0.9 of the weights
    averaged = load(p.lora_file())
    assert averaged.keys() == at_first.keys()
    for name, value in averaged.items():
        torch.testing.assert_close(value, at_first[name] + 0.9)
    assert all(torch.equal(q, trained[name]) for name, q in p.trained.items())


# --- calls and fingerprints


def test_pipeline_call(folders: Folders) -> None:
    pipe = loaded(folders["sd3"])
    sampling = SamplingConfig(
        height=16, width=24, num_inference_steps=4, guidance_scale=2.0, call={"max_sequence_length": 8}
    )
    call = pipeline_call(pipe, sampling, ["a", "b"])
    assert call == {
        "prompt": ["a", "b"], "height": 16, "width": 24, "num_inference_steps": 4, "guidance_scale": 2.0,
        "max_sequence_length": 8, "output_type": "np",
    }  # fmt: skip
    assert pipeline_call(pipe, SamplingConfig(), ["a"]).keys() == {"prompt", "num_inference_steps", "output_type"}
    changed = pipeline_call(pipe, sampling, ["a"], num_inference_steps=7, guidance_scale=None)
    assert (changed["num_inference_steps"], changed["guidance_scale"]) == (7, 2.0)
    assert pipe(**call).images.shape == (2, 16, 24, 3)


@pytest.mark.parametrize("key", ["max_sequnce_length", "true_cfg_scale"])
def test_arguments_that_the_pipeline_does_not_take(folders: Folders, key: str) -> None:
    pipe = loaded(folders["sd3"])
    with pytest.raises(ModelError, match=f"StableDiffusion3Pipeline takes no argument '{key}'"):
        pipeline_call(pipe, SamplingConfig(call={key: 3}), ["a"])


def test_the_fingerprint_is_that_of_the_base_weights(folders: Folders) -> None:
    p = policy(folders)
    first = weights_fingerprint(p.denoisers)
    assert weights_fingerprint(policy(folders, seed=9).denoisers) == first
    for q in p.trained.values():
        q.data.add_(1.0)
    assert weights_fingerprint(p.denoisers) == first
    bias = p.pipe.transformer.proj_out.bias
    bias.data[0] += 1e-3
    changed = weights_fingerprint(p.denoisers)
    bias.data[0] = float("nan")
    assert len({first, changed, weights_fingerprint(p.denoisers)}) == 3
    assert weights_fingerprint(policy(folders, "sd15").denoisers) != first


def test_a_safety_checker_is_kept_where_the_pipeline_does_not_draw_without(caplog: pytest.LogCaptureFixture) -> None:
    pipe = text_to_image.cosmos2()
    with caplog.at_level("INFO", "gerl"):
        leave_out_safety_checker(pipe)
    assert pipe.safety_checker is not None
    assert "kept the safety checker, which Cosmos2TextToImagePipeline requires" in caplog.text


def test_a_pipeline_that_takes_no_prompt_says_of_what_it_is_made() -> None:
    parts = {name: part for name, part in tiny.flux().components.items() if part is not None}
    pipe = diffusers.VisualClozePipeline(**parts)
    made_of = r"generation_pipe \(VisualClozeGenerationPipeline\), upsampling_pipe \(FluxFillPipeline\)"
    with pytest.raises(ModelError, match=rf"VisualClozePipeline takes no argument 'prompt'.* {made_of}"):
        pipeline_call(pipe, SamplingConfig(), ["a sign"])
    with pytest.raises(
        ModelError, match=r"generation_pipe, upsampling_pipe: train one of these, .*pipe\.generation_pipe"
    ):
        record(pipe, {"prompt": ["a sign"]})


@pytest.mark.parametrize(
    ("case", "feature"), [("qwen_image", "QwenImagePipeline"), ("wan", "WanPipeline without the package ftfy")]
)
def test_what_an_older_diffusers_cannot_compute_is_refused(
    case: str, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tiny.build(tiny.CASES[case])
    monkeypatch.setattr(versions, "version", lambda package: "0.36.0")
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    has.cache_clear()
    try:
        with pytest.raises(
            VersionError, match=rf"^{feature} needs diffusers 0\.37 or newer, and 0\.36\.0 is installed"
        ):
            prepare(pipe, half=False)
    finally:
        has.cache_clear()
