"""Count the kernel launches, copies, waits and operations of a rollout and of an update."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from gerl.algorithms import batches_of, count_pairs
from gerl.preflight.bench import TEXT, Bench
from gerl.protocol import Prompt
from gerl.workers.worker import PolicyWorker

# calls of CUDA's runtime and driver, by what they do; an asynchronous copy to pageable memory waits as well
CALLS = {
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch"),
    "copies": ("cudaMemcpyAsync", "cudaMemcpy", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize"),
}
OWN_WAITS = 1  # the profiler's, at its end
Row = dict[str, Any]


def counted(names: Iterable[str]) -> dict[str, int]:
    """Count launches, copies and waits among the calls `names`."""
    calls = Counter(names)
    return {what: sum(calls[name] for name in among) for what, among in CALLS.items()}


def looked_at(work: Callable[[], object], on_gpu: bool) -> Row:
    """Profile `work`: number of calls, microseconds of kernels, and operations counted by torch.

    It is done twice, since the counter of operations keeps tensors and takes time.
    """
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as found:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    events = list(found.events())
    with FlopCounterMode(display=False) as counter:
        work()
    calls = counted(event.name for event in events)
    calls["waits"] = max(0, calls["waits"] - OWN_WAITS)
    busy = sum(e.time_range.elapsed_us() for e in events if e.device_type == torch.autograd.DeviceType.CUDA)
    return {**calls, "kernels_s": busy / 1e6, "flops": counter.get_total_flops()}


def profiled(worker: PolicyWorker, device: str) -> Row:
    """Profile a rollout and an update of a micro-batch, with all of its images, after one as warm-up."""
    on_gpu = device.startswith("cuda")
    task = Bench(worker, Prompt(0, TEXT)).task(worker.algorithm)
    credit = torch.ones(len(task.samples), worker.config.sampling.num_inference_steps)
    credit[1::2] = -1.0

    def update() -> None:
        batches = batches_of(worker.trajectories[task.id], credit, None)
        worker.actor.accumulate(batches, count_pairs([(task, credit)]))

    worker.sample(task)
    update()
    worker.step(0)
    worker.clear()
    rollout = looked_at(partial(worker.sample, task), on_gpu)
    phases = {"rollout": rollout, "update": looked_at(update, on_gpu)}
    worker.clear()
    return {"images": len(task.samples), "profile": phases}
