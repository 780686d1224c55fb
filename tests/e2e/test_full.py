"""Training the weights themselves, over Ray with two ranks that divide them, and in one process."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, SD3Transformer2DModel
from drills import more
from PIL import Image

import gerl
from gerl.export.command import main as export
from gerl.model.shards import Shards
from gerl.rewards.total import TOTAL
from gerl.run.checkpoint import PARTS
from gerl.run.settings import read_config
from gerl.run.usage import usage
from gerl.run.validation import load_validations

# three of the six prompts always get the same reward, so that some ranks have nothing to train
DULL = """
import numpy as np

def compute_score(images, prompts, metadata):
    return [0.5 if len(p) < 6 else float(np.asarray(i).mean()) / 255 for i, p in zip(images, prompts)]
"""
# three micro-batches for two ranks, of which each draws two, and two optimizer steps; AdamW's epsilon keeps gradients
# that are rounding alone from moving a weight by the learning rate
KEYS = """
algorithm=flow_grpo algorithm.kl_coef=0.01 rollout.prompts_per_step=3 actor.updates_per_step=2 actor.micro_batch_size=3
actor.full_lr=0.003 actor.eps=1e-4 trainer.steps=3 checkpoint.every=1 checkpoint.keep=9
""".split()
RANKS = "cluster.launcher=ray model.shard=all cluster.num_workers=1 cluster.ranks_per_worker=2".split()


def tensors(run: Any, step: int) -> dict[str, torch.Tensor]:
    shards = Shards(run.checkpoint(step) / PARTS)
    return {name: shards.whole(name) for name in shards.shapes()}


def assert_close(run: Any, other: Any, step: int = 3) -> None:
    """The weights, their average and moments are equal up to rounding, and so is what was logged, but for the number
    of evaluations, which has the padding of ranks."""
    found, expected = tensors(run, step), tensors(other, step)
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-3, atol=2e-5), name
    for row, like in zip(run.untimed(), other.untimed(), strict=True):
        counts = {name: value for name, value in like.items() if name.startswith("evaluations/")}
        assert row | counts == pytest.approx(like, rel=1e-3, abs=1e-5)


@pytest.fixture(scope="module")
def fit(train: Callable[..., Any], workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    (workplace / "some_dull.py").write_text(DULL)

    def run(*overrides: str, of: Any = None, **more: Any) -> Any:
        """A run of three steps; `of`: the last of them again, from the checkpoint before it."""
        folder = tmp_path_factory.mktemp("full") / "run"
        if of is not None:
            shutil.copytree(of.folder, folder)
            shutil.rmtree(folder / "checkpoints" / "step_3")
            overrides = (*overrides, f"checkpoint.resume={folder}")
        keys = {"scorer": "some_dull.py", "validation__data": workplace / "val.txt", "model__train": "full"}
        return train(folder, *KEYS, *overrides, **keys | more)

    return run


@pytest.fixture(scope="module")
def alone(fit: Callable[..., Any]) -> Any:
    return fit()


@pytest.fixture(scope="module")
def divided(fit: Callable[..., Any]) -> Any:
    return fit(*RANKS)


def test_a_run_carries_on_exactly(alone: Any, fit: Callable[..., Any]) -> None:
    again = fit(of=alone)
    found, expected = tensors(again, 3), tensors(alone, 3)
    assert sorted(found) == sorted(expected) and all(torch.equal(found[name], expected[name]) for name in found)
    assert again.untimed() == alone.untimed()


@more
def test_two_ranks_train_as_one_process(alone: Any, divided: Any) -> None:
    assert len(list((divided.checkpoint(3) / PARTS).iterdir())) == 2
    assert_close(divided, alone)
    first, last = tensors(alone, 1), tensors(alone, 3)
    weights = [name for name in first if name.startswith("weights/") and "norm" not in name]
    assert all((first[name] != last[name]).any() for name in weights)
    assert max(alone.column("actor/grad_norm")) > 0 and max(alone.column("actor/kl")) > 0


def test_one_process_carries_on_what_two_ranks_began(divided: Any, fit: Callable[..., Any]) -> None:
    assert_close(fit("cluster.launcher=local", "model.shard=none", "cluster.ranks_per_worker=1", of=divided), divided)


@more
def test_two_ranks_that_keep_gathered_weights_train_the_same(divided: Any, fit: Callable[..., Any]) -> None:
    kept = fit(*RANKS, "model.reshard=false", of=divided)
    found, expected = tensors(kept, 3), tensors(divided, 3)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert kept.untimed() == divided.untimed()


@more
def test_two_ranks_resume_what_one_process_began(alone: Any, fit: Callable[..., Any]) -> None:
    assert_close(fit(*RANKS, of=alone), alone)


def test_a_checkpoint_has_the_averaged_denoiser_as_diffusers_reads_it(divided: Any) -> None:
    model, saved = SD3Transformer2DModel.from_pretrained(divided.checkpoint(3) / "transformer"), tensors(divided, 3)
    trained = {name: p for name, p in model.named_parameters() if f"ema/transformer.{name}" in saved}
    assert len(trained) == len(list(model.parameters()))
    assert all(torch.equal(p, saved[f"ema/transformer.{name}"]) for name, p in trained.items())
    assert not (divided.checkpoint(3) / ".frozen").exists()


@pytest.fixture(scope="module")
def partly(fit: Callable[..., Any]) -> Any:
    """A run in half precision that trains some of the weights."""
    return fit(model__train="attn.to_q", model__dtype="bfloat16")


def test_some_weights_in_half_precision(partly: Any, model: Path) -> None:
    """They are trained in fp32; what is saved computes as the run did, and has the base model's other weights."""
    saved, base = tensors(partly, 3), SD3Transformer2DModel.from_pretrained(model / "transformer")
    trained = {name.removeprefix("weights/transformer.") for name in saved if name.startswith("weights/")}
    assert len(trained) == 2 * len(base.transformer_blocks) and all("attn.to_" in name for name in trained)
    stored = SD3Transformer2DModel.from_pretrained(partly.checkpoint(3) / "transformer", dtype="auto").state_dict()
    for name, before in base.state_dict().items():
        value = saved[f"ema/transformer.{name}"] if name in trained else before
        assert torch.equal(stored[name], value.bfloat16()), name
        assert (name in trained) == bool((value != before).any())
        assert value.dtype == torch.float32
    assert max(partly.column("actor/ratio_deviation")) < 1e-2


