"""People are asked about many groups at once, waiting is no failure, and held-out images are none of theirs."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from voting import Voter, service

from gerl.cluster import Cluster, Pending
from gerl.config import ClusterConfig, Config, RewardConfig, RolloutConfig, ScorerConfig
from gerl.errors import ConfigError, RewardError
from gerl.protocol import Images, Prompt, Sample
from gerl.rewards.asking import LATE, Asleep, occasions
from gerl.rewards.checks import without_people
from gerl.rewards.manager import RewardManager
from gerl.rewards.trial import try_scorers
from gerl.trainer.rollouts import PendingRollout, advance
from gerl.workers.fleet import RoundRobin

GROUPS, N = 3, 4
BATCHES = [[Sample(Prompt(g, f"prompt {g}"), k, 10 * g + k, 1) for k in range(N)] for g in range(GROUPS)]


def manager(url: str, run: str = "signs/now", **more: ScorerConfig) -> RewardManager:
    scorers = {"vote": ScorerConfig(kwargs={"url": url}, timeout=0.2), **more}
    return RewardManager(RewardConfig(scorers), Cluster(ClusterConfig(launcher="local")), run)


def drawing(i: int) -> Pending[Images]:
    pixels = np.zeros((N, 4, 8, 3), np.uint8)
    pixels[..., 0] = 40 * np.arange(N)[:, None, None] + i
    return Pending("worker", value=Images(i, pixels, 0.0))


def sampled(found: RewardManager, held_out: bool = False) -> PendingRollout:
    return PendingRollout(found, BATCHES, RoundRobin(drawing, 1, GROUPS), held_out=held_out)


def test_all_groups_are_asked_about_while_the_first_is_waited_for(tmp_path: Path) -> None:
    """And for longer than the time-out of a call, at which nothing is restarted."""
    with service(tmp_path) as (url, ballots, _):
        people = manager(url)
        waiting = sampled(people)

        def answer() -> None:
            while len(ballots.open()) < GROUPS:
                time.sleep(0.01)
            time.sleep(0.4)
            with Voter(f"{url}/"):
                time.sleep(5)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        scores = waiting.finish()
    assert [s.by_scorer["vote"] for s in scores] == [pytest.approx([0, 1 / 3, 2 / 3, 1])] * GROUPS
    assert [s.totals for s in scores] == [s.by_scorer["vote"] for s in scores]
    metrics = people.metrics()
    assert metrics["scorer/vote/latency_s"] > 0.4
    assert metrics["scorer/vote/restarts"] == metrics["scorer/vote/retries"] == 0


def test_an_outage_of_the_service_is_said_once_and_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with service(tmp_path) as (url, _, _):
        port = int(url.rsplit(":", 1)[1])
    people = manager(url)

    def come_back() -> None:
        time.sleep(0.6)
        with service(tmp_path, port=port), Voter(f"{url}/"):
            over.wait(20)

    over = threading.Event()
    thread = threading.Thread(target=come_back, daemon=True)
    thread.start()
    scores = sampled(people).finish()
    over.set()
    thread.join(20)
    assert all(s.failures == [[]] * N for s in scores)
    said = [record.getMessage() for record in caplog.records if "scorer vote" in record.getMessage()]
    assert len(said) == 2 and "start the service" in said[0] and said[1] == "scorer vote: people can be asked again"


def test_a_refusal_is_a_failure_of_the_group(tmp_path: Path) -> None:
    with service(tmp_path, ["anna"]) as (url, _, _):
        people = manager(url)
        (first, *_) = sampled(people).finish()
    assert first.totals == [None] * N and "401" in first.failures[0][0].reason


def test_held_out_images_are_not_shown_to_people(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "def compute_score(images, prompts, metadata):\n    return [1.0 for _ in images]\n"
    )
    watched = ScorerConfig(0.0, str(tmp_path / "one.py"))
    with service(tmp_path / "votes") as (url, ballots, _):
        found = sampled(manager(url, one=watched), held_out=True).finish()
        assert ballots.ballots == {}
        counted = sampled(manager(url, one=ScorerConfig(2.0, watched.path)), held_out=True).finish()
    assert [(s.totals, s.failures, s.by_scorer) for s in found] == [([None] * N, [[]] * N, {"one": [1.0] * N})] * GROUPS
    assert [s.totals for s in counted] == [[2.0] * N] * GROUPS


def test_calls_that_were_given_up_are_asked_no_more(tmp_path: Path) -> None:
    with service(tmp_path) as (url, _, _):
        people = manager(url)
        begun = sampled(people)
        begun.wait_until_sampled()
        while len(people.asleep) < GROUPS:
            advance([begun])
        assert begun.scoring.left == GROUPS
        people.give_up()
        assert not people.asleep and not any(pool.queue for pool in people.pools.values())


def test_the_trial_asks_nobody_and_finds_a_wrong_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(rollout=RolloutConfig(n=N))
    prompts = [Prompt(0, "a")]

    def tried(url: str) -> None:
        people = manager(url)
        try_scorers(people, Config(rollout=config.rollout, reward=people.config), prompts)

    with service(tmp_path / "open") as (url, ballots, _):
        tried(url)
        assert ballots.ballots == {} and not caplog.records
    tried(url)
    assert "start the service" in caplog.text  # it is not there yet: the run begins all the same
    with (
        service(tmp_path / "named", ["anna"]) as (url, _, _),
        pytest.raises(RewardError, match=r"^reward\.scorers\.vote: .*401"),
    ):
        tried(url)


def test_a_key_stands_for_run_step_prompt_and_seeds() -> None:
    def keys(run: str = "a/b", step: int = 1, seed: int = 0) -> set[str]:
        members = {s.group: [Sample(s.prompt, 0, seed, step)] for batch in BATCHES for s in batch}
        found = occasions(run, members)
        assert {o.together for o in found.values()} == {tuple(o.key for o in found.values())}
        return {o.key for o in found.values()}

    assert keys() == keys() and len(keys()) == GROUPS
    for other in (keys(run="a/c"), keys(step=2), keys(seed=1)):
        assert not other & keys()


def test_the_pause_between_two_questions_grows_to_a_second() -> None:
    class Call:
        scorer, polls, wake = "vote", 0, 0.0

    asleep: Asleep[Call] = Asleep()
    call, pauses = Call(), list[float]()
    for _ in range(20):
        asleep.put(call, "")
        pauses.append(call.wake - time.perf_counter())
        assert asleep.awake() == []
        asleep.clear()
    assert pauses == sorted(pauses) or max(np.diff(pauses)) >= 0
    assert pauses[0] < 0.06 and pauses[-1] == pytest.approx(LATE, abs=0.01)


def test_what_measures_leaves_people_out() -> None:
    vote, other = ScorerConfig(kwargs={"url": "http://127.0.0.1:1"}), ScorerConfig()
    found = without_people(RewardConfig({"vote": vote, "sharpness": other}))
    assert list(found.scorers) == ["sharpness"]
    assert list(without_people(RewardConfig({"vote": ScorerConfig(path="mine.py")})).scorers) == [
        "vote"
    ]  # a file of one's own
    for left in ({}, {"sharpness": ScorerConfig(0.0)}):
        with pytest.raises(ConfigError, match=r"reward\.scorers\.vote: people vote in training only"):
            without_people(RewardConfig({"vote": vote, **left}))
