"""The state of a worker: copied while the next step changes it, written in parts, read again, sent to samplers."""

import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from actors import new_actor, stepped, weights
from safetensors.torch import load_file
from training import config

from gerl.algorithms.planning import plan_samples
from gerl.commandline.composition import compose_run
from gerl.errors import CheckpointError, ClusterError
from gerl.model.policy import EMA, Policy, chosen, parameters_of
from gerl.model.shards import Part, Shards
from gerl.protocol import Prompt
from gerl.run.checkpoint import PARTS, WorkerState
from gerl.utils.tensors import unpack_tensors
from gerl.workers.actor import Actor, PartSnapshots, copied
from gerl.workers.fleet import hold_state, set_gradient, start_state, written
from gerl.workers.state import Writing, parts_of, take_weights, weights_of
from gerl.workers.worker import PolicyWorker

# --- snapshots


def test_the_state_before_an_update_is_kept_in_place_and_packed_on_demand() -> None:
    worker = PolicyWorker(compose_run(["experiment=signs"]).config, 0, "cpu", 1, 10)
    worker.setup()

    def update(finished: int) -> None:
        set_gradient(worker, torch.ones(sum(p.numel() for p in worker.policy.trained.values())))
        assert worker.step(finished).applied

    start = worker.checkpoint(0)
    for _ in range(2):
        update(0)
        assert worker.checkpoint(0) == start
    assert start[0]["lora/pytorch_lora_weights.safetensors"] != worker.policy.lora_file()
    worker.finish_step(1)
    after, (kept, _) = worker.checkpoint(1), worker.snapshots.take(1)
    assert worker.snapshots.step == 1 and after[1].policy_version == 2
    stored, state = unpack_tensors(after[0]["state.safetensors"]), worker.actor.state()[0]
    assert stored.keys() == state.keys() and all(torch.equal(stored[name], state[name]) for name in state)
    assert after[0]["lora/pytorch_lora_weights.safetensors"] == worker.policy.lora_file()
    places = {name: tensor.data_ptr() for name, tensor in kept.items()}
    update(1)
    worker.finish_step(2)
    worker.snapshots.take(2)
    assert places == {name: worker.snapshots.take(2)[0][name].data_ptr() for name in places}


def test_another_worker_continues_from_what_one_has_finished() -> None:
    config = compose_run(["experiment=signs", "algorithm=diffusion_nft"]).config
    one, other = (PolicyWorker(config, rank, "cpu", 1, 10) for rank in (0, 1))
    with pytest.raises(ClusterError, match="rank 0 was restarted"):
        one.checkpoint(0)
    for worker in (one, other):
        worker.setup()
    set_gradient(one, torch.ones(sum(p.numel() for p in one.policy.trained.values())))
    one.step(0)
    one.finish_step(1)
    files, numbers = one.checkpoint(1)
    with pytest.raises(ClusterError, match="rank 1 was restarted and does not have the state of step 1"):
        other.checkpoint(1)
    other.load(files["state.safetensors"], numbers, 1)
    assert other.checkpoint(1) == one.checkpoint(1)
    set_gradient(other, torch.ones(sum(p.numel() for p in one.policy.trained.values())))
    assert other.step(1).applied


def test_the_state_is_copied_while_the_next_step_is_drawn() -> None:
    worker = PolicyWorker(compose_run(["experiment=signs", "actor.ema_decay=0.5"]).config, 0, "cpu", 1, 10)
    worker.setup()
    for finished in (0, 1):
        set_gradient(worker, torch.ones(sum(p.numel() for p in worker.policy.trained.values())))
        end = worker.step(finished, last=True)
        assert end is not None and worker.ended == finished + 1
    expected = {name: tensor.clone() for name, tensor in worker.actor.state()[0].items()}
    assert worker.snapshots.step == 1  # step 2 may have to be done again, as long as not all workers have finished it
    prompts = [Prompt(0, 'a sign that reads "7"')]
    tasks = worker.algorithm.plan(plan_samples(worker.config, prompts, 3, 0)[:1])
    worker.sample(tasks[0])
    assert worker.snapshots.step == 2
    with worker.policy.ema.swapped_in():  # as validation does
        found, numbers = worker.snapshots.take(2)
    assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)
    assert numbers.policy_version == 2


