"""The protocol and rows of the ladder, which run is next, and the statistics of its table."""

import json
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import ladder
import ladder_table as report
import numpy as np
import pytest
import torch
import yaml

from gerl.algorithms.common import replayed
from gerl.commandline.composition import compose_run, shipped
from gerl.model.loading import load_policy

RULES = {"evaluations": 100, "rates": [1e-3, 3e-3], "tuning_seeds": [1, 2], "seeds": [11, 12], "tasks": {"signs": {}}}
FILES = [file for file in ladder.ROWS.glob("*.yaml") if file != ladder.PROTOCOL]
ROWS = [file.stem for file in FILES if "trainer" not in yaml.safe_load(file.read_text())]  # those that gerl trains


def run(stage: str, rate: float, seed: int, *rewards: float, kl: float = 5.0) -> dict[str, Any]:
    points = [[10 * k, 40 * k, 6 * k, reward] for k, reward in enumerate((0.5, *rewards))]
    ends = {"first": {"colour": 0.9}, "last": {"colour": 0.8, "kl": kl}}
    fixed = {"stage": stage, "rate": rate, "seed": seed, "steps": 20, "updates": 20, "error": "", "own": []}
    return fixed | {"points": points, "code": "0123", "machine": "a CPU"} | ends


def row(name: str, *runs: dict[str, Any], change: tuple[str, ...] = ()) -> ladder.Row:
    return ladder.Row(name, "signs", ("algorithm=awm",), change, "for a reason" if change else "", list(runs))


def measured(name: str, first: float, second: float, **more: Any) -> ladder.Row:
    tuned = [run("tune", rate, seed, rate * 100) for rate in RULES["rates"] for seed in (1, 2)]
    return row(name, *tuned, run("final", 3e-3, 11, 0.6, first), run("final", 3e-3, 12, 0.6, second), **more)


# --- The protocol


def test_every_preset_has_a_row() -> None:
    assert set(ROWS) == set(shipped("algorithm"))


@pytest.mark.parametrize("name", ROWS)
def test_the_runs_of_a_row_compose(name: str, tmp_path: Path) -> None:
    rules = ladder.protocol()
    for found in ladder.rows([name]):
        given = [key for key in found.keys if not any(file in key for file in ladder.PREPARED)]
        config = compose_run([*given, *ladder.Job(found, "final", 1e-3, 101, 20).own()]).config
        assert config.actor.lr == 1e-3 and config.actor.lr_schedule == "linear" and config.trainer.seed == 101
        assert config.sampling.num_inference_steps <= rules["denoising_steps"]
        assert rules["tasks"][found.task]["reward"] in config.reward.scorers
        assert bool(found.change) == bool(found.why)


def test_seeds_of_the_table_were_not_tuned_on() -> None:
    rules = ladder.protocol()
    assert len(set(rules["seeds"])) >= 8 and len(set(rules["tuning_seeds"])) >= 3
    assert not set(rules["seeds"]) & set(rules["tuning_seeds"])


# --- Which run is next


def names(*found: ladder.Row, last: str = "final") -> list[tuple[Any, ...]]:
    jobs = islice(ladder.next_jobs(list(found), RULES, inf, last), 9)
    return [(job.row.name, *job.key, job.steps) for job in jobs if job is not None]


def test_a_probe_comes_first_and_says_how_many_steps_the_budget_has() -> None:
    assert names(row("a")) == [("a", "probe", 3e-3, 1, 2)]
    probed = row("a", run("probe", 3e-3, 1, 0.5))  # 40 evaluations in ten steps
    assert names(probed)[:3] == [("a", "tune", 1e-3, 1, 25), ("a", "tune", 3e-3, 1, 25), ("a", "tune", 1e-3, 2, 25)]
    assert names(probed, last="probe") == []


def test_all_rows_are_tuned_before_the_seeds_of_one_count() -> None:
    tuned = [run("tune", rate, seed, rate * 100) for rate in RULES["rates"] for seed in (1, 2)]
    tuned[3]["points"][-1][1] = 10  # 50 evaluations in twenty steps, of both seeds with the best
    done = row("a", run("probe", 3e-3, 1, 0.5), *tuned)
    assert ladder.best_rate(done) == 3e-3
    found = names(done, row("b"))
    assert found[0] == ("b", "probe", 3e-3, 1, 2) and found[1:] == [("a", "final", 3e-3, s, 40) for s in (11, 12)]


def test_results_of_other_keys_are_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ladder, "RESULTS", tmp_path)
    (found,) = ladder.rows(["rwr"], ["shapes"])
    found.runs.append(run("probe", 1e-3, 1, 0.5))
    found.write()
    assert ladder.rows(["rwr"], ["shapes"])[0].runs == found.runs
    content = json.loads(found.file.read_text())
    found.file.write_text(json.dumps(content | {"keys": [*content["keys"], "rollout.n=8"]}))
    assert ladder.rows(["rwr"], ["shapes"])[0].runs == []


# --- Statistics


def test_the_permutation_test_counts_all_divisions() -> None:
    assert report.permutation_test([3.0, 4.0, 5.0], [0.0, 1.0, 2.0]) == pytest.approx(2 / 20)
    assert report.permutation_test([1.0, 2.0], [2.0, 1.0]) == 1.0


def test_the_paired_test_counts_all_signs() -> None:
    assert report.paired_test([1.0, 2.0, 3.0]) == pytest.approx(2 / 8)
    assert report.paired_test([1.0, -1.0]) == 1.0


