"""Environments of workers: their `runtime_env`, and what is said of one that cannot be; e2e over Ray."""

import sys
from pathlib import Path

import pytest
from thin_environment import thin_environment

from gerl.cluster import environments
from gerl.config import ScorerConfig
from gerl.errors import ClusterError, ConfigError, RewardError
from gerl.rewards.scorers import RemoteOnlyScorer, known_scorer
from gerl.rewards.worker import RewardWorker

UV = """Failed to set up runtime environment.
Could not create the actor because its associated runtime env failed to be created.
Last 50 lines of stdout:
    Using Python 3.11 environment at: somewhere
      × No solution found when resolving dependencies:
      ╰─▶ Because nothing was found in the package registry and you require nothing, we can conclude
"""


def test_packages_are_installed_with_the_caches_of_their_installers() -> None:
    assert environments.runtime_env({}, 60, joined=False) == {}
    assert environments.runtime_env({"pip": ["a>=1"]}, 60.5, joined=False) == {
        "config": {"setup_timeout_seconds": 60},
        "pip": {"packages": ["a>=1"], "pip_install_options": ["--disable-pip-version-check"]},
    }
    uv = environments.runtime_env({"uv": ["a"]}, 60, joined=False)["uv"]
    assert uv == {"packages": ["a"], "uv_pip_install_options": []}


def test_an_interpreter_is_asked_whether_it_could_run_a_scorer(tmp_path: Path) -> None:
    python = str(thin_environment(tmp_path / "thin"))
    assert environments.runtime_env({"python": python}, 60, joined=False)["py_executable"] == python
    with pytest.raises(ClusterError, match=r"env\.python=/nowhere/python: there is no such program"):
        environments.runtime_env({"python": "/nowhere/python"}, 60, joined=False)
    # on other machines it may be there
    assert (
        environments.runtime_env({"python": "/nowhere/python"}, 60, joined=True)["py_executable"] == "/nowhere/python"
    )
    (pth,) = (tmp_path / "thin").rglob("below.pth")
    pth.unlink()
    environments._check_python.cache_clear()
    with pytest.raises(ClusterError, match=r"cannot run a scorer \(ModuleNotFoundError.*install gerl there"):
        environments.runtime_env({"python": python}, 60, joined=False)
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho 3.9.1 2.0.0\n")
    other.chmod(0o755)
    with pytest.raises(ClusterError, match=r"has Python and Ray 3\.9\.1 and 2\.0\.0, this process .*must be the same"):
        environments.runtime_env({"python": str(other)}, 60, joined=False)


def test_without_the_package_that_makes_environments_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "virtualenv", None)
    with pytest.raises(ClusterError, match=r"virtualenv.*'gerl\[env\]'"):
        environments.runtime_env({"uv": ["a"]}, 60, joined=False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (UV, "× No solution found when resolving dependencies: ╰─▶ Because nothing was found"),
        (
            "...\nLast 50 lines of stdout:\n  Looking\n  ERROR: No matching distribution\n",
            "ERROR: No matching distribut",
        ),
        ("Failed to install runtime_env within the timeout 60 seconds.", "Failed to install runtime_env within"),
        ("", "Ray gives no reason"),
    ],
)
def test_why_an_environment_could_not_be_made_is_said_in_the_words_of_the_installer(text: str, reason: str) -> None:
    said = environments.failure("scorer mine, process 0", text)
    assert said.startswith("the environment of scorer mine, process 0 could not be created (" + reason)
    assert "correct reward.scorers.NAME.env" in said and "\n" not in said


@pytest.mark.parametrize(
    "env", [{"uv": ["a"], "pip": ["b"]}, {"pip": "a"}, {"pip": [3]}, {"python": ""}, {"conda": []}]
)
def test_what_is_no_environment_is_refused(env: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"reward\.scorers\.NAME\.env=.*expected one of"):
        ScorerConfig(env=env)


def test_a_package_that_is_missing_here_may_be_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import nosuchpackage\n\ndef compute_score(images, prompts, metadata):\n    return [0.0]\n")
    env = {"pip": ["nosuchpackage"]}
    found = known_scorer("mine", ScorerConfig(path=str(file), env=env))
    assert isinstance(found, RemoteOnlyScorer) and not found.groupwise
    with pytest.raises(RewardError, match="nosuchpackage"):
        known_scorer("mine", ScorerConfig(path=str(file)))
    file.write_text("def other(images, prompts, metadata):\n    return [0.0]\n")
    with pytest.raises(RewardError, match="no such function"):  # another mistake than a missing package
        known_scorer("mine", ScorerConfig(path=str(file), env=env))


def test_a_scorer_of_gerl_is_known_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "open_clip", None)
    assert isinstance(known_scorer("hpsv2", ScorerConfig(env={"uv": ["open-clip-torch"]})), RemoteOnlyScorer)
    with pytest.raises(RewardError, match=r"'gerl\[clip\]'"):
        known_scorer("hpsv2", ScorerConfig())


def test_a_groupwise_function_that_only_its_process_can_import_is_refused_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # as the worker does
    (tmp_path / "mine.py").write_text("def compute_score(i, p, m):\n    return [0.0]\ncompute_score.groupwise = True\n")
    config = {"mine": ScorerConfig(path="mine.py")}
    with pytest.raises(RewardError, match=r"reward\.scorers\.mine is groupwise.*inside the function"):
        RewardWorker(config, 0, str(tmp_path), groupwise=()).build()
    RewardWorker(config, 0, str(tmp_path), groupwise=("mine",)).build()


def test_a_package_that_its_own_environment_lacks_is_looked_for_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # as the worker does
    (tmp_path / "mine.py").write_text("import nosuchpackage\n")
    config = {"mine": ScorerConfig(path="mine.py", env={"pip": ["other"]})}
    with pytest.raises(RewardError, match=r"nosuchpackage.*add it to reward\.scorers\.mine\.env"):
        RewardWorker(config, 0, str(tmp_path)).build()
