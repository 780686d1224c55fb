"""A worker keeps the last finished step while the next one changes it."""

import torch

from gerl.commandline.composition import compose_run
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
    after, (number, (kept, _)) = worker.finished(1), worker.before or (None, ({}, None))
    assert number == 1 and after[1].policy_version == 2
    stored, state = unpack_tensors(after[0]["state.safetensors"]), worker.actor.state()[0]
    assert stored.keys() == state.keys() and all(torch.equal(stored[name], state[name]) for name in state)
    assert after[0]["lora/pytorch_lora_weights.safetensors"] == worker.policy.lora_file()
    places = {name: tensor.data_ptr() for name, tensor in kept.items()}
    update(1)
    worker.finish_step(2)
    worker.keep(2)
    assert worker.before is not None
    assert places == {name: worker.before[1][0][name].data_ptr() for name in places}
