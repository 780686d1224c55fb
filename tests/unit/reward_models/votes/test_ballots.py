"""The state of a vote service, without HTTP; the clock is the test's."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from voting import group, pngs

from gerl.errors import GerlError, RewardError
from reward_models.votes.ballots import (
    Ballots,
    Journal,
    Rules,
    VoteRefused,
    mean_scores,
    normalised_ranks,
    parse_request,
    scores,
)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ballots(tmp_path: Path, clock: Clock) -> Ballots:
    return Ballots(tmp_path, Rules(undo=0), clock=clock)


def ask(ballots: Ballots, *numbers: int, **more: Any) -> list[list[float] | str]:
    """As the run asks about groups of a step: images come when they are asked for."""
    found = []
    for number in numbers:
        described = group(number, together=numbers, **more)
        if (said := ballots.ask(described, f"prompt {number}", [])) == "images":
            said = ballots.ask(described, f"prompt {number}", pngs())
        found.append(said)
    return found


def shown(ballots: Ballots, voter: str = "anna") -> str | None:
    ballots.active.setdefault(voter, ballots.clock())
    ballot, _ = ballots.next(voter)
    return None if ballot is None else ballot.text


def vote(ballots: Ballots, ranks: list[int], voter: str = "anna") -> None:
    ballots.sign(voter)
    ballot, _ = ballots.next(voter)
    assert ballot is not None
    ballots.vote(voter, ballot.id, ranks)


def test_a_step_gets_its_scores_when_all_its_groups_have_votes(ballots: Ballots) -> None:
    assert ask(ballots, 1, 2) == ["votes", "votes"]
    vote(ballots, [2, 1, 2])
    assert ask(ballots, 1, 2) == ["votes", "votes"]  # the first may still be taken back
    vote(ballots, [1, 2, 3])
    assert ask(ballots, 1, 2) == [[0, 1, 0], [1, 0.5, 0]]
    assert shown(ballots) is None


def test_images_are_wanted_once(ballots: Ballots) -> None:
    assert ballots.ask(group(), "a", []) == "images"
    assert ballots.ask(group(), "a", pngs()) == "votes" == ballots.ask(group(), "a", [])
    (ballot,) = ballots.ballots.values()
    assert [(ballots.folder / path).read_bytes() for path in ballot.images] == pngs()


def test_a_skipped_group_has_equal_scores(ballots: Ballots) -> None:
    ask(ballots, 1)
    vote(ballots, [1, 1, 1])
    assert ask(ballots, 1) == [[0.5, 0.5, 0.5]]


def test_groups_are_shown_to_one_voter_at_a_time_until_the_lease_expires(ballots: Ballots, clock: Clock) -> None:
    ask(ballots, 1, 2)
    assert (shown(ballots, "anna"), shown(ballots, "ben"), shown(ballots, "cleo")) == ("prompt 1", "prompt 2", None)
    clock.now += ballots.rules.lease - 1
    for voter in ("anna", "cleo"):
        ballots.sign(voter)  # anna is there, and keeps hers
    clock.now += 2
    assert (shown(ballots, "cleo"), shown(ballots, "anna")) == ("prompt 2", "prompt 1")
    assert shown(ballots, "ben") is None


def test_a_page_that_was_left_open_takes_no_group_from_those_who_vote(ballots: Ballots, clock: Clock) -> None:
    for voter in ("anna", "ben"):
        ballots.sign(voter)
    ask(ballots, 1, 2, 3)
    assert (shown(ballots, "anna"), shown(ballots, "ben")) == ("prompt 1", "prompt 2")
    clock.now += ballots.rules.lease + 1
    ballots.sign("anna", active=False)
    vote(ballots, [1, 2, 2], "ben")
    vote(ballots, [1, 2, 2], "ben")  # the one that anna has left, too
    assert shown(ballots, "anna") is None and ballots.idle("anna")
    ballots.sign("anna")  # is back
    assert shown(ballots, "anna") == "prompt 3"
    clock.now += ballots.rules.lease + 1
    ballots.sign("anna", active=False)
    assert not ballots.idle("anna")  # who is alone takes nothing from anybody
    assert shown(ballots, "anna") == "prompt 3"


def test_the_next_group_is_known_before_the_vote(ballots: Ballots) -> None:
    ask(ballots, 1, 2)
    first, after = ballots.next("anna")
    assert first is not None and after is not None and (first.text, after.text) == ("prompt 1", "prompt 2")


def test_a_vote_that_comes_late_is_kept_and_not_used(ballots: Ballots, clock: Clock) -> None:
    ask(ballots, 1)
    held, _ = ballots.next("anna")
    assert held is not None
    clock.now += ballots.rules.lease + 1
    vote(ballots, [1, 2, 2], "ben")
    assert ask(ballots, 1) == [[1, 0, 0]]
    ballots.vote("anna", held.id, [2, 2, 1])
    assert ask(ballots, 1) == [[1, 0, 0]]
    assert [(row.voter, row.used) for row in ballots.preferences()] == [("ben", True), ("anna", False)]


def test_several_votes_on_a_group_are_of_different_people(tmp_path: Path, clock: Clock) -> None:
    ballots = Ballots(tmp_path, Rules(votes=2, undo=0), clock=clock)
    ask(ballots, 1)
    vote(ballots, [1, 2, 2], "anna")
    assert shown(ballots, "anna") is None and ask(ballots, 1) == ["votes"]
    vote(ballots, [2, 2, 1], "ben")
    assert ask(ballots, 1) == [[0.5, 0, 0.5]]


def test_undo_goes_back_until_the_step_is_trained(ballots: Ballots) -> None:
    ask(ballots, 1, 2, 3)
    with pytest.raises(VoteRefused, match="no vote to undo"):
        ballots.undo("anna")
    vote(ballots, [1, 2, 2])
    vote(ballots, [1, 2, 2])
    ballots.undo("anna")
    assert shown(ballots) == "prompt 2"
    ballots.undo("anna")
    assert shown(ballots) == "prompt 1"
    for _ in range(3):
        vote(ballots, [2, 1, 2])
    assert ask(ballots, 1, 2, 3) == [[0, 1, 0]] * 3
    with pytest.raises(VoteRefused, match="too late: step 1 has been trained"):
        ballots.undo("anna")
    assert len(ballots.preferences()) == 3


def test_the_last_vote_of_a_step_can_be_taken_back_for_a_moment(tmp_path: Path, clock: Clock) -> None:
    ballots = Ballots(tmp_path, Rules(undo=3), clock=clock)
    ask(ballots, 1)
    vote(ballots, [1, 2, 2])
    assert ask(ballots, 1) == ["votes"] and shown(ballots) is None
    clock.now += 2
    ballots.undo("anna")
    vote(ballots, [2, 1, 2])
    clock.now += 2
    assert ask(ballots, 1) == ["votes"]
    clock.now += 2
    assert ask(ballots, 1) == [[0, 1, 0]]


def test_a_second_vote_of_the_same_voter_takes_the_place_of_the_first(ballots: Ballots) -> None:
    ask(ballots, 1, 2)
    ballot, _ = ballots.next("anna")
    assert ballot is not None
    for ranks in ([1, 2, 2], [2, 2, 1]):
        ballots.vote("anna", ballot.id, ranks)
    vote(ballots, [1, 1, 1])
    assert ask(ballots, 1, 2)[0] == [0, 0, 1]
    with pytest.raises(VoteRefused, match="step 1 has already been trained with your vote"):
        ballots.vote("anna", ballot.id, [1, 2, 2])


@pytest.mark.parametrize("when", ["open", "voted", "undone", "taken"])
def test_a_service_that_starts_anew_knows_what_the_one_before_knew(tmp_path: Path, clock: Clock, when: str) -> None:
    before = Ballots(tmp_path, Rules(undo=0), clock=clock)
    ask(before, 1, 2)
    if when != "open":
        vote(before, [1, 2, 2])
    if when == "undone":
        before.undo("anna")
    if when == "taken":
        vote(before, [2, 1, 2])
        assert ask(before, 1, 2) == [[1, 0, 0], [0, 1, 0]]
    after = Ballots(tmp_path, Rules(undo=0), clock=clock)  # the one before is not closed: it was killed
    assert after.preferences() == before.preferences()
    assert [b.text for b in after.open()] == [b.text for b in before.open()]
    assert after.progress() | {"asking": True, "voters": 0} == before.progress() | {"voters": 0}
    if when == "taken":
        assert ask(after, 1, 2) == [[1, 0, 0], [0, 1, 0]]  # a run that repeats the step has its answers
        with pytest.raises(VoteRefused, match="too late"):
            after.undo("anna")
    else:
        assert ask(after, 1, 2) == ["votes", "votes"] and shown(after) == (
            "prompt 2" if when == "voted" else "prompt 1"
        )


def test_images_that_changed_are_asked_about_anew(ballots: Ballots) -> None:
    ask(ballots, 1)
    vote(ballots, [1, 2, 2])
    assert ask(ballots, 1, drawn=1) == ["votes"] and shown(ballots) == "prompt 1"
    vote(ballots, [2, 2, 1])
    assert ask(ballots, 1, drawn=1) == [[0, 0, 1]]
    assert [row.ranks for row in ballots.preferences()] == [[1, 2, 2], [2, 2, 1]]  # both are kept


def test_groups_that_the_run_asks_about_no_longer_are_not_shown(ballots: Ballots, clock: Clock) -> None:
    ask(ballots, 1)
    clock.now += 70
    assert shown(ballots) == "prompt 1"  # nothing is asked about: the run may be waiting to be carried on
    ask(ballots, 2, step=2)
    assert shown(ballots) == "prompt 2"


def test_a_group_that_never_comes_is_not_waited_for_without_end(ballots: Ballots, clock: Clock) -> None:
    described = group(1, together=[1, 2])
    ballots.ask(described, "a", pngs())
    vote(ballots, [1, 2, 2])
    assert ballots.ask(described, "a", []) == "votes"
    clock.now += 700
    assert ballots.ask(described, "a", []) == [1, 0, 0]


def test_progress(ballots: Ballots, clock: Clock) -> None:
    ballots.rules.steps = 20
    ask(ballots, 1, 2, 3)
    ballots.sign("anna")
    ballots.sign("ben", active=False)
    vote(ballots, [1, 2, 2])
    expected = {
        "step": 1,
        "steps": 20,
        "waiting": 2,
        "decided": 1,
        "groups": 3,
        "voters": 2,
        "votes": 1,
        "asking": True,
    }
    assert ballots.progress() == expected | {"ended": ""}
    clock.now += 61
    assert ballots.progress()["voters"] == 0 and not ballots.progress()["asking"]


def test_every_change_is_told(ballots: Ballots) -> None:
    told: list[int] = []
    ballots.changed = lambda: told.append(1)
    ask(ballots, 1)
    vote(ballots, [1, 2, 2])
    ballots.undo("anna")
    ballots.end("The run is finished.")
    assert len(told) == 5 and ballots.progress()["ended"] == "The run is finished."  # one for the new voter


@pytest.mark.parametrize(
    "change",
    [{"group": "0" * 16}, {"kind": "taken", "groups": ["no"]}, {"kind": "group"}, {"ranks": [9, 2, 2]}, {"time": []}],
)
def test_a_journal_whose_lines_do_not_fit_is_refused(tmp_path: Path, ballots: Ballots, change: dict[str, Any]) -> None:
    ask(ballots, 1)
    vote(ballots, [1, 2, 2])
    path = ballots.journal.path
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], json.dumps({**json.loads(lines[1]), **change})]) + "\n")
    with pytest.raises(GerlError, match="inconsistent line"):
        Ballots(tmp_path)


def test_a_journal_names_no_image_outside_its_folder(tmp_path: Path, ballots: Ballots) -> None:
    ask(ballots, 1)
    path = ballots.journal.path
    path.write_text(json.dumps({**json.loads(path.read_text()), "images": ["../../x.png"] * 3}) + "\n")
    with pytest.raises(GerlError, match="outside its folder"):
        Ballots(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"key": "../../etc"}, {"seeds": [1]}, {"digests": ["x"]}, {"seeds": [1, 2]}, {"step": -1}, {"more": 1}],
)
def test_a_group_that_is_none_is_refused(change: dict[str, Any]) -> None:
    values = {**vars(group()), **change}
    with pytest.raises(RewardError, match="group"):
        parse_request(values)


def test_rows_come_back_in_order_and_the_folder_comes_with_the_first(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run" / "votes")
    assert journal.replay() == [] and not (tmp_path / "run").exists()
    rows = [{"kind": "vote", "voter": "änna", "ranks": [1, 2]}, {"kind": "undo", "text": "two\nlines"}]
    for row in rows:
        journal.append(row)
        assert Journal(tmp_path / "run" / "votes").replay()[-1] == row  # without closing: it is on disk
    assert Journal(tmp_path / "run" / "votes").replay() == rows


def test_a_line_that_was_cut_off_is_taken_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path)
    journal.append({"kind": "vote"})
    with journal.path.open("ab") as file:
        file.write(b'{"kind": "vo')
    assert Journal(tmp_path).replay() == [{"kind": "vote"}] and "incomplete line" in caplog.text
    again = Journal(tmp_path)
    again.append({"kind": "undo"})
    assert [row["kind"] for row in Journal(tmp_path).replay()] == ["vote", "undo"]


@pytest.mark.parametrize("content", [b"not json\n", b"[1]\n", b'{"other": 1}\n', b"\xff\n"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal.jsonl").write_bytes(content)
    with pytest.raises(GerlError, match="move it away"):
        Journal(tmp_path).replay()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "votes").write_text("a file")
    with pytest.raises(GerlError, match="cannot be written"):
        Journal(tmp_path / "votes").append({"kind": "vote"})


def test_what_could_not_be_written_is_not_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.append({"kind": "vote", "number": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(GerlError, match="No space left"):
        patched.setattr("os.fsync", full)
        journal.append({"kind": "vote", "number": 2})
    journal.append({"kind": "vote", "number": 3})
    journal.close()
    assert [row["number"] for row in Journal(tmp_path).replay()] == [1, 3]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([2, 1, 2, 2], [0, 1, 0, 0]),  # the best is picked
        ([1, 2, 3], [1, 0.5, 0]),
        ([2, 3, 1, 3, 3], [0.5, 0, 1, 0, 0]),  # two are ranked, the others share the last place
        ([1, 1, 2], [1, 1, 0]),
        ([1, 1, 1], [0.5, 0.5, 0.5]),  # skipped
    ],
)
def test_scores_are_spread_evenly_and_ties_share(ranks: list[int], expected: list[float]) -> None:
    assert scores(ranks) == expected


@given(st.lists(st.integers(1, 6), min_size=6, max_size=6))
def test_ranks_lose_their_gaps_and_keep_their_order(ranks: list[int]) -> None:
    given_, found = normalised_ranks(ranks, 6), scores(normalised_ranks(ranks, 6))
    assert sorted(set(given_)) == list(range(1, len(set(ranks)) + 1))
    for a in range(6):
        for b in range(6):
            assert (ranks[a] < ranks[b]) == (given_[a] < given_[b]) == (found[a] > found[b])


@pytest.mark.parametrize("ranks", [[1, 2], [0, 1, 2], [1, 2, 4], []])
def test_what_is_no_ranking_is_refused(ranks: list[int]) -> None:
    with pytest.raises(RewardError, match="from 1 to 3 for each of the 3 images"):
        normalised_ranks(ranks, 3)


def test_votes_are_averaged() -> None:
    assert mean_scores([[1, 2, 2], [2, 1, 2], [1, 1, 1]]) == pytest.approx([0.5, 0.5, 1 / 6])
