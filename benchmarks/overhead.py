"""The cost of gerl on top of the denoiser: `python benchmarks/overhead.py [key=value ...] [--batch N]`.

One process alternates gerl's rollout (without VAE decode) and update with the bare denoiser, called the same number
of times on the same inputs, and prints the median ratio of their times. The machine's speed cancels out, and its drift.
The rollout is measured with encoded prompts, as a run's workers keep them (`data.cache_gb`), and with new ones; for
comparison, the pipeline without gerl is measured too. Also prints the shares of a rollout's time with new prompts that
are spent in the denoiser, in encoding prompts, and elsewhere: in the pipeline's loop, the sampler and gerl.
"""

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from gerl.algorithms import Batch, build_algorithm
from gerl.commandline.composition import compose_run
from gerl.config import Config, SamplingConfig
from gerl.engine import record, record_batch_probe
from gerl.model.loading import load_policy
from gerl.model.policy import Policy
from gerl.model.prompts import PromptCache, detach, pipeline_call
from gerl.protocol import Prompt, Sample
from gerl.utils.seeding import sample_generators
from gerl.workers.actor import Actor

Inputs = list[tuple[tuple[Any, ...], dict[str, Any]]]


def captured_inputs(policy: Policy, run: Callable[[], Any]) -> Inputs:
    """Positional and keyword arguments of every denoiser call that `run` makes."""
    calls: Inputs = []
    (denoiser,) = policy.denoisers.values()
    hook = denoiser.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    try:
        run()
    finally:
        hook.remove()
    return calls


def bare(denoiser: Any, inputs: Inputs, backward: bool) -> None:
    """The denoiser alone, with its backward pass if asked for; one step's graph is alive at a time."""
    with torch.set_grad_enabled(backward):
        for args, kwargs in inputs:
            output = denoiser(*args, **kwargs)[0]
            if backward:
                output.backward(torch.ones_like(output))


def seconds(function: Callable[[], Any]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else torch.cpu.synchronize
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


def shares(pipe: Any, denoiser: torch.nn.Module, rollout: Callable[[], Any], repetitions: int) -> list[float]:
    """Median shares of a rollout's time in the denoiser, in `encode_prompt` and elsewhere."""
    spent: dict[str, float] = {}
    started: list[float] = []
    encode = pipe.encode_prompt

    def end(kind: str) -> None:
        spent[kind] = spent.get(kind, 0.0) + time.perf_counter() - started.pop()

    def encoded(*args: Any, **kwargs: Any) -> Any:
        started.append(time.perf_counter())
        found = encode(*args, **kwargs)
        end("encoding")
        return found

    hooks = [
        denoiser.register_forward_pre_hook(lambda *_: started.append(time.perf_counter())),
        denoiser.register_forward_hook(lambda *_: end("denoiser")),
    ]
    pipe.encode_prompt = encoded
    rows = []
    for _ in range(repetitions):
        spent.clear()
        total = seconds(rollout)
        inside = [spent["denoiser"] / total, spent["encoding"] / total]
        rows.append([*inside, 1 - sum(inside)])
    for hook in hooks:
        hook.remove()
    del pipe.encode_prompt
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def measure(
    policy: Policy, sampling: SamplingConfig, batch: int, repetitions: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Ratios of gerl's time to the bare denoiser's by repetition, and the `shares` of a rollout of new prompts."""
    prompts = [f'a red sign that reads "{100 + i}"' for i in range(batch)]
    call = pipeline_call(policy.pipe, sampling, prompts) | {"output_type": "latent"}
    window = tuple(range(sampling.trained_steps))
    probe = record_batch_probe(policy.pipe, call)  # made once a run by the rollout worker
    config = Config(sampling=sampling)
    actor = Actor(policy, config.actor, build_algorithm(config), total_updates=1)
    (denoiser,) = policy.denoisers.values()
    cache = PromptCache(1.0)

    def rollout() -> Any:
        generators = sample_generators(list(range(batch)))
        return record(policy.pipe, call, sampling.kernel, sampling.noise_level, window, generators, probe)[1]

    def encoded_rollout() -> None:
        cache.attach(policy.pipe)
        rollout()
        detach(policy.pipe)

    def stock() -> None:
        with torch.no_grad():
            policy.pipe(**call, generator=sample_generators(list(range(batch))))

    tape = rollout()
    credit = torch.tensor([[1.0 if i % 2 else -1.0] * len(tape.steps) for i in range(batch)])
    samples = [Sample(Prompt(0, prompt), i, i, 1) for i, prompt in enumerate(prompts)]

    def update() -> None:
        actor.accumulate([Batch(tape, samples, window, credit)], batch * len(window))

    rollout_inputs, update_inputs = captured_inputs(policy, rollout), captured_inputs(policy, update)
    pairs = {
        "rollout": (encoded_rollout, lambda: bare(denoiser, rollout_inputs, backward=False)),
        "rollout of new prompts": (rollout, lambda: bare(denoiser, rollout_inputs, backward=False)),
        "pipeline without gerl": (stock, lambda: bare(denoiser, rollout_inputs, backward=False)),
        "update": (update, lambda: bare(denoiser, update_inputs, backward=True)),
    }
    ratios: dict[str, list[float]] = {name: [] for name in pairs}
    for repetition in range(repetitions + 1):
        for name, (ours, theirs) in pairs.items():
            # who goes first alternates, and the first repetition warms up
            order = (ours, theirs) if repetition % 2 else (theirs, ours)
            times = {f: seconds(f) for f in order}
            if repetition:
                ratios[name].append(times[ours] / times[theirs])
    return ratios, shares(policy.pipe, denoiser, rollout, repetitions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("keys", nargs="*", help="keys of the run, such as experiment=NAME or model.path=PATH")
    parser.add_argument("--batch", type=int, help="images per call; default: the experiment's micro-batch")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(args.threads)
    # a policy gradient: its update replays the denoiser on what the rollout recorded
    config = compose_run(["algorithm=flow_grpo", *args.keys]).config
    policy = load_policy(config.model, 0.0, "cuda" if torch.cuda.is_available() else "cpu", seed=0)
    batch = args.batch or config.rollout.micro_batch_size
    ratios, (inside, encoding, rest) = measure(policy, config.sampling, batch, args.repetitions)
    for name, values in ratios.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{name:22s} x{middle:.3f} of the bare denoiser (min {low:.3f}, max {high:.3f}, batch {batch})")
    shown = f"{inside:.1%} in the denoiser, {encoding:.1%} encoding prompts, {rest:.1%} elsewhere"
    print(f"a rollout of new prompts: {shown}")


if __name__ == "__main__":
    main()
