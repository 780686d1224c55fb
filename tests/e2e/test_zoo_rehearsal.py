"""Every pipeline of the zoo on a simulated accelerator: recorded and replayed with ratio 1, and with a gradient."""

import pretended
import pytest
import tiny
import torch
from drills import PIPELINES, sampled
from pretended import DEVICE
from zoo import checks
from zoo.base import Entry
from zoo.entries import ENTRIES, name_of

from gerl.engine import ReplayedStep, record, replay

pytestmark = pytest.mark.filterwarnings("ignore")  # diffusers' own, on its older modules
REPLAYED = [e for e in ENTRIES if "replay" not in e.fails and sampled(name_of(e), PIPELINES)]


@pytest.mark.parametrize("entry", REPLAYED, ids=name_of)
def test_a_pipeline_on_a_device(entry: Entry) -> None:
    guided = entry.cfg is not None and "guided" not in entry.fails
    pipe, _ = checks.build(entry)
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    with pretended.pretending():
        for module in modules:
            pretended.movable(module).to(DEVICE)
        options = {"kernel": entry.kernel, "generators": tiny.generators(entry.batch), "noise_level": checks.NOISE}
        _, tape = record(pipe, checks.call_for(entry, pipe, guided), **options)
        deviations: list[float] = []

        def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
            deviations.append(checks.ratio_deviation(step))
            return (step.log_prob if step.std > 0 else step.mean).sum()

        steps = [0, 1] if entry.kernel == "ode" else tape.stochastic_steps
        replay(pipe, tape, on_step, steps=steps)
    assert deviations and max(deviations) == 0
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    assert any(p.grad is not None and bool(p.grad.any()) for p in trained)
    assert all(p.grad is None or p.grad.device == DEVICE for p in trained)