def test_the_rank_correlation_is_spearmans() -> None:
    assert report.rank_correlation([1.0, 2.0, 5.0, 9.0], [0.1, 0.2, 0.3, 0.4])[0] == pytest.approx(1.0)
    value, p = report.rank_correlation([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 1.0, 4.0, 3.0, 5.0])
    assert value == pytest.approx(0.8) and p == pytest.approx(16 / 120, abs=0.01)  # all 120 orders


def test_the_permutation_test_keeps_its_level() -> None:
    rng = np.random.default_rng(0)
    p = [report.permutation_test(*rng.lognormal(size=(2, 5))) for _ in range(400)]
    assert 0.02 < np.mean(np.array(p) <= 0.05) < 0.08


def test_holm_adjusts_for_all_tests_together() -> None:
    assert report.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert report.holm([0.9, 0.6]) == [1.0, 1.0] and report.holm([]) == []


def test_ranks_of_rows_that_do_not_overlap_are_certain() -> None:
    rewards = np.array([[0.9, 0.91, 0.92], [0.5, 0.52, 0.51], [0.51, 0.5, 0.52]])
    assert report.rank_intervals(rewards) == [(1, 1), (2, 3), (2, 3)]


def test_a_row_that_ends_below_its_middle_diverges() -> None:
    falls = row("a", run("final", 1e-3, 11, 0.7, 0.8, 0.5), run("final", 1e-3, 12, 0.7, 0.8, 0.4))
    assert report.Summary.of(falls, [11, 12]).diverges  # type: ignore[union-attr]
    assert not report.Summary.of(measured("b", 0.8, 0.7), [11, 12]).diverges  # type: ignore[union-attr]
    assert report.Summary.of(row("c", run("final", 1e-3, 11, 0.7)), [11, 12]) is None


def test_a_table_has_what_was_gained_and_what_was_lost() -> None:
    found = report.summaries([measured("awm_fast", 0.9, 0.8), measured("b", 0.7, 0.6, change=("x=1",))], RULES)
    rules = {"tasks": {"signs": {"others": ["colour"]}}}
    lines = report.table("signs", found, rules).splitlines()
    assert lines[2].startswith("| `awm_fast` | 1 | 0.850 ± ") and "| 5 | 3e-3 | 12 | 20 |" in lines[2]
    assert lines[3].startswith("| `b` * | 2 | 0.650 ± ") and "| -0.100 |" in lines[3]
    assert [summary.cost(0.8) for summary in found] == [80, None]
    tuned = report.tuning([summary.row for summary in found], RULES).splitlines()
    assert tuned[0] == "| algorithm | 1e-3 | 3e-3 |" and tuned[2].startswith("| `awm_fast` | ") and "**" in tuned[2]
    assert report.changes(found) == ["* `b`: `x=1` (for a reason)"]


def test_a_row_has_its_tuning_when_it_is_whole() -> None:
    tuned = [run("tune", rate, seed, rate * 100) for rate in RULES["rates"] for seed in (1, 2)]
    assert report.tuned_means(row("a", *tuned), RULES) == pytest.approx([0.1, 0.3])
    assert report.tuned_means(row("a", *tuned[1:]), RULES) == []


def test_the_page_has_the_tables_of_the_results() -> None:
    assert report.section(ladder.protocol()) in report.PAGE.read_text(encoding="utf-8")


# --- The KL at the end


def test_the_kl_is_the_mean_log_ratio_of_what_the_policy_samples(tmp_path: Path) -> None:
    task = ladder.protocol()["tasks"]["signs"]
    config = compose_run(["algorithm=flow_grpo", *task["keys"]]).config
    policy = load_policy(config.model, 0.0, "cpu", seed=0)
    file = tmp_path / "pytorch_lora_weights.safetensors"
    file.write_bytes(policy.lora_file())
    assert ladder.kl_to_base(tmp_path, task) == 0.0  # a new LoRA changes nothing
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in policy.trained.values():
            value += 0.01 * torch.randn(value.shape, generator=generator)
    policy.ema.update()
    file.write_bytes(policy.lora_file())
    tape = ladder.noisy_tape(policy, config)
    own = replayed(policy.pipe, tape, lambda step: step.log_prob)
    with policy.base():
        base = replayed(policy.pipe, tape, lambda step: step.log_prob)
    ratios = sum(own[k] - base[k] for k in own) * tape.steps[-1].x[0].numel()  # [B]
    kl = ladder.kl_to_base(tmp_path, task)
    assert kl > 1 and abs(float(ratios.mean()) - kl) < 3 * (2 * kl / len(ratios)) ** 0.5  # its variance is 2 KL


def test_known_runs_are_repeated_and_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    one = measured("one", 0.7, 0.75)
    made: list[ladder.Job] = []

    def trained(next_job: Any, *rest: Any) -> Any:
        while (job := next_job()) is not None:
            made.append(job)
            yield job, len(made) < 2, "no memory"

    monkeypatch.setattr(ladder, "run_jobs", trained)
    monkeypatch.setattr(ladder, "result", lambda job, *rest: run("final", 3e-3, job.seed, 0.6, 0.72))
    with caplog.at_level("INFO", "ladder"):
        assert ladder.repeat([one], 11, tmp_path, 1, RULES) == 0
    assert [(job.seed, job.rate, job.steps) for job in made] == [(11, 3e-3, 20)]
    assert "0.02000" in caplog.text and "80 evaluations" in caplog.text
    assert ladder.repeat([one], 12, tmp_path, 1, RULES) == 1  # a run that failed
    assert ladder.repeat([one], 99, tmp_path, 1, RULES) == 1 and len(made) == 2
    assert "11, 12" in caplog.text  # the seeds that there are
