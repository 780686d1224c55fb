"""The changes that benchmarks/sample_efficiency.py makes to a run, and which run is next."""

import math
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import sample_efficiency as efficiency
import torch

from gerl.commandline.composition import compose_run
from gerl.config import Config
from gerl.engine.record import Recorder
from gerl.protocol import Prompt, Sample, Scores
from gerl.trainer.step import Step


def config(*keys: str) -> Config:
    return compose_run(["experiment=signs", *keys]).config


def stepped(kind: type[torch.optim.AdamW], p: torch.nn.Parameter, gradient: torch.Tensor, lr: float) -> torch.Tensor:
    """The change of `p` by one optimizer step."""
    optimizer, before = kind([p], lr=lr, weight_decay=0.0), p.detach().clone()
    p.grad = gradient
    optimizer.step()
    return p.detach() - before


# --- Variants


@pytest.mark.parametrize("name", efficiency.VARIANTS)
def test_the_runs_of_a_variant_compose(name: str, tmp_path: Any) -> None:
    job = efficiency.Job(name, "final", 1e-3, 601, 22)
    keys = [key for key in job.arguments(tmp_path) if not key.startswith("hydra.")]
    composed = compose_run(keys).config
    assert composed.trainer.steps == 22 and composed.actor.lr == 1e-3 and composed.trainer.seed == 601


def test_muon_steps_are_orthogonal_with_the_size_of_adamw() -> None:
    gradient = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    change = stepped(efficiency.Muon, torch.nn.Parameter(torch.ones(4, 32)), gradient, lr=0.1)
    scale = 0.1 * 0.2 * math.sqrt(32)
    torch.testing.assert_close(change @ change.T, scale**2 * torch.eye(4))
    assert float((change * gradient).sum()) < 0
    plain = stepped(torch.optim.AdamW, torch.nn.Parameter(torch.ones(3)), torch.randn(3), lr=0.1)
    vector = stepped(efficiency.Muon, torch.nn.Parameter(torch.ones(3)), torch.randn(3), lr=0.1)
    torch.testing.assert_close(vector.abs(), plain.abs())  # what is no matrix gets AdamW's step


def test_muon_momentum_averages_the_gradients() -> None:
    first, second = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    p = torch.nn.Parameter(torch.ones(3, 5))
    optimizer = efficiency.Muon([p], lr=0.1)
    for gradient in (first, second):
        p.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], 0.05 * (0.95 * first + second))


def test_lora_plus_quickens_the_matrix_that_starts_at_zero() -> None:
    gradient = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    slow = stepped(efficiency.LoRAPlus, torch.nn.Parameter(torch.ones(2, 3)), gradient, lr=0.1)
    fast = stepped(efficiency.LoRAPlus, torch.nn.Parameter(torch.zeros(2, 3)), gradient, lr=0.1)
    torch.testing.assert_close(fast, 4 * slow)


def test_the_rate_falls_where_gradients_disagree() -> None:
    p = torch.nn.Parameter(torch.zeros(8))
    optimizer = efficiency.Consistency([p], lr=0.1, weight_decay=0.0)
    generator, changes = torch.Generator().manual_seed(0), []
    for k in range(30):
        before = p.detach().clone()
        p.grad = torch.ones(8) if k < 15 else torch.randn(8, generator=generator)
        optimizer.step()
        changes.append(float((p.detach() - before).norm()))
    assert changes[10] == pytest.approx(0.1 * math.sqrt(8), rel=1e-3)  # gradients agree: the whole rate
    assert changes[-1] < 0.5 * changes[10] and optimizer.param_groups[0]["lr"] == 0.1


def test_antithetic_pairs_have_mirrored_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "_spread", Recorder._spread)
    efficiency.antithetic()
    recorder = object.__new__(Recorder)
    recorder.init_spread, recorder.generators = 0.6, [torch.Generator().manual_seed(k) for k in range(4)]
    common = torch.full((4, 3), 2.0)

    def sampler(generator: list[torch.Generator]) -> torch.Tensor:
        return torch.stack([torch.randn(3, generator=g) for g in generator])

    own = recorder._spread(common, sampler, recorder.generators) - 0.8 * common  # type: ignore[operator]
    torch.testing.assert_close(own[1::2], -own[::2])
    assert float(own.abs().min()) > 0