def test_copies_keep_their_place() -> None:
    source = {"a": torch.randn(3, 2, requires_grad=True), "b": torch.tensor(1)}
    first = copied(source, {})
    with torch.no_grad():
        source["a"].add_(1)
    assert not torch.equal(first["a"], source["a"]) and not first["a"].requires_grad
    place = first["a"].data_ptr()
    second = copied(source | {"b": torch.zeros(2), "c": torch.ones(1)}, first)
    assert second["a"].data_ptr() == place and torch.equal(second["a"], source["a"])
    assert second["b"].shape == (2,) and list(second) == ["a", "b", "c"]


# --- checkpoints of full fine-tuning


def whole_actor(train: str = "full", **settings: Any) -> Actor:
    pipe = tiny.build(tiny.CASES["sd3"])
    denoisers = {"transformer": tiny.denoiser_of(pipe)}
    denoisers["transformer"].requires_grad_(False)
    trained = parameters_of(denoisers, chosen(train, denoisers))
    for p in trained.values():
        p.requires_grad_()
    return new_actor(Policy(pipe, denoisers, trained, EMA(trained, 0.9), whole=True), **settings)


def restored(actor: Actor, folder: Path, numbers: WorkerState) -> None:
    worker = PolicyWorker(config("flow_grpo"), 0, "cpu", 1, 10)
    worker.actor, worker.policy = actor, actor.policy
    worker.load(folder, numbers, 2)
    assert worker.ended == 2


