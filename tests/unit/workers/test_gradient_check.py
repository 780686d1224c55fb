"""The check of a micro-batch's gradient: equal to the plain one, or the switch that changes it is named."""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gerl.algorithms.planning import plan_samples
from gerl.commandline.composition import compose_run
from gerl.engine.replay import BatchedReplayer
from gerl.errors import TrainingError
from gerl.protocol import Prompt, RolloutTask
from gerl.workers.gradient_check import (
    CHECKPOINTING,
    COMPILE,
    DUPLICATES,
    OFFLOAD,
    SCALING,
    STEP_BATCH,
    Compare,
    check_gradient,
    compare_gradient,
)
from gerl.workers.worker import PolicyWorker

ENGINE = importlib.import_module("gerl.engine.replay")  # gerl.engine.replay is also a function
WINDOW = ("algorithm=flow_grpo", "sampling.window_range=[0,2]", "sampling.window_size=2")
SAVING = (*WINDOW, "model.gradient_checkpointing=true", "model.offload=blocks")


def sampled(*overrides: str) -> tuple[PolicyWorker, RolloutTask]:
    """A worker that has sampled one micro-batch of a group that shares its initial noise."""
    command = ["experiment=signs", "rollout.n=4", "rollout.micro_batch_size=4", "sampling.same_init_noise=true"]
    worker = PolicyWorker(compose_run([*command, *overrides]).config, 0, "cpu", 1, 10)
    worker.setup()
    samples = plan_samples(worker.config, [Prompt(0, 'a sign that says "OPEN"')], 1, 0)
    (task, *_) = worker.algorithm.plan(samples)
    worker.sample(task)
    return worker, task


def compare(worker: PolicyWorker, task: RolloutTask) -> Compare:
    credit = torch.ones(len(task.samples), worker.config.sampling.num_inference_steps)
    credit[1::2] = -0.5
    return lambda kept, reorder: compare_gradient(worker, {task.id: credit}, 8, kept=kept, reorder=reorder)


def halved(value: Any) -> Any:
    """The same values with half of their gradient."""
    if isinstance(value, tuple | list):
        return type(value)(map(halved, value))
    return (value + value.detach()) / 2 if torch.is_tensor(value) and value.requires_grad else value


@pytest.mark.parametrize(("steps", "other"), [(1, DUPLICATES), (2, STEP_BATCH)])
def test_the_gradient_of_all_switches_is_the_plain_one_and_nothing_else_changes(steps: int, other: str) -> None:
    worker, task = sampled(*SAVING, f"actor.step_batch={steps}")
    for p in worker.actor.parameters:
        p.grad = torch.ones_like(p)
    counts, state = vars(worker.evaluations).copy(), torch.get_rng_state()
    found = check_gradient(compare(worker, task), 1e-4)
    assert found is not None and found.rows == 4
    assert set(found.switches) == {CHECKPOINTING, OFFLOAD, other}
    assert found.distance < 1e-4 and found.cosine > 0.9999 and not found.is_zero
    assert all(bool((p.grad == 1).all()) for p in worker.actor.parameters if p.grad is not None)
    assert vars(worker.evaluations) == counts and bool((torch.get_rng_state() == state).all())
    assert any(getattr(m, "gradient_checkpointing", False) for m in worker.policy.denoisers["transformer"].modules())


def break_checkpointing(worker: PolicyWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in worker.policy.denoisers["transformer"].modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            monkeypatch.setattr(module, "_gradient_checkpointing_func", lambda run, *args: halved(run(*args)))


def break_duplicates(worker: PolicyWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def merged(*args: Any) -> Callable[..., object]:
        run = deduplicate(*args)
        return lambda *a, **k: halved(run(*a, **k))

    deduplicate = ENGINE.deduplicate
    monkeypatch.setattr(ENGINE, "deduplicate", merged)


def break_step_batch(worker: PolicyWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_stack(self: BatchedReplayer, *args: Any) -> None:
        before(self, *args)
        self.outputs = {position: halved(value) for position, value in self.outputs.items()}

    before = BatchedReplayer._run_stack
    monkeypatch.setattr(BatchedReplayer, "_run_stack", run_stack)


@pytest.mark.parametrize(
    ("switch", "break_gradient"),
    [(CHECKPOINTING, break_checkpointing), (DUPLICATES, break_duplicates), (STEP_BATCH, break_step_batch)],
)
def test_the_switch_that_changes_the_gradient_is_named(
    switch: str, break_gradient: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, task = sampled(*SAVING, f"actor.step_batch={1 + (switch == STEP_BATCH)}")
    break_gradient(worker, monkeypatch)
    with pytest.raises(TrainingError, match="changes the gradient") as error:
        check_gradient(compare(worker, task), 1e-2)
    assert str(error.value).startswith(switch) and "actor.check_gradient=false" in str(error.value)


@pytest.mark.parametrize("broken", [False, True])
def test_the_loss_scale_of_fp16_cancels_out_or_is_named(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, task = sampled(*WINDOW, "model.dtype=float16")
    if broken:
        monkeypatch.setattr(ENGINE, "unscaled", lambda leaves, scale: contextlib.nullcontext())
        with pytest.raises(TrainingError, match=SCALING):
            check_gradient(compare(worker, task), 0.2)
    else:
        found = check_gradient(compare(worker, task), 0.2)
        assert found is not None and SCALING in found.switches and found.distance < 0.01


def test_compiled_blocks_have_the_gradient_of_those_that_are_not() -> None:
    worker, task = sampled(*WINDOW, "model.compile=aot_eager")
    found = check_gradient(compare(worker, task), 1e-4)
    assert found is not None and set(found.switches) == {COMPILE, DUPLICATES} and found.distance < 1e-4


def test_rounding_errors_of_images_that_are_equal_are_no_reason_to_stop() -> None:
    """DPO compares two images; without noise they are the same one, and their gradients cancel but for rounding."""
    worker, task = sampled("algorithm=diffusion_dpo")
    found = check_gradient(compare(worker, task), 1e-2)
    assert found is not None and found.distance > 0.1 and DUPLICATES in found.switches


def test_a_gradient_that_is_not_finite_is_named_and_so_is_the_place_to_look() -> None:
    worker, task = sampled(*SAVING)
    with torch.no_grad():
        worker.actor.parameters[0].fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"not finite.*model\.dtype"):
        check_gradient(compare(worker, task), 1e-2)


def test_memory_that_does_not_suffice_halves_the_images_and_then_compares_less(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, task = sampled(*WINDOW, "model.gradient_checkpointing=true")
    train = worker.algorithm.train

    def train_if_it_fits(policy: Any, batch: Any, rows: list[int], *args: Any) -> Any:
        if not any(getattr(m, "gradient_checkpointing", False) for m in policy.pipe.transformer.modules()):
            asked.append(len(rows))
            raise MemoryError
        return train(policy, batch, rows, *args)

    asked: list[int] = []
    monkeypatch.setattr(worker.algorithm, "train", train_if_it_fits)
    found = check_gradient(compare(worker, task), 1e-2)
    assert found is not None and asked == [4, 2, 1]
    assert CHECKPOINTING in found.omitted and CHECKPOINTING in found.text
