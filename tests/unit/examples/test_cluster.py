"""The scripts of `examples/cluster`, in dry runs with stand-ins for the commands that need a cluster."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from dry_run import ROOT, TRAIN, DryRun, wait_for
from ray.runtime_env import RuntimeEnv

from gerl.commandline.composition import compose_run

FOLDER = ROOT / "examples" / "cluster"
SKYPILOT: dict[str, Any] = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
SCRIPTS = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.sh"))}
SCRIPTS |= {f"skypilot.yaml: {part}": f"#!/bin/bash\n{SKYPILOT[part]}" for part in ("setup", "run")}


@pytest.fixture
def dry(tmp_path: Path) -> Iterator[DryRun]:
    with socket.create_server(("127.0.0.1", 0)) as head:
        yield DryRun(tmp_path, head.getsockname()[1])


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_sound(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(SCRIPTS[name])
    checks = [["bash", "-n"]]
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    checks += [[shellcheck]] if shellcheck else []
    for check in checks:
        done = subprocess.run([*check, script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    if shellcheck is None:
        pytest.skip("parsed, but shellcheck (of the extra dev) is not installed")


def test_a_cluster_by_hand(dry: DryRun) -> None:
    script = str(FOLDER / "by_hand.sh")
    dry.run(script, "head", "127.0.0.1", "--num-gpus=4", RAY_ADDRESS="elsewhere:1")
    dry.run(script, "worker", "127.0.0.1", "--block")
    dry.run(script, "train", "127.0.0.1", "2", "experiment=sd35_medium_ocr", "trainer.steps=5")
    head, worker = (call.options for call in dry.calls("ray"))
    assert head["head"] and (head["port"], head["num_gpus"], head["node_ip_address"]) == (dry.port, 4, "127.0.0.1")
    assert worker["address"] == f"127.0.0.1:{dry.port}" and worker["block"]
    waited = dry.calls("python")[0].arguments
    assert Path(waited[0]).is_file() and waited[1:] == ["2", "20"]
    trained = dry.trained()
    assert (trained.experiment, trained.config.trainer.steps) == ("sd35_medium_ocr", 5)


@pytest.mark.parametrize("arguments", [[], ["head"], ["worker"], ["train", "127.0.0.1"], ["begin"]])
def test_a_cluster_by_hand_says_what_is_missing(arguments: list[str], dry: DryRun) -> None:
    process = dry.start(str(FOLDER / "by_hand.sh"), *arguments)
    said, _ = process.communicate(timeout=30)
    assert process.returncode != 0 and re.search("address|number of machines|head, worker, train or stop", said), said
    assert dry.nothing()


def test_waiting_for_machines_ends_with_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        nobody = f"127.0.0.1:{listening.getsockname()[1]}"
    done = subprocess.run(
        [sys.executable, FOLDER / "wait_for_nodes.py", "2", "0.1"],
        env={**os.environ, "RAY_ADDRESS": nobody},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1 and f"0 of 2 machines at {nobody}" in done.stderr and "token" in done.stderr


def test_a_job_of_a_running_cluster(dry: DryRun, tmp_path: Path) -> None:
    keys = ["experiment=sd35_medium_ocr", "+reward.scorers.bright={path: bright.py}"]
    environment = {"RUN": "/shared/runs/mine", "RAY_ADDRESS": "10.0.0.1:6379"}
    dry.run(str(FOLDER / "submit.sh"), str(tmp_path), *keys, **environment)
    [submitted] = (call.options for call in dry.calls("ray"))
    assert submitted["address"] == "http://127.0.0.1:8265" and submitted["working_dir"] == str(tmp_path)
    runtime_env = RuntimeEnv(**yaml.safe_load(Path(submitted["runtime_env"]).read_text()))
    assert int(runtime_env["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > 3  # which Ray would give
    command = list(submitted["entrypoint"])
    composed = compose_run(command[len(TRAIN) :])
    assert command[: len(TRAIN)] == TRAIN and composed.run_dir == Path("/shared/runs/mine")
    assert composed.config.checkpoint.resume == "auto" and set(composed.config.reward.scorers) == {"ocr", "bright"}


def test_a_job_needs_a_folder_and_a_run(dry: DryRun, tmp_path: Path) -> None:
    for arguments, missing in (([], "the folder"), ([str(tmp_path)], "RUN: ")):
        process = dry.start(str(FOLDER / "submit.sh"), *arguments)
        said, _ = process.communicate(timeout=30)
        assert process.returncode != 0 and missing in said and dry.nothing()


SBATCH = {
    "job-name": r"\w+",
    "nodes": r"\d+",
    "ntasks-per-node": "1",
    "exclusive": "",
    "mem": "0",
    "time": r"\d+:\d\d:\d\d",
    "signal": r"B:USR1@\d+",
    "requeue": "",
    "no-kill": "",
    "open-mode": "append",
    "output": r".*%j.*",
}


def test_the_options_of_the_slurm_script() -> None:
    script = SCRIPTS["slurm.sh"]
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script, re.M)
    assert len(lines) == script.count("\n#SBATCH") and dict(lines).keys() == SBATCH.keys()
    assert all(re.fullmatch(SBATCH[name], value) for name, value in lines), lines
    code = re.search(r"^[^#\n]", script, re.M)
    assert code is not None and "#SBATCH" not in script[code.start() :], "SLURM does not read these"


@pytest.fixture
def job(dry: DryRun) -> Callable[..., "subprocess.Popen[str]"]:
    """Start the script as SLURM does."""

    def start(training: str, nodes: int = 2, **environment: str) -> "subprocess.Popen[str]":
        given = {"SLURM_JOB_ID": "7", "SLURM_NNODES": str(nodes), "SLURMD_NODENAME": "n1", "SLURM_CPUS_ON_NODE": "8"}
        given |= {"HEAD_ADDRESS": "127.0.0.1", **environment}
        keys = ["experiment=sd35_medium_ocr", "trainer.steps=5"]
        process = dry.start(str(FOLDER / "slurm.sh"), *keys, training=training, **given)
        if training == "waits":
            wait_for(lambda: dry.trains and len(dry.calls("ray")) == nodes, process)
        return process

    return start


def stopped(process: "subprocess.Popen[str]", number: int = signal.SIGTERM) -> int:
    """Send a signal to the script alone, as SLURM does with `--signal=B:`; returns its exit code."""
    process.send_signal(number)
    process.communicate(timeout=60)
    return process.returncode


def test_a_slurm_job_starts_ray_on_its_nodes_and_trains(dry: DryRun, job: Callable[..., Any]) -> None:
    assert stopped(job("waits")) == 143
    head, worker = sorted((call.options for call in dry.calls("ray")), key=lambda found: not found["head"])
    assert head["head"] and head["port"] == dry.port and not worker["head"]
    assert worker["address"] == f"127.0.0.1:{dry.port}"
    assert all(found["block"] and found["num_cpus"] == 8 for found in (head, worker))
    first, others, last = sorted((call.arguments for call in dry.calls("srun")), key=lambda words: "rm" in words)
    first, others = sorted((first, others), key=lambda words: "head" not in words)
    assert last[-3:] == ["rm", "-rf", head["temp_dir"]] and head["temp_dir"] == worker["temp_dir"] == "/tmp/ray_7"
    assert {"--nodelist=n1", "--nodes=1", "--ntasks=1"} <= set(first)
    assert {"--exclude=n1", "--nodes=1", "--ntasks=1"} <= set(others)
    assert all({"--no-kill", "--overlap", "--kill-on-bad-exit=0"} <= set(words) for words in (first, others))
    assert [call.arguments for call in dry.calls("scancel")] == [["--signal=KILL", "7.0"], ["--signal=KILL", "7.1"]]
    trained = dry.trained()
    assert trained.run_dir == ROOT / "outputs" / "slurm_7" and trained.config.checkpoint.resume == "auto"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not say which signals are blocked")
def test_ray_does_not_see_sigterm_in_a_slurm_job(dry: DryRun, job: Callable[..., Any]) -> None:
    stopped(job("waits"))
    unseen, (training,) = 1 << (signal.SIGTERM - 1), (c for c in dry.calls("python") if c.arguments[0] == "-m")
    assert [bool(call.blocked & unseen) for call in dry.calls("ray")] == [True, True]
    assert not training.blocked & unseen


def test_a_slurm_job_of_one_node_has_no_others(dry: DryRun, job: Callable[..., Any]) -> None:
    assert stopped(job("waits", nodes=1, RUN="/shared/runs/mine")) == 143
    assert len(dry.calls("ray")) == len(dry.calls("scancel")) == 1 and len(dry.calls("srun")) == 2
    assert dry.trained().run_dir == Path("/shared/runs/mine")


@pytest.mark.parametrize(
    ("number", "again"), [(signal.SIGUSR1, [["requeue", "7"]]), (signal.SIGTERM, [])], ids=["time is over", "cancelled"]
)
def test_a_stopped_slurm_job_waits_for_the_checkpoint_and_is_begun_again_if_it_shall(
    number: int, again: list[list[str]], dry: DryRun, job: Callable[..., Any]
) -> None:
    assert stopped(job("waits"), number) == 143 and dry.saved
    assert [call.arguments for call in dry.calls("scontrol")] == again


@pytest.mark.parametrize(("code", "again"), [(0, []), (2, []), (143, [["requeue", "7"]])])
def test_a_slurm_job_that_ends_by_itself_is_begun_again_if_its_time_was_over(
    code: int, again: list[list[str]], dry: DryRun, job: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """143 is also the code of `trainer.hours`."""
    process = job(str(code))
    process.communicate(timeout=60)
    assert process.returncode == code and [call.arguments for call in dry.calls("scontrol")] == again


def test_the_skypilot_task_trains_on_its_first_machine(dry: DryRun, tmp_path: Path) -> None:
    given = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    script = tmp_path / "run.sh"
    script.write_text(SKYPILOT["run"])
    dry.run(str(script), **given, SKYPILOT_NODE_RANK="1")
    assert not dry.calls("python")
    dry.run(str(script), **given, SKYPILOT_NODE_RANK="0")
    worker, head = (call.options for call in dry.calls("ray"))
    assert worker["address"] == f"127.0.0.1:{dry.port}" and head["head"] and head["node_ip_address"] == "127.0.0.1"
    assert head["num_gpus"] == worker["num_gpus"] == 8
    composed, [volume] = dry.trained(), SKYPILOT["volumes"]
    assert composed.run_dir.is_relative_to(volume) and composed.config.checkpoint.resume == "auto"
    assert Path(composed.config.data.train).is_relative_to(volume)
