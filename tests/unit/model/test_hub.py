"""Pipelines from a stand-in for the hub on this machine, in processes of their own: its address is read at import."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import tiny
from drills import more
from huggingface_hub import constants

from gerl.model.hub import Downloads

COMMIT = "a" * 40
READ = """
import json, sys, time, logging
from gerl.utils.imports import importing
with importing():
    from gerl.config import ModelConfig, SamplingConfig
    from gerl.errors import GerlError
    from gerl.model.hub import fetch_lora
    from gerl.model.loading import check_model, read_pipeline
    import torch

logging.basicConfig(level=logging.INFO, format="%(message)s")
for path in sys.argv[1:]:
    start = time.monotonic()
    try:
        if path.startswith("lora:"):
            found = fetch_lora(path.removeprefix("lora:"))
            print(found.name, sorted(file.name for file in found.rglob("*")) if found.is_dir() else "file")
            continue
        path, _, parts = path.partition("?")
        config = ModelConfig(path=path, parts=json.loads(parts or "{}"))
        check_model(config, SamplingConfig())
        pipe = read_pipeline(path, torch.float32, config)
        print("read", type(pipe).__name__, *(name for name, part in pipe.components.items() if part is None and parts))
    except GerlError as error:
        print(f"{type(error).__name__} {error}")
    assert time.monotonic() - start < 60