def update(actor: Actor, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    stepped(actor, torch.randn(weights(actor).shape, generator=generator))


def test_the_base_is_kept_where_an_algorithm_asks_for_it() -> None:
    actor = whole_actor(kl_coef=0.1, lr=0.01)
    first = weights(actor).clone()
    update(actor, 0)
    now = weights(actor).clone()
    with actor.policy.base():
        assert torch.equal(weights(actor), first)
    assert torch.equal(weights(actor), now) and not torch.equal(now, first)
    assert whole_actor(kl_coef=0.0).policy.reference is None


def test_the_base_is_kept_in_main_memory_for_the_guard() -> None:
    actor = whole_actor(lr=0.01, judge="base")
    first = weights(actor).clone()
    update(actor, 0)
    now = weights(actor).clone()
    assert actor.policy.reference is not None
    assert {value.device.type for value in actor.policy.reference.average.values()} == {"cpu"}
    with actor.policy.first():
        assert torch.equal(weights(actor), first)
    assert torch.equal(weights(actor), now) and not torch.equal(now, first)


def test_another_actor_continues_bitwise(tmp_path: Path) -> None:
    actor = whole_actor(lr=0.01)
    for number in range(2):
        update(actor, number)
    parts, numbers = parts_of(actor)
    Writing(actor.policy, parts).write_state(tmp_path, 0)
    resumed = whole_actor(lr=0.01)
    restored(resumed, tmp_path, numbers)
    for one in (actor, resumed):
        update(one, 2)
    end, other = actor.state(), resumed.state()
    torch.testing.assert_close(other[0], end[0], rtol=0, atol=0)
    assert other[1] == end[1] and resumed.policy.version == 3
    with pytest.raises(CheckpointError, match="an unexpected tensor"):
        restored(whole_actor("attn", lr=0.01), tmp_path, numbers)


def test_the_state_before_an_update_can_be_written_after_it(tmp_path: Path) -> None:
    worker = PolicyWorker(config("flow_grpo"), 0, "cpu", 1, 10)
    worker.actor = whole_actor(lr=0.01)
    worker.policy, worker.snapshots, worker.ended = worker.actor.policy, PartSnapshots(worker.actor), 3
    update(worker.actor, 0)
    before, version = weights(worker.actor).clone(), worker.policy.version
    worker.actor.set_flat_gradient(torch.ones(before.shape))
    assert worker.step(finished=3).applied
    for step, expected in ((3, before), (4, weights(worker.actor).clone())):
        worker.ended = step
        assert hold_state(worker, step).policy_version == version + step - 3
        if step == 4:  # what is held is written as it was, whatever comes
            update(worker.actor, 1)
        start_state(worker, tmp_path / str(step), 0)
        while not written(worker):
            time.sleep(0.01)
        shards = Shards(tmp_path / str(step) / PARTS)
        found = torch.cat([shards.whole(f"weights/{name}").flatten() for name in worker.policy.trained])
        assert torch.equal(found, expected)


def test_weights_that_are_not_trained_stand_beside_the_average(tmp_path: Path) -> None:
    actor = whole_actor("attn.to_q", lr=0.01)
    update(actor, 0)
    writing = Writing(actor.policy, parts_of(actor)[0])
    writing.write_state(tmp_path, 0)
    writing.write_denoisers(tmp_path)
    (file,) = (tmp_path / "transformer").glob("*.safetensors")
    stored, denoiser = load_file(file), actor.policy.denoisers["transformer"]
    assert stored.keys() == denoiser.state_dict().keys()
    for name, value in denoiser.state_dict().items():
        average = actor.policy.ema.average.get(f"transformer.{name}", value)
        assert torch.equal(stored[name], average)


def test_what_is_not_divided_is_written_once(tmp_path: Path) -> None:
    """As two processes do, of which each has half of the rows."""
    actor = whole_actor(lr=0.01)
    update(actor, 0)
    parts, _ = parts_of(actor)
    for number in range(2):
        rows = {
            name: Part(half, (number * (len(p.values) - len(half)), *p.offset[1:]), p.shape)
            for name, p in parts.items()
            for half in [p.values.tensor_split(2)[number] if "step/" not in name else p.values]
        }
        Writing(actor.policy, rows).write_state(tmp_path, number)
    shards = Shards(tmp_path / PARTS)
    assert all(torch.equal(shards.whole(name), part.values) for name, part in parts.items())
    second = load_file(sorted((tmp_path / PARTS).iterdir())[1])
    assert not any("step/" in name for name in second)


# --- weights for samplers


def policy_of(seed: int, pipe: object) -> Policy:
    generator = torch.Generator().manual_seed(seed)

    def filled() -> dict[str, torch.nn.Parameter]:
        shapes = {"transformer.a": (2, 3), "transformer.b": (4,)}
        return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}

    def average() -> EMA:
        found = EMA(filled(), 0.9)
        found.updates = seed
        return found

    trained = filled()
    return Policy(
        pipe, {}, trained, average(), version=seed, old=average(), old_is_current=bool(seed), sampler=average(),
        earlier=[average(), average()],
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize("earlier", [True, False])
def test_a_worker_that_draws_follows_one_that_trains(earlier: bool) -> None:
    """Also to weights of earlier steps, but only where it is asked to: they are needed after a run was resumed."""
    source, target = policy_of(3, None), policy_of(0, None)
    kept = [{name: value.clone() for name, value in average.average.items()} for average in target.earlier]
    weights = weights_of(source, earlier)
    with torch.no_grad():
        before = {name: p.clone() for name, p in source.trained.items()}
        for p in source.trained.values():
            p.add_(1)  # the weights are a copy
    for array in weights.flat.values():
        array.flags.writeable = False  # as out of Ray's store
    take_weights(target, weights)
    assert all(torch.equal(target.trained[name], value) for name, value in before.items())
    averages, others = target.averages(), source.averages()
    for name in ("ema", "old", "sampler"):
        assert averages[name].updates == 3
        assert all(torch.equal(averages[name].average[key], value) for key, value in others[name].average.items())
    assert target.version == 3 and target.old_is_current
    for found, own, other in zip(target.earlier, kept, source.earlier, strict=True):
        wanted = other.average if earlier else own
        assert all(torch.equal(found.average[key], value) for key, value in wanted.items())
    for p in target.trained.values():
        with torch.no_grad():
            p.add_(1)  # and may be written
