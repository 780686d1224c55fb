"""What a sweep hands to Hydra, what its runs are given, and the table of their results."""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gerl.commandline.composition import compose_run
from gerl.errors import ConfigError
from gerl.trainer.sweep import JOB, _arguments, _check_choices, _plan, read_jobs, result, table, write_table

LAST = "reward.scorers.ocr.weight=2"
SLEEPER = """
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path("ended").touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
pathlib.Path("started").touch()
time.sleep(120)
"""


def test_each_combination_is_a_run_and_the_rest_is_the_same_in_all() -> None:
    plan = _plan(["experiment=plain", "actor.lr=1e-3,1e-4", "trainer.seed=range(1,4)", LAST])
    assert plan.batch is not None and len(plan.batch) == 6
    runs = [compose_run(_arguments(run, plan)).config for run in plan.batch]
    assert [(run.actor.lr, run.trainer.seed) for run in runs] == [(lr, s) for lr in (1e-3, 1e-4) for s in (1, 2, 3)]
    assert all(run.reward.scorers["ocr"].weight == 2 for run in runs)
    assert plan.fixed == ["experiment", "reward.scorers.ocr.weight"]
    assert "hydra.sweep.subdir=${hydra.job.num}_lr_${actor.lr}+seed_${trainer.seed}" in plan.overrides
    assert "hydra/job_logging=none" in plan.overrides and not any("direction" in o for o in plan.overrides)


def test_algorithms_and_experiment_files_are_swept_over_by_name(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("trainer:\n  steps: 7\n")
    plan = _plan([f"experiment={mine},plain", "algorithm=awm,flow_grpo"])
    assert plan.batch is not None
    assert _arguments(plan.batch[0], plan) == [f"experiment={mine}", "algorithm=awm"]
    assert _arguments(plan.batch[3], plan) == ["experiment=plain", "algorithm=flow_grpo"]
    assert compose_run(_arguments(plan.batch[1], plan)).config.trainer.steps == 7
    names = "hydra.runtime.choices."
    assert (
        f"hydra.sweep.subdir=${{hydra.job.num}}_experiment_${{{names}experiment}}+algorithm_${{{names}algorithm}}"
        in (plan.overrides)
    )


@pytest.mark.parametrize("values", ["choice(awm,awm_fast)", "glob(awm*)"])
def test_presets_by_functions_of_hydra(values: str) -> None:
    plan = _plan(["experiment=plain", f"algorithm={values}"])
    assert plan.batch is not None
    assert [run[-1] for run in plan.batch] == ["algorithm=awm", "algorithm=awm_fast"]


def test_values_that_make_no_name_are_left_out_of_it() -> None:
    plan = _plan(["data.train=a/b.txt,c.txt", "trainer.seed=1"])
    assert "hydra.sweep.subdir=${hydra.job.num}" in plan.overrides


def test_scorers_are_swept_over_as_a_whole_or_by_a_key() -> None:
    plan = _plan(["experiment=plain", "reward.scorers={ocr: {scale: 3}}", "reward.scorers.ocr.weight=1,2"])
    assert plan.batch is not None
    weights = [compose_run(_arguments(run, plan)).config.reward.scorers["ocr"].weight for run in plan.batch]
    assert weights == [1, 2]


def test_a_plugin_chooses_its_values_itself_and_is_told_that_more_is_better() -> None:
    plan = _plan(["hydra/sweeper=optuna", "actor.lr=interval(1e-5,1e-2)"])
    assert plan.batch is None and {"hydra.sweeper.direction=maximize", "hydra.sweeper.max_failure_rate=1.0"} <= {
        *plan.overrides
    }
    assert (
        "hydra.sweeper.direction=maximize"
        not in _plan(
            ["hydra/sweeper=optuna", "hydra.sweeper.direction=minimize", "actor.lr=interval(1e-5,1e-2)"]
        ).overrides
    )


def test_a_preset_in_a_file_is_swept_over(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("algorithm:\n  name: flow_grpo\n  kl_coef: 0.5\n")
    plan = _plan([f"algorithm={mine},awm", "experiment=plain"])
    assert plan.batch is not None
    assert [_arguments(run, plan) for run in plan.batch] == [
        [f"algorithm={mine}", "experiment=plain"],
        ["algorithm=awm", "experiment=plain"],
    ]
    assert compose_run(_arguments(plan.batch[0], plan)).config.algorithm.kl_coef == 0.5


OPTUNA = ("hydra/sweeper=optuna", "experiment=plain")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["actor.lr=interval(-1,1)", "trainer.seed=choice(1,2)"], r"^actor\.lr=-1\.0: "),
        (["actor.lr=interval(1e-5,1e-3)", "model.lora_rank=choice(8,0)"], r"^model\.lora_rank=0: "),
        (["trainer.seed=range(1,99)", "model.dtype=choice(bfloat16,bfloat61)"], r"^model\.dtype=.?bfloat61"),
        (["trainer.seed=1,2", "trainer.steps=0"], r"^trainer\.steps=0: "),
    ],
)
def test_a_value_that_a_plugin_might_choose_and_no_run_can_have_is_refused_at_first(
    given: list[str], said: str
) -> None:
    plan = _plan([*OPTUNA, *given])
    with pytest.raises(ConfigError, match=said):
        _check_choices(plan)


