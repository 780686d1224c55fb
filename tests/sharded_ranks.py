"""The ranks of a worker, as a program: `python -m sharded_ranks RANKS FOLDER "WHAT CASE" ...`, see ranks.py.

Each writes a line of JSON a case. `draw` (one of `tiny.CASES`), `zoo` (one of the zoo), `signs` (the shipped one, with
keys of `model`): drawn with and trained whole and with the weights divided among the ranks; by how much latents,
log-probabilities and gradients differ at most, in parts of the largest, which share of the divided weights is here, and
how often weights were gathered. `full` (keys of `model`): training of all weights with and without those in capitals;
how many of the images and of the first gradients differ, how many gradients are not the rounded ones, and how many
gathers are saved. `sum` (dtypes): how many sums of gradients in `Actor` are not those of rounded gradients. `read` (a
pipeline's folder): read whole and in parts; how many weights differ, and the memory that this took at most.
"""

import functools
import gc
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import tiny
import torch
import torch.distributed as dist
from ranks import fork
from replaying import Recorded, own, randomise
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from training import new_policy

from gerl.algorithms import build_algorithm
from gerl.config import ActorConfig, Config, ModelConfig, algorithm_config
from gerl.engine import ReplayedStep, replay
from gerl.model.denoisers import find_denoisers
from gerl.model.loading import load_policy
from gerl.model.policy import EMA, local
from gerl.model.sharding import shard, sharded_components
from gerl.workers.actor import Actor

Row = dict[str, Any]
SMALL = {"height": 64, "width": 64, "max_sequence_length": 1}  # the third text encoder is a placeholder


def trained(r: Recorded) -> list[torch.Tensor]:
    """The latents of a guided rollout, and the log-probabilities and the gradient of an update with half of it."""
    for p in r.parameters:
        p.grad = None
    output, tape = r.record(window=[1, 2])
    found = [torch.as_tensor(output)]

    def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
        del k
        found.append(step.log_prob.detach())
        return (step.log_prob * torch.tensor([1.0, -0.5])).sum()

    replay(r.pipe, tape, on_step, index=[0, 3])
    return [*found, *(p.grad for p in r.parameters if p.grad is not None)]


def share_here(models: list[torch.nn.Module], whole: set[torch.nn.Parameter]) -> float:
    """The part of the weights of `models`, but for `whole`, that this rank holds."""
    frozen = [p for model in models for p in model.parameters() if p not in whole]
    here = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in frozen)
    return here / sum(p.numel() for p in frozen)


def compared(
    pipe: Any, whole: list[torch.nn.Parameter], mesh: DeviceMesh, compute: Callable[[], list[torch.Tensor]]
) -> Row:
    """What `compute` gives before and after the weights of `pipe` are divided, but for `whole`."""
    before = compute()
    components = sharded_components(pipe, find_denoisers(pipe), "all")
    shard(components, set(whole), mesh)
    after = compute()
    return {"off": apart(before, after), "share": share_here(list(components.values()), set(whole))}


def apart(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in zip(before, after, strict=True))


def signs(mesh: DeviceMesh | None, **keys: Any) -> Recorded:
    """The pipeline that ships with gerl, with a LoRA that has learnt something."""
    policy = load_policy(ModelConfig(lora_rank=4, **keys), 0.0, "cpu", 0, mesh)
    pipe, parameters = policy.pipe, list(policy.trained.values())
    randomise(parameters, std=0.02)
    call = {"prompt": tiny.PROMPTS, "num_inference_steps": 4, "guidance_scale": 4.5, "output_type": "latent"}
    return Recorded(pipe, parameters, {**call, **SMALL}, "flow_sde")


def draw(name: str, mesh: DeviceMesh) -> Row:
    r = own(name)
    return compared(r.pipe, r.parameters, mesh, lambda: trained(r))


