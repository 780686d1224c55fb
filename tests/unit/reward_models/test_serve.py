"""The command line of the service, without Ray: tests/e2e/test_services.py starts real ones."""

import inspect
import logging
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from gerl.config import ScorerConfig
from gerl.errors import ConfigError
from gerl.rewards.scorers import SCORERS, build_scorer
from reward_models.scoring import WARM_PROMPT
from reward_models.serve import Options, listen, main, parse, warm_row

ROOT = Path(__file__).resolve().parents[3]

# ray.serve defines its own settings in a way pydantic will drop.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")


def test_arguments_become_options() -> None:
    place = "port=0 host=::1 replicas=2 gpus=0.5 batch_wait_s=0 token_env=NAME".split()
    options = parse(["scorer=ocr", "kwargs.detect=true", "kwargs.a=2", "warm_prompt=a", "warm_metadata.text=b", *place])
    kwargs = {"detect": True, "a": 2}
    expected = Options(scorer="ocr", kwargs=kwargs, warm_prompt="a", warm_metadata={"text": "b"}, token_env="NAME")
    assert options == replace(expected, port=0, host="::1", replicas=2, gpus=0.5, batch_wait_s=0.0)
    assert options.config() == ScorerConfig(kwargs=kwargs)
    assert parse(["scorer=a", "kwargs={b: [1, 2]}"]).kwargs == {"b": [1, 2]}
    assert parse(["scorer=a", "kwargs.text=a=b"]).kwargs == {"text": "a=b"}