def test_a_value_that_goes_with_some_of_the_others_is_left_to_the_plugin() -> None:
    plan = _plan([*OPTUNA, "trainer.staleness=choice(0,1)", "algorithm.dynamic_sampling=choice(2,0)"])
    with pytest.raises(ConfigError, match=r"trainer\.staleness=1"):
        compose_run(["experiment=plain", "trainer.staleness=1", "algorithm.dynamic_sampling=2"])
    _check_choices(plan)


def test_nothing_to_sweep_over_is_said() -> None:
    with pytest.raises(ConfigError, match="-m: there is nothing to sweep over"):
        _plan(["trainer.seed=1"])


METRICS = [
    {"step": 0, "val/reward/mean": 0.1},
    {"step": 1, "reward/mean": 9.0},
    {"step": 2, "reward/mean": 8.0, "val/reward/mean": 0.7},
    {"step": 4, "val/reward/mean": None},
    {"step": 6, "val/reward/mean": 0.5},
]


def write_run(folder: Path, number: int, code: int | None, metrics: list[dict[str, object]], *swept: str) -> None:
    folder.mkdir(parents=True)
    job = {"number": number, "overrides": ["experiment=plain", *swept], "swept": list(swept), "code": code, "at": 0.0}
    (folder / JOB).write_text(json.dumps(job | ({} if code is None else {"seconds": 61.0})))
    if metrics:
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in metrics))


def test_the_table_has_what_was_swept_over_the_held_out_reward_and_how_each_ended(tmp_path: Path) -> None:
    write_run(tmp_path / "1_b", 1, 1, [], "++reward.scorers.x.weight=2", "trainer.seed=1")
    write_run(tmp_path / "0_a", 0, 0, METRICS, "++reward.scorers.x.weight=1", "trainer.seed=1")
    write_run(tmp_path / "2_c", 2, None, METRICS[1:2], "++reward.scorers.x.weight=3", "trainer.seed=1")
    write_table(tmp_path)
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert [row["reward.scorers.x.weight"] for row in rows] == ["1", "2", "3"]
    assert (rows[0]["final"], rows[0]["best"], rows[0]["best_step"], rows[0]["end"]) == ("0.5", "0.7", "2", "finished")
    assert (rows[1]["final"], rows[1]["end"]) == ("", "exit code 1")
    assert (rows[2]["final"], rows[2]["end"], rows[2]["seconds"]) == (
        "9.0",
        "unfinished",
        "",
    )  # of the training prompts
    runs = json.loads((tmp_path / "sweep.json").read_text())["runs"]
    assert runs[0]["overrides"][0] == "experiment=plain" and runs[0]["folder"] == str(tmp_path / "0_a")
    shown = table(read_jobs(tmp_path)).splitlines()
    assert shown[0].split()[:2] == ["reward.scorers.x.weight", "trainer.seed"] and len(shown) == 5
    assert [row["reward"] for row in rows] == ["val/reward/mean", "", "reward/mean"] and "validation.data" in shown[-1]
    assert shown[1].split() == ["0", "1", "1", "0.500", "0.700", "2", "61", "s", "finished"]


def test_a_run_without_metrics_or_with_damaged_ones_has_no_result(tmp_path: Path) -> None:
    nothing = {"final": None, "best": None, "best_step": None, "reward": None}
    assert result(tmp_path) == nothing
    (tmp_path / "metrics.jsonl").write_text('{"step": "x"}\n{"step": 1}\n')
    assert result(tmp_path) == nothing


def test_a_training_is_stopped_if_the_search_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    code = "from gerl.trainer import sweep; sweep.PROGRAM = 'sleeper'; sweep.run_training([])"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as parent:
        while not (tmp_path / "started").exists():
            assert parent.poll() is None
            time.sleep(0.05)
        parent.kill()
    deadline = time.monotonic() + 60
    while not (tmp_path / "ended").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
