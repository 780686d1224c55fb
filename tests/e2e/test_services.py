"""Reward services as users start them, and what a run sees when they die, are slow or refuse.

The three ways to a scorer of one's own (a function, a class, a service) are the files in examples/.
"""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from drills import more
from PIL import Image

from gerl.config import ScorerConfig
from gerl.errors import RewardError
from gerl.rewards.scorers import build_scorer
from gerl.trainer.run import Run
from gerl.trainer.step import Step
from reward_models.scorers.http import png_base64
from reward_models.scorers.remote import RemoteScorer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TOKEN = "a-token-of-this-test"
IMAGES = [Image.new("RGB", (8, 8), (20 * i, 255 - 20 * i, 7 * i)) for i in range(12)]
PROMPTS = [f"a red thing {i}" for i in range(12)]
ROWS: list[dict[str, Any]] = [{} for _ in range(12)]
MEAN = """
import os, time
import numpy as np

def compute_score(images, prompts, metadata, scale=1.0):
    for row in metadata:
        time.sleep(row.get("sleep", 0))
        if "raise" in row:
            raise KeyError("lost")
    return {
        "bright": [float(np.asarray(image).mean()) / 255 * scale for image in images],
        "batch": [len(images)] * len(images),
        "pid": [os.getpid()] * len(images),
    }
"""


class Service:
    """A service in processes of its own; `start` and `kill` as an operator would."""

    def __init__(self, *arguments: str, log: Path, **environment: str) -> None:
        self.arguments, self.environment, self.log = arguments, environment, log
        self.start()

    def start(self) -> None:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.arguments],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def url(self) -> str:
        self.wait(lambda: re.search(r"http://\S+:\d+", self.log.read_text()) is not None)
        (url,) = set(re.findall(r"http://\S+:\d+", self.log.read_text()))
        return str(url)

    def ready(self) -> str:
        url = self.url()

        def asked() -> bool:
            with suppress(requests.RequestException):
                return requests.get(f"{url}/v1/ready", timeout=5).status_code == 200
            return False

        self.wait(asked)
        return url

    def end(self, number: int) -> int:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)
        return self.process.wait(30)

    def wait(self, condition: Callable[[], bool], seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)