def test_probed_groups_that_are_skipped_and_filled_average_to_one() -> None:
    """A solved group weighs 1 / FILLED when it is filled, and every other group is filled."""
    settings = config("rollout.prompts_per_step=3")
    prompts = [Prompt(k, f'a red sign that reads "{k}"') for k in range(3)]
    extension, filled, weights = efficiency.ProbeThenFill(settings), [], []
    for number in range(1, 401):
        step = Step(number, None, rounds=1)  # type: ignore[arg-type]
        for prompt, pair in zip(prompts, ([1.0, 1.0], [0.0, 0.0], [0.4, 1.0]), strict=True):
            step.scores.add(Scores([Sample(prompt, k, k, number) for k in range(2)], list(pair), {}, [[], []]))
        run: Any = SimpleNamespace(
            state=SimpleNamespace(policy_version=0), rollouts=SimpleNamespace(start=lambda tasks: tasks),
            algorithm=SimpleNamespace(plan=lambda samples, first: samples),
        )  # fmt: skip
        planned: Any = extension.scored(run, step)
        assert extension.scored(run, replace(step, rounds=2)) is None
        counts = [sum(sample.prompt is prompt for sample in planned) for prompt in prompts]
        assert counts[1:] == [4, 4] and {sample.index for sample in planned} == {2, 3, 4, 5}
        filled.append(counts[0] == 4)
        step.credit = torch.ones(6, 4)
        extension.credited(run, step)
        assert bool((step.credit[2:] == 1).all())
        assert float(step.credit[0, 0]) == (4.0 if filled[-1] else 0.0)
        weights.append(float(step.credit[0, 0]))
    assert 60 < sum(filled) < 140 and sum(weights) / len(weights) == pytest.approx(1, abs=0.3)


def test_prompts_of_larger_expected_variance_are_chosen() -> None:
    """Rewards differ only where signs have a Z; after some steps most chosen signs have one."""
    settings = config()
    words = [f"{a}{b}" for a in "ABCDEFGHXZ" for b in "ABCDEFGHXZ"]
    prompts = [Prompt(k, f'a red sign that reads "{word}"') for k, word in enumerate(words)]
    extension, shown = efficiency.ExpectedVariance(settings), []
    run: Any = SimpleNamespace(plan=SimpleNamespace(prompts=prompts))
    for number in range(1, 31):
        planned = prompts[number * 4 % 100 :][:4]
        chosen = extension.prompted(run, number, planned, False)
        assert extension.prompted(run, number, planned, True) == planned
        shown.append(sum('"Z' in prompt.text or 'Z"' in prompt.text for prompt in chosen))
        step = Step(number, None)  # type: ignore[arg-type]
        for prompt in chosen:
            pair = [0.0, 1.0] if "Z" in prompt.text.partition('"')[2] else [0.5, 0.5]
            step.scores.add(Scores([Sample(prompt, k, k, number) for k in range(2)], list(pair), {}, [[], []]))
        extension.rewarded(run, step)
    assert sum(shown[-15:]) > 30  # of 60; 19 of 100 signs have one


# --- Which run is next


def known(variant: str, stage: str, rate: float, seed: int, reward: float = 0.5) -> dict[str, Any]:
    numbers = {"steps": 20, "evaluations": 1500, "images": 480, "reward": reward, "exact": 0.5, "colour": 0.9}
    return {"variant": variant, "stage": stage, "rate": rate, "seed": seed} | numbers


def following(names: list[str], runs: list[dict[str, Any]]) -> list[efficiency.Job | None]:
    return list(islice(efficiency.next_jobs(names, runs), 40))


def test_a_pilot_comes_first_then_tuning_then_other_seeds() -> None:
    names, runs = ["default", "antithetic"], []
    pilots = following(names, runs)
    assert [(job.variant, job.stage) for job in pilots if job] == [("default", "pilot"), ("antithetic", "pilot")]
    assert {job.steps for job in pilots if job} == {efficiency.PILOT_STEPS}
    runs += [known(name, "pilot", 1e-3, 1) for name in names]
    tuning = [job for job in following(names, runs) if job]
    assert {job.stage for job in tuning} == {"tune"} and {job.variant for job in tuning} == {"default"}
    assert {job.steps for job in tuning} == {round(3000 * 20 / 1500)} and len(tuning) == 9
    runs += [known("default", "tune", job.rate, job.seed, reward=-abs(job.rate - 2e-3)) for job in tuning]
    finals = [job for job in following(names, runs) if job]
    assert {(job.variant, job.rate) for job in finals} == {("default", 2e-3), ("antithetic", 2e-3)}
    assert {job.seed for job in finals}.isdisjoint(efficiency.TUNING_SEEDS) and len(finals) == 20


def test_the_table_compares_with_the_default() -> None:
    runs = [known("default", "final", 1e-3, s, 0.8 + s % 3 * 0.01) for s in efficiency.SEEDS]
    runs += [known("muon", "final", 1e-3, s, 0.9 + s % 3 * 0.01) for s in efficiency.SEEDS]
    runs += [known("antithetic", "final", 1e-3, 601, 0.99)]  # not complete
    lines = efficiency.table(runs).splitlines()
    assert [line.split("|")[1].strip(" `") for line in lines[2:]] == ["muon", "default"]
    assert "0.100 ± 0.000" in lines[2] and "antithetic" not in "".join(lines)
