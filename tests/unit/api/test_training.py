"""Where a pipeline in memory lies as files."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
import yaml
from diffusers.models.attention_processor import AttnProcessor
from huggingface_hub import constants
from peft import LoraConfig, inject_adapter_in_model

from gerl.api.training import nested, path_of, plain, scorers_of, write_experiment, write_prompts
from gerl.commandline.composition import compose_run
from gerl.errors import ConfigError, DataError, ModelError
from gerl.model.denoisers import check_offered
from gerl.utils.versions import DTYPE


def read(folder: Path) -> Any:
    return diffusers.DiffusionPipeline.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    tiny.sd3(layers=1).save_pretrained(str(folder))
    return folder


def test_one_that_was_built_is_saved(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    assert path_of(tiny.sd3(layers=1), saved) == str(saved)
    assert type(read(saved)) is diffusers.StableDiffusion3Pipeline


def test_one_that_was_read_is_named(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = read(stored)
    assert path_of(pipe, tmp_path / "other") == str(stored)
    pipe("a", height=16, width=16, num_inference_steps=1, max_sequence_length=8)  # tokenizers keep how they padded
    assert path_of(pipe, tmp_path / "other") == str(stored)
    half = diffusers.DiffusionPipeline.from_pretrained(str(stored), **{DTYPE: torch.bfloat16})
    assert path_of(half, tmp_path / "other") == str(stored), "the weights in the precision in which they were read"
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    assert path_of(pipe, tmp_path / "other") == str(stored), "a LoRA is no part of the base model"

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = tmp_path / "cache" / "models--me--tiny" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(stored)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    pipe.register_to_config(_name_or_path="me/tiny")
    assert path_of(pipe, tmp_path / "other") == "me/tiny" and not (tmp_path / "other").exists()


def other_weights(pipe: Any) -> None:
    with torch.no_grad():
        pipe.transformer.transformer_blocks[0].attn.to_q.weight[3, 5] += 1


def fused_lora(pipe: Any) -> None:
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    pipe.fuse_lora()
    pipe.unload_lora_weights()


def other_vae(pipe: Any) -> None:
    pipe.vae.register_to_config(scaling_factor=2.0)


def other_scheduler(pipe: Any) -> None:
    pipe.scheduler = diffusers.FlowMatchHeunDiscreteScheduler.from_config(pipe.scheduler.config)


def more_tokens(pipe: Any) -> None:
    pipe.tokenizer.add_tokens("<style>")
    pipe.text_encoder.resize_token_embeddings(len(pipe.tokenizer))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (other_weights, {"transformer"}),
        (fused_lora, {"transformer"}),
        (other_vae, {"vae"}),
        (other_scheduler, {"scheduler"}),
        (more_tokens, {"text_encoder", "tokenizer"}),
    ],
)
def test_one_that_was_changed_is_written(
    stored: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Any], None], parts: set[str]
) -> None:
    """Not replaced by the name that it once had: what follows the run would mean another model."""
    pipe, saved = read(stored), tmp_path / "saved"
    change(pipe)
    with caplog.at_level(logging.INFO):
        assert path_of(pipe, saved) == str(saved)
    assert all(part in caplog.text for part in parts) and str(saved) in caplog.text
    assert {path.name for path in saved.iterdir() if path.is_dir() and not path.is_symlink()} == parts
    found = read(saved)
    call = {"height": 16, "width": 16, "num_inference_steps": 2, "max_sequence_length": 8, "output_type": "np"}
    if change is not other_scheduler:  # whose draw is its own
        images = [p("a <style>", generator=torch.Generator().manual_seed(0), **call).images for p in (pipe, found)]
        assert abs(images[0] - images[1]).max() < 1e-5  # weights at other addresses are rounded otherwise
    assert type(found.scheduler) is type(pipe.scheduler)


def test_one_with_adapters_that_was_changed_is_refused(stored: Path, tmp_path: Path) -> None:
    pipe = read(stored)
    other_weights(pipe)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    with pytest.raises(ModelError, match=r"unload_lora_weights\(\)"):
        path_of(pipe, tmp_path / "saved")


@pytest.fixture(scope="module")
def stored_unet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unet")
    tiny.sd15().save_pretrained(str(folder))
    return folder


CALL = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "np"}
TEXT = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)


def fused_text_encoder(pipe: Any) -> None:
    pipe.text_encoder.add_adapter(TEXT)
    pipe.fuse_lora(components=["text_encoder"])


def doubled(module: torch.nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args, **keys: 2 * forward(*args, **keys)  # type: ignore[method-assign]


class OwnLinear(torch.nn.Linear):
    """A class of the calling program, as of token merging."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class OwnProcessor(AttnProcessor):
    """An attention processor of the calling program."""

    def __call__(self, *args: Any, **keys: Any) -> Any:
        return 2 * super().__call__(*args, **keys)


