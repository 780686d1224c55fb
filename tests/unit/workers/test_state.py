"""A worker keeps the last finished step while the next one changes it."""

import pytest
import torch

from gerl.algorithms.planning import plan_samples
from gerl.commandline.composition import compose_run
from gerl.errors import ClusterError
from gerl.protocol import Prompt
from gerl.utils.tensors import unpack_tensors
from gerl.workers.hybrid import HybridWorker


def test_the_state_before_an_update_is_kept_in_place_and_packed_on_demand() -> None:
    worker = HybridWorker(compose_run(["experiment=signs"]).config, 0, "cpu", 1, 10)
    worker.setup()

    def update(finished: int) -> None:
        worker.set_flat_gradient(torch.ones(sum(p.numel() for p in worker.policy.trained.values())))
        assert worker.step(finished).applied

    start = worker.finished(0)
    for _ in range(2):
        update(0)
        assert worker.finished(0) == start
    assert start[0]["lora/pytorch_lora_weights.safetensors"] != worker.policy.lora_file()
    worker.finish_step(1)
    after, (kept, _) = worker.finished(1), worker.keeping.kept(1)
    assert worker.keeping.step == 1 and after[1].policy_version == 2
    stored, state = unpack_tensors(after[0]["state.safetensors"]), worker.actor.state()[0]
    assert stored.keys() == state.keys() and all(torch.equal(stored[name], state[name]) for name in state)
    assert after[0]["lora/pytorch_lora_weights.safetensors"] == worker.policy.lora_file()
    places = {name: tensor.data_ptr() for name, tensor in kept.items()}
    update(1)
    worker.finish_step(2)
    worker.keep(2)
    assert places == {name: worker.keeping.kept(2)[0][name].data_ptr() for name in places}


def test_another_worker_continues_from_what_one_has_finished() -> None:
    config = compose_run(["experiment=signs", "algorithm=diffusion_nft"]).config
    one, other = (HybridWorker(config, rank, "cpu", 1, 10) for rank in (0, 1))
    with pytest.raises(ClusterError, match="rank 0 was restarted"):
        one.finished(0)
    for worker in (one, other):
        worker.setup()
    one.set_flat_gradient(torch.ones(sum(p.numel() for p in one.policy.trained.values())))
    one.step(0)
    one.finish_step(1)
    files, numbers = one.finished(1)
    with pytest.raises(ClusterError, match="rank 1 was restarted and does not have the state of step 1"):
        other.finished(1)
    other.load_checkpoint(files["state.safetensors"], numbers, 1)
    assert other.finished(1) == one.finished(1)
    other.set_flat_gradient(torch.ones(sum(p.numel() for p in one.policy.trained.values())))
    assert other.step(1).applied


def test_the_state_is_copied_while_the_next_step_is_drawn() -> None:
    worker = HybridWorker(compose_run(["experiment=signs", "actor.ema_decay=0.5"]).config, 0, "cpu", 1, 10)
    worker.setup()
    for finished in (0, 1):
        worker.set_flat_gradient(torch.ones(sum(p.numel() for p in worker.policy.trained.values())))
        end = worker.step(finished, last=True).end
        assert end is not None and worker.ended == finished + 1
    expected = {name: tensor.clone() for name, tensor in worker.actor.state()[0].items()}
    assert worker.keeping.step == 1  # step 2 may have to be done again, as long as not all workers have finished it
    prompts = [Prompt(0, 'a sign that reads "7"')]
    tasks = worker.algorithm.plan(plan_samples(worker.config, prompts, 3, 0)[:1])
    worker.generate(tasks[0])
    assert worker.keeping.step == 2
    with worker.policy.ema.swapped_in():  # as validation does
        found, numbers = worker.keeping.kept(2)
    assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)
    assert numbers.policy_version == 2
