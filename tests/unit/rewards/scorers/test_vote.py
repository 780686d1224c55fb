"""The scorer against a real vote service on this machine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from voting import Voter, service

from gerl.errors import DataError, RewardError
from gerl.protocol import FeedbackRequest
from gerl.rewards.scorers.vote import VoteScorer, digest, encoded

IMAGES = [Image.new("RGB", (8, 4), (60 * i, 0, 0)) for i in range(4)]


def occasion(key: str = "0123456789abcdef", count: int = 4) -> FeedbackRequest:
    return FeedbackRequest(key, "signs/now", 3, 7, tuple(range(count)), (key,))


class Drawn:
    """Images that count how often they are looked at."""

    def __init__(self, images: list[Any]) -> None:
        self.images, self.calls = images, 0

    def __call__(self) -> list[Any]:
        self.calls += 1
        return self.images


def test_images_are_sent_once_and_ranks_come_back_as_scores(tmp_path: Path) -> None:
    with service(tmp_path) as (url, ballots, _):
        scorer, drawn = VoteScorer(url=url), Drawn(IMAGES)
        assert [scorer.ask(drawn, "a", {}, occasion()) for _ in range(3)] == ["", "", ""] and drawn.calls == 2
        (ballot,) = ballots.ballots.values()
        assert (ballot.text, ballot.request.step, ballot.request.prompt, ballot.request.run) == ("a", 3, 7, "signs/now")
        found = [np.asarray(Image.open(tmp_path / path)) for path in ballot.images]
        assert all((np.asarray(image) == pixels).all() for image, pixels in zip(IMAGES, found, strict=True))
        Voter(f"{url}/").post("vote", group=ballot.id, ranks=[4, 3, 2, 1])
        assert scorer.ask(drawn, "a", {}, occasion()) == pytest.approx([0, 1 / 3, 2 / 3, 1])
        assert scorer.ask(drawn, "a", {}, occasion()) == pytest.approx(
            [0, 1 / 3, 2 / 3, 1]
        )  # of a step that is repeated
        assert scorer.ask(Drawn(IMAGES[::-1]), "a", {}, occasion()) == ""  # other images are asked about


def test_the_picture_that_is_edited_is_sent_with_the_images(tmp_path: Path) -> None:
    Image.new("RGB", (80, 40), (0, 200, 0)).save(tmp_path / "photo.png")
    row = {"image": str(tmp_path / "photo.png"), "other": [str(tmp_path / "photo.png")] * 2, "text": "no picture"}
    for sources, count in ((None, 1), ([], 0), (["image", "other"], 3)):
        with service(tmp_path / f"votes {count}") as (url, ballots, _):
            scorer = VoteScorer(url=url, sources=sources)
            scorer.check_prompt("paint it", row)
            assert scorer.ask(Drawn(IMAGES), "paint it", row, occasion()) == ""
            (ballot,) = ballots.ballots.values()
            assert ballot.sources == [f"images/{ballot.id}/source_{i}.png" for i in range(count)]
            for path in ballot.sources:
                shown = Image.open(ballots.folder / path)
                assert shown.size == (8, 4) and shown.getpixel((4, 2)) == (0, 200, 0)  # as large as the images are
    VoteScorer(url=url).check_prompt("paint it", {})
    with pytest.raises(DataError, match="'paint it' has no reference for the vote scorer"):
        VoteScorer(url=url, sources=["photo"]).check_prompt("paint it", row)


def test_a_service_that_is_down_is_waited_for(tmp_path: Path) -> None:
    with service(tmp_path) as (url, _, _):
        port = int(url.rsplit(":", 1)[1])
        scorer = VoteScorer(url=url)
        assert scorer.reach() == "" and scorer.ask(Drawn(IMAGES), "a", {}, occasion()) == ""
    for said in (scorer.reach(), scorer.ask(Drawn(IMAGES), "a", {}, occasion())):
        assert isinstance(said, str) and "start the service" in said and "the run waits" in said
    with service(tmp_path, port=port) as (url, ballots, _):
        assert scorer.ask(Drawn(IMAGES), "a", {}, occasion()) == "" and len(ballots.open()) == 1


def test_a_token_that_is_wrong_ends_the_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with service(tmp_path, ["anna"]) as (url, _, tokens):
        (tmp_path / "token").write_text(f"{tokens.run}\n")
        assert VoteScorer(url=url, token_file=str(tmp_path / "token")).ask(Drawn(IMAGES), "a", {}, occasion()) == ""
        monkeypatch.setenv("VOTE", "wrong")
        wrong = VoteScorer(url=url, token_env="VOTE")
        for call in (wrong.reach, lambda: wrong.ask(Drawn(IMAGES), "a", {}, occasion())):
            with pytest.raises(RewardError, match=r"401 .*the token of token_env=VOTE is rejected"):
                call()
        with pytest.raises(RewardError, match=r"401 .*set token_file to its file"):
            VoteScorer(url=url).reach()


def test_another_service_is_told_apart(tmp_path: Path) -> None:
    from reward_service import serving

    with serving() as url, pytest.raises(RewardError, match=r"404 .*correct the address"):
        VoteScorer(url=url).reach()


def test_a_single_image_is_nothing_to_choose_from() -> None:
    assert VoteScorer(url="http://127.0.0.1:1").ask(Drawn(IMAGES[:1]), "a", {}, occasion(count=1)) == [0.5]


def test_a_digest_is_of_pixels_and_size() -> None:
    other = IMAGES[0].copy()
    assert digest(other) == digest(IMAGES[0])
    other.putpixel((0, 0), (1, 0, 0))
    same = {digest(image) for image in (IMAGES[0], other, Image.new("RGB", (4, 8)))}
    assert len(same) == 3
    assert digest([IMAGES[0], IMAGES[1]]) != digest([IMAGES[1], IMAGES[0]])


def test_videos_are_moving_pngs_and_images_can_be_reduced(tmp_path: Path) -> None:
    import base64
    import io

    found = Image.open(io.BytesIO(base64.b64decode(encoded([IMAGES[0], IMAGES[1], IMAGES[2]], None, 8.0))))
    assert found.format == "PNG" and found.n_frames == 3 and found.info["duration"] == 125  # type: ignore[attr-defined]
    assert Image.open(io.BytesIO(base64.b64decode(encoded(IMAGES[0], 4, 8.0)))).size == (4, 2)
