"""Images from another process: `gerl serve pipeline=MODEL` samples, and a run trains on its images."""

import base64
import io
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import requests
import tiny
import torch
import zoo.base
import zoo.conditioned
from PIL import Image

from gerl.commandline.composition import compose_run
from gerl.errors import ConfigError, ModelError
from gerl.protocol import Prompt, Sample
from gerl.utils.seeding import sample_generators
from gerl.utils.serving import listen
from gerl.verify.command import main as verify
from gerl.web.engine import TOKEN as SERVICE_TOKEN
from gerl.web.engine import Options, build_app, load_engine
from gerl.web.server import address, serving
from gerl.web.studio.jobs import Jobs, Store
from gerl.web.studio.sampler import Sampler, SampleRequest
from gerl.workers.service import opened
from gerl.workers.worker import PolicyWorker

Train = Callable[..., Any]
TOKEN = "word"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
PLAIN = "sampling.solver=euler sampling.same_init_noise=false sampling.init_noise_spread=0 validation.every=1".split()


@contextmanager
def served(model: Path, **options: Any) -> Iterator[str]:
    """A service with the model, at the address."""
    engine = load_engine(Options(pipeline=str(model), device="cpu", **options))
    with listen("127.0.0.1", 0) as listener, serving(build_app(engine, TOKEN), listener, 2.0):
        yield address(listener)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD", TOKEN)


def test_the_images_are_those_of_the_workers(model: Path, arguments: Any, tmp_path: Path) -> None:
    def worker(*keys: str) -> PolicyWorker:
        command = arguments(tmp_path / "run", "algorithm=awm_fast", *PLAIN, *keys)
        made = PolicyWorker(compose_run(command).config, 0, "cpu", 1, 10)
        made.setup()
        torch.manual_seed(3)
        for p in made.policy.trained.values():
            p.data.normal_(0, 0.2)
        made.policy.version = 5
        return made

    samples = [Sample(Prompt(0, "a fox"), k, 11 + k, 1) for k in range(2)]
    own = worker()
    (task,) = own.algorithm.plan(samples)
    expected = own.sample(task).pixels
    with served(model) as url:
        other = worker(f"rollout.service={{url: '{url}', token_env: WORD}}")
        found = other.sample(task).pixels
        assert requests.get(f"{url}/health", headers=BEARER, timeout=5).json()["lora"].startswith("gerl-5-")
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1  # rounded to 8 bits on the way
    tapes = [made.trajectories[task.id].tapes[0] for made in (own, other)]
    assert tapes[0].steps[-1].x_next.shape == tapes[1].steps[-1].x_next.shape


def test_a_run_with_a_service_trains_and_resumes_bit_for_bit(model: Path, train: Train, tmp_path: Path) -> None:
    keys = ("algorithm=awm_fast", *PLAIN, "checkpoint.every=1", "actor.lr=0.02", "reward.trial=false")
    with served(model) as url:
        service = f"rollout.service={{url: '{url}', token_env: WORD}}"
        run = train(tmp_path / "run", *keys, service, "trainer.dump=2", trainer__steps=4)
        assert min(run.column("actor/grad_norm")) > 0
        train(tmp_path / "half", *keys, service, trainer__steps=2)
    with served(model) as url:  # another process, at another address
        service = f"rollout.service={{url: '{url}', token_env: WORD}}"
        again = train(tmp_path / "half", *keys, service, f"checkpoint.resume={tmp_path / 'half'}", trainer__steps=4)
    assert torch.equal(run.lora(4), again.lora(4))
    assert verify([str(run.folder)]) == 0  # also without the service


def test_wrong_requests_are_answered(model: Path) -> None:
    with served(model, folders="/no") as url:

        def post(path: str, body: Any, token: str = "word") -> requests.Response:
            return requests.post(url + path, json=body, headers={"Authorization": f"Bearer {token}"}, timeout=20)

        assert post("/generate", {}, "other").status_code == 401
        assert post("/generate", {"prompts": ["a"], "seeds": []}).status_code == 400
        assert post("/generate", {"prompts": ["a"], "seeds": [1], "lora": "none"}).status_code == 409
        assert "/no/file" in post("/lora/a", {"path": "/no/file"}).json()["error"]
        assert post("/lora/a%20b", {}).status_code == 400
        call = {"height": 16, "width": 16, "num_inference_steps": 2, "max_sequence_length": 8}
        answers = list[int]()

        def ask() -> None:
            answers.append(post("/generate", {"prompts": ["a"], "seeds": [1], "call": call}).status_code)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [200] * 3


