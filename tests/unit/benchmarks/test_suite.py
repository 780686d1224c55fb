"""The suite of time_to_reward: equal budgets, an order that a stop leaves even, results that are carried on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import suite
import yaml
from drills import ALL
from suite import FINAL, TUNE, Candidate, Job, Suite

from gerl.algorithms import build_algorithm
from gerl.algorithms.planning import plan_prompts, plan_samples, prompt_schedule
from gerl.commandline.composition import compose_run, shipped
from gerl.config.algorithms import algorithm_config
from gerl.utils.dataset import load_prompts


def candidates(name: str, count: int = 2) -> list[Candidate]:
    return [Candidate(name, (f"actor.lr={i}",), (), f"{name}-{i}") for i in range(count)]


def plan(*names: str, seeds: tuple[int, ...] = (1, 2), count: int = 2) -> Suite:
    return Suite({name: candidates(name, count) for name in names}, 0, 10, seeds)


def result(job: Job, reward: float = 0.5, cost: int = 100, error: str = "") -> dict[str, Any]:
    """A result of `job` as the file has it."""
    algorithm, keys, seed, stage, until, fingerprint = job.key
    point = {"step": 20, "forward": cost, "backward": cost, "reward": reward}
    known = {"algorithm": algorithm, "overrides": list(keys), "seed": seed, "stage": stage, "fingerprint": fingerprint}
    return {**known, "until": until, "points": [point], "error": error}


def order(found: Suite) -> list[tuple[str, str, int, str]]:
    """All jobs one after the other; the second candidate of everything is the better one."""
    runs: list[dict[str, Any]] = []
    while (job := found.next_job(runs)) is not None:
        runs.append(result(job, reward=float(job.candidate.keys[0][-1])))
    return [(r["algorithm"], r["stage"], r["seed"], r["overrides"][0]) for r in runs]


# --- the plan


def test_breadth_first() -> None:
    assert order(plan("a", "b")) == [
        ("a", TUNE, 0, "actor.lr=0"),
        ("b", TUNE, 0, "actor.lr=0"),
        ("a", TUNE, 0, "actor.lr=1"),
        ("b", TUNE, 0, "actor.lr=1"),
        ("a", FINAL, 1, "actor.lr=1"),
        ("b", FINAL, 1, "actor.lr=1"),
        ("a", FINAL, 2, "actor.lr=1"),
        ("b", FINAL, 2, "actor.lr=1"),
    ]
    assert plan("a", "b").length == 8


def test_taken_jobs_are_passed_over_and_an_algorithm_waits_for_its_tuning() -> None:
    found = plan("a", "b", seeds=(1,))
    a, b = found.candidates["a"], found.candidates["b"]
    tuned = [result(found.tuning(c)) for c in (*a, b[0])]
    going_on = found.tuning(b[1])
    job = found.next_job(tuned, [going_on])
    assert job == Job(a[0], 1, FINAL)
    assert found.next_job(tuned, [going_on, job]) is None
    assert found.next_job([*tuned, result(going_on), result(job)]) == Job(b[0], 1, FINAL)


@pytest.mark.parametrize("changed", ["algorithm", "overrides", "seed", "stage", "until", "fingerprint"])
def test_a_run_is_known_by_all_that_decides_it(changed: str) -> None:
    found = plan("a")
    first = found.tuning(found.candidates["a"][0])
    run = result(first)
    assert found.next_job([run]) != first
    assert found.next_job([{**run, changed: ["other"] if changed == "overrides" else "other"}]) == first


def test_the_best_candidate() -> None:
    found = plan("a", count=4)
    a = found.candidates["a"]
    jobs = [found.tuning(c) for c in a]
    assert {job.until for job in jobs} == {10}
    rewards = [(0.7, 100, ""), (0.8, 200, ""), (0.8, 100, ""), (0.9, 100, "it diverged")]
    runs = [result(job, *values) for job, values in zip(jobs, rewards, strict=True)]
    assert found.best(a, runs) == a[2]  # of equal rewards the cheaper one; a run that diverged is the last
    assert found.best(a, runs[:3]) is None
    assert found.best(a, [{**run, "seed": 1} for run in runs]) is None
    assert suite.best_run([runs[3]]) == runs[3]


def test_results_of_changed_settings_are_replaced() -> None:
    found = plan("a")
    old, kept = result(found.tuning(candidates("a", 3)[2])), result(found.tuning(found.candidates["a"][1]))
    other = result(found.tuning(candidates("b")[0]))  # an algorithm that this call leaves out
    losing = result(Job(found.candidates["a"][0], 1, FINAL))
    new = result(found.tuning(found.candidates["a"][0]))
    assert suite.with_run([old, kept, other, losing], new, found) == [kept, new, losing, other]
    assert suite.with_run([new], {**new, "error": "again"}, found) == [{**new, "error": "again"}]


# --- the file


def test_the_file_has_a_line_a_run(tmp_path: Path) -> None:
    path = tmp_path / "results" / "runs.json"
    assert suite.load_runs(path) == []
    runs = [result(Job(c, 0, TUNE)) for c in candidates("a")]
    suite.save_runs(path, runs)
    assert suite.load_runs(path) == runs and len(path.read_text().splitlines()) == len(runs) + 2
    suite.save_runs(path, [])
    assert suite.load_runs(path) == []


# --- processes


def worker(tmp_path: Path, fails: str = "") -> Any:
    """Starts a process that writes a result, and its name to a file; `fails`: the keys with which it ends with 1."""
    (tmp_path / "started").touch()

    def start(job: Job, out: Path) -> subprocess.Popen[bytes]:
        name = f"{job.candidate.algorithm} {job.candidate.keys[0]} {job.seed} {job.stage}"
        with (tmp_path / "started").open("a") as file:
            file.write(name + "\n")
        if job.candidate.keys[0] == fails:
            return subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
        code = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
        return subprocess.Popen([sys.executable, "-c", code, str(out), json.dumps(result(job))])

    return start


def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    path, found = tmp_path / "runs.json", plan("a", "b", seeds=(1,))
    suite.save_runs(path, [result(found.tuning(found.candidates["a"][0]))])
    assert suite.carry_out(found, path, jobs=2, start=worker(tmp_path)) == []
    started = (tmp_path / "started").read_text().splitlines()
    assert len(started) == 5 == len(set(started)) and "a actor.lr=0 0 tune" not in started
    runs = suite.load_runs(path)
    assert len(runs) == found.length == len({suite.key_of(run) for run in runs})
    assert runs[1]["command"] == "python benchmarks/time_to_reward.py a --seeds 0 --until 10"
    assert suite.carry_out(found, path, start=worker(tmp_path)) == []
    assert len((tmp_path / "started").read_text().splitlines()) == 5


def test_no_run_starts_after_the_hours(tmp_path: Path) -> None:
    assert suite.carry_out(plan("a"), tmp_path / "runs.json", hours=0, start=worker(tmp_path)) == []
    assert not (tmp_path / "runs.json").exists() and (tmp_path / "started").read_text() == ""


def test_a_process_that_fails_is_tried_again_next_time(tmp_path: Path) -> None:
    path, found = tmp_path / "runs.json", plan("a", "b", seeds=(1,))
    failed = suite.carry_out(found, path, start=worker(tmp_path, fails="actor.lr=1"))
    assert [(job.candidate.algorithm, job.candidate.keys[0]) for job in failed] == [
        ("a", "actor.lr=1"),
        ("b", "actor.lr=1"),
    ]
    assert len(suite.load_runs(path)) == 2  # no final runs without the whole tuning
    assert suite.carry_out(found, path, start=worker(tmp_path)) == []
    assert len(suite.load_runs(path)) == found.length


def test_a_run_whose_preset_was_edited_meanwhile_has_no_result(tmp_path: Path) -> None:
    job = Job(candidates("a")[0], 0, TUNE)
    process = subprocess.Popen([sys.executable, "-c", ""])
    (tmp_path / "out").write_text(json.dumps({**result(job), "fingerprint": "other"}))
    assert suite.Process(job, process, tmp_path / "out").result() is None


def test_an_interruption_ends_the_processes(tmp_path: Path) -> None:
    processes = []

    def start(job: Job, out: Path) -> subprocess.Popen[bytes]:
        if processes:
            raise KeyboardInterrupt
        processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return processes[0]

    with pytest.raises(KeyboardInterrupt):
        suite.carry_out(plan("a"), tmp_path / "runs.json", jobs=2, start=start)
    assert processes[0].poll() is not None


# --- suite.yaml


SOME = shipped("algorithm")[:: 1 if ALL else 4]  # of all, composing the configurations takes some ten seconds


@pytest.fixture(scope="module")
def shipped_suite() -> Suite:
    return suite.read_suite(algorithms=SOME)


def test_every_preset_has_candidates() -> None:
    content = yaml.safe_load(suite.SUITE.read_text())
    groups = [content, *content["others"].values()]
    assert sorted(name for group in groups for name in group["algorithms"]) == shipped("algorithm")
    assert {len(found) for group in groups for found in group["algorithms"].values()} == {4}


def test_candidates_differ(shipped_suite: Suite) -> None:
    assert {len({c.fingerprint for c in found}) for found in shipped_suite.candidates.values()} == {4}
    assert shipped_suite.tuning_seed not in shipped_suite.seeds and len(set(shipped_suite.seeds)) == 5
    job = shipped_suite.next_job([])
    assert job is not None and job.command()[-2:] == ["--until", "5"]


@pytest.mark.parametrize("name", SOME)
def test_every_candidate_has_the_same_budget(name: str, shipped_suite: Suite) -> None:
    for candidate in shipped_suite.candidates[name]:
        config = candidate.config
        assert (config.trainer.steps, config.validation.every, config.sampling.num_inference_steps) == (15, 5, 10)
        assert config.cluster.launcher == "local" and config.cluster.threads_per_worker == 1
        assert any(key.startswith("actor.lr=") for key in candidate.keys)
        [ocr] = [scorer for name, scorer in config.reward.scorers.items() if name == "ocr"]
        differentiates = algorithm_config(config.algorithm.name).needs.reward_gradient
        assert (ocr.weight == 0) is (differentiates and name != "mixed_gradient")
        assert (candidate.images_before > 0) is (config.data.train_on == "files" or config.algorithm.data_coef > 0)
        if config.data.train_on == "files":
            assert candidate.images_before == config.trainer.steps * shipped_suite.images[name]
            continue
        pool = load_prompts(config.data.train)
        prompts = plan_prompts(prompt_schedule(config, pool), pool, 1)
        tasks = build_algorithm(config).plan(plan_samples(config, prompts, 1, 0))
        assert sum(len(task.samples) for task in tasks) == shipped_suite.images[name], candidate.keys


def test_files_that_runs_learn_from_are_made_once(tmp_path: Path) -> None:
    made = tmp_path / "made"
    found = Suite({}, 0, 5, (1,), prepared={str(made): f"-c \"open('{made}', 'a').write('x')\""})
    suite.prepare(found)
    suite.prepare(found)
    assert made.read_text() == "x"


def test_the_fingerprint_is_that_of_what_is_computed() -> None:
    def of(*overrides: str) -> str:
        return suite.fingerprint(compose_run(["algorithm=rwr", *overrides]).config)

    assert of() == of("trainer.seed=3") == of("cluster.launcher=local", "logger.progress=false", "checkpoint.every=0")
    assert of() == of("data.cache_gb=2") != of("data.cache_gb=0")
    assert len({of(), of("actor.lr=2e-3"), of("trainer.steps=3"), of("sampling.num_inference_steps=4")}) == 4
    assert of("actor.lr=2e-3") == of("actor.lr=0.002")


def test_overrides_change_every_run() -> None:
    found = suite.read_suite(algorithms=["rwr"], overrides=["trainer.steps=1"])
    assert list(found.candidates) == ["rwr"]
    assert all(c.arguments.count("trainer.steps=1") == 1 for c in found.candidates["rwr"])
    assert all("trainer.steps=20" not in c.arguments for c in found.candidates["rwr"])