def test_the_file_of_a_scorer_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse(["scorer=mine", "path=x.py", "function=f"]).config() == ScorerConfig(
        path=str(tmp_path / "x.py"), function="f"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "scorer is missing: give scorer="),
        (["ocr"], 2, "ocr: expected key=value"),
        (["scorer=ocr", "--port=1"], 2, "--port=1: drop the dashes, write port=1"),
        (["scorer=ocr", "replica=2"], 2, "replica: the service has no such key; did you mean 'replicas'"),
        (["scorer=ocr", "qqqq=2"], 2, "it has scorer, path, function"),
        (["scorer=ocr", "port.x=2"], 2, "port.x: the service has no such key; did you mean 'port'"),
        (["scorer=ocr", "kwargs.=2"], 2, "kwargs.: the service has no such key; did you mean 'kwargs'"),
        (["scorer=ocr", "port=1", "port=2"], 2, "port is given twice"),
        (["scorer=ocr", "kwargs.a=1", "kwargs.a=2"], 2, "kwargs.a is given twice"),
        (["scorer=ocr", "kwargs=3", "kwargs.a=2"], 2, "kwargs is given twice"),
        (["scorer=ocr", "port=70000"], 2, "port=70000: it must be less than or equal to 65535"),
        (["scorer=ocr", "replicas=0"], 2, "replicas=0: it must be greater than or equal to 1"),
        (["scorer=ocr", "rate_per_minute=many"], 2, "rate_per_minute='many': it must be an integer"),
        (["scorer=a/b"], 2, "scorer='a/b': it must be a name of letters"),
        (["scorer=ocr", "warm_metadata=3"], 2, "warm_metadata=3: it must be a dictionary"),
        (["scorer=orc"], 1, "gerl has no such scorer"),
        (["scorer=ocr", "kwargs.detekt=1"], 1, "detekt=1 is invalid"),
        (["scorer=mine", "path=nowhere.py"], 1, "there is no Python file"),
        (["scorer=sharpness", "host=0.0.0.0"], 2, "there is no token: set one in token_env"),
        (["scorer=sharpness", "token_env=GERL_TEST_NO_TOKEN"], 2, "token_env=GERL_TEST_NO_TOKEN holds no token"),
        (["scorer=ocr", "warm_prompt=nothing quoted"], 2, "warm_prompt and warm_metadata: "),
    ],
)
def test_what_is_wrong_is_said_before_ray_starts(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from reward_models import replicas

    monkeypatch.setattr(replicas, "deployed", None)
    assert main(arguments) == code
    told = capsys.readouterr().err
    assert told.startswith("error: ") and message in told


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port={port} \(Address already in use\)"):
            listen("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
    with pytest.raises(ConfigError, match=r"host=no\.such\.host\.invalid port=1"):
        listen("no.such.host.invalid", 1)


def test_tokens_come_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    monkeypatch.setenv("GERL_TEST_TOKEN", "from-env")
    assert parse(["scorer=a"]).token() is None
    assert parse(["scorer=a", f"token_file={file}"]).token() == "from-file"
    assert parse(["scorer=a", "token_env=GERL_TEST_TOKEN"]).token() == "from-env"
    with pytest.raises(ConfigError, match="keep one of them"):
        parse(["scorer=a", f"token_file={file}", "token_env=GERL_TEST_TOKEN"]).token()
    file.write_text("umläut")
    with pytest.raises(ConfigError, match="holds no token") as caught:
        parse(["scorer=a", f"token_file={file}"]).token()
    assert "umläut" not in str(caught.value)


def test_the_warm_up_uses_a_row_the_scorer_can_score(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert warm_row(parse(["scorer=ocr"])) == (WARM_PROMPT, {})
    assert warm_row(parse(["scorer=ocr", "warm_prompt=x", "warm_metadata.text=7"])) == ("x", {"text": 7})
    assert warm_row(parse(["scorer=ocr", "warm_up=false"])) is None
    assert not caplog.records  # what a run says of its prompts
    with caplog.at_level(logging.WARNING):
        assert warm_row(parse(["scorer=image_similarity"])) is None
    assert "no warm-up" in caplog.text and "set warm_prompt or warm_metadata" in caplog.text
    assert "image_similarity" in SCORERS


def test_a_scorer_that_compares_images_is_not_served(tmp_path: Path) -> None:
    text = "def compute_score(images, prompts, metadata):\n    return [0.0]\ncompute_score.groupwise = True\n"
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=r"scorer=mine compares .*reward\.scorers of the run"):
        warm_row(parse(["scorer=mine", f"path={tmp_path}/mine.py", "warm_up=false"]))


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["max_body_mb=300"], "max_in_flight_mb=256"),
        (["max_in_flight_mb=1"], "max_in_flight_mb=1"),
        (["max_megapixels=300"], "max_in_flight_megapixels=256"),
        (["max_image_megapixels=179"], "max_image_megapixels=179"),
    ],
)
def test_limits_that_no_request_could_meet_are_refused(arguments: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse(["scorer=ocr", *arguments])


def test_the_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ") and line.strip()}
    for name, option in Options.__dataclass_fields__.items():
        if isinstance(option.default, bool | int | float):
            assert f"(default: {str(option.default).lower()})" in lines[name], name
        assert name in lines


def test_without_the_extra_the_error_names_it(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ImportError('not installed')\n")
    done = subprocess.run(
        [sys.executable, "-m", "reward_models.serve", "scorer=sharpness"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "pip install 'gerl[serve]'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("recipe", sorted((ROOT / "reward_models/recipes").glob("*.md")), ids=lambda path: path.stem)
def test_the_code_of_a_recipe_fits_into_the_service(recipe: Path) -> None:
    text = recipe.read_text().replace("\\\n", " ")
    assert recipe.name in (ROOT / "reward_models" / "README.md").read_text()
    example = runpy.run_path(str(ROOT / "examples" / "scorer_service.py"))
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        values: dict[str, Any] = {}
        exec(compile(block, recipe.name, "exec"), values)
        assert set(values) - {"__builtins__"} == {"NAME", "load", "score"}
        for name in ("load", "score"):
            assert list(inspect.signature(values[name]).parameters) == list(inspect.signature(example[name]).parameters)
    for command in re.findall(r"-m reward_models\.serve (.*)", text):
        options = parse(shlex.split(command))
        assert options.path or options.scorer in SCORERS
    for name, block in re.findall(r"reward\.scorers(?:\.|={)(\w+)[=:] ?({.*?}})", text):
        build_scorer(name, ScorerConfig(**yaml.safe_load(block)))
