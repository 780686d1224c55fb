import json
import os
import subprocess
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import pytest

from gerl.errors import ModelError
from gerl.run.card import Card, changed_software, commit_of, hardware, read_sessions, redact, redacted, secrets

SMI = """#!/bin/sh
echo "NVIDIA H200, 143771, 580.65.06"
echo "[N/A], [N/A], [N/A]"
"""


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_card_has_command_code_versions_machine_and_times(tmp_path: Path) -> None:
    arguments = ["trainer.steps=2", "data.train=my prompts.txt", "reward.scorers.a.kwargs.api_key=s3cret"]
    card = Card(tmp_path, arguments, "2 on cpu, ray")
    (session,) = read_sessions(tmp_path / "run.json")
    assert session["ended"] is None and session["end"] is None  # it shows that a run was killed
    card.end("finished")
    (session,) = read_sessions(tmp_path / "run.json")
    shown = "trainer.steps=2 'data.train=my prompts.txt' reward.scorers.a.kwargs.api_key=***"
    assert session["command"] == f"python -m gerl.trainer.main_flowgrpo {shown}"
    assert session["folder"] == os.getcwd() and session["workers"] == "2 on cpu, ray"
    started, ended = (datetime.fromisoformat(session[name]) for name in ("started", "ended"))
    assert started.tzinfo is not None and started <= ended
    assert session["end"] == "finished" and "error" not in session
    assert {"torch", "diffusers", "peft", "transformers", "ray", "numpy"} <= set(session["packages"])
    assert session["python"] and session["system"] and session["cpu"] and session["cores"] >= 1


def test_a_resumed_run_adds_a_session_and_says_how_each_ended(tmp_path: Path) -> None:
    Card(tmp_path, [], "1").end("error", ModelError("no such\npassword=abc"))
    Card(tmp_path, ["checkpoint.resume=auto"], "1").end("interrupted", KeyboardInterrupt())
    first, second = read_sessions(tmp_path / "run.json")
    assert first["error"] == "ModelError: no such password=***" and first["end"] == "error"
    assert second["end"] == "interrupted" and "resume=auto" in second["command"]


def test_packages_of_other_versions_are_named(tmp_path: Path) -> None:
    assert changed_software(tmp_path) == []
    Card(tmp_path, [], "1").end("interrupted")
    assert changed_software(tmp_path) == []
    values = json.loads((tmp_path / "run.json").read_text())
    values["sessions"][-1]["packages"] |= {"torch": "1.0", "numpy": "1.0"}
    values["sessions"][-1]["gerl"]["code"] = "abc"
    (tmp_path / "run.json").write_text(json.dumps(values))
    torch, gerl = changed_software(tmp_path)
    assert torch.startswith(f"torch {version('torch')} ") and "1.0" in torch and "gerl" in gerl


@pytest.mark.parametrize("content", ["", "[]", "{", '{"sessions": 3}', '{"sessions": [1]}'])
def test_a_damaged_card_does_not_keep_a_run_from_going_on(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    Card(tmp_path, [], "1").end("finished")
    assert len(json.loads((tmp_path / "run.json").read_text())["sessions"]) == 1


def test_the_commit_and_whether_files_were_changed(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "a")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert commit_of(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "outputs").mkdir()
    assert commit_of(tmp_path / "outputs") == {"commit": commit, "dirty": False}
    assert commit_of(tmp_path / "outputs", at_top=True) is None
    (tmp_path / "a").write_text("2")
    assert commit_of(tmp_path, at_top=True) == {"commit": commit, "dirty": True}


def test_gpus_are_those_that_the_driver_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware()["gpus"] == []
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert hardware()["gpus"] == ["NVIDIA H200, 140 GiB, driver 580.65.06"]


SECRET = "s3cret-Value.9"


@pytest.mark.parametrize(
    "text",
    [
        "reward.scorers.vlm.kwargs.api_key=@",
        "reward.scorers.vlm.kwargs={url: 'http://a', token: @, model: b}",
        "'+reward.scorers.vlm.kwargs.headers={Authorization: Bearer @}'",
        'kwargs={"password": "@"}',
        "reward.scorers.vlm.kwargs.url=https://user:@@example.org/v1",
        "https://@@example.org",
        "http://host/score?token=@&n=3",
        "HF_TOKEN=@",
        "aws_secret_access_key=@",
        "kwargs={access_key: @, model: b}",
        "private_key=@",
        "secretKey=@",
        'kwargs={"accessToken": "@"}',
        "passphrase: @",
        "pwd=@",
        "bearer: @",
        "the server said: Authorization: Bearer @",
        "https://example.org/v1?key=@&n=3",
        "kwargs={token: [@], model: b}",
        "the token: @ was refused",
        "token: @\nmodel: b",
        "passphrase=correct horse @",
        "Cookie: session=a; id=@",
        "Set-Cookie: @; Path=/",
        "https://example.org/blob?sv=1&sig=@&n=3",
        "https://example.org/a?X-Amz-Signature=@&n=3",
    ],
)
def test_secrets_are_left_out(text: str) -> None:
    hidden = redact(text.replace("@", SECRET, 1))
    assert SECRET not in hidden and "***" in hidden
    assert all(word in hidden for word in ("model: b", "example.org", "n=3") if word in text)


@pytest.mark.parametrize(
    "token",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123",
        "AIzaSyA1234567890abcdefghijklmnopqrstuv",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dozjgNryP4J3jVmNHl0w5N",
        "r8_AbCdEfGhIjKlMnOpQrStUvWxYz01234567890",
        "gsk_AbCdEfGhIjKlMnOpQrStUvWxYz0123",
        *(
            f"{prefix}AbCdEfGhIjKlMnOpQrStUvWx"
            for prefix in ("ghs_", "ghu_", "ASIA", "npm_", "pypi-", "nvapi-", "xai-")
        ),
        *(f"{prefix}AbCdEfGhIjKlMnOpQrStUvWx" for prefix in ("dckr_pat_", "ya29.", "SG.")),
    ],
)
def test_tokens_are_known_by_their_looks(token: str) -> None:
    assert redact(f"model.path={token} x") == "model.path=*** x"
    assert redact(f"got Bearer {token}") == "got Bearer ***"


