"""Workers that only draw and workers that only train (cluster.layout=split): the numbers of those that do both."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drills import more
from running import loaded

from gerl.cluster import Cluster
from gerl.commandline.composition import compose_run
from gerl.model.shards import Shards
from gerl.run.checkpoint import PARTS
from gerl.utils.dataset import load_prompts

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = "checkpoint.every=2 checkpoint.keep=9 actor.lr=0.01 rollout.micro_batch_size=2 validation.every=2".split()
STEPS = 4
Train = Callable[..., Any]


def split(drawing: int, training: int) -> list[str]:
    return ["cluster.layout=split", f"cluster.rollout_workers={drawing}", f"cluster.actor_workers={training}"]


@pytest.fixture(scope="module")
def run(train: Train, workplace: Path) -> Train:
    def started(folder: Path, *overrides: str, **keys: Any) -> Any:
        keys = {"trainer__steps": STEPS, "validation__data": workplace / "val.txt"} | keys
        return train(folder, *SETTINGS, *overrides, **keys)

    return started


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm=diffusion_nft", "algorithm.rollout_decay=[0,0.3,0.1,0.9]"],  # a policy of its own draws
        ["algorithm=tempflow_grpo", "rollout.n=2", "algorithm.branch_factor=2", "actor.updates_per_step=2"],  # trees
        ["algorithm=dgpo", "sampling.window_range=[0,4]"],  # sums over groups, of all workers that train
        ["trainer.staleness=2", "algorithm=awm_fast"],
    ],
    ids=["diffusion_nft", "tempflow_grpo", "dgpo", "staleness"],
)
def test_the_numbers_are_those_of_workers_that_do_both(settings: list[str], run: Train, tmp_path: Path) -> None:
    both = run(tmp_path / "both", *settings, "cluster.num_workers=2")
    apart = run(tmp_path / "apart", *settings, *split(1, 2))
    apart.assert_same(both, STEPS)
    assert both.column("val/reward/mean")[-1] != both.column("val/reward/mean")[0]


def test_a_resumed_run_sends_the_weights_of_earlier_steps(run: Train, tmp_path: Path) -> None:
    both = run(tmp_path / "both", "trainer.staleness=2")
    folder = tmp_path / "apart"
    run(folder, *split(1, 1), trainer__steps=2, trainer__staleness=2)
    apart = run(folder, *split(1, 1), f"checkpoint.resume={folder}", trainer__staleness=2)
    apart.assert_same(both, STEPS)


@pytest.mark.parametrize(("settings", "away"), [(split(1, 1), [True, False]), (["cluster.num_workers=2"], [False] * 2)])
def test_workers_that_only_train_keep_all_but_the_denoiser_off_their_device(
    settings: list[str], away: list[bool], arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    config = compose_run(arguments(tmp_path / "run", *settings)).config
    with Cluster(config.cluster) as cluster:
        whole = loaded(config, tmp_path / "run", cluster, load_prompts(config.data.train))
        pipes = [worker.policy.pipe for worker in whole.fleet.workers.workers]
    for part in ("vae", "text_encoder"):
        assert [bool(getattr(pipe, part)._forward_pre_hooks) for pipe in pipes] == away


def test_workers_get_their_gpus_before_the_scorers_that_share_them(
    arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Ray packs the shares of two scorers on one of two GPUs, and the second worker would never find room."""
    groups: list[str] = []

    class Recorded(Cluster):
        def workers(self, name: str, *rest: Any, **keys: Any) -> Any:
            groups.append(name)
            return super().workers(name, *rest, **keys)

    config = compose_run(arguments(tmp_path / "run")).config
    with Recorded(config.cluster) as cluster:
        loaded(config, tmp_path / "run", cluster, load_prompts(config.data.train))
    assert groups[0] == "worker" and all(name.startswith("scorer ") for name in groups[1:]) and len(groups) > 1


@more
def test_over_ray_workers_of_both_kinds_may_die(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Drawn by two, trained by one, which draws nothing; a step ahead, so that both are busy."""
    settings = ["trainer.staleness=1", "cluster.max_restarts=20"]
    both = run(tmp_path / "both", *settings)
    (tmp_path / "kills").mkdir()
    calls = ["accumulate.0.2", "sample.1.3", "release.2.4"]
    for call in calls:
        (tmp_path / "kills" / call).write_text(str(int(signal.SIGKILL)))
    monkeypatch.setenv("GERL_KILLS", str(tmp_path / "kills"))  # the workers inherit both
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "in_workers"), str(ROOT)]))
    apart = run(tmp_path / "apart", *settings, *split(2, 1), cluster__launcher="ray")
    assert not list((tmp_path / "kills").iterdir())
    apart.assert_same(both, STEPS)
    assert sum(apart.column("cluster/restarts")) >= len(calls)
    assert "3 worker(s) on cpu (2 for sampling, 1 for training)" in caplog.text


@more
def test_ranks_with_a_part_of_trained_weights_send_it_to_the_same_ranks(run: Train, tmp_path: Path) -> None:
    full = "model.train=full actor.full_lr=0.003 actor.eps=1e-4".split()
    whole = run(tmp_path / "whole", *full, "cluster.num_workers=2")
    ranks = {"cluster__launcher": "ray", "cluster__ranks_per_worker": 2}
    parts = run(tmp_path / "parts", *full, *split(1, 1), "model.shard=denoiser", **ranks)
    found, expected = (Shards(one.checkpoint(STEPS) / PARTS) for one in (parts, whole))
    assert found.shapes().keys() == expected.shapes().keys()
    for name in found.shapes():
        assert torch.allclose(found.whole(name), expected.whole(name), rtol=1e-3, atol=2e-5), name
    held_out = [one.column("val/reward/mean") for one in (parts, whole)]
    assert held_out[0] == pytest.approx(held_out[1], abs=1e-5) and held_out[0][-1] != held_out[0][0]
