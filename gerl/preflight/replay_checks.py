"""Check that rollouts and updates match the pipeline, which the ratio of gerl's rollout to its replay does not show."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from gerl.config import Config
from gerl.engine import ReplayedStep, Tape, record, replay
from gerl.engine.hooks import noise_from
from gerl.engine.transitions import RESAMPLES, family
from gerl.model.prompts import training_sigmas
from gerl.preflight.findings import Report
from gerl.protocol import RolloutTask, Sample
from gerl.utils.seeding import sample_generators
from gerl.workers.rollout import CallFormat, Rollout, find_images
from gerl.workers.worker import PolicyWorker

LARGEST = {False: 1e-3, True: 0.1}  # relative difference; key: whether the base weights are in half precision


def stock_difference(rollout: Rollout, samples: Sequence[Sample]) -> float:
    """Return the distance of images sampled without noise from the plain pipeline's, relative to their centred norm.

    For a consistency model, whose sampler is stochastic, the rollout uses its noise.
    """
    pipe = rollout.policy.pipe
    kernel, noise = ("cps", 1.0) if family(pipe.scheduler) in RESAMPLES else ("ode", 0.0)

    def difference(form: CallFormat) -> float:
        part = samples[: form.of(len(samples))]

        def compared(call: Mapping[str, object]) -> float:
            images = []
            for stock in (True, False):
                generators = sample_generators([sample.seed for sample in part])
                with torch.random.fork_rng():  # for random numbers sampled without a generator
                    torch.manual_seed(0)
                    if stock:
                        generator = generators[0] if form.text else generators
                        with noise_from(pipe.scheduler, generator):
                            output = pipe(**call, generator=generator)
                    else:
                        output, _ = record(pipe, call, kernel, noise, generators=generators, probe=False)
                images.append(find_images(output).astype(np.float64))
            plain, ours = images
            contrast = float(np.linalg.norm(plain - plain.mean()))
            return float(np.linalg.norm(ours - plain)) / max(contrast, 1e-9)

        return rollout.called(compared, part, form, sigmas=training_sigmas(rollout.sampling))

    with rollout.policy.as_sampler():
        return rollout.format.attempt("rollout", len(samples), difference)


def parts_difference(worker: PolicyWorker, task: RolloutTask) -> float:
    """Return the relative distance of summed gradients of single samples from the batch's; 0 for a single sample."""
    rollout, policy = worker.rollout, worker.policy
    tape = rollout.sample(task)[1][0]
    if tape.batch_size == 1:
        return 0.0
    step = (task.segments[0].trained or (0,))[0]
    whole = _gradient(worker, tape, step, range(tape.batch_size))
    parts = [_gradient(worker, tape, step, [i]) for i in range(tape.batch_size)]
    for p in policy.trained.values():
        p.grad = None
    return float((torch.stack(parts).sum(0) - whole).norm() / whole.norm().clamp(min=1e-30))


def _gradient(worker: PolicyWorker, tape: Tape, step: int, rows: Sequence[int]) -> torch.Tensor:
    """Return the gradient `[P]` of a random projection of the model output of `rows` at `step`."""

    def on_step(_: int, replayed: ReplayedStep) -> torch.Tensor:
        output = replayed.model_output
        shape = (tape.batch_size, len(output) // len(rows), *output.shape[1:])
        projection = torch.randn(shape, generator=torch.Generator().manual_seed(0))[list(rows)].flatten(0, 1)
        return (output * projection.to(output.device)).mean() * len(rows)

    worker.actor.optimizer.zero_grad(set_to_none=True)
    replay(worker.policy.pipe, tape, on_step, steps=[step], index=list(rows), cfg=worker.config.algorithm.cfg)
    return worker.actor.flat_gradient()


def judge_faithful(report: Report, config: Config, half_precision: bool) -> None:
    """Add problems if a rollout differs from the pipeline, or if samples of a micro-batch depend on each other."""
    largest = LARGEST[half_precision]
    if report.stock_difference is not None and not report.stock_difference <= largest:
        report.problems.append(
            f"images sampled without noise differ from those of {report.pipeline} by "
            f"{report.stock_difference:.1%}: its loop samples or edits outside gerl's view, and would be trained "
            "on images other than those it samples; use another pipeline of this model"
        )
    if report.parts_difference is not None and not report.parts_difference <= largest:
        split = (config.actor.micro_batch_size or config.rollout.micro_batch_size) < config.rollout.micro_batch_size
        sentence = (
            "the gradients of single samples of a micro-batch add up to one that differs by "
            f"{report.parts_difference:.1%} from that of all: in {report.pipeline} samples of a batch depend on "
            "each other"
        )
        if split:
            size = config.rollout.micro_batch_size
            report.problems.append(f"{sentence}; set actor.micro_batch_size={size}, the rollout's")
        else:
            report.notes.append(f"{sentence}; keep actor.micro_batch_size equal to the rollout's")
