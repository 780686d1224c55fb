"""Images from another process: `gerl serve pipeline=MODEL` samples, and a run trains on its images."""

import base64
import io
import threading
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

from gerl.commandline.command import listen
from gerl.commandline.composition import compose_run
from gerl.errors import ConfigError, ModelError
from gerl.protocol import Prompt, Sample
from gerl.utils.seeding import sample_generators
from gerl.verify.command import main as verify
from gerl.web.engine import Options, build_app, load_engine
from gerl.web.server import address, serving
from gerl.workers.service import opened
from gerl.workers.worker import PolicyWorker

Train = Callable[..., Any]
PLAIN = "sampling.solver=euler sampling.same_init_noise=false sampling.init_noise_spread=0 validation.every=1".split()


@contextmanager
def served(model: Path, port: int = 0, token: str | None = None) -> Iterator[str]:
    """A service with the model, at the address."""
    engine = load_engine(Options(pipeline=str(model), device="cpu"))
    with listen("127.0.0.1", port) as listener, serving(build_app(engine, token), listener, 2.0):
        yield address(listener)


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
        other = worker(f"rollout.service={{url: '{url}'}}")
        found = other.sample(task).pixels
        assert requests.get(f"{url}/health", timeout=5).json()["lora"].startswith("gerl-5-")
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1  # rounded to 8 bits on the way
    tapes = [made.trajectories[task.id].tapes[0] for made in (own, other)]
    assert tapes[0].steps[-1].x_next.shape == tapes[1].steps[-1].x_next.shape


def test_a_run_with_a_service_trains_and_resumes_bit_for_bit(model: Path, train: Train, tmp_path: Path) -> None:
    keys = ("algorithm=awm_fast", *PLAIN, "checkpoint.every=1", "actor.lr=0.02", "reward.trial=false")
    with served(model) as url:
        service = f"rollout.service={{url: '{url}'}}"
        run = train(tmp_path / "run", *keys, service, "trainer.dump=2", trainer__steps=4)
        assert min(run.column("actor/grad_norm")) > 0
        train(tmp_path / "half", *keys, service, trainer__steps=2)
    with served(model) as url:  # another process, at another address
        again = train(
            tmp_path / "half", *keys, f"rollout.service={{url: '{url}'}}", f"checkpoint.resume={tmp_path / 'half'}",
            trainer__steps=4,
        )  # fmt: skip
    assert torch.equal(run.lora(4), again.lora(4))
    assert verify([str(run.folder)]) == 0  # also without the service


def test_wrong_requests_are_answered(model: Path) -> None:
    with served(model, token="word") as url:

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


def sample(url: str, *texts: str, **body: Any) -> list[Image.Image]:
    """The images that a service samples; seeds from 1."""
    seeds = list(range(1, len(texts) + 1))
    answer = requests.post(f"{url}/generate", json={"prompts": texts, "seeds": seeds, **body}, timeout=60)
    assert answer.ok, answer.text
    return [Image.open(io.BytesIO(base64.b64decode(image))) for image in answer.json()["images"]]


def test_a_pipeline_that_edits_is_given_the_image_of_each_row(tmp_path: Path) -> None:
    pipe = zoo.base.as_class(tiny.flux(), diffusers.FluxKontextPipeline)
    pipe.save_pretrained(tmp_path / "model")
    for name, picture in zip("ab", zoo.conditioned.pictures(2), strict=True):
        picture.save(tmp_path / f"{name}.png")
    call = zoo.conditioned.KONTEXT | {"num_inference_steps": 2, "height": 16, "width": 16}
    with served(tmp_path / "model") as url:
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
