"""A dumped step is trained on again, bit for bit as in the run."""

import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from drills import more
from safetensors.torch import load_file, save_file

from gerl.errors import ConfigError, ModelError, TrainingError
from gerl.run.dump import DumpError, dumped_steps, read_dump
from gerl.trainer.replay import Comparison, Request, run
from gerl.trainer.replay import main as replay_main

Train = Callable[..., Any]
EASY = "trainer.dump=1 actor.lr=0.01 checkpoint.every=1 checkpoint.keep=9 reward.trial=false logger.live=false".split()
TREE = "rollout.n=2 algorithm.branch_factor=2"
RAY = "cluster.launcher=ray cluster.num_workers=2"
KL = "algorithm.kl_coef=0.04 actor.updates_per_step=2"
TENSORS = {"scorer": "bright_tensors.py"}
CASES = {
    "flow_grpo": f"{KL} actor.micro_batch_size=2",
    "awm_fast": "",
    "diffusion_nft": "actor.epochs=2",
    "tree_grpo": TREE,
    "branch_grpo": "rollout.n=2 algorithm.split_steps=[0,1]",
    "dgpo": "rollout.micro_batch_size=2 sampling.window_range=[0,3]",
    "draft": "rollout.n=1 rollout.prompts_per_step=4",
}
# what changes credit, reference or sampling policy of a step
KEYS = {
    "the KL is a part of the reward": "algorithm=flow_grpo algorithm.kl_coef=0.04 algorithm.kl_in_reward=true",
    "a moving reference": f"algorithm=flow_grpo {KL} algorithm.kl_reset_every=1",
    "doubted samples": f"algorithm=flow_grpo {KL} algorithm.kl_share=0.3 +reward.scorers.sharpness.weight=0",
    "further prompts": "algorithm=flow_grpo algorithm.dynamic_sampling=1",
    "values of a critic": "algorithm=flow_ppo critic.warmup_steps=1",
    "rewards of earlier steps": "algorithm=flow_grpo algorithm.history=2",
    "steps sampled ahead": f"algorithm=flow_grpo {KL} trainer.staleness=1",
    "guidance": "algorithm=flow_grpo sampling.guidance_scale=4.5 algorithm.cfg=detach_uncond",
    "half precision": f"algorithm=flow_grpo {KL} model.dtype=bfloat16 actor.max_ratio_deviation=0.1",
    "full fine-tuning": f"algorithm=flow_grpo {KL} model.train=full",
    "sharded half precision": f"algorithm=flow_grpo {KL} model.train=full model.dtype=bfloat16",
}


def replayed(folder: Path, tolerance: str | None = "0") -> list[Comparison]:
    return [run(Request(dump=path, tolerance=tolerance, trust=True)) for path in dumped_steps(folder).values()]


def assert_exact(folder: Path, steps: int = 2) -> None:
    found = replayed(folder)
    assert [c.step for c in found] == list(range(1, steps + 1)) and all(c.exact for c in found)
    assert all(c.weights and not c.environment for c in found)
    assert all(n.run for c in found for n in c.numbers if n.name in ("actor/grad_norm", "credit"))


@pytest.mark.parametrize("name", [n if n in ("flow_grpo", "tree_grpo") else pytest.param(n, marks=more) for n in CASES])
def test_a_replayed_step_is_that_of_the_run(name: str, train: Train, tmp_path: Path) -> None:
    keys: dict[str, Any] = TENSORS if name == "draft" else {}
    run = train(tmp_path / "run", f"algorithm={name}", *EASY, *CASES[name].split(), **keys)
    assert_exact(run.folder)
    dumps = [read_dump(path) for path in dumped_steps(run.folder).values()]
    rows = [row for row in run.metrics if row["step"]]
    for dump, row in zip(dumps, rows, strict=True):
        assert {k: v for k, v in row.items() if k.startswith(("actor/", "reward/", "group/"))} == dump.record.metrics
        gradient = dump.tensor("gradient")
        assert float(gradient.norm()) == pytest.approx(row["actor/grad_norm"], rel=1e-6)
        steps = [name for name in row if name.startswith("actor/step_grad_norm/")]
        assert steps or name == "draft"
    state = run.state(1)
    assert all(torch.equal(state[n], t) for n, t in dumps[1].group("state/").items())


