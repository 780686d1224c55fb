"""The command: where it listens, what it prints, how it ends."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import requests
from watching import make_run

from gerl.commandline.command import PAGE
from gerl.errors import ConfigError
from gerl.web.watch import addresses, main, opened


@pytest.mark.parametrize(
    ("arguments", "code", "named", "remedy"),
    [
        (["nowhere"], 1, "run=nowhere", "give a run folder"),
        (["run=.", "port=99999"], 2, "port=99999", "0 to 65535"),
        (["run=.", "port=x"], 2, "port=x", "a port, 0 to 65535"),
        (["run=.", "token=a"], 2, "token", "'token_env'"),
        (["run=.", "token_env=GERL_NO_TOKEN"], 2, "token_env=GERL_NO_TOKEN", "export it"),
        (["run=.", "host=256.1.1.1", "port=0"], 2, "host=256.1.1.1", "cannot|can be listened"),
        (["prot=1"], 2, "prot", "'port'"),
    ],
)
def test_wrong_command_lines(
    arguments: list[str], code: int, named: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ") and named in said and re.search(remedy, said) and said.count("\n") == 1


def test_a_package_that_is_missing_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main([f"run={tmp_path}"]) == 1
    assert "pip install 'gerl[watch]'" in capsys.readouterr().err


def test_the_usual_port_or_a_free_one_and_never_another_than_was_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="port=0 selects a free one"):
        opened("127.0.0.1", taken.getsockname()[1])
    with opened("127.0.0.1", None) as first, opened("127.0.0.1", None) as second:
        assert second.getsockname()[1] not in (PAGE, first.getsockname()[1])


def test_addresses_have_the_token_where_there_is_one() -> None:
    with opened("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert addresses("127.0.0.1", listener, None) == [f"http://127.0.0.1:{port}/"]
        assert addresses("0.0.0.0", listener, "t-1")[0] == f"http://localhost:{port}/?token=t-1"
        assert addresses("::1", listener, None) == [f"http://[::1]:{port}/"]


def test_it_serves_until_it_is_stopped_and_other_machines_need_the_token_that_it_prints(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    command = [sys.executable, "-m", "gerl.watch", f"run={tmp_path / 'one'}", "port=0", "host=0.0.0.0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline().strip()
        assert re.fullmatch(r"http://localhost:\d+/\?token=[\w-]{30,}", line), line
        assert requests.get(line, timeout=10).status_code == 200
        assert requests.get(line[:-1], timeout=10).status_code == 401
        stream = requests.get(
            line.replace("?token=", "api/events?run=one&x="),
            headers={"Authorization": f"Bearer {line.partition('=')[2]}"}, stream=True, timeout=10,
        )  # fmt: skip
        assert stream.status_code == 200
        process.send_signal(signal.SIGINT)  # also while a page listens
        assert process.wait(10) == 0
        assert "Traceback" not in process.stderr.read()