def test_cast_weights_that_are_kept_are_those_of_the_checkpoint(partly: Any, fit: Callable[..., Any]) -> None:
    kept = fit("model.reshard=false", of=partly, model__train="attn.to_q", model__dtype="bfloat16")
    found, expected = tensors(kept, 3), tensors(partly, 3)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert kept.untimed() == partly.untimed()


@pytest.mark.parametrize("kind", ["alone", "partly"])
def test_an_evaluation_draws_as_the_run(kind: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(kind)
    last = load_validations(run.folder)[-1]
    found = gerl.evaluate(lora=run.checkpoint(last.step), trust=True, overrides=["logger.progress=false"])  # type: ignore[operator]
    by_variant = {row.variant: [r.values[TOTAL] for r in found.rows if r.variant == row.variant] for row in found.rows}
    base, trained = by_variant["base"], by_variant[f"step_{last.step}"]
    assert trained == last.rewards and trained != base
    if kind == "alone":  # the base comes back after the others
        assert base == load_validations(run.folder)[0].rewards


def test_the_report_loads_the_model_in_plain_diffusers(
    alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = load_validations(alone.folder)[-1]
    code = usage(alone.folder, read_config(alone.folder / "config.yaml")[1], load_validations(alone.folder))
    assert code is not None and "load_lora" not in code
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    drawn = torch.tensor(list(Image.open("picture.png").tobytes()))
    assert (drawn - torch.tensor(last.pixels[0]).flatten()).abs().max() <= 1


def test_the_denoiser_or_a_lora_of_a_rank_is_exported(alone: Any, model: Path, tmp_path: Path) -> None:
    def written(name: str, *keys: str) -> Path:
        out = tmp_path / name
        assert export([f"run={alone.checkpoint(3)}", f"out={out}", *keys]) == 0
        return out

    saved = tensors(alone, 3)
    for kind, out in (("ema", written("a")), ("weights", written("b", "weights=raw"))):
        denoiser = SD3Transformer2DModel.from_pretrained(out / "transformer")
        assert all(torch.equal(p, saved[f"{kind}/transformer.{name}"]) for name, p in denoiser.named_parameters())
    pipe = DiffusionPipeline.from_pretrained(written("c", "format=merged"))
    assert all(torch.equal(p, saved[f"ema/transformer.{n}"]) for n, p in pipe.transformer.named_parameters())

    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.transformer.requires_grad_(False)
    before = {n: p.clone() for n, p in pipe.transformer.named_parameters()}
    off: dict[int, float] = {}
    for rank in (2, 256):  # the second one is more than any layer has
        pipe.load_lora_weights(written(f"rank{rank}", f"rank={rank}"))
        pipe.fuse_lora()
        pipe.unload_lora_weights()
        linear = [n for n, m in pipe.transformer.named_modules() if isinstance(m, torch.nn.Linear)]
        now = dict(pipe.transformer.named_parameters())
        off[rank] = sum(float((now[f"{n}.weight"] - saved[f"ema/transformer.{n}.weight"]).norm() ** 2) for n in linear)
        pipe.transformer.load_state_dict(before, strict=False)
    change = sum(float((before[f"{n}.weight"] - saved[f"ema/transformer.{n}.weight"]).norm() ** 2) for n in linear)
    assert off[256] < 1e-8 * change + 1e-10 < off[2] < change
    assert export([f"run={alone.checkpoint(3)}", f"out={tmp_path / 'p'}", "format=peft"]) == 2
