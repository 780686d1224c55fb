"""From one micro-batch to a step, in sums that can be done by hand, and what a preflight says about its numbers."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from training import config

from gerl.config import Config, ValidationConfig
from gerl.model.lora import add_lora
from gerl.preflight import findings
from gerl.preflight.findings import (
    Component,
    Memory,
    Report,
    Run,
    Seconds,
    Usage,
    busiest,
    capacity,
    components,
    count_gradients,
    duration,
    forecast_memory,
    forecast_seconds,
    judge_batches,
    judge_memory,
    judge_run,
    measured,
    rows_of,
    size,
    sized,
    through,
)
from gerl.protocol import Prompt, RolloutTask, Sample, SamplingProbe, Segment

RUN = Run(4, 4, 2, Usage(8.0, 1400), Usage(4.0, 1200), 0.5, 40, 0.0, True, {"transformer": 3}, "image")
PROBE = SamplingProbe(1e-6, [])
GB = 10**9


def tasks(*sizes: int) -> list[RolloutTask]:
    segment = Segment((0,), (0,), (), ())
    return [
        RolloutTask(i, [Sample(Prompt(0, "a"), k, k, 1) for k in range(n)], (segment,)) for i, n in enumerate(sizes)
    ]


def report(**changes: Any) -> Report:
    made = Report("tiny", "flow_grpo", "cpu", 2, pipeline="Pipeline", scheduler="Euler", load_seconds=1.0)
    made.components = [Component("transformer", "Model", 2_500_000, "float32", 400, 3, 9, ("b.*.to_q", "b.*.to_k"))]
    made.run, made.probe, made.clip, made.max_ratio_deviation = RUN, PROBE, 0.1, 1e-3
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("changes", "problems", "warnings"),
    [
        ({}, [], []),
        ({"run": replace(RUN, deviation=2e-3)}, ["max |ratio - 1| is 2.00e-03 before"], []),
        ({"run": replace(RUN, deviation=math.nan)}, ["max |ratio - 1| is nan"], []),
        ({"run": replace(RUN, finite=False)}, ["the gradient is not finite"], []),
        ({"run": replace(RUN, gradients={"transformer": 0})}, [], ["no gradient reached the LoRA of transformer"]),
        ({"clip": 1e-6}, [], ["the clip range 1e-06 is below twice the numerical noise"]),
        ({"clip": None, "run": replace(RUN, deviation=6e-4)}, [], []),
        ({"probe": SamplingProbe(0.0, [(8, 0.1, 0.0, -0.03)])}, [], ["step 8 of the window, from sigma 0.100 to"]),
        ({"probe": None, "run": replace(RUN, deviation=1.0)}, [], []),
    ],
)
def test_sentences_on_a_run(changes: dict[str, Any], problems: list[str], warnings: list[str]) -> None:
    made = report(**changes)
    judge_run(made, (0, 1))
    for said, expected in ((made.problems, problems), (made.warnings, warnings)):
        assert len(said) == len(expected) and all(s.startswith(e) for s, e in zip(said, expected, strict=True)), said


@pytest.mark.parametrize(
    ("sizes", "workers", "updates", "words"),
    [
        ((4, 4, 4, 4), 2, 2, []),
        ((6, 6, 4), 1, 1, ["2 of 6 and 1 of 4 images; 4 or 8 would divide 16"]),
        ((4, 4, 4), 2, 1, ["3 micro-batches for 2 workers"]),
        ((4,), 1, 2, ["a step has only 1 micro-batches"]),
    ],
)
def test_sentences_on_batches(sizes: tuple[int, ...], workers: int, updates: int, words: list[str]) -> None:
    c = config("flow_grpo")
    c = replace(sized(c, sizes[0], sizes[0]), actor=replace(c.actor, updates_per_step=updates))
    said = list(judge_batches(c, tasks(*sizes), workers, sum(sizes)))
    assert len(said) == len(words) and all(word in s for word, s in zip(words, said, strict=True)), said


def test_sentences_on_memory() -> None:
    made = report(memory=Memory(10 * GB, GB, 9 * GB, 11 * GB, 4, 2, 12 * GB))
    judge_memory(made, config("flow_grpo"))
    assert made.problems[0].startswith("the update of a step needs about 11.0 GB") and len(made.problems) == 1
    assert "gradient_checkpointing" in made.problems[0]
    assert made.warnings[0].startswith("validation.micro_batch_size=32 would need about 12.0 GB of 10.0 GB")
    fits = report(memory=Memory(None, GB, None, None, None, None, None))
    judge_memory(fits, config("flow_grpo"))
    assert not fits.problems and not fits.warnings


def test_the_text_and_the_json() -> None:
    made = report(
        seconds=Seconds(16, 8, 100.0, 50.0), memory=Memory(10 * GB, GB, 9 * GB, None, 0, None, None), notes=["a note"]
    )
    text = made.text(config("flow_grpo"))
    assert "transformer 2.5 M float32" in text and "b.*.(to_q, to_k)" in text and "of which 3 got a gradient" in text
    assert "rollout.micro_batch_size none and actor.micro_batch_size not known" in text
    assert "a step of 16 images: 2 min (100 s rollout, 50 s update); 100 prompts: 2.1 h" in text
    assert text.endswith("note: a note\n\nit can train") and max(map(len, text.splitlines())) <= 118
    made.steps_per_epoch, made.prompts, made.problems = 3, 6, ["bad"]
    assert "an epoch of 6 prompts: 8 min" in made.text(config("flow_grpo"))
    assert made.text(config("flow_grpo")).endswith("problem: bad\nnote: a note")
    made.run = replace(RUN, deviation=math.nan)
    assert made.as_json()["can_train"] is False and made.as_json()["run"]["deviation"] is None
    assert made.as_json()["components"][0]["targets"] == ["b.*.to_q", "b.*.to_k"]


def test_an_early_end_and_an_algorithm_without_a_ratio_leave_a_text() -> None:
    early = Report("tiny", "flow_grpo", problems=["no model"])
    assert early.text(config("flow_grpo")) == "\n\nproblem: no model" and early.as_json()["run"] is None
    unguided, forward = report(probe=None), report(probe=None, max_ratio_deviation=None, algorithm="awm")
    assert "with algorithm.cfg=off" in unguided.text(config("flow_grpo"))
    assert "none: awm does not compare probabilities" in forward.text(config("flow_grpo"))


def test_numbers_to_read() -> None:
    assert [size(n) for n in (None, 5e5, 2e6, 3.25e9)] == ["not known", "0.5 MB", "2.0 MB", "3.2 GB"]
    assert [duration(s) for s in (3.21, 45.0, 200.0, 9000.0)] == ["3.2 s", "45 s", "3 min", "2.5 h"]


def test_the_worker_with_most_images_decides() -> None:
    assert [busiest(tasks(4, 4, 4, 2), workers) for workers in (2, 4, 1)] == [8, 4, 14]
    # two updates of (4, 4) and (4, 2): 4 + 4 images for the busier worker, 2 s an image drawn, 1 s trained
    two = replace(config("flow_grpo"), actor=replace(config("flow_grpo").actor, updates_per_step=2))
    found = forecast_seconds(two, tasks(4, 4, 4, 2), 2, RUN, share=1.0)
    assert (found.images, found.images_per_worker) == (14, 8)
    assert (found.rollout, found.update, found.step) == (16.0, 8.0 + 2 * 0.5, 25.0)
    assert forecast_seconds(two, tasks(4, 4, 4, 2), 2, RUN, share=0.25).update == 2.0 + 2 * 0.5


@pytest.mark.parametrize(
    ("capacity", "rollout", "update"),
    # 10 bytes for each of 20 images are held; without them the rollout takes 1000 + 90 n, the update 960 + 100 n
    [(None, None, None), (10_000, 20, 20), (2000, 6, 6), (1700, 3, 3), (1000, 0, 0)],
)
def test_the_largest_micro_batch(capacity: int | None, rollout: int | None, update: int | None) -> None:
    c = replace(config("flow_grpo"), validation=ValidationConfig(micro_batch_size=32))
    small = replace(RUN, images=1, sampled=1, trained=1, rollout=Usage(2, 1100), update=Usage(1, 1070), trajectories=10)
    found = forecast_memory(c, [small, RUN], RUN, 20, range(1, 21), capacity)
    assert (found.trajectories, found.rollout, found.update) == (200, 1560, 1360)
    assert (found.largest_rollout, found.largest_update) == (rollout, update)
    assert found.validation == 1000 + 90 * 32


def test_what_is_not_measured_is_not_known() -> None:
    blind = replace(RUN, rollout=Usage(8.0, None), update=Usage(4.0, None))
    found = forecast_memory(config("flow_grpo"), [blind, blind], blind, 20, range(1, 21), 10_000)
    assert (found.rollout, found.update, found.largest_rollout, found.validation) == (None, None, None, None)


def test_sizes() -> None:
    changed: Config = sized(config("flow_grpo"), 6, 3)
    assert (changed.rollout.micro_batch_size, changed.actor.micro_batch_size, changed.rollout.n) == (6, 3, 4)
    segments: list[Any] = [Segment((0, 1), (0, 1), (), ()), Segment((0, 1, 2), (0, 1, 2), (), ())]
    assert rows_of(segments) == 3


def test_networks_and_their_lora() -> None:
    pipe = tiny.build(tiny.CASES["sd3"])
    whole = sum(p.numel() for p in pipe.transformer.parameters())
    linear = sum(isinstance(m, torch.nn.Linear) for m in pipe.transformer.modules())
    pipe.vae.to(torch.bfloat16)
    lora = {f"transformer.{key}": p for key, p in add_lora(pipe.transformer, 4, 4.0, r"attn\.to_[qk]$", 0).items()}
    found = {c.name: c for c in components(pipe.components, lora)}
    transformer = found["transformer"]
    assert next(iter(found)) == "transformer" and "tokenizer" not in found and "scheduler" not in found
    assert (transformer.parameters, transformer.linear_layers) == (whole, linear)
    assert (transformer.lora_modules, transformer.lora_parameters) == (4, sum(p.numel() for p in lora.values()))
    assert transformer.targets == ("transformer_blocks.*.attn.to_q", "transformer_blocks.*.attn.to_k")
    assert (found["vae"].dtype, found["vae"].lora_modules, found["vae"].targets) == ("bfloat16", 0, ())


def test_gradients_are_counted_where_they_are_not_zero() -> None:
    def parameter(gradient: float | None) -> torch.nn.Parameter:
        p = torch.nn.Parameter(torch.zeros(2))
        p.grad = None if gradient is None else torch.full((2,), gradient)
        return p

    gradients = {"one.a": 0.5, "one.b": 0.0, "one.c": None, "one.d": float("nan"), "one_more.a": 1.0}
    lora = {f"{name}.lora_B.default.weight": parameter(g) for name, g in gradients.items()}
    lora["one.b.lora_A.default.weight"] = parameter(1.0)
    assert count_gradients(lora, "one") == 2 and count_gradients(lora, "one_more") == 1


LINUX = Path("/proc/self/status").exists()


def test_the_peak_is_that_of_the_work() -> None:
    result, large = measured("cpu", lambda: float(torch.ones(50_000_000).sum()))
    assert result == 5e7 and large.seconds > 0
    _, small = measured("cpu", lambda: None)
    if LINUX:
        assert large.peak is not None and small.peak is not None
        assert large.peak >= small.peak


def test_capacity_is_what_is_free_and_what_the_process_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "PROC", tmp_path)
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(findings, "LIMITS", (limit,))
    assert capacity("cpu") is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   6 kB\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("Name: x\nVmRSS:\t 2 kB\n")
    assert capacity("cpu") == 8 * 1024
    limit.write_text("max\n")
    assert capacity("cpu") == 8 * 1024
    limit.write_text("5000\n")
    assert capacity("cpu") == 5000


def test_without_proc_the_peak_is_that_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "PROC", tmp_path)
    assert measured("cpu", lambda: None)[1].peak == findings._peak()
    assert (findings._peak() or 0) > 10_000_000


def test_a_line_through_two_sizes() -> None:
    line = through({4: 130.0, 1: 100.0})
    assert line is not None and [line(size) for size in (0, 1, 4, 8)] == [90.0, 100.0, 130.0, 170.0]
    assert through({}) is None and through({4: 130.0}) is None and through({1: 100.0, 4: 100.0}) is None