@pytest.mark.parametrize("case", [k if k.startswith(("full", "steps")) else pytest.param(k, marks=more) for k in KEYS])
def test_what_a_step_depends_on_is_dumped(case: str, train: Train, tmp_path: Path) -> None:
    assert_exact(train(tmp_path / "run", *EASY, *KEYS[case].split()).folder)


def test_a_run_with_dumps_is_the_run_without_and_a_resumed_one_dumps_the_same_bytes(
    train: Train, tmp_path: Path
) -> None:
    keys = ["algorithm=flow_grpo", *EASY, *KL.split()]
    whole = train(tmp_path / "whole", *keys, "trainer.steps=3")
    without = train(tmp_path / "without", *keys, "trainer.steps=3", "trainer.dump=0")
    whole.assert_same(without, 3)
    assert not (without.folder / "dumps").exists()
    stopped = Path(shutil.copytree(whole.folder, tmp_path / "stopped"))
    for path in (stopped / "dumps").glob("step_[23].*"):
        path.unlink()
    resumed = train(stopped, *keys, f"checkpoint.resume={stopped / 'checkpoints' / 'step_1'}", "trainer.steps=3")
    for folder in (whole.folder, resumed.folder):
        assert sorted(p.name for p in (folder / "dumps").iterdir()) == sorted(
            f"step_{k}.{kind}" for k in (1, 2, 3) for kind in ("json", "safetensors")
        )
    for file in (whole.folder / "dumps").iterdir():
        assert file.read_bytes() == (resumed.folder / "dumps" / file.name).read_bytes(), file.name
    seldom = train(tmp_path / "seldom", *keys, "trainer.steps=3", "trainer.dump=2")
    assert list(dumped_steps(seldom.folder)) == [2]


@pytest.mark.parametrize("way", ["", pytest.param("cluster.layout=split trainer.staleness=1", marks=more)])
def test_over_ray_with_two_workers(way: str, train: Train, tmp_path: Path) -> None:
    run = train(tmp_path / "run", *EASY, "algorithm=flow_grpo", *KL.split(), *f"{RAY} {way}".split())
    assert_exact(run.folder)
    holders = {process for dump in dumped_steps(run.folder).values() for process in read_dump(dump).record.holders}
    assert holders == ({0} if way else {0, 1})


@more
def test_ranks_that_share_the_weights(train: Train, tmp_path: Path) -> None:
    ranks = "cluster.launcher=ray cluster.num_workers=1 cluster.ranks_per_worker=2 model.shard=all model.train=full"
    run = train(tmp_path / "run", *EASY, "algorithm=flow_grpo", *KL.split(), *ranks.split())
    found = replayed(run.folder, "1e-6")  # up to the order of sums
    assert len(found) == 2 and all(c.weights is None for c in found)


@more
def test_half_precision_is_replayed_in_float32(train: Train, tmp_path: Path) -> None:
    keys = ["model.dtype=bfloat16", "actor.max_ratio_deviation=0.1", "sampling.guidance_scale=4.5"]
    folder = train(tmp_path / "run", *EASY, "algorithm=flow_grpo", *keys).folder
    found = run(Request(dump=dumped_steps(folder)[2], tolerance="2"), ["model.dtype=float32"])
    assert found.environment == ["dtype: float32, bfloat16"]
    values = {n.name: (n.run, n.replay) for n in found.numbers}
    assert 0 < values["actor/ratio_deviation"][1] < 0.02  # the rounding of the rollout
    assert values["gradient"][1] == pytest.approx(values["gradient"][0], rel=0.2)


@pytest.fixture(scope="module")
def dumped(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("dumped") / "run", *EASY, "algorithm=flow_grpo", *KL.split()).folder


