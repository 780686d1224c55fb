"""A torch that cannot use the GPUs of the machine, which are stand-ins: a program on PATH, and what torch raises."""

import warnings
from pathlib import Path

import pytest
import torch

from gerl.cluster import Cluster, gpus
from gerl.config import ClusterConfig
from gerl.errors import ClusterError

OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update it"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The nvidia-smi of a machine with a GPU."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA GeForce RTX 4090, 470.82.01'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return program


def test_a_torch_without_cuda_beside_a_gpu_is_said(driver: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Cluster(ClusterConfig(launcher="local")).device == "cpu"
    (said,) = caplog.messages
    for word in (
        "1 x NVIDIA GeForce RTX 4090 (driver 470.82.01)",
        torch.__version__,
        "get-started",
        "cluster.device=cpu",
    ):
        assert word in said
    with pytest.raises(ClusterError, match=r"cluster\.device=cuda: .*RTX 4090.*without CUDA.*get-started"):
        Cluster(ClusterConfig(launcher="local", device="cuda"))


def test_gpus_that_are_hidden_or_not_there_are_nothing_to_speak_of(
    driver: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Cluster(ClusterConfig(device="cpu", launcher="local"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Cluster(ClusterConfig(launcher="local"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(gpus, "DEVICES", "none of them")
    driver.write_text("#!/bin/sh\nexit 9\n")  # as where the driver does not run
    Cluster(ClusterConfig(launcher="local"))
    assert not caplog.messages
    monkeypatch.setattr(gpus, "DEVICES", "null")
    Cluster(ClusterConfig(launcher="local"))
    assert "this machine has an NVIDIA GPU" in caplog.text


def test_a_driver_that_is_too_old_is_said_before_anything_is_loaded(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_available() -> bool:
        warnings.warn(OLD, stacklevel=1)
        return False

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", not_available)
    said = (
        r"built for CUDA 12\.8, cannot start on 1 x NVIDIA .*470\.82\.01.*driver on your system is too old.*get-started"
    )
    for device in ("auto", "cuda"):
        with pytest.raises(ClusterError, match=said):
            Cluster(ClusterConfig(launcher="local", device=device))
    Cluster(ClusterConfig(launcher="local", device="cpu"))


def test_what_torch_raises_when_it_starts_on_a_gpu_is_a_sentence(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(OLD)

    monkeypatch.setattr(torch, "zeros", fail)
    gpus.start_device("cpu")
    with pytest.raises(ClusterError, match=r"cannot start on .*driver on your system is too old .*cluster\.device=cpu"):
        gpus.start_device("cuda:0")
