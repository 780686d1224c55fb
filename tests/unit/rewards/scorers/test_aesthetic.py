import hashlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tensor_scores import assert_differentiable
from tiny_clip import pictures, whole_model
from torch import nn

from gerl.errors import RewardError
from gerl.protocol import Prompt
from gerl.rewards.scorers import aesthetic
from gerl.rewards.scorers.aesthetic import AestheticScore, linear_head, read_tensors

WIDTH = 16  # of a feature of the tiny tower


class Original(nn.Module):
    """The module of the published file."""

    def __init__(self, width: int = WIDTH, relu: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts: list[nn.Module] = []
        for size, dropout in ((1024, 0.2), (128, 0.2), (64, 0.1), (16, None)):
            parts.append(nn.Linear(width, size))
            parts += [nn.ReLU()] if relu else []
            parts += [nn.Dropout(dropout)] if dropout else []
            width = size
        self.layers = nn.Sequential(*parts, nn.Linear(width, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features)


def saved(path: Path, module: nn.Module) -> str:
    (torch.save if path.suffix == ".pth" else safetensors.torch.save_file)(module.state_dict(), path)
    return str(path)


@pytest.mark.parametrize("name", ["head.pth", "head.safetensors"])
def test_the_score_is_the_head_on_the_normalised_image_feature(clip: str, tmp_path: Path, name: str) -> None:
    original = Original().eval()
    expected = original(whole_model(clip, pictures(3), ["a"]).image_embeds).squeeze(-1)
    scorer = AestheticScore(model=clip, head=saved(tmp_path / name, original), batch_size=2, device="cpu")
    scores = scorer(pictures(3), ["a", "b", "c"], [{}] * 3)
    assert scores == pytest.approx(expected.tolist(), abs=1e-5)
    assert max(scores) - min(scores) > 1e-3
    alone = [scorer([image], ["other"], [{}])[0] for image in pictures(3)]  # the prompt does not count
    assert scores == pytest.approx(alone, abs=1e-6)
    scorer.check_prompts([Prompt(0, "anything")])


def test_the_head_is_one_affine_map() -> None:
    original = Original()
    head = linear_head(original.state_dict(), WIDTH, "head")
    product, offset = torch.eye(WIDTH), torch.zeros(WIDTH)
    for layer in original.layers:
        if isinstance(layer, nn.Linear):
            product, offset = layer.weight @ product, layer.weight @ offset + layer.bias
    features = torch.randn(4, WIDTH)
    torch.testing.assert_close(head(features), features @ product.T + offset, atol=1e-5, rtol=0)


def test_a_head_of_another_kind_or_width_is_refused(clip: str, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"layers 0, 2, 4, 6, 7 .* got layers\.0\.bias"):
        linear_head(Original(relu=True).state_dict(), WIDTH, "head=x")
    wide = AestheticScore(model=clip, head=saved(tmp_path / "wide.pth", Original(24)), device="cpu")
    with pytest.raises(RewardError, match=r"head=.*wide\.pth: expected a head from 16 to 1 .* \(1024, 24\)"):
        wide(pictures(1), ["a"], [{}])
    two = Original().state_dict() | {"layers.7.weight": torch.zeros(2, 16), "layers.7.bias": torch.zeros(2)}
    with pytest.raises(RewardError, match="a head from 16 to 1"):
        linear_head(two, WIDTH, "head=x")


def test_a_path_that_names_no_file_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        RewardError, match=r"head=/nowhere/head\.pth is neither a file .* or sac\+logos\+ava1-l14-linearMSE"
    ):
        AestheticScore(head="/nowhere/head.pth")


def test_the_published_head_is_found_by_name_and_only_the_authors_file_is_taken(
    clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = saved(tmp_path / "sac+logos+ava1-l14-linearMSE.pth", Original())
    scorer = AestheticScore(model=clip, repository=str(tmp_path), device="cpu")
    with pytest.raises(RewardError, match=r"repository=.* has the SHA-256 [0-9a-f]{64}, not 21dd590f3ccd.*path of the"):
        scorer(pictures(1), ["a"], [{}])
    # where the tiny file is the authors', it is taken
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    monkeypatch.setattr(aesthetic, "HEADS", {"sac+logos+ava1-l14-linearMSE": digest})
    by_path = AestheticScore(model=clip, head=file, device="cpu")
    assert scorer(pictures(2), ["a"] * 2, [{}] * 2) == by_path(pictures(2), ["a"] * 2, [{}] * 2)


@pytest.mark.usefixtures("hub")
def test_a_head_that_cannot_be_downloaded_is_named(clip: str) -> None:
    message = r"^repository=camenduru/improved-aesthetic-predictor cannot be loaded .*linearMSE\.pth"
    with pytest.raises(RewardError, match=message):
        AestheticScore(model=clip, device="cpu")(pictures(1), ["a"], [{}])


def test_a_file_that_is_not_named_tensors_is_refused(tmp_path: Path) -> None:
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    with pytest.raises(RewardError, match=r"head=.*list\.pth contains list, not named tensors"):
        read_tensors("head", str(tmp_path / "list.pth"))
    (tmp_path / "broken.safetensors").write_text("nothing of the kind")
    with pytest.raises(RewardError, match=re.escape("broken.safetensors cannot be loaded (SafetensorError")):
        read_tensors("head", str(tmp_path / "broken.safetensors"))


class Payload:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("ran",)


def test_a_file_with_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"layers.0.weight": Payload()}, "evil.pth")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        read_tensors("head", "evil.pth")
    assert not Path("ran").exists()


def test_scores_of_tensors_have_a_gradient(clip: str, tmp_path: Path) -> None:
    head = saved(tmp_path / "head.pth", Original())
    assert_differentiable(AestheticScore(model=clip, head=head, device="cpu"), pictures(2), ["a", "b"])
