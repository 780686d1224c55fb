"""A stand-in for the HTTP interface of the Hugging Face hub: it serves repositories from folders and takes uploads."""

import base64
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
TOKEN = "hf_of_the_test"
LFS = (".safetensors", ".png")


class Hub(BaseHTTPRequestHandler):
    """Models lie in ROOT/owner/name, data sets in ROOT/datasets/owner/name."""

    server: "Server"
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts == ["api", "whoami-v2"]:
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            return self.json({"name": "owner", "type": "user"}) if known else self.reply(401)
        if parts[0] == "api":
            return self.about(parts[1], "/".join(parts[2:4]), parts[4:])
        kind = "datasets" if parts[0] == "datasets" else "models"
        owner, name, action, _, *file = parts[1:] if kind == "datasets" else [*parts, *[""] * 4][: max(len(parts), 4)]
        folder = self.folder(kind, f"{owner}/{name}")
        path = folder / "/".join(file)
        if not folder.is_dir():
            return self.reply(401, error="RepoNotFound")
        if "gated" in name:
            return self.reply(403, error="GatedRepo")
        if action != "resolve" or not path.is_file():
            return self.reply(404, error="EntryNotFound")
        return self.reply(200, path.read_bytes(), tag=hashlib.sha1(path.read_bytes()).hexdigest())

    def do_POST(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if self.path == "/api/validate-yaml":
            return self.json({"errors": [], "warnings": []})
        if "paths-info" in parts:
            wanted = json.loads(body)["paths"] if body.startswith(b"{") else []
            return self.json(
                [row for row in self.tree(self.folder(parts[1], "/".join(parts[2:4]))) if row["path"] in wanted]
            )
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.reply(401)
        if self.path == "/api/repos/create":
            return self.create(json.loads(body))
        if parts[-4:] == ["info", "lfs", "objects", "batch"]:
            return self.batch(json.loads(body))
        folder = self.folder("models", "/".join(parts[2:4]))
        if parts[4] == "preupload":
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {file: "lfs" if file.endswith(LFS) else "regular" for file in files}
            return self.json({"files": [{"path": f, "uploadMode": m, "shouldIgnore": False} for f, m in modes.items()]})
        return self.commit(folder, [json.loads(line) for line in body.splitlines()])

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        digest = self.path.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() != digest:
            return self.reply(400)
        self.server.objects[digest] = body
        return self.reply(200)

    def about(self, kind: str, name: str, rest: list[str]) -> None:
        """Facts of a repository, or the list of its files."""
        folder = self.folder(kind, name)
        if not folder.is_dir():
            return self.reply(401, error="RepoNotFound")
        if rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
            return self.reply(404, error="RevisionNotFound")
        if rest[:1] == ["tree"]:
            below = "/".join(rest[2:])
            return self.json([row for row in self.tree(folder) if row["path"].startswith(below)])
        files = [{"rfilename": row["path"]} for row in self.tree(folder) if row["type"] == "file"]
        card = {"license": "cc0-1.0"} if (folder / "LICENSED").exists() else None
        facts = {"id": name, "sha": COMMIT, "siblings": files, "private": name in self.server.private, "cardData": card}
        return self.json(facts)

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization'] or 'owner'}/{asked['name']}"
        if name.startswith("other/"):
            return self.reply(403)
        folder = self.folder("models", name)
        if folder.is_dir():
            return self.json({"url": self.server.address(name)}, 409)
        folder.mkdir(parents=True)
        if asked.get("private") or asked.get("visibility") == "private":
            self.server.private.add(name)
        return self.json({"url": self.server.address(name), "name": name})

    def batch(self, asked: dict[str, Any]) -> None:
        objects = [
            {**entry, "actions": {"upload": {"href": f"{self.server.address('lfs')}/{entry['oid']}"}}}
            for entry in asked["objects"]
        ]
        return self.json({"transfer": "basic", "objects": objects})

    def commit(self, folder: Path, lines: list[dict[str, Any]]) -> None:
        """Write the files of a commit: small ones are in it, large ones were sent before."""
        for line in lines:
            value = line["value"]
            if line["key"] not in ("file", "lfsFile"):
                continue
            large = line["key"] == "lfsFile"
            content = self.server.objects[value["oid"]] if large else base64.b64decode(value["content"])
            (folder / value["path"]).parent.mkdir(parents=True, exist_ok=True)
            (folder / value["path"]).write_bytes(content)
        url = self.server.address(f"{folder.parent.name}/{folder.name}/commit/{COMMIT}")
        return self.json({"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})

    def folder(self, kind: str, name: str) -> Path:
        return self.server.root / name if kind == "models" else self.server.root / "datasets" / name

    def tree(self, folder: Path) -> list[dict[str, Any]]:
        return [
            {"type": "directory", "path": str(path.relative_to(folder)), "oid": "0" * 40}
            if path.is_dir()
            else {"type": "file", "path": str(path.relative_to(folder)), "size": path.stat().st_size, "oid": "0" * 40}
            for path in sorted(folder.rglob("*"))
        ]

    def json(self, value: Any, status: int = 200) -> None:
        self.reply(status, json.dumps(value).encode(), kind="application/json")

    def reply(
        self, status: int, body: bytes = b"", error: str | None = None, tag: str | None = None, kind: str | None = None
    ) -> None:
        whole, window = len(body), self.headers.get("Range")
        if window and status == 200 and tag:
            first, _, last = window.removeprefix("bytes=").partition("-")
            body, status = body[int(first) : int(last or whole) + 1], 206
        self.send_response(status)
        headers = {"X-Error-Code": error, "ETag": tag and f'"{tag}"', "X-Repo-Commit": tag and COMMIT}
        headers |= {"Content-Type": kind, "Content-Length": str(len(body))}
        if status == 206:
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(body) - 1}/{whole}"
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    """The stand-in on the loopback, with what it was asked and was given."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Hub)
        self.root, self.requests = root, list[str]()
        self.objects: dict[str, bytes] = {}
        self.private: set[str] = set()

    def address(self, path: str = "") -> str:
        return f"http://127.0.0.1:{self.server_port}" + (f"/{path}" if path else "")

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a process that takes this for the hub, with its cache in `home`, not logged in."""
        own = {"HF_HOME": str(home), "HF_ENDPOINT": self.address(), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
        inherited = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
        return inherited | own | more


@contextmanager
def serving(root: Path) -> Iterator[Server]:
    """Serve the repositories in `root`."""
    server = Server(root)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