def first_linear(pipe: Any) -> torch.nn.Module:
    return next(m for m in pipe.unet.modules() if type(m) is torch.nn.Linear)  # type: ignore[no-any-return]


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "text-encoder LoRA": ("refused", lambda pipe: pipe.text_encoder.add_adapter(TEXT)),
    "VAE adapter": (
        "refused",
        lambda pipe: inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_q"]), pipe.vae),
    ),
    "fused text-encoder LoRA": ("kept", fused_text_encoder),
    "scaling factor": ("kept", lambda pipe: pipe.vae.register_to_config(scaling_factor=2.0)),
    "setting of the pipeline": (
        "kept",
        lambda pipe: pipe.register_to_config(requires_safety_checker=not pipe.config.requires_safety_checker),
    ),
    "FreeU": ("said", lambda pipe: pipe.enable_freeu(0.9, 0.2, 1.2, 1.4)),
    "AttnProcessor": ("nothing", lambda pipe: pipe.unet.set_attn_processor(AttnProcessor())),
    "OwnProcessor": ("said", lambda pipe: pipe.unet.set_attn_processor(OwnProcessor())),
    "layerwise_casting": (
        "said",
        lambda pipe: pipe.unet.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32),
    ),
    "forward": ("said", lambda pipe: doubled(pipe.vae.decoder)),
    "OwnLinear": ("said", lambda pipe: setattr(first_linear(pipe), "__class__", OwnLinear)),
    "forward hooks": ("said", lambda pipe: pipe.text_encoder.register_forward_hook(lambda *_: None)),
    "text_encoder of": (
        "said",
        lambda pipe: getattr(pipe.text_encoder, "text_model", pipe.text_encoder).encoder.layers.pop(-1),
    ),
    "scheduler of": ("said", lambda pipe: setattr(pipe.scheduler, "alphas_cumprod", pipe.scheduler.alphas_cumprod**2)),
    "attention slicing": ("nothing", lambda pipe: pipe.enable_attention_slicing()),
    "tiling": ("nothing", lambda pipe: pipe.vae.enable_tiling()),
    "checkpointing": ("nothing", lambda pipe: pipe.unet.enable_gradient_checkpointing()),
    "model offload": ("nothing", lambda pipe: pipe.unet.enable_group_offload("cpu", torch.device("cpu"), "leaf_level")),
}