def test_no_other_site_and_nobody_without_the_token_is_served(model: Path) -> None:
    """What a page of another site can send draws nothing, replaces no LoRA and reads nothing."""
    with served(model) as url:
        lora = {"data": b"{}", "headers": BEARER | {"Content-Type": "text/plain"}}
        foreign = BEARER | {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
        draw = {"json": {"prompts": ["a"], "seeds": [1]}}
        cases: list[tuple[str, dict[str, Any], int]] = [
            ("/generate", draw, 401),
            ("/generate", draw | {"headers": {"Authorization": "Bearer other"}}, 401),
            ("/generate", draw | {"headers": foreign}, 403),
            ("/generate", draw | {"headers": BEARER | {"Host": "evil.example"}}, 403),
            ("/generate", {"data": json.dumps(draw["json"]), "headers": BEARER | {"Content-Type": "text/plain"}}, 415),
            ("/lora/a", lora, 415),
            ("/lora/a", {"data": b"{}", "headers": foreign | {"Content-Type": "application/octet-stream"}}, 403),
            ("/generate", {"data": bytes(5_000_000), "headers": BEARER | {"Content-Type": "application/json"}}, 413),
        ]
        assert [r for r in cases if requests.post(url + r[0], timeout=20, **r[1]).status_code != r[2]] == []
        for headers in ({}, BEARER | {"Host": "evil.example"}):
            answer = requests.get(f"{url}/health", headers=headers, timeout=5)
            assert answer.status_code in (401, 403) and "lora" not in answer.json()
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:  # no byte of it is waited for
            client.sendall(
                b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer word\r\n"
                b"Content-Type: application/json\r\nContent-Length: 400000000\r\n\r\n"
            )
            assert client.recv(100).startswith(b"HTTP/1.1 413 ")
        assert requests.get(f"{url}/health", headers=BEARER, timeout=5).json()["lora"] is None


CALL = {"height": 16, "width": 16, "num_inference_steps": 2}


def test_a_request_asks_for_no_more_than_the_service_allows(model: Path, tmp_path: Path) -> None:
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    (tmp_path / "large.safetensors").write_bytes(bytes(1_000_001))
    os.mkfifo(tmp_path / "pipe.safetensors")
    with served(model, folders=str(tmp_path), max_steps=9, max_megapixels=1, max_lora_mb=1) as url:

        def refused(where: str, **body: Any) -> str:
            answer = requests.post(url + where, json=body, headers=BEARER, timeout=20)
            assert answer.status_code == 400
            return str(answer.json()["error"])

        def draw(**call: Any) -> str:
            return refused("/generate", prompts=["a"], seeds=[1], call={"height": 16, "width": 16, **call})

        for steps in ({"num_inference_steps": 3000}, {"sigmas": [1.0] * 10}, {"num_inference_steps": 1e9}):
            assert "max_steps=9" in draw(**steps)
        assert "max_steps=9" in refused("/generate", prompts=["a"], seeds=[1], sampling={"num_inference_steps": 30})
        assert "max_steps=9" in refused("/tokens", prompts=["a"], sampling={"num_inference_steps": 30})
        for size in ({"height": 10**5}, {"num_images_per_prompt": 10**4}):
            assert "max_megapixels=1" in draw(num_inference_steps=2, **size)
        assert "folders" in refused("/lora/a", path="/dev/zero") and "folders" in refused("/lora/a", path="zero")
        assert "folders" in refused("/lora/a", path=str(tmp_path / "zero.safetensors"))
        assert "is no file" in refused("/lora/a", path=str(tmp_path / "pipe.safetensors"))
        assert "max_lora_mb=1" in refused("/lora/a", path=str(tmp_path / "large.safetensors"))
        assert "prompt_2" in draw(prompt_2=["a"] * 3000) and "prompt" in draw(prompt=["a" * 30_000])
        for column in ([["/etc/passwd"]], 3, {"a": "/etc/passwd"}):
            assert "columns" in refused("/generate", prompts=["a"], seeds=[1], columns=[{"image": column}], call=CALL)
        row = {"image": "/dev/zero"}
        assert "folders" in refused("/generate", prompts=["a"], seeds=[1], columns=[row], call={"height": 16})


def test_the_studio_gives_its_service_a_token_that_no_command_line_shows(model: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "outputs")
    sampler = Sampler(Jobs(store))
    request = SampleRequest(str(model), [Prompt(0, "a")], {"num_inference_steps": 2, "height": 16, "width": 16})
    try:
        assert len(sampler.sample(request, tmp_path / "images")) == 1
        assert sampler.job is not None and sampler.job.pid is not None
        url, first = sampler.service(str(model)), sampler.jobs.environment[SERVICE_TOKEN]
        for headers in ({}, {"Authorization": "Bearer "}):
            assert requests.post(f"{url}/generate", json={}, headers=headers, timeout=20).status_code == 401
        secret = sampler.jobs.environment[SERVICE_TOKEN].encode()
        shown = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if is_readable(path)]
        assert any(str(model).encode() in line for line in shown) and not any(secret in line for line in shown)
        files = [path.read_bytes() for path in store.root.rglob("*") if path.is_file()]
        assert len(files) >= 3 and not any(secret in content for content in files)
        another = Sampler(sampler.jobs)  # a studio that is started again
        assert len(another.sample(request, tmp_path / "again")) == 1 and another.job is not sampler.job
        assert sampler.jobs.environment[SERVICE_TOKEN] != first
    finally:
        sampler.close()
        while any(job.ended is None for job in sampler.jobs.all):
            sampler.jobs.poll()
            time.sleep(0.1)
        store.close()


