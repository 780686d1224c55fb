"""Clients of engines that sample images: what they send, and which answers they refuse."""

import base64
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from http_service import Answer, Asked, HttpService
from PIL import Image
from reward_service import huge_png

from gerl.config.services import Service, service_of
from gerl.errors import ConfigError, ModelError
from gerl.protocol import Prompt, Sample
from gerl.workers import service as module
from gerl.workers.service import CLIENTS, Client, NamedLora, Refused, filled_graph

SAMPLES = [Sample(Prompt(0, f"a fox {k}"), k, 7 + k, 1) for k in range(2)]
CALL = {"height": 8, "width": 16, "num_inference_steps": 4, "guidance_scale": 1.0}
LORA = NamedLora("gerl-3-abc", b"weights", Path("/loras/gerl-3-abc.safetensors"))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    monkeypatch.setattr(module, "POLL_S", 0.01)


def png(red: int) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 8), (red, 0, 0)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


@contextmanager
def client(answer: Callable[[Asked], Answer], **keys: Any) -> Iterator[tuple[Client, HttpService]]:
    served = HttpService(answer)
    try:
        found = service_of({"url": served.url, "retries": 1, "timeout": 5, **keys})
        assert found is not None
        yield CLIENTS[found.format](found), served
    finally:
        served.stop()


def always(answer: Answer, asked: Asked) -> Answer:
    return answer


def gerl_answer(asked: Asked) -> Answer:
    if asked.path.startswith("/lora/"):
        return Answer({"lora": LORA.name})
    return Answer({"lora": asked.json["lora"], "images": [png(seed) for seed in asked.json["seeds"]]})


def test_a_lora_is_announced_once_and_images_come_in_order() -> None:
    with client(gerl_answer, lora="path", folder="/loras") as (made, served):
        for _ in range(2):
            images = made.images(SAMPLES, CALL, LORA)
            assert [image.getpixel((0, 0)) for image in images] == [(7, 0, 0), (8, 0, 0)]
    assert [asked.path for asked in served.asked] == ["/lora/gerl-3-abc", "/generate", "/generate"]
    assert served.asked[0].json == {"path": str(LORA.path)}
    assert served.asked[1].json["call"] == CALL and served.asked[1].json["prompts"] == ["a fox 0", "a fox 1"]


def test_images_of_other_weights_are_refused() -> None:
    for found in ("gerl-2-old", None):
        given = Answer({"lora": found, "images": []})
        with (
            client(partial(always, given), lora="path", folder="/l") as (made, _),
            pytest.raises(Refused, match="-abc"),
        ):
            made.images(SAMPLES, CALL, LORA)


def test_a_failure_of_the_server_is_retried_and_then_raised() -> None:
    calls: list[str] = []

    def failing(asked: Asked) -> Answer:
        calls.append(asked.path)
        return Answer({}, 503) if len(calls) == 1 else gerl_answer(asked)

    with client(failing, lora="path", folder="/loras") as (made, _):
        assert len(made.images(SAMPLES, CALL, LORA)) == 2
    with (
        client(lambda asked: Answer({}, 500), lora="path", folder="/loras") as (made, served),
        pytest.raises(ModelError, match=r"500.*2 attempts.*resume"),
    ):
        made.images(SAMPLES, CALL, LORA)
    assert len(served.asked) == 2


def test_a_service_that_hangs_or_is_gone_ends_in_a_sentence() -> None:
    with (
        client(lambda asked: Answer({}, delay=2.0), lora="path", folder="/l", timeout=0.1, retries=0) as (made, _),
        pytest.raises(ModelError, match=r"not answered for 0\.1 s"),
    ):
        made.images(SAMPLES, CALL, LORA)
    with client(gerl_answer, lora="path", folder="/loras") as (made, served):
        served.stop()
        with pytest.raises(ModelError, match="ConnectionError"):
            made.images(SAMPLES, CALL, LORA)
        served.start()


def test_a_service_that_lost_the_lora_is_sent_it_again() -> None:
    known: set[str] = set()

    def answer(asked: Asked) -> Answer:
        if asked.path.startswith("/lora/"):
            known.add(asked.path.removeprefix("/lora/"))
            return Answer({})
        return gerl_answer(asked) if asked.json["lora"] in known else Answer({"error": "unknown"}, 409)

    with client(answer, lora="path", folder="/loras") as (made, _):
        made.images(SAMPLES, CALL, LORA)
        known.clear()
        assert len(made.images(SAMPLES, CALL, LORA)) == 2


@pytest.mark.parametrize(
    ("body", "said"),
    [(b"<html>", "JSON object"), ({"lora": LORA.name}, "no images"),
     ({"lora": LORA.name, "images": ["*", "*"]}, "base64"), (b"[" * 200_000 + b"]" * 200_000, "JSON object"),
     ({"lora": LORA.name, "images": ["AAAA"] * 2}, "no readable image"),
     ({"lora": LORA.name, "images": ["AAAA"] * 30}, "has 30 images"),
     ({"lora": LORA.name, "images": [huge_png(13000, 13000)] * 2}, "too large")],
)  # fmt: skip
def test_a_strange_answer_is_refused(body: Any, said: str) -> None:
    def answer(asked: Asked) -> Answer:
        return Answer({}) if asked.path.startswith("/lora/") else Answer(body)

    with client(answer, lora="path", folder="/l") as (made, _), pytest.raises(Refused, match=said):
        made.images(SAMPLES, CALL, LORA)