"""


class Hub(BaseHTTPRequestHandler):
    """What `huggingface_hub` asks for: facts of a repository, its files, and each of them."""

    root: Path
    requests: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.requests.append(self.path)
        parts = self.path.split("?")[0].strip("/").split("/")
        about = parts[0] == "api"
        name = "/".join(parts[2:4] if about else parts[:2])
        folder = self.root / name
        files = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
        file = "/".join(parts[4:])
        if not files:
            self.reply(401, error="RepoNotFound")
        elif about and "tree" in parts:
            sizes = [(folder / file).stat().st_size for file in files]
            rows = [{"type": "file", "path": f, "size": n, "oid": "0" * 40} for f, n in zip(files, sizes, strict=True)]
            self.reply(200, json.dumps(rows).encode())
        elif about:
            facts = {"id": name, "modelId": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
            self.reply(200, json.dumps(facts).encode())
        elif "gated" in name:
            self.reply(403, error="GatedRepo")
        elif file not in files:
            self.reply(404, error="EntryNotFound")
        else:
            self.reply(200, (folder / file).read_bytes(), tag=hashlib.sha1(file.encode()).hexdigest())

    def reply(self, status: int, body: bytes = b"", error: str | None = None, tag: str | None = None) -> None:
        self.send_response(status)
        headers = {"X-Error-Code": error, "ETag": tag and f'"{tag}"', "X-Repo-Commit": tag and COMMIT}
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadingHTTPServer]:
    Hub.root, Hub.requests = tmp_path_factory.mktemp("hub"), []
    pipe = tiny.sd3(layers=1)
    pipe.save_pretrained(Hub.root / "owner" / "tiny")
    pipe.save_pretrained(Hub.root / "owner" / "half", variant="fp16")
    pipe.vae.save_pretrained(Hub.root / "owner" / "vae")
    code = {"code": {"_class_name": ["mine", "Mine"]}, "elsewhere": {"_class_name": ["owner/code", "Mine"]}}
    for name, index in {"gated": {}, **code, "other": None}.items():
        (Hub.root / "owner" / name).mkdir()
        file = "readme.md" if index is None else "model_index.json"
        (Hub.root / "owner" / name / file).write_text(json.dumps(index))
    for file in ("mine.py", "pipeline.py"):
        (Hub.root / "owner" / "code" / file).write_text("raise RuntimeError('it was run')\n")
    lora = Hub.root / "owner" / "lora"
    lora.mkdir()
    for file in ("a.safetensors", "b.safetensors", "notes.md"):
        (lora / file).write_bytes(b"content")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def read(home: Path, hub: ThreadingHTTPServer, *paths: str, **environment: str) -> tuple[list[str], str]:
    """What becomes of each path, and stderr."""
    own = {"HF_HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", READ, *paths],
        env=os.environ | own | environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@more
def test_parts_are_fetched_and_those_left_out_are_not(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    parts = json.dumps({"text_encoder_3": None, "vae": "owner/vae", "text_encoder": "owner/tiny"})
    (half, wrong), shown = read(tmp_path, hub, f"owner/half?{parts}", 'owner/half?{"vaee": null}')
    assert half.startswith("read StableDiffusion3Pipeline text_encoder_3 tokenizer_3")
    assert "model.parts.vaee" in wrong and "did you mean model.parts.vae" in wrong
    assert shown.count("variant fp16") == 1
    fetched = [path for path in Hub.requests if path.endswith((".safetensors", "tokenizer.json"))]
    assert fetched and not [path for path in fetched if "_3/" in path or ("owner/half" in path and "/vae/" in path)]
    assert any("owner/vae/" in path for path in fetched)
    assert not any("owner/tiny/" in path and "/text_encoder/" not in path for path in fetched)


@more
def test_pipelines_and_loras_are_fetched_with_bars_and_read_again_without_the_hub(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    names = ["owner/tiny", "owner/gated", "owner/none", "owner/code", "owner/elsewhere", "owner/other"]
    loras = ["lora:owner/lora/b.safetensors", "lora:owner/lora", "lora:owner/tiny", "lora:owner/none"]
    (file, folder, pipeline, none, *of_names), shown = read(tmp_path, hub, *loras, *names)
    assert file == "b.safetensors file" and folder.endswith("['a.safetensors', 'b.safetensors']")
    assert "model.lora='owner/tiny' is a pipeline" in pipeline and "model.path" in pipeline
    assert "model.lora='owner/none'" in none and "no such model" in none
    whole, gated, none, code, elsewhere, other = of_names
    assert whole == "read StableDiffusion3Pipeline" and "Fetching" in shown
    address = f"http://127.0.0.1:{hub.server_port}"
    assert "'owner/gated' is gated" in gated and f"{address}/owner/gated" in gated and "hf auth login" in gated
    assert "'owner/none'" in none and "no such model" in none and "hf auth login" in none
    assert "'owner/code' contains custom code" in code and "--local-dir" in code
    assert "'owner/elsewhere' contains custom code" in elsewhere
    assert "'owner/other' cannot be loaded as a diffusers pipeline" in other and "model_index.json" in other

    Hub.requests.clear()
    names = ["owner/tiny", "owner/none"]
    (whole, none, again, absent), _ = read(tmp_path, hub, *names, loras[0], loras[3], HF_HUB_OFFLINE="1")
    assert whole == "read StableDiffusion3Pipeline" and Hub.requests == []
    assert "'owner/none'" in none and str(tmp_path) in none and "HF_HUB_OFFLINE" in none
    assert again == file and "model.lora='owner/none' is missing" in absent and "set model.lora to a folder" in absent
    (whole, none), shown = read(tmp_path, hub, *names, HF_ENDPOINT="http://127.0.0.1:9")
    assert whole == "read StableDiffusion3Pipeline" and "from the cache" in shown
    assert "127.0.0.1:9 cannot be reached" in none and "Connection refused" in none and "--local-dir" in none


def test_growth_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "a").write_bytes(bytes(2_000_000))
    downloads = Downloads()
    assert downloads() == ""
    (tmp_path / "blobs" / "b.incomplete").write_bytes(bytes(30_000_000))
    (tmp_path / "link").symlink_to(tmp_path / "blobs" / "a")
    assert downloads() == "0.03 GB downloaded"


def test_a_disk_that_is_full() -> None:
    from gerl.utils.hub_errors import missing

    error = RuntimeError("download failed")
    error.__cause__ = OSError(28, "No space left on device")
    assert "disk" in (said := missing("owner/name", error, None, "model.path")) and "HF_HOME" in said