def test_what_changes_a_pipeline_is_kept_refused_or_said(
    stored_unet: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What files do not hold: images of the pipeline and of the files that its run would name are equal, or it said."""
    wrong = []
    for i, (name, (expected, change)) in enumerate(CHANGES.items()):
        pipe = read(stored_unet)
        change(pipe)
        caplog.clear()
        try:
            check_offered(pipe)
            folder = Path(path_of(pipe, tmp_path / str(i)))
        except ModelError as error:
            outcome = "refused" if "fuse_lora(components" in str(error) else str(error)
        else:
            images = [p("a", generator=torch.Generator().manual_seed(0), **CALL).images for p in (pipe, read(folder))]
            same, said = (
                abs(images[0] - images[1]).max() < 1e-4,
                [r for r in caplog.records if r.levelname == "WARNING"],
            )
            outcome = "said" if said and name in caplog.text else "kept" if folder != stored_unet else "nothing"
            outcome = outcome if outcome == "said" or same else "silently other images"
        wrong += [] if outcome == expected else [f"{name}: {outcome}, not {expected}"]
    assert not wrong


def test_a_shift_outside_the_configuration_is_said(
    stored: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = read(stored)
    pipe.scheduler.set_shift(5.0)
    path_of(pipe, tmp_path / "saved")
    assert "scheduler of the pipeline in memory cannot be written" in caplog.text


def test_what_is_no_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a diffusers pipeline"):
        path_of("signs", tmp_path / "saved")  # type: ignore[arg-type]


def bright(images: list[object]) -> list[float]:
    return [0.0 for _ in images]


def test_keys_with_dots_and_blocks_are_the_same() -> None:
    dotted = nested({"sampling.height": 32, "sampling.call": {"a": (1, 2)}, "actor.lr": 1e-3})
    assert dotted == nested({"sampling": {"height": 32, "call": {"a": [1, 2]}}, "actor": {"lr": 1e-3}})
    assert nested({"sampling.call.a": 1, "sampling": {"call": {"b": 2}}})["sampling"]["call"] == {"a": 1, "b": 2}
    assert plain({"path": Path("x"), "none": None}) == {"path": "x", "none": None}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sampling": 3}, r"sampling=3: .*block"),
        ({"samplng.height": 3}, r"samplng\.height: there is no such key"),
        ({"sampling.height": object()}, "numbers, strings, lists and dictionaries"),
    ],
)
def test_wrong_keys_are_sentences(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        nested(given)


def test_rewards_by_function_name_file_and_keys() -> None:
    one = scorers_of(bright)
    assert one.keys == {"bright": {"path": "python:bright"}} and one.functions == {"bright": bright}
    assert scorers_of(lambda images: []).keys == {"my_reward": {"path": "python:my_reward"}}
    assert scorers_of("ocr").keys == {"ocr": {}} and scorers_of("my reward.py").keys == {
        "my_reward": {"path": "my reward.py"}
    }
    several = scorers_of({"b": bright, "ocr": 0.5, "c": {"function": bright, "weight": 0.0}, "f": "f.py", "hpsv2": {}})
    assert several.keys == {
        "b": {"path": "python:b"},
        "ocr": {"weight": 0.5},
        "c": {"weight": 0.0, "path": "python:c"},
        "f": {"path": "f.py"},
        "hpsv2": {},
    }
    assert set(several.functions) == {"b", "c"}
    assert scorers_of({"b": bright, "ocr": None}).keys == {"b": {"path": "python:b"}, "ocr": None}


@pytest.mark.parametrize("given", [3, {"a": [1]}, {"a b": bright}, {"a": "ocr"}, {"a": True}])
def test_what_is_no_reward_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"^reward: "):
        scorers_of(given)  # type: ignore[arg-type]


def test_prompts_are_written_as_rows(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    assert write_prompts(["a „b“", {"prompt": "c", "text": "d"}], file) == str(file)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"prompt": "a „b“"},
        {"prompt": "c", "text": "d"},
    ]
    assert write_prompts("mine.txt", file) == "mine.txt"
    for wrong in ([], [3], 3, [{"prompt": "a", "x": object()}], [("a", "b")]):
        with pytest.raises(DataError):
            write_prompts(wrong, file)  # type: ignore[arg-type]


def test_the_experiment_file_composes_what_was_asked_for(tmp_path: Path) -> None:
    values = nested({"sampling.height": 32, "data.train": "signs_train", "validation.data": None})
    file = write_experiment(tmp_path, "mine", "plain", "flow_grpo_fast", values)
    composed = compose_run([f"experiment={file}"])
    assert (composed.config.sampling.height, composed.preset) == (32, "flow_grpo_fast")
    assert composed.config.validation.data is None and yaml.safe_load(file.read_text())["sampling"] == {"height": 32}
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    mine = write_experiment(folder, "python", str(file), None, {"trainer": {"steps": 3}})
    config = compose_run([f"experiment={mine}"]).config
    assert (config.sampling.height, config.trainer.steps, config.algorithm.name) == (32, 3, "flow_grpo_fast")
    for wrong, said in (("sings", "'signs'"), (folder / "pyton.yaml", r"python\.yaml")):
        with pytest.raises(ConfigError, match=f"^experiment=.*{said}"):
            write_experiment(tmp_path, "other", wrong, None, {})
    again = write_experiment(tmp_path, "other", "sd15_aesthetic", None, {"trainer": {"steps": 3}})
    config = compose_run([f"experiment={again}"]).config
    assert (config.trainer.steps, list(config.reward.scorers)) == (3, ["aesthetic"])