@pytest.mark.parametrize(("delay", "error", "said"), [(0.0, Refused, "more than"), (0.1, ModelError, "not answered")])
def test_an_answer_without_end_is_not_read(
    delay: float, error: type[ModelError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IMAGE_BYTES", 10**6)

    def endless() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
        for _ in range(100):
            yield b" " * (10**5 if delay == 0 else 1)

    def answer(asked: Asked) -> Answer:
        return Answer({}) if asked.path.startswith("/lora/") else Answer(raw=endless(), delay=delay)

    keys = {"lora": "path", "folder": "/l", "retries": 0, "timeout": 20 if delay == 0 else 0.5}
    with client(answer, **keys) as (made, _), pytest.raises(error, match=said):
        made.images(SAMPLES, CALL, LORA)


def test_an_openai_server_gets_a_request_per_image() -> None:
    def answer(asked: Asked) -> Answer:
        if asked.path == "/v1/set_lora":
            return Answer({})
        return Answer({"data": [{"b64_json": png(asked.json["seed"])}]}, headers={"X-LoRA-Version": LORA.name})

    with client(answer, format="openai", lora="path", folder="/l", body={"model": "m"}) as (made, served):
        images = made.images(SAMPLES, CALL, LORA)
    assert [image.getpixel((0, 0)) for image in images] == [(7, 0, 0), (8, 0, 0)]
    sent = served.asked[0].json
    assert (sent["size"], sent["model"], sent["lora"]["name"]) == ("16x8", "m", LORA.name)
    with client(answer, format="openai", lora="path", folder="/l", announce="/v1/set_lora") as (made, served):
        made.images(SAMPLES, CALL, LORA)
    assert served.asked[0].json["lora_path"] == str(LORA.path) and "lora" not in served.asked[1].json


def test_a_workflow_of_comfyui_is_filled_in(tmp_path: Path) -> None:
    file = tmp_path / "flow.json"
    graph = {"1": {"inputs": {"text": "{prompt}", "seed": "{seed}", "lora_name": "{lora}", "w": "{width}"}}}
    file.write_text(json.dumps(graph))
    queue: list[Any] = []

    def answer(asked: Asked) -> Answer:
        if asked.path == "/prompt":
            queue.append(asked.json["prompt"])
            return Answer({"prompt_id": str(len(queue))})
        if asked.path.startswith("/history/"):
            number = asked.path.removeprefix("/history/")
            outputs = {"9": {"images": [{"filename": f"{number}.png", "subfolder": "", "type": "output"}]}}
            ready = sum(other.path == asked.path for other in served.asked) > 1
            return Answer(
                {number: {"prompt": [0, number, queue[int(number) - 1]], "outputs": outputs}} if ready else {}
            )
        return Answer(base64.b64decode(png(queue[-1]["1"]["inputs"]["seed"])))

    keys = {"format": "comfyui", "lora": "path", "folder": "/l", "workflow": str(file)}
    with client(answer, **keys) as (made, served):
        images = made.images(SAMPLES, CALL, LORA)
        assert [image.getpixel((0, 0)) for image in images] == [(7, 0, 0), (8, 0, 0)]
    assert queue[0]["1"]["inputs"] == {"text": "a fox 0", "seed": 7, "lora_name": "gerl-3-abc.safetensors", "w": 16}
    file.write_text("{}")
    with pytest.raises(ConfigError, match="without the LoRA"):
        CLIENTS["comfyui"](Service("http://a", "comfyui", "path", "/l", workflow=str(file)))


def test_a_text_of_a_graph_may_have_parts() -> None:
    assert filled_graph(["{a}", "x {a} {b}", 3], {"a": 1, "b": "y"}) == [1, "x 1 y", 3]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"uri": "x"}, "uri"), ({"url": "ftp://a"}, "url"), ({"url": "http://user:word@a"}, "token_env"),
        ({"url": "http://a", "format": "grpc"}, "format"), ({"url": "http://a", "lora": "copy"}, "lora"),
        ({"url": "http://a", "timeout": True}, "timeout"), ({"url": "http://a", "retries": -1}, "retries"),
        ({"url": "http://a", "token_env": "a b"}, "token_env"), ({"url": "http://a", "body": 3}, "body"),
        ({"url": "http://a", "format": "comfyui"}, "workflow"), ({"url": "http://a", "format": "openai"}, "lora=path"),
        ({"url": "http://a", "lora": "path"}, "folder"), ({"url": "http://a", "announce": "/x"}, "announce"),
    ],
)  # fmt: skip
def test_a_wrong_service_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        service_of(given)


def test_a_token_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    with client(gerl_answer, lora="path", folder="/l", token_env="MY_TOKEN") as (made, served):
        made.images(SAMPLES, CALL, LORA)
    assert served.asked[0].headers["Authorization"] == "Bearer secret"
    with pytest.raises(ConfigError, match="NO_TOKEN"):
        CLIENTS["gerl"](Service("http://a", token_env="NO_TOKEN"))
