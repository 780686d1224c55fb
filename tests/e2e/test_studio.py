"""The studio as a process: a page that is killed loses nothing, and the command it shows gives the same LoRA."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

KEYS = {
    "experiment": "signs", "trainer.steps": "3", "validation.max_prompts": "4", "validation.every": "3",
    "checkpoint.every": "1", "cluster.launcher": "local", "rollout.prompts_per_step": "2", "rollout.n": "2",
    "logger.report": "false", "rollout.micro_batch_size": "4",
}  # fmt: skip
SESSION = requests.Session()
CODE = """
def compute_score(images, prompts):
    return [sum(image.convert("L").tobytes()) / image.width / image.height / 255 for image in images]
"""


@contextmanager
def studio(root: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    command = [sys.executable, "-m", "gerl", "studio", f"folder={root}", "port=0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    match = re.match(r"(http://\S+:\d+)/\?token=([\w-]{30,})\n", process.stderr.readline())
    assert match, process.stderr.read()
    assert requests.get(f"{match[1]}/api/home", timeout=30).status_code == 401  # other users of the machine
    SESSION.headers["Authorization"] = f"Bearer {match[2]}"
    try:
        yield match[1], process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def post(url: str, name: str, body: Any) -> Any:
    answer = SESSION.post(f"{url}/api/{name}", json=body, timeout=60)
    assert answer.ok, answer.text
    return answer.json()


def job_of(url: str, number: int) -> dict[str, Any]:
    jobs = SESSION.get(f"{url}/api/home", timeout=30).json()["jobs"]
    return next(job for job in jobs if job["id"] == number)


def ended(url: str, number: int) -> dict[str, Any]:
    end = time.monotonic() + 240
    while (job := job_of(url, number))["ended"] is None:
        assert time.monotonic() < end
        time.sleep(0.3)
    return job


def lora(folder: Path) -> bytes:
    return (folder / "checkpoints" / "step_3" / "lora" / "pytorch_lora_weights.safetensors").read_bytes()


def test_a_killed_page_loses_nothing_and_the_shown_command_gives_the_same_lora(tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    draft = {"name": "first", "keys": KEYS, "scorers": {"mine": {"weight": 1}}, "texts": {"mine.py": CODE}}
    with studio(root) as (url, process):
        line = post(url, "draft", draft)["line"]
        number = post(url, "start", {"name": "first"})["job"]
        arguments = [f"lora={root / 'first'}", "validation.max_prompts=2", "out={out}", "trust=true"]
        waiting = post(url, "command", {"command": "evaluate", "arguments": arguments})["job"]
        end = time.monotonic() + 120
        while not (root / "first" / "metrics.jsonl").exists():
            assert time.monotonic() < end and job_of(url, number)["state"] == "running"
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with studio(root) as (url, _):
        assert job_of(url, number)["state"] in ("running", "finished")
        assert ended(url, number)["code"] == 0 and ended(url, waiting)["code"] == 0
        (run,) = SESSION.get(f"{url}/api/home", timeout=30).json()["runs"]
        assert run["name"] == "first" and run["step"] == 3
    program, *arguments = shlex.split(line)
    assert program == "gerl" and arguments[-1] == f"out={root / 'first'}"
    again = [*arguments[:-1], f"out={tmp_path / 'again'}"]
    subprocess.run([sys.executable, "-m", "gerl", *again], check=True, capture_output=True, timeout=240)
    assert lora(tmp_path / "again") == lora(root / "first")


def test_another_studio_of_the_same_folder_is_refused_with_the_address(tmp_path: Path) -> None:
    with studio(tmp_path) as (url, _):
        command = [sys.executable, "-m", "gerl", "studio", f"folder={tmp_path}", "port=0"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert found.returncode == 1 and url in found.stderr and found.stderr.startswith("error: ")