def draw_signs(keys: str, mesh: DeviceMesh) -> Row:
    """`keys`: of `model`, for the whole weights and those in parts, but for those in capitals, for the parts only."""
    both, given = values(keys)
    whole = signs(None, **both)
    parts = signs(mesh, shard="all", **given)
    components = list(sharded_components(parts.pipe, find_denoisers(parts.pipe), "all").values())
    before, _ = trained(whole), compiled_calls()
    with gathering() as calls:
        after = trained(parts)
    row = {"off": apart(before, after), "share": share_here(components, set(parts.parameters))}
    return row | {"compiled": compiled_calls(), "gathers": calls.call_count}


def gathering() -> Any:
    """Counts the gathers within the block."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return mock.patch.object(dist, name, wraps=getattr(dist, name))


def values(keys: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys in small letters, and all in small letters."""
    pairs = dict(pair.split("=") for pair in keys.split())
    given = {key: {"true": True, "false": False}.get(value, value) for key, value in pairs.items()}
    return {k: value for k, value in given.items() if k.islower()}, {k.lower(): value for k, value in given.items()}


def full(keys: str, mesh: DeviceMesh) -> Row:
    """`keys`: as of `draw_signs`."""
    both, given = values(keys)
    (drawn, gradients, usual), (images, rounded, gathers) = lessons(mesh, **both), lessons(mesh, **given)
    row = {"images": unequal(drawn, images), "gradients": unequal(gradients, rounded)}
    exact = [gradient.bfloat16().float() for gradient in gradients]  # of both ranks, whose parts of the sum are equal
    return row | {"rounded": unequal(exact, rounded), "saved": usual - gathers}


def unequal(some: list[torch.Tensor], others: list[torch.Tensor]) -> int:
    return sum(not torch.equal(a, b) for a, b in zip(some, others, strict=True))


