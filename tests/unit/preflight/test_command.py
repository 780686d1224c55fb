"""Parts of the preflight: micro-batches that do not fit, and what a step leaves out."""

from typing import Any

import pytest
import tiny
import torch
from torch.utils.hooks import RemovableHandle
from training import config

from gerl.algorithms import build_algorithm
from gerl.algorithms.planning import plan_samples
from gerl.config import Config, ModelConfig
from gerl.preflight import bench as module
from gerl.preflight.bench import Bench, TooLarge, further_runs
from gerl.preflight.command import trained_share
from gerl.preflight.findings import Report
from gerl.protocol import Prompt
from gerl.workers.worker import PolicyWorker


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> PolicyWorker:
    """Of a configuration with micro-batches of 8 = 2 groups of 4."""
    folder = tmp_path_factory.mktemp("model")
    tiny.sd3(layers=1).save_pretrained(folder)
    c = config("awm", timesteps=1)
    model = ModelConfig(path=str(folder), lora_rank=2)
    whole = Config(model=model, sampling=c.sampling, rollout=c.rollout, algorithm=c.algorithm)
    worker = PolicyWorker(whole, 0, "cpu", 1, 10)
    worker.setup()
    return worker


def full(worker: PolicyWorker, drawing: int, training: int) -> RemovableHandle:
    """While entered, memory runs out for batches of more than so many rows, without gradient and with it."""

    def check(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if len(kwargs["hidden_states"]) > (drawing, training)[torch.is_grad_enabled()]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return worker.policy.denoisers["transformer"].register_forward_pre_hook(check, with_kwargs=True)


def test_a_micro_batch_that_does_not_fit_is_halved(worker: PolicyWorker) -> None:
    bench, report = Bench(worker, Prompt(0, "a red fox")), Report("tiny", "awm")
    first = bench.run(1, 1)
    with full(worker, drawing=5, training=2):
        runs = further_runs(bench, first, report)
    assert [(run.sampled, run.trained) for run in runs] == [(4, 2)]
    (problem,) = report.problems
    assert "rollout.micro_batch_size=8 with actor.micro_batch_size=8: 4 and 2 fit" in problem
    assert not worker.trajectories and all(p.grad is None for p in worker.policy.trained.values())


def test_one_image_that_does_not_fit_ends_it(worker: PolicyWorker) -> None:
    bench = Bench(worker, Prompt(0, "a red fox"))
    with full(worker, drawing=8, training=0), pytest.raises(TooLarge, match=r"the update of a micro-batch of 1: use"):
        bench.run(1, 1)


def test_memory_of_two_sizes_is_measured_where_the_configured_one_is_the_smallest(
    worker: PolicyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(worker, Prompt(0, "a red fox"))
    first = bench.run(8, 8)
    monkeypatch.setattr(module, "capacity", lambda _: 1)
    assert len(further_runs(bench, first, Report("tiny", "awm"))) == 1, "the larger one could end the process"
    monkeypatch.setattr(module, "capacity", lambda _: 10**15)
    runs = further_runs(bench, first, Report("tiny", "awm"))
    assert [(run.sampled, run.trained, run.images) for run in runs] == [(8, 8, 8), (16, 16, 16)]
    assert runs[1].trajectories == pytest.approx(2 * runs[0].trajectories, rel=0.1)


@pytest.mark.parametrize(("name", "share"), [("flow_grpo", 1.0), ("best_of_n", 0.25), ("diffusion_dpo", 0.5)])
def test_images_without_a_credit_are_not_trained_on(name: str, share: float) -> None:
    algorithm = build_algorithm(config(name))
    prompts = [Prompt(i, "a") for i in range(3)]
    assert trained_share(algorithm, algorithm.plan(plan_samples(algorithm.config, prompts, 1, 0))) == share
