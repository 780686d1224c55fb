"""What the tests of several scorers share: tiny models, and a machine that cannot reach the Hub."""

from pathlib import Path

import huggingface_hub.constants
import pytest
from apart import import_scipy
from tiny_clip import clip_folder
from tiny_detectors import detr_folder, mask2former_folder


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny CLIP model with its processor."""
    return clip_folder(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="session")
def detr(tmp_path_factory: pytest.TempPathFactory) -> str:
    return detr_folder(tmp_path_factory.mktemp("detr"))


@pytest.fixture(scope="session")
def mask2former(tmp_path_factory: pytest.TempPathFactory) -> str:
    import_scipy()
    return mask2former_folder(tmp_path_factory.mktemp("mask2former"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what was downloaded from the Hub, which is empty; nothing more can be."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path / "hub"), raising=False)  # before 5
    monkeypatch.setattr("transformers.utils.hub._is_offline_mode", True, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"
