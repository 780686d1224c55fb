"""Ranks that share the tokens of calls, as a program: `python -m context_ranks RANKS FOLDER [CASE ...]`, see ranks.py.

A case is the name of one of `tiny.CASES`, or the class of a pipeline of the zoo of which a call should fail. Draws with
and trains the former, whole and then with the tokens of each call divided among the ranks, in several ways. Each writes
a line of JSON a case: by how much what comes of it differs, in parts of the norm, by way; gradients are summed over the
ranks. "call" is one of the denoiser alone, in fp64.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tiny
import torch
import torch.distributed as dist
from ranks import fork
from replaying import Recorded, own, randomise
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map
from zoo import video
from zoo.checks import call_for

from gerl.engine import ReplayedStep, Tape, replay
from gerl.engine.guidance import CfgMode
from gerl.errors import ModelError
from gerl.model.lora import add_lora
from gerl.model.sharding import divide_context, shard

Found = dict[str, torch.Tensor]


def fresh(name: str) -> Recorded:
    """A pipeline with a LoRA on all linear layers, also in front of the divided ones, and texts of odd length."""
    r = own(name)
    denoiser = tiny.denoiser_of(r.pipe)
    denoiser.delete_adapters("default")
    r.parameters = list(add_lora(denoiser, 4, 8.0, ".*", seed=0).values())
    randomise(r.parameters)
    r.call |= {"height": 32, "width": 32, "prompt": [f"{prompt}!" for prompt in tiny.PROMPTS]}
    return r


def gradient(r: Recorded) -> torch.Tensor:
    """As one vector, which is then gone."""
    found = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in r.parameters])
    for p in r.parameters:
        p.grad = None
    return found


def trained(r: Recorded, tape: Tape, cfg: CfgMode = "joint") -> Found:
    """The images of a guided rollout, and the log-probabilities and the gradient of an update with half of `tape`."""
    log_probs: list[torch.Tensor] = []

    def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
        del k
        log_probs.append(step.log_prob.detach())
        return (step.log_prob * torch.tensor([1.0, -0.5])).sum()

    replay(r.pipe, tape, on_step, index=[0, 3], cfg=cfg)
    images = torch.as_tensor(r.record(window=[1, 2])[0])
    return {"images": images, "log_probs": torch.cat(log_probs), "gradient": gradient(r)}


def called(r: Recorded, arguments: dict[str, Any]) -> Found:
    """The output of one call of the denoiser in fp64, and the gradient of a projection of it."""
    with in_fp64(tiny.denoiser_of(r.pipe)) as denoiser:
        output = denoiser(**arguments)[0]
        drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=output.dtype)
        (output * drawn).sum().backward()
        return {"output": output.detach(), "gradient": gradient(r)}


@contextmanager
def in_fp64(denoiser: Any) -> Iterator[Any]:
    denoiser.double()
    yield denoiser
    denoiser.float()


def arguments_of(r: Recorded) -> dict[str, Any]:
    """Those of the first call of the denoiser in a rollout, in fp64."""
    seen: list[dict[str, Any]] = []
    note: Callable[..., None] = lambda module, args, kwargs: seen.append(kwargs)  # noqa: E731
    with tiny.denoiser_of(r.pipe).register_forward_pre_hook(note, with_kwargs=True):
        r.record(window=[1, 2], probe=False)
    return {
        name: tree_map(lambda v: v.double() if torch.is_tensor(v) and v.is_floating_point() else v, value)
        for name, value in seen[0].items()
    }


def off(found: Found, expected: Found) -> dict[str, float]:
    """The differences, and by how much the gradient of this rank alone is off."""
    alone = found["gradient"].clone()
    dist.all_reduce(found["gradient"])
    pairs = {kind: (found[kind], value) for kind, value in expected.items()} | {"alone": (alone, expected["gradient"])}
    return {kind: float((a - b).norm() / b.norm()) for kind, (a, b) in pairs.items()}


def refusal(r: Recorded) -> str:
    """What is said of a text of seven tokens."""
    try:
        r.record(r.call | {"max_sequence_length": 7})
    except ModelError as error:
        return str(error)
    return ""


def differences(r: Recorded, ranks: DeviceMesh, context: DeviceMesh) -> dict[str, dict[str, Any]]:
    denoiser, arguments = tiny.denoiser_of(r.pipe), arguments_of(r)
    tape = r.record(window=[1, 2])[1]
    call, joint, detached = called(r, arguments), trained(r, tape), trained(r, tape, "detach_uncond")
    divide_context({"denoiser": denoiser}, context)
    found: dict[str, dict[str, Any]] = {"call": off(called(r, arguments), call), "joint": off(trained(r, tape), joint)}
    found["odd text"] = {"refused": refusal(r) if "max_sequence_length" in r.call else ""}
    found["detach_uncond"] = off(trained(r, tape, "detach_uncond"), detached)
    shard({"denoiser": denoiser}, set(r.parameters), ranks)
    found["shards"] = off(trained(r, tape), joint)
    denoiser.enable_gradient_checkpointing()
    found["checkpointing"] = off(trained(r, tape), joint)
    return found


def unusable(name: str, context: DeviceMesh) -> dict[str, dict[str, Any]]:
    """What is raised where the plan of a pipeline's denoiser is of no use."""
    entry = next(entry for entry in (*video.ENTRIES, *video.ENTRIES) if entry.name == name)
    pipe = tiny.build(tiny.Case(entry.build, {}, {}))
    call = call_for(entry, pipe, guided=False)
    pipe(**call)
    divide_context({"transformer": pipe.transformer}, context)
    try:
        pipe(**call | {"height": 64, "width": 64})
    except RuntimeError as error:
        return {"plan": {"raised": str(error)}}
    return {"plan": {"raised": ""}}


def main(rank: int, ranks: int, store: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    context = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("ring", "ulysses"))
    for name in names:
        found = differences(fresh(name), mesh, context) if name in tiny.CASES else unusable(name, context)
        sys.stdout.write(json.dumps({"case": name, "off": found}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    fork(main)
