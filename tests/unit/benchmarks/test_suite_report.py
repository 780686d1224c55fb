"""The table of time_to_reward: intervals, significance and costs, and that docs/algorithm_benchmark.md has it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apart import import_scipy
from sections import with_section
from suite import FINAL, RESULTS, TUNE, load_runs

import_scipy()
import suite_report as report  # noqa: E402


def run(
    name: str,
    reward: float,
    seed: int = 1,
    stage: str = FINAL,
    keys: tuple[str, ...] = ("actor.lr=1e-3",),
    middle: float = 0.6,
    error: str = "",
) -> dict[str, Any]:
    """A result with validations at steps 0, 5 and 10."""
    rewards = (0.5, middle, reward)
    points = [
        {"step": 5 * i, "forward": 20 * i, "backward": 10 * i, "cpu_seconds": 3.0 * i, "images": 480 * i}
        | {"reward": r, "exact": r / 2}
        for i, r in enumerate(rewards)
    ]
    return {
        "algorithm": name, "overrides": list(keys), "seed": seed, "stage": stage, "fingerprint": "-".join(keys),
        "points": points, "optimizer_steps": 20, "validation_seconds": 2.0, "error": error, "torch": "2.0",
        "gerl": {"version": "0.1.0", "commit": "0123456789"}, "hardware": {"cpu": "a CPU", "cores": 2},
    }  # fmt: skip


def runs_of(name: str, *rewards: float) -> list[dict[str, Any]]:
    final = [run(name, reward, seed) for seed, reward in enumerate(rewards, start=1)]
    return [run(name, 0.7, 0, TUNE), *final]


def test_cpu_seconds_do_not_depend_on_the_machine() -> None:
    fast, slow = run("awm_fast", 0.8), run("awm_fast", 0.8)
    slow["validation_seconds"] *= 3
    slow["points"] = [point | {"cpu_seconds": 3 * point["cpu_seconds"]} for point in slow["points"]]
    assert report.cpu_seconds(slow, 2.0) == pytest.approx(report.cpu_seconds(fast, 2.0)) == 6.0
    assert report.usual_validation([report.Summary("awm_fast", [fast, slow, fast])]) == 2.0


# --- statistics


def test_the_interval_is_the_textbooks() -> None:
    found = report.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3 and found.half == pytest.approx(2.776445 * math.sqrt(2.5 / 5))  # t of 4 degrees, 97.5 %
    assert str(report.interval([0.5, 0.7])) == f"0.600 ± {12.7062 * 0.1:.3f}"
    assert report.interval([0.5]) == report.Interval(0.5, None) and str(report.interval([0.5])) == "0.500"


def test_welch() -> None:
    # by hand: t = -1 / sqrt(1/3 + 4/3), degrees (5/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2)
    t, degrees = -1 / math.sqrt(5 / 3), (5 / 3) ** 2 / ((1 / 9 + 16 / 9) / 2)
    x = np.linspace(0, -t, 10001)  # Student's density, integrated from 0 to |t|
    scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
    inside = np.trapezoid(scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2), x)
    assert report.welch([1.0, 2.0, 3.0], [1.0, 3.0, 5.0]) == pytest.approx(1 - 2 * inside)
    assert report.welch([1.0], [5.0, 6.0]) == 1
    assert report.welch([1.0, 1.0], [1.0, 1.0]) == 1 and report.welch([1.0, 1.0], [2.0, 2.0]) == 0


def test_holm() -> None:
    # the example of Holm's procedure: against 0.05/4, 0.05/3, 0.05/2; the third fails and so does the last
    assert report.holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert report.holm([0.024, 0.03]) == [True, True]
    assert report.holm([0.03, 0.03]) == [False, False] and report.holm([]) == []


@pytest.mark.parametrize(
    ("count", "different", "expected"),
    [
        (0, [], []),
        (3, [], [{0, 1, 2}]),
        (3, [(0, 2)], [{0, 1}, {1, 2}]),
        (3, [(0, 1), (0, 2), (1, 2)], [{0}, {1}, {2}]),
        (4, [(0, 1), (2, 3)], [{0, 2}, {0, 3}, {1, 2}, {1, 3}]),
        (4, [(0, 2), (0, 3), (1, 3)], [{0, 1}, {1, 2}, {2, 3}]),
    ],
)
def test_groups_are_the_largest_without_a_difference(
    count: int, different: list[tuple[int, int]], expected: list[set[int]]
) -> None:
    assert report.groups(count, different) == expected


# --- from the results to the table


def test_algorithms_are_ranked_by_the_final_runs_of_their_best_candidate() -> None:
    keys = ("actor.lr=3e-3",)
    runs = [*runs_of("awm", 0.7, 0.8), *runs_of("rwr", 0.9, 0.8)]
    runs += [run("awm", 0.75, 0, TUNE, keys), run("awm", 0.9, 1, keys=keys), run("awm", 0.92, 2, keys=keys)]
    runs += [run("dgpo", 0.99, 0, TUNE)]  # tuned only
    found = report.summaries(runs)
    assert [summary.algorithm for summary in found] == ["awm", "rwr"]
    assert found[0].rewards == [0.9, 0.92] and found[1].rewards == [0.9, 0.8]


def test_results_of_settings_that_changed_are_not_mixed() -> None:
    runs = runs_of("awm", 0.7, 0.8)
    assert not report.summaries([{**r, "fingerprint": "old"} if r["stage"] == FINAL else r for r in runs])


def test_evaluations_to_the_goal_are_a_median_over_the_seeds() -> None:
    def cost(*reached: str) -> int | None:
        values = {"middle": (0.9, 0.95), "end": (0.6, 0.9), "never": (0.6, 0.89)}
        own = [run("awm", values[r][1], seed, middle=values[r][0]) for seed, r in enumerate(reached)]
        return report.Summary("awm", own).to(0.9)

    assert cost("middle", "middle", "end") == 30 and cost("middle", "end", "never") == 60
    assert cost("never", "never", "middle") is None and cost("never", "middle") == 30


def test_letters() -> None:
    runs = [*runs_of("awm", 0.90, 0.91, 0.92, 0.91), *runs_of("rwr", 0.91, 0.90, 0.92, 0.90)]
    runs += runs_of("crd", 0.60, 0.61, 0.62, 0.61)
    assert report.letters(report.summaries(runs)) == ["a", "a", "b"]
    assert report.letters(report.summaries(runs_of("awm", 0.9))) == ["a"]
    assert [report.letter(0), report.letter(25), report.letter(26)] == ["a", "z", "(26)"]


def test_the_table() -> None:
    runs = [*runs_of("awm", 0.90, 0.92), *runs_of("rwr", 0.70)]
    runs[1]["error"] = "the weights grew"
    runs[2]["gerl"] = {**runs[2]["gerl"], "dirty": True}
    lines = report.table(runs, seeds=1).splitlines()
    half = 12.7062 * 0.01
    reward, exact = f"0.910 ± {half:.3f}", f"0.455 ± {half / 2:.3f}"
    assert lines[0].startswith("| algorithm | letters | held-out reward | read exactly | evaluations | CPU seconds |")
    assert lines[2] == f"| `awm` | a | {reward} | {exact} | 60 | 6 | 2 (1 diverged) |"
    assert lines[3] == "| `rwr` | a | 0.700 | 0.350 | 60 | 6 | 1 |"
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    said, end = lines[5], lines[7]
    assert said == "Images: 960. Optimizer steps: 20. `actor.lr`: 1e-3. Evaluations to 0.9: `awm` 60."
    assert end.startswith("Rows of a table that share a letter do not differ significantly in held-out reward; all ot")
    assert "of all 1 pairs," in end and "family-wise error rate 5 %" in end
    assert "gerl 0.1.0 at 0123456, 0123456\\* (\\*: with uncommitted changes);" in end and "a CPU with 2 cores" in end
    assert report.table(runs[:1], seeds=1) == report.table([]) == "not measured yet"
    assert "rwr" not in report.table(runs, seeds=2) and report.table(runs) == "not measured yet"


def test_columns_are_words_only_where_most_rows_have_the_same() -> None:
    runs = [*runs_of("awm", 0.90, 0.92), *runs_of("rwr", 0.70, 0.72), *runs_of("crd", 0.80, 0.81)]
    assert "\nSeeds: 2. Images: 960. Optimizer steps: 20." in report.table(runs, seeds=2)
    for point in runs[-1]["points"]:
        point["images"] *= 3
    assert "Images: 960; 1,920 for `crd`." in report.table(runs, seeds=2)
    assert "| images |" in report.table(runs[3:], seeds=2) and "Images:" not in report.table(runs[3:], seeds=2)


def test_settings_besides_the_learning_rate_stand_below_the_table() -> None:
    def of(name: str, *keys: str) -> list[dict[str, Any]]:
        return [{**r, "overrides": list(keys), "fingerprint": "x"} for r in runs_of(name, 0.8)]

    runs = [*of("awm", "actor.lr=3e-3", "a.b=1", "a.c=2"), *of("rwr", "a.b=1", "a.c=2"), *of("crd", "actor.lr=1e-3")]
    lines = report.table(runs, seeds=1).splitlines()
    rates = {line.split(" | ")[0].strip("| `"): line.split(" | ")[-1] for line in lines[2:5]}
    assert lines[0].endswith("| actor.lr |") and rates == {"awm": "3e-3 |", "rwr": "preset |", "crd": "1e-3 |"}
    assert "Other settings:" in lines and "* `awm`, `rwr`: `a.b=1` `a.c=2`" in lines
    assert "Other settings" not in report.table(runs_of("awm", 0.9), seeds=1)


def test_presets_that_learn_from_something_else_have_a_table_of_their_own() -> None:
    runs = [*runs_of("awm", 0.90, 0.92), *runs_of("draft", 0.95, 0.95), *runs_of("mixed_gradient", 0.7, 0.9)]
    table = report.table(runs, seeds=2)
    by_rewards, others = table.split(report.OTHERS)
    assert "tests of all 1 pairs" not in by_rewards and others.count("that share a letter") == 1
    assert "`awm`" in by_rewards and not any(word in by_rewards for word in ("draft", "mixed", "learns from"))
    assert "A drawing of the wanted text" in others and "ranked images" not in others
    assert "| letters | learns from | held-out reward |" in others and "| `draft` | a | drawing | 0.950 ± " in others
    assert "| `mixed_gradient` | a | OCR, drawing | 0.800 ± " in others


def test_the_page_has_the_committed_results() -> None:
    page = report.PAGE.read_text(encoding="utf-8")
    has = page == with_section(page, report.BEGIN, report.END, report.table(load_runs(RESULTS)))
    assert has, "run python benchmarks/time_to_reward.py --table"


# --- the curves


def test_a_curve_is_a_mean_over_the_seeds_at_each_validation() -> None:
    [summary] = report.summaries(runs_of("awm", 0.8, 0.9))
    summary.runs[0]["points"].insert(2, {**summary.runs[0]["points"][2], "step": 7})  # of one seed only
    found = report.curve(summary)
    assert [cost for cost, _ in found] == [0, 30, 60]
    assert [y.mean for _, y in found] == pytest.approx([0.5, 0.6, 0.85])


def test_the_picture_has_every_algorithm_and_is_the_same_again(tmp_path: Path) -> None:
    runs = [*runs_of("awm", 0.8, 0.9), *runs_of("flow_grpo", 0.7, 0.8), *runs_of("mix_grpo_flash", 0.6)]
    for name in ("one.svg", "two.svg"):
        report.plot(runs, tmp_path / name, seeds=1)
    drawn = (tmp_path / "one.svg").read_text()
    assert all(f">{name}</text>" in drawn for name in ("awm", "flow_grpo", "mix_grpo_flash"))
    assert drawn == (tmp_path / "two.svg").read_text()
    report.plot([], tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()