@pytest.fixture
def copied(dumped: Path, tmp_path: Path) -> Path:
    """The dump of step 2, alone in a folder, as it is sent with a bug report."""
    for kind in ("json", "safetensors"):
        shutil.copy(dumped / "dumps" / f"step_2.{kind}", tmp_path)
    return tmp_path / "step_2.json"


def test_numbers_that_differ_are_named(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(copied.read_text())
    values["metrics"]["actor/grad_norm"] *= 1.1
    values["environment"]["software"]["packages"]["torch"] = "1.0"
    copied.write_text(json.dumps(values))
    out = tmp_path / "found.json"
    assert replay_main([str(copied), f"out={out}"]) == 1
    assert "actor/grad_norm" in capsys.readouterr().err
    found = json.loads(out.read_text())
    (wrong,) = [n for n in found["numbers"] if n["difference"]]
    assert wrong["name"] == "actor/grad_norm" and wrong["difference"] == pytest.approx(0.1 / 1.1)
    assert found["weights"] is True and found["environment"] == [f"torch: {version('torch')}, 1.0"]
    assert replay_main([str(copied), "tolerance=0.2"]) == 0
    (copied.with_suffix(".safetensors")).rename(tmp_path / "moved.safetensors")
    with pytest.raises(DumpError, match="belongs beside"):
        run(Request(dump=copied))


def test_a_changed_credit_is_found(copied: Path) -> None:
    file = copied.with_suffix(".safetensors")
    tensors = load_file(file)
    tensors["credit"][0] *= 1.01
    save_file(tensors, file)
    with pytest.raises(TrainingError, match=r"actor/step_grad_norm/0"):
        run(Request(dump=copied, tolerance="1e-6"))


def test_another_model_or_key_is_answered(copied: Path, dumped: Path, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    weights = other / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor + 0.1 for name, tensor in load_file(weights).items()}, weights)
    with pytest.raises(ModelError, match=r"model\.path=.*not those of the run"):
        run(Request(dump=copied), [f"model.path={other}"])
    shutil.rmtree(other)
    with pytest.raises(ModelError, match=r"model\.path=.*is not a pipeline"):
        run(Request(dump=copied), [f"model.path={other}"])
    # smaller micro-batches: the same gradient, whose parts by step are those of a smaller one
    found = run(Request(dump=copied, tolerance="1"), ["actor.micro_batch_size=1"])
    assert {n.name.split("/")[1] for n in found.numbers if n.difference > 1e-5} == {"step_grad_norm", "step_grad_share"}
    assert run(Request(dump=dumped / "dumps" / "step_2.safetensors", tolerance="0")).exact  # either file names it
    with pytest.raises(ConfigError, match=r"model\.dtype=bfloat16: .*float32"):
        run(Request(dump=copied), ["model.dtype=bfloat16"])
    tensors = load_file(copied.with_suffix(".safetensors"))
    del tensors[next(name for name in tensors if name.startswith("state/ema/"))]
    save_file(tensors, copied.with_suffix(".safetensors"))
    with pytest.raises(DumpError, match="does not fit"):
        run(Request(dump=copied))


def test_a_dump_that_cannot_be_written_does_not_end_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "dumps").write_text("in the way")
    keys = ["algorithm=flow_grpo", *EASY]
    run = train(tmp_path / "run", *keys)
    assert len(run.metrics) == 2
    log = (run.folder / "log.txt").read_text()
    assert "step 1 is not dumped" in log and "cannot be written" in log


def test_secrets_are_left_out(train: Train, tmp_path: Path, workplace: Path) -> None:
    (workplace / "keyed.py").write_text(
        (workplace / "bright.py").read_text().replace("metadata)", "metadata, api_key)")
    )
    keys = "+reward.scorers.bright.kwargs.api_key=s3cret-Value.9"
    run = train(tmp_path / "run", *EASY, keys, "algorithm=flow_grpo", scorer="keyed.py")
    assert all(b"s3cret-Value" not in path.read_bytes() for path in (run.folder / "dumps").iterdir())
    assert_exact(run.folder)
