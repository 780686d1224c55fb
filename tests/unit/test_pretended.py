"""The simulated accelerator refuses what a GPU refuses, and detects each kind of mistake in gerl's own code."""

from collections.abc import Sequence
from typing import Any

import pretended
import pytest
import step_costs
import tiny
import torch
import training
from pretended import COUNTS, DEVICE, Mixed, Racing

from gerl.engine import record, transitions
from gerl.engine.record import Recorder
from gerl.workers.actor import Actor, Snapshots


def test_tensors_of_two_devices_do_not_mix_but_numbers_and_indices_do() -> None:
    x = torch.arange(6.0, device=DEVICE).view(2, 3)
    with pytest.raises(Mixed, match=r"meet"):
        x + torch.ones(2, 3)
    with pytest.raises(Mixed, match=r"generator"):
        torch.randn(3, device=DEVICE, generator=torch.Generator())
    with pytest.raises(TypeError, match=r"cpu\(\)"):
        x.numpy()
    assert (x * torch.tensor(2.0))[torch.tensor([1])].tolist() == [[6.0, 8.0, 10.0]]


def test_parameters_change_devices_in_place_and_have_gradients_there() -> None:
    layer = pretended.movable(torch.nn.Linear(3, 2))
    weight, twin = layer.weight, torch.nn.Linear(3, 2)
    twin.load_state_dict(layer.state_dict())
    layer.to(DEVICE)
    assert layer.weight is weight and weight.device == DEVICE
    (layer(torch.ones(1, 3, device=DEVICE)) ** 2).sum().backward()
    (twin(torch.ones(1, 3)) ** 2).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad.cpu(), twin.weight.grad)
    layer.zero_grad()
    layer.to("cpu")
    assert layer.weight is weight and weight.device.type == "cpu"
    with pytest.raises(Mixed):
        layer(torch.ones(1, 3, device=DEVICE))


def test_waits_launches_and_copies_are_counted() -> None:
    x = torch.ones(4)
    with COUNTS.counting():
        y = x.to(DEVICE)
        (y + y).sum().item()
        y.cpu()
    assert {kind: COUNTS.total(kind) for kind in ("launch", "to device", "to host", "sync")} == {
        "launch": 2, "to device": 1, "to host": 1, "sync": 2
    }  # fmt: skip


def test_an_asynchronous_copy_is_poison_until_it_is_waited_for() -> None:
    with pretended.pretending():
        host = torch.full((3,), 7.0, device=DEVICE).to("cpu", non_blocking=True)
        assert host.isnan().all()
        torch.get_device_module(DEVICE).synchronize()
        assert host.tolist() == [7.0] * 3


def test_memory_of_the_host_must_stay_until_it_was_read() -> None:
    with pretended.pretending():
        host = torch.ones(3).pin_memory()
        there = host.to(DEVICE, non_blocking=True)
        host.zero_()
        with pytest.raises(Racing, match=r"changed before"):
            there.cpu()


def test_a_stream_reads_only_what_it_has_waited_for() -> None:
    module = torch.get_device_module(DEVICE)
    with pretended.pretending():
        beside = module.Stream(DEVICE)
        x = torch.ones(3, device=DEVICE)
        with module.stream(beside), pytest.raises(Racing):
            x + 1
        beside.wait_stream(module.current_stream(DEVICE))
        with module.stream(beside):
            y = x + 1
        with pytest.raises(Racing):
            y.cpu()
        module.current_stream(DEVICE).wait_stream(beside)
        assert y.tolist() == [2.0] * 3


# --- Mutants: each kind of mistake, made in gerl's code


def recorded() -> None:
    policy = training.on_device(training.new_policy())
    with pretended.pretending():
        call = tiny.call_for(tiny.CASES["sd3"], False)
        record(policy.pipe, call, generators=tiny.generators(len(call["prompt"])))


def test_noise_that_stays_on_the_cpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded()
    monkeypatch.setattr(transitions, "on_device", lambda noise, device: noise)
    with pytest.raises(Mixed):
        recorded()


def test_a_generator_of_the_cpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def noise(x: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
        return torch.randn(x.shape, generator=generators[0], device=x.device)

    monkeypatch.setattr(transitions, "_noise", noise)
    with pytest.raises(Mixed, match=r"generator"):
        recorded()


def test_a_comparison_that_waits_for_the_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def carried_to(self: Any, scheduler: Any, sample: torch.Tensor) -> tuple[torch.Tensor, None]:
        before = self.carried.get(id(scheduler))
        return (sample.float().clone() if before is None or not torch.equal(before, sample) else before), None

    monkeypatch.setattr(Recorder, "_carried_to", carried_to)
    assert step_costs.costs("StableDiffusion3Pipeline", deep=False)["record"].own_waits == 1


def test_a_snapshot_that_does_not_wait_for_the_update_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = training.on_device(training.new_policy())
    c = training.config("flow_grpo")
    with pretended.pretending():
        actor = Actor(policy, c.actor, training.build_algorithm(c), total_updates=10)

        def snapshot() -> dict[str, torch.Tensor]:
            for p in policy.trained.values():
                p.grad = torch.ones_like(p)
            actor.step()
            return Snapshots(actor).take(0)[0]

        found, (expected, _) = snapshot(), actor.state()
        assert all(torch.equal(found[name], value.cpu()) for name, value in expected.items())
        monkeypatch.setattr(pretended.Stream, "wait_stream", lambda self, other: None)
        with pytest.raises(Racing):
            snapshot()