@contextmanager
def running(*arguments: str, log: Path, **environment: str) -> Iterator[Service]:
    service = Service(*arguments, log=log, **environment)
    try:
        yield service
    finally:
        service.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two replicas of the scorer above behind a token, three images a batch; the last test that uses it stops it."""
    folder = tmp_path_factory.mktemp("service")
    (folder / "mean.py").write_text(MEAN)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]  # fixed, for the service to come back to
    scorer = ["scorer=mean", f"path={folder / 'mean.py'}", "kwargs.scale=2"]
    keys = [*scorer, f"port={port}", "replicas=2", "max_batch_size=3"]
    limits = ["max_body_mb=1", "token_env=GERL_TEST_SERVICE_TOKEN", "batch_wait_s=0.05"]
    arguments = ["-m", "reward_models.serve", *keys, *limits]
    with running(*arguments, log=folder / "log", GERL_TEST_SERVICE_TOKEN=TOKEN) as running_service:
        yield running_service


@pytest.fixture
def remote(service: Service, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RemoteScorer]:
    """A client with the token, made of kwargs."""
    monkeypatch.setenv("GERL_TEST_SERVICE_TOKEN", TOKEN)
    url = service.ready()

    def build(**kwargs: Any) -> RemoteScorer:
        defaults = {"token_env": "GERL_TEST_SERVICE_TOKEN", "timeout": 30.0, "backoff": 0.2, "retries": 0}
        return RemoteScorer(url=url, scorer="mean", **{**defaults, **kwargs})

    return build


def both_pids(remote: Callable[..., RemoteScorer]) -> set[int]:
    """Those of the two replicas, once both answer."""
    end = time.monotonic() + 90
    while True:
        pids = remote(batch_size=1, retries=30)(IMAGES, PROMPTS, ROWS)["pid"]
        if len(set(pids)) == 2:
            return set(map(int, pids))
        assert time.monotonic() < end


def brightness(images: list[Image.Image]) -> list[float]:
    return [float(np.asarray(image).mean()) / 255 * 2 for image in images]


@more
def test_scores_do_not_depend_on_requests_batches_or_replicas(remote: Callable[..., RemoteScorer]) -> None:
    batches: set[float] = set()
    pids: set[float] = set()
    with ThreadPoolExecutor(4) as pool:
        for size in (1, 2, 5, 12):
            scorer = remote(batch_size=size)
            for columns in pool.map(lambda _, ask=scorer: ask(IMAGES, PROMPTS, ROWS), range(4)):
                assert columns["bright"] == brightness(IMAGES)
                batches.update(columns["batch"])
                pids.update(columns["pid"])
    assert max(batches) == 3  # also for requests of one image: those of several requests were scored together
    assert both_pids(remote) >= pids  # on a busy machine the second replica is late


def test_requests_of_one_image_are_scored_together(remote: Callable[..., RemoteScorer]) -> None:
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(remote(), [image], ["a"], [{}]) for image in IMAGES]
        answers = [future.result() for future in asked]
    assert [answer["bright"][0] for answer in answers] == brightness(IMAGES)
    assert max(answer["batch"][0] for answer in answers) > 1


def test_a_failing_request_fails_alone(remote: Callable[..., RemoteScorer]) -> None:
    with ThreadPoolExecutor(12) as pool:
        rows: list[dict[str, Any]] = [{"raise": 1} if i == 5 else {} for i in range(12)]
        asked = [pool.submit(remote(), [image], ["a"], [row]) for image, row in zip(IMAGES, rows, strict=True)]
        errors = [future.exception() for future in asked]
    assert [i for i, error in enumerate(errors) if error is not None] == [5]
    assert isinstance(errors[5], RewardError) and "the scorer mean failed: KeyError" in str(errors[5])


def test_refusals_reach_the_client(
    service: Service, remote: Callable[..., RemoteScorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RewardError, match=r"no answer within 0\.5 s"):
        remote(timeout=0.5)(IMAGES[:1], ["a"], [{"sleep": 2}])
    with pytest.raises(RewardError, match=r"answered 413 .*lower image_size"):
        remote()([Image.effect_noise((1000, 900), 100)] * 3, PROMPTS[:3], ROWS[:3])
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    answer = requests.post(f"{service.url()}/v1/score", b'{"scorer', headers=headers, timeout=5)
    assert answer.status_code == 400 and "not JSON" in answer.json()["error"]
    monkeypatch.setenv("GERL_TEST_SERVICE_TOKEN", "another")
    with pytest.raises(RewardError, match=r"answered 401 .*is rejected"):
        remote()(IMAGES, PROMPTS, ROWS)
    assert "gerl_reward_images_total" in requests.get(f"{service.url()}/metrics", timeout=5).text


@more
def test_the_memory_of_large_images_is_given_back(remote: Callable[..., RemoteScorer]) -> None:
    def resident(pid: int) -> int:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 10**6

    before = {pid: resident(pid) for pid in both_pids(remote)}
    large = Image.new("L", (5000, 5000), 128)  # 100 MB each once it is read, and as much for its copy
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: remote(timeout=120)([large], ["a"], [{}]), range(3)))
    assert [answer["bright"] for answer in answers] == [brightness([large])] * 3
    end = time.monotonic() + 30
    while any(resident(pid) > size + 90 for pid, size in before.items()):
        assert time.monotonic() < end, (before, {pid: resident(pid) for pid in before})
        time.sleep(0.1)


@more
def test_replicas_that_die_are_replaced_and_what_they_were_scoring_is_asked_again(
    remote: Callable[..., RemoteScorer],
) -> None:
    victims = both_pids(remote)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(remote(backoff=0.5, retries=30), IMAGES[:1], ["a"], [{"sleep": 1.5}])
        time.sleep(0.5)
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        answer = slow.result()
    assert answer["bright"] == brightness(IMAGES[:1]) and int(answer["pid"][0]) not in victims
    assert not both_pids(remote) & victims


@more
def test_a_run_trains_on_a_service_as_on_a_function_and_outlives_its_end(
    service: Service,
    remote: Callable[..., RemoteScorer],
    train: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = train(tmp_path / "plain")
    kwargs = f"{{url: '{remote().url}', scorer: mean, token_env: GERL_TEST_SERVICE_TOKEN, retries: 60, backoff: 0.5}}"
    log, operator = Run.log, threading.Timer(1, service.start)

    def log_and_kill(run: Run, step: Step) -> None:  # here, so that the second step finds no service
        log(run, step)
        if step.number == 1:
            service.end(signal.SIGKILL)
            operator.start()

    monkeypatch.setattr(Run, "log", log_and_kill)
    served = train(tmp_path / "served", f"+reward.scorers.remote={{weight: 0.5, kwargs: {kwargs}}}", scorer="")
    operator.join(120)
    assert served.column("reward/mean") == pytest.approx(plain.column("reward/mean"), rel=1e-6)
    assert served.column("reward/mean")[0] > 0 and not any(served.column("reward/failures"))
    assert (served.lora(2) - plain.lora(2)).abs().max() < 1e-6 and served.lora(2).abs().max() > 0
    assert served.column("scorer/remote/latency_s")[1] > 1  # it waited for the service
    before, after = served.column("scorer/remote/warnings")
    assert before == 0 < after and "attempt 1; next in" in caplog.text
    assert service.end(signal.SIGTERM) == 0  # and that ends in peace
    assert "Traceback" not in service.log.read_text()


@more
def test_a_scorer_that_cannot_start_ends_the_service_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def compute_score(images, prompts, metadata):\n    raise OSError('no weights')\n")
    done = subprocess.run(
        [sys.executable, "-m", "reward_models.serve", "scorer=bad", f"path={tmp_path / 'bad.py'}", "port=0"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: the scorer failed to start") and "OSError: no weights" in last, done.stderr


def test_the_example_of_a_function_is_a_scorer() -> None:
    scorer = build_scorer("bright", ScorerConfig(path=str(EXAMPLES / "brightness_reward.py")))
    grey, white = (Image.new("RGB", (4, 4), (v, v, v)) for v in (51, 255))
    assert scorer([grey, white], ["a", "b"], [{}, {}]) == [0.2, 1.0]


def test_the_example_of_a_class_is_a_scorer() -> None:
    scorer = build_scorer("colour", ScorerConfig(path=str(EXAMPLES / "scorer_class.py")))
    red, blue = Image.new("RGB", (4, 4), (255, 0, 0)), Image.new("RGB", (4, 4), (0, 0, 255))
    right, wrong = scorer([red, blue], ["a red car", "a red car"], [{}, {}])
    assert right == 1.0 and wrong == pytest.approx(1 - (2 / 3) ** 0.5)
    with pytest.raises(ValueError, match="names none of red"):
        scorer([red], ["a car"], [{}])


def test_the_example_of_a_service_is_a_scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GERL_TEST_SERVICE_TOKEN", TOKEN)
    arguments = [str(EXAMPLES / "scorer_service.py"), "--port", "0", "--token-env", "GERL_TEST_SERVICE_TOKEN"]
    with running(*arguments, log=tmp_path / "log") as example:
        scorer = RemoteScorer(url=example.url(), scorer="saturation", token_env="GERL_TEST_SERVICE_TOKEN", retries=0)
        assert requests.get(f"{example.url()}/v1/health", timeout=5).json()["scorers"] == ["saturation"]
        grey, red = Image.new("RGB", (4, 4), (51, 51, 51)), Image.new("RGB", (4, 4), (255, 0, 0))
        assert scorer([grey, red], ["a", "b"], [{}, {}]) == {"saturation": [0.0, 1.0], "value": [0.2, 1.0]}
        with pytest.raises(RewardError, match=r"answered 404 .*there is only the scorer saturation"):
            RemoteScorer(url=example.url(), scorer="x", token_env="GERL_TEST_SERVICE_TOKEN")([red], ["a"], [{}])
        with pytest.raises(RewardError, match=r"answered 401"):
            RemoteScorer(url=example.url(), scorer="saturation")([red], ["a"], [{}])


@pytest.fixture
def example_address(tmp_path: Path) -> Iterator[tuple[str, int]]:
    arguments = [str(EXAMPLES / "scorer_service.py"), "--port", "0", "--token-env", "GERL_TEST_SERVICE_TOKEN"]
    with running(*arguments, log=tmp_path / "log", GERL_TEST_SERVICE_TOKEN=TOKEN) as example:
        host, port = example.url().removeprefix("http://").split(":")
        yield host, int(port)
        assert "Traceback" not in (tmp_path / "log").read_text()


def status(address: tuple[str, int], *headers: str, path: str = "/v1/score", body: bytes = b"") -> int:
    """The status that a request gets by its head alone, or with its body."""
    with socket.create_connection(address, timeout=20) as client:
        client.sendall("\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode() + body)
        return int(client.makefile("rb").readline().split()[1])


def test_the_example_of_a_service_reads_no_body_that_it_will_refuse(example_address: tuple[str, int]) -> None:
    token = f"Authorization: Bearer {TOKEN}"
    for length in ("-1", "100", "many", "9" * 5000):  # and no byte of them comes
        assert status(example_address, f"Content-Length: {length}") == 401
    assert status(example_address, token, "Content-Length: 5", path="/x") == 404
    for length in ("-1", "many", "", "\u00b2"):
        assert status(example_address, token, f"Content-Length: {length}") == 411
    assert status(example_address, token, "Transfer-Encoding: chunked") == 411
    for length in ("64000001", "9" * 5000):
        assert status(example_address, token, f"Content-Length: {length}") == 413


def test_the_example_of_a_service_has_limits(example_address: tuple[str, int]) -> None:
    token = f"Authorization: Bearer {TOKEN}"

    def asked(**changes: Any) -> int:
        row = {"scorer": "saturation", "images": [png_base64(IMAGES[0])], "prompts": ["a"], "metadata": [{}]}
        body = json.dumps({**row, **changes}).encode()
        return status(example_address, token, f"Content-Length: {len(body)}", body=body)

    assert asked() == 200
    assert asked(images=[png_base64(Image.new("1", (9000, 9000)))]) == 413
    assert asked(images=[png_base64(Image.effect_noise((64, 64), 50))[:2000]]) == 422
    assert asked(prompts=[]) == asked(images=5) == asked(metadata=None) == 422
    deep = b"[" * 10**5
    assert status(example_address, token, f"Content-Length: {len(deep)}", body=deep) == 422
    waiting = []
    end = time.monotonic() + 20
    while asked() != 429:  # until they hold all places; one that came while another request was answered holds none
        assert time.monotonic() < end
        client = socket.create_connection(example_address, timeout=20)
        client.sendall(f"POST /v1/score HTTP/1.1\r\n{token}\r\nContent-Length: 10\r\n\r\n".encode())
        waiting.append(client)
    for _ in range(10):  # clients that are gone before they are refused
        with socket.create_connection(example_address, timeout=20) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(f"POST /v1/score HTTP/1.1\r\n{token}\r\nContent-Length: 10\r\n\r\n".encode())
    for client in waiting:
        client.close()
    while asked() != 200:
        assert time.monotonic() < end
        time.sleep(0.05)