@pytest.mark.parametrize(
    "text",
    [
        "trainer.steps=10 hydra.run.dir=/tmp/a model.path=owner/name",
        "reward.scorers.vlm_judge.kwargs.max_tokens=8 sampling.call={max_sequence_length: 8}",
        "http://127.0.0.1:8000/v1 data.train=a@b.txt",
        "model.path=/models/sk-tiny",
        "the secret: a house",
        "secret: a house by the sea",
        'a sign that says "password: swordfish is wrong"',
        "commit 8f3c2a1b9d4e5f60718293a4b5c6d7e8f9012345",
        'a sign that reads "token: 5"',
        "sort_key=3 monkey=a key: b",
        "actor.one_pass=true sampling.seed=1 --out x -u",
        "python -u my.py:rows MAX_TOKENS=5",
    ],
)
def test_the_rest_stays(text: str) -> None:
    assert redact(text) == text


def test_keys_and_hooks_are_known_by_their_place() -> None:
    key = "8f3c2a1b9d4e5f60718293a4b5c6d7e8f9012345"
    assert redact(f"wandb login {key}") == "wandb login ***"
    assert redact("https://hooks.slack.com/services/T0AB/B0CD/aBcDeFgHiJkL") == "https://hooks.slack.com/services/***"
    assert redact("https://discord.com/api/webhooks/12345/aBcDeFgHiJkLmNoPqR") == "https://discord.com/api/webhooks/***"


def test_settings_lose_their_secrets_and_nothing_else() -> None:
    settings = {
        "reward": {"scorers": {"vlm": {"kwargs": {"api_key": "abc", "url": "https://me:word@host/v1", "tokens": 512}}}},
        "model": {"path": "a/b", "lora": None, "token": ""},
        "rows": [1, (2.5, "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123")],
    }
    assert redacted(settings) == {
        "reward": {"scorers": {"vlm": {"kwargs": {"api_key": "***", "url": "https://***@host/v1", "tokens": 512}}}},
        "model": {"path": "a/b", "lora": None, "token": ""},
        "rows": [1, [2.5, "***"]],
    }


def test_usual_forms_of_secrets_are_hidden() -> None:
    forms = """Authorization: Token @|PGPASSWORD=@|--password @ --out x|--api-key @|curl -u me:@ http://a|wandb_key=@
        account_key=@|jwt=@|dsn=@|-----BEGIN PRIVATE KEY-----\n@\n-----END PRIVATE KEY-----"""
    for form in forms.split("|"):
        assert SECRET not in redact(form.replace("@", SECRET)), form
    structures = [
        {"token": {"value": SECRET}},
        {"headers": [["Authorization", f"Token {SECRET}"]]},
        {"ssh_key": [SECRET]},
    ]
    for structure in structures:
        assert SECRET not in str(redacted(structure)), structure
    assert redacted({"pairs": [["a", "b"], ["token", 3]]}) == {"pairs": [["a", "b"], ["token", 3]]}


def test_the_keys_of_secrets_are_named() -> None:
    kwargs = {"api_key": "abc", "url": "https://me:word@host/v1", "tokens": [1, 2], "accessToken": ["a"], "n": (1, 2)}
    settings = {"reward": {"kwargs": kwargs}, "model": {"token": ""}}
    assert secrets({"a": {"token": {"value": "abc"}}}) == ["a.token"]
    assert secrets(settings) == ["reward.kwargs.api_key", "reward.kwargs.url", "reward.kwargs.accessToken"]
    assert redacted(settings)["reward"]["kwargs"]["accessToken"] == "***"
