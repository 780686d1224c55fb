"""A rank of a worker, as a program: `python -m sharded_ranks RANK RANKS STORE [CASE ...]`.

Draws with and trains tiny pipelines of `tiny.CASES`, whole and then with their weights divided among the ranks. Writes
a line of JSON a case: by how much latents, log-probabilities and gradient differ at most, in parts of the largest, and
which share of the divided weights is here.
"""

import json
import sys

import tiny
import torch
import torch.distributed as dist
from replaying import Recorded, own
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gerl.engine import ReplayedStep, replay
from gerl.model.sharding import shard, sharded_components


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


def main(rank: int, ranks: int, store: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for name in names:
        r = own(name)
        before = trained(r)
        denoisers = {"denoiser": tiny.denoiser_of(r.pipe)}
        components = sharded_components(r.pipe, denoisers, "all")
        shard(components, set(r.parameters), mesh)
        after = trained(r)
        off = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(before, after, strict=True)]
        row = {"case": name, "off": max(off), "share": share_here(list(components.values()), set(r.parameters))}
        sys.stdout.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