@functools.cache
def lessons(mesh: DeviceMesh, **keys: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """What is drawn while weights change, this rank's parts of the first gradients, and the number of gathers."""
    policy = load_policy(ModelConfig(train="full", shard="denoiser", **keys), 0.0, "cpu", 0, mesh)
    call = {"prompt": tiny.PROMPTS, "num_inference_steps": 4, "guidance_scale": 1.0, "output_type": "latent"}
    r = Recorded(policy.pipe, list(policy.trained.values()), {**call, **SMALL}, "flow_sde")
    (denoiser,), inputs = policy.denoisers.values(), dict[str, Any]()
    watch = denoiser.register_forward_pre_hook(lambda module, args, given: inputs.update(given), with_kwargs=True)
    optimizer, other = torch.optim.AdamW(r.parameters, lr=0.003, eps=1e-4), EMA(policy.trained, 0.0)
    torch.manual_seed(0)
    for value in other.average.values():
        local(value).add_(0.02 * torch.randn(local(value).shape))
    drawn, gradients = [torch.as_tensor(r.record()[0])], list[torch.Tensor]()
    watch.remove()

    with gathering() as calls:
        for number in range(2):
            output, tape = r.record(window=[1])
            with other.swapped_in():
                drawn += [torch.as_tensor(output), torch.as_tensor(r.record()[0])]
            replay(r.pipe, tape, lambda k, step: (step.log_prob * torch.tensor([1.0, -0.5])).sum(), index=[0, 3])
            if not number:  # of one backward pass
                gradients = [local(p.grad).clone() for p in r.parameters if p.grad is not None]
            output = denoiser(**inputs)[0]
            with torch.no_grad(), other.swapped_in():  # between a forward pass and its backward pass
                drawn.append(denoiser(**inputs)[0])
            (output * drawn[-1]).sum().backward()
            drawn.append(torch.as_tensor(r.record()[0]))
            optimizer.step()  # while weights are gathered
            optimizer.zero_grad()
            drawn.append(torch.as_tensor(r.record()[0]))
    return drawn, gradients, calls.call_count


def sums(dtypes: str, mesh: DeviceMesh) -> Row:
    del mesh
    row: Row = {}
    for name in dtypes.split():
        policy, dtype = new_policy(), getattr(torch, name)
        config = Config(algorithm=algorithm_config(), actor=ActorConfig())
        actor = Actor(policy, config.actor, build_algorithm(config), 1, reduced=dtype)
        parts = [torch.randn(actor.flat_gradient().shape, generator=tiny.generators()[rank]) for rank in range(2)]
        actor.set_flat_gradient(parts[dist.get_rank()])
        actor.all_reduce()
        expected = (parts[0].to(dtype) + parts[1].to(dtype)).float()
        row[name] = int((actor.flat_gradient() != expected).sum())
    return row


def compiled_calls() -> int:
    """The calls in graphs that were compiled since this was asked last."""
    count = sum(torch._dynamo.utils.counters["stats"].values())
    torch._dynamo.utils.counters.clear()
    return int(count)


def draw_zoo(name: str, mesh: DeviceMesh) -> Row:
    from zoo.checks import NOISE, Trial, arrays, build, call_for
    from zoo.entries import BY_NAME

    entry = BY_NAME[name]
    pipe, lora = build(entry)
    guided = entry.cfg is not None and not entry.fails
    trial = Trial(entry, pipe, lora, call_for(entry, pipe, guided), guided)

    def compute() -> list[torch.Tensor]:
        torch.manual_seed(0)
        output, trial.tape = trial.record(NOISE)
        gradients, deviation = trial.gradients()
        assert deviation == 0.0, f"the ratio of the full replay is off by {deviation}"
        assert any(g.any() for g in gradients)
        return [*map(torch.as_tensor, arrays(output)), *gradients]

    return compared(pipe, trial.parameters, mesh, compute)


def own_memory() -> int:
    """The bytes of memory that this process has to itself; those of files that it looks at are not among them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@contextmanager
def measured(found: Row, key: str) -> Iterator[None]:
    """Write to `found` by how much the memory of this process grows at most, looked at every other millisecond."""
    gc.collect()
    before, over, peak = own_memory(), threading.Event(), [0]

    def watch() -> None:
        while not over.wait(0.002):
            peak[0] = max(peak[0], own_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    over.set()
    thread.join()
    found[key] = max(peak[0], own_memory()) - before


def read(folder: str, mesh: DeviceMesh) -> Row:
    """`load_policy` with and without parts; the parts come first, after what is loaded once was."""
    row: Row = {}
    load_policy(ModelConfig(lora_rank=2), 0.0, "cpu", 0)
    config = ModelConfig(path=folder, shard="all", dtype="bfloat16", lora_rank=2)
    with measured(row, "parts"):
        parts = load_policy(config, 0.0, "cpu", 0, mesh)
    with measured(row, "whole"):
        whole = load_policy(config, 0.0, "cpu", 0)
    different = [] if parts.fingerprint == whole.fingerprint else ["fingerprint"]
    for name, component in sharded_components(whole.pipe, whole.denoisers, "all").items():
        mine = getattr(parts.pipe, name)
        held = {**dict(mine.named_parameters()), **dict(mine.named_buffers())}
        expected = {**dict(component.named_parameters()), **dict(component.named_buffers())}
        full = {key: p.full_tensor() if isinstance(p, DTensor) else p for key, p in held.items()}
        different += [k for k, p in expected.items() if p.dtype != full[k].dtype or not torch.equal(p, full[k])]
        different += sorted(held.keys() ^ expected.keys())
    return {**row, "different": len(different)}


WHAT: dict[str, Callable[[str, DeviceMesh], Row]] = {
    "draw": draw,
    "signs": draw_signs,
    "zoo": draw_zoo,
    "read": read,
    "full": full,
    "sum": sums,
}


def main(rank: int, ranks: int, store: str, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for argument in arguments:
        what, _, case = argument.partition(" ")
        sys.stdout.write(json.dumps({"case": argument, **WHAT[what](case, mesh)}) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    fork(main)