def is_readable(path: Path) -> bool:
    """Whether a process still runs, and may be looked at."""
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


def sample(url: str, *texts: str, **body: Any) -> list[Image.Image]:
    """The images that a service samples; seeds from 1."""
    seeds = list(range(1, len(texts) + 1))
    answer = requests.post(
        f"{url}/generate", json={"prompts": texts, "seeds": seeds, **body}, headers=BEARER, timeout=60
    )
    assert answer.ok, answer.text
    return [Image.open(io.BytesIO(base64.b64decode(image))) for image in answer.json()["images"]]


def test_a_pipeline_that_edits_is_given_the_image_of_each_row(tmp_path: Path) -> None:
    pipe = zoo.base.as_class(tiny.flux(), diffusers.FluxKontextPipeline)
    pipe.save_pretrained(tmp_path / "model")
    for name, picture in zip("ab", zoo.conditioned.pictures(2), strict=True):
        picture.save(tmp_path / f"{name}.png")
    call = zoo.conditioned.KONTEXT | {"num_inference_steps": 2, "height": 16, "width": 16}
    with served(tmp_path / "model", folders=str(tmp_path)) as url:
        columns = [{"image": str(tmp_path / f"{name}.png")} for name in "aba"]
        found = sample(url, "a fox", "a fox", "a fox", call=call, columns=columns, seeds=[1, 1, 1])
    first, other, again = map(np.asarray, found)
    picture = Image.open(tmp_path / "a.png")
    own = pipe(prompt=["a fox"], image=picture, generator=sample_generators([1]), output_type="np", **call).images[0]
    assert (first == (own * 255).round()).all() and (first == again).all() and (first != other).any()


def test_videos_are_animations_which_a_run_refuses(tmp_path: Path, model: Path) -> None:
    tiny.wan().save_pretrained(tmp_path / "model")
    call = {"height": 16, "width": 16, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 16}
    with served(tmp_path / "model") as url:
        (video,) = sample(url, "a fox", call=call)
    assert video.format == "PNG" and video.n_frames == 5 and video.size == (16, 16)
    buffer = io.BytesIO()
    video.save(buffer, "PNG", save_all=True)
    with pytest.raises(ModelError, match="video"):
        opened(buffer.getvalue(), "http://127.0.0.1")


def test_a_pipeline_that_is_not_there_is_answered_as_for_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^pipeline='.*' is not a pipeline: .* use one written by"):
        load_engine(Options(pipeline=str(tmp_path), device="cpu"))


def test_a_service_that_is_not_there_is_named_before_the_first_step(refused: Callable[..., str]) -> None:
    said = refused("algorithm=awm_fast", "rollout.service={url: 'http://127.0.0.1:9', retries: 0}")
    assert "127.0.0.1:9/health" in said


def test_algorithms_that_train_on_steps_are_refused(refused: Callable[..., str]) -> None:
    said = refused("algorithm=flow_grpo", "rollout.service={url: 'http://127.0.0.1:9'}", expect=2)
    assert "rollout.service" in said and "awm_fast" in said
