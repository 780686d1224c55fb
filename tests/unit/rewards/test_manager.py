"""The reward manager in this process; its processes over Ray, and how it outlives them, are in tests/e2e."""

import logging
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from voting import Voter, service

from gerl.cluster import Cluster, Pending
from gerl.config import (
    ClusterConfig,
    Config,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    ScorerConfig,
    ValidationConfig,
)
from gerl.errors import ConfigError, RewardError
from gerl.protocol import Images, Prompt, Sample, Scores
from gerl.rewards.checks import without_people
from gerl.rewards.manager import LATE, FeedbackQueue, RewardManager, feedback_requests
from gerl.rewards.rollouts import PendingRollout, RoundRobin, advance
from gerl.rewards.trial import try_scorers

SCORERS = """
def compute_score(images, prompts, metadata):
    return [float(row["value"]) for row in metadata]

def broken(images, prompts, metadata):
    return [float("nan") if row.get("broken") else 1.0 for row in metadata]

def spread(images, prompts, metadata):
    assert len(set(prompts)) == 1
    values = [row["value"] for row in metadata]
    return {"spread": [max(values) - min(values)] * len(values), "place": [sorted(values).index(v) for v in values]}

spread.groupwise = True

def flaky(images, prompts, metadata, log):
    with open(log, "a") as file:
        file.write("x")
    if len(open(log).read()) == 1:
        raise OSError("lost")
    return [1.0] * len(images)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("scorers") / "mine.py"
    path.write_text(SCORERS)
    return str(path)


def manager(retries: int = 0, **scorers: ScorerConfig) -> RewardManager:
    return RewardManager(RewardConfig(scorers, retries=retries), Cluster(ClusterConfig(launcher="local")))


def samples(*values: tuple[int, float], **metadata: Any) -> list[Sample]:
    """Samples of (prompt, value)."""
    return [Sample(Prompt(p, f"p{p}", {"value": v, **metadata}), i, 0, 1) for i, (p, v) in enumerate(values)]


def scored(made: RewardManager, *batches: list[Sample], held_out: bool = False) -> list[Scores]:
    scoring = made.open(batches, held_out)
    for i, batch in enumerate(batches):
        scoring.add(i, Pending("worker", value=Images(i, np.zeros((len(batch), 4, 4, 3), np.uint8), 0.0)))
    return scoring.finish()


def test_totals_are_weighted_sums_of_shaped_scores(file: str) -> None:
    made = manager(
        a=ScorerConfig(2.0, file),
        b=ScorerConfig(-1.0, file, scale=10.0, offset=-5.0, clip=[0.0, 20.0]),
        c=ScorerConfig(0.0, file),
    )
    (first, second) = scored(made, samples((0, 0.0), (0, 1.0)), samples((1, 3.0)))
    assert first.totals == [0.0, 2.0 - 5.0] and second.totals == [6.0 - 20.0]
    assert first.by_scorer == {name: [0.0, 1.0] for name in "abc"}  # as the scorer said
    assert first.failures == [[], []]


def test_a_failure_leaves_no_total_and_a_watched_one_changes_nothing(file: str) -> None:
    weighted = {"a": ScorerConfig(1.0, file), "bad": ScorerConfig(1.0, file, "broken")}
    rows = samples((0, 1.0)) + samples((0, 2.0), broken=True)
    (found,) = scored(manager(**weighted), rows)
    assert found.totals == [2.0, None] and found.by_scorer == {"a": [1.0, 2.0], "bad": [1.0, None]}
    assert [[f.scorer for f in row] for row in found.failures] == [[], ["bad"]]
    (found,) = scored(manager(bad=ScorerConfig(0.0, file, "broken"), a=ScorerConfig(1.0, file)), rows)
    assert found.totals == [1.0, 2.0] and [len(row) for row in found.failures] == [0, 1]


def test_a_groupwise_scorer_sees_each_group_at_once_across_micro_batches(file: str) -> None:
    made = manager(group=ScorerConfig(1.0, file, "spread"), a=ScorerConfig(0.0, file))
    found = scored(made, samples((0, 1.0), (1, 5.0)), samples((0, 4.0), (1, 5.5)), samples((0, 2.0)))
    assert [s.totals for s in found] == [[3.0, 0.5], [3.0, 0.5], [3.0]]
    assert [s.by_scorer["group/place"] for s in found] == [[0.0, 0.0], [2.0, 1.0], [1.0]]
    assert list(found[0].by_scorer) == ["group", "group/place", "a"]


def test_the_data_source_of_a_row_picks_its_scorers(file: str) -> None:
    made = manager(
        text=ScorerConfig(1.0, file, data_sources=["signs", "pages"]),
        taste=ScorerConfig(10.0, file, data_sources=["photos"]),
        all=ScorerConfig(0.0, file),
    )
    mixed = samples((0, 1.0), data_source="signs") + samples((1, 2.0), data_source="photos")
    (found,) = scored(made, mixed)
    assert found.totals == [1.0, 20.0] and found.failures == [[], []]
    assert found.by_scorer == {"text": [1.0, None], "taste": [None, 2.0], "all": [1.0, 2.0]}


def test_a_watched_scorer_may_look_at_one_part_of_a_run_only(file: str, tmp_path: Path) -> None:
    def watching(during: Any) -> ScorerConfig:
        return ScorerConfig(0.0, file, "flaky", {"log": str(tmp_path / during)}, during=during)

    made = manager(1, a=ScorerConfig(1.0, file), late=watching("validation"), early=watching("training"))
    (found,) = scored(made, samples((0, 1.0), (0, 2.0)))
    assert list(found.by_scorer) == ["a", "early"] and found.totals == [1.0, 2.0]
    assert not (tmp_path / "validation").exists()  # 0 calls in training
    (found,) = scored(made, samples((0, 1.0), (0, 2.0)), held_out=True)
    assert found.by_scorer == {"a": [1.0, 2.0], "late": [1.0, 1.0]} and found.totals == [1.0, 2.0]
    assert len((tmp_path / "validation").read_text()) == len((tmp_path / "training").read_text()) == 2  # one a retry


@given(order=st.permutations(range(6)), size=st.integers(1, 6))
def test_neither_order_nor_size_of_the_micro_batches_changes_a_score(file: str, order: list[int], size: int) -> None:
    rows = samples(*((i % 2, float(i) ** 2) for i in range(6)))
    shuffled = [rows[i] for i in order]
    batches = [shuffled[i : i + size] for i in range(0, 6, size)]
    made = manager(a=ScorerConfig(1.0, file), group=ScorerConfig(0.1, file, "spread"))
    totals = [t for s in scored(made, *batches) for t in s.totals]
    assert dict(zip(order, totals, strict=True)) == dict(enumerate(scored(made, rows)[0].totals))


def test_retries_are_logged_and_counted(file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = manager(1, f=ScorerConfig(1.0, file, "flaky", {"log": str(tmp_path / "log")}))
    with caplog.at_level(logging.WARNING):
        (found,) = scored(made, samples((0, 1.0), (0, 2.0)))
    assert found.totals == [1.0, 1.0]
    place = f'({file}, line 19: raise OSError("lost"))'
    assert caplog.messages == [f"scorer f was called again after it failed for 2 of 2 images: OSError: lost {place}"]
    metrics = made.metrics()
    names = ("latency_s", "queue_s", "images_per_s", "retries", "restarts", "warnings")
    assert set(metrics) == {f"scorer/f/{m}" for m in names}
    assert metrics["scorer/f/retries"] == 1 and metrics["scorer/f/latency_s"] > 0
    assert set(made.metrics().values()) == {0.0}  # a new count


def test_scorers_on_one_model_share_their_processes(file: str) -> None:
    kwargs = {"model": "some/clip", "device": "cpu"}
    alike = manager(clipscore=ScorerConfig(kwargs=kwargs), image_similarity=ScorerConfig(kwargs=kwargs))
    assert alike.pools["clipscore"] is alike.pools["image_similarity"]
    apart = manager(
        clipscore=ScorerConfig(kwargs=kwargs),
        image_similarity=ScorerConfig(kwargs=kwargs, replicas=2),
        a=ScorerConfig(1.0, file),
        b=ScorerConfig(1.0, file),
    )
    assert len({id(pool) for pool in apart.pools.values()}) == 4


GROUPS, N = 3, 4
BATCHES = [[Sample(Prompt(g, f"prompt {g}"), k, 10 * g + k, 1) for k in range(N)] for g in range(GROUPS)]


def manager_of_asking(url: str, run: str = "signs/now", **more: ScorerConfig) -> RewardManager:
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
        people = manager_of_asking(url)
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
    people = manager_of_asking(url)

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
        people = manager_of_asking(url)
        (first, *_) = sampled(people).finish()
    assert first.totals == [None] * N and "401" in first.failures[0][0].reason


def test_held_out_images_are_not_shown_to_people(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "def compute_score(images, prompts, metadata):\n    return [1.0 for _ in images]\n"
    )
    watched = ScorerConfig(0.0, str(tmp_path / "one.py"))
    with service(tmp_path / "votes") as (url, ballots, _):
        found = sampled(manager_of_asking(url, one=watched), held_out=True).finish()
        assert ballots.ballots == {}
        counted = sampled(manager_of_asking(url, one=ScorerConfig(2.0, watched.path)), held_out=True).finish()
    assert [(s.totals, s.failures, s.by_scorer) for s in found] == [([None] * N, [[]] * N, {"one": [1.0] * N})] * GROUPS
    assert [s.totals for s in counted] == [[2.0] * N] * GROUPS


def test_calls_that_were_given_up_are_asked_no_more(tmp_path: Path) -> None:
    with service(tmp_path) as (url, _, _):
        people = manager_of_asking(url)
        begun = sampled(people)
        begun.wait_until_sampled()
        while len(people.feedback_queue) < GROUPS:
            advance([begun])
        assert begun.scoring.left == GROUPS
        people.give_up()
        assert not people.feedback_queue and not any(pool.queue for pool in people.pools.values())


def test_the_trial_asks_nobody_and_finds_a_wrong_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(rollout=RolloutConfig(n=N))
    prompts = [Prompt(0, "a")]

    def tried(url: str) -> None:
        people = manager_of_asking(url)
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
        found = feedback_requests(run, members)
        assert {o.together for o in found.values()} == {tuple(o.key for o in found.values())}
        return {o.key for o in found.values()}

    assert keys() == keys() and len(keys()) == GROUPS
    for other in (keys(run="a/c"), keys(step=2), keys(seed=1)):
        assert not other & keys()


def test_the_pause_between_two_questions_grows_to_a_second() -> None:
    class Call:
        scorer, polls, wake = "vote", 0, 0.0

    feedback_queue: FeedbackQueue[Call] = FeedbackQueue()
    call, pauses = Call(), list[float]()
    for _ in range(20):
        feedback_queue.put(call, "")
        pauses.append(call.wake - time.perf_counter())
        assert feedback_queue.awake() == []
        feedback_queue.clear()
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


PROMPTS = [
    Prompt(0, 'a sign that reads "482"', {"data_source": "signs", "n": 1}),
    Prompt(1, "a cat", {"data_source": "photos", "n": 2}),
    Prompt(2, "a dog", {"data_source": "photos", "n": 3}),
]
# What stands on line 6 of a file, behind its helper, and what is said of it.
WRONG = {
    "pass": "returned None, expected a list with one number per image",
    "return 0.5": "returned 0.5, expected a list with one number per image, or a dict of such lists by name: images",
    "return [0.5] * len(images), {}": "returned a tuple of list, dict, expected a list",
    "return {0.1, 0.2, 0.3, 0.4, 0.5}": "returned a set, expected a list",
    'return "0.5"': "returned a str, expected a list with one number per image",
    'return ["0.5"] * len(images)': "returned '0.5', which is not a number",
    "return [0.5]": "returned a list of length 1 for 5 images, expected one score each",
    "return np.ones((len(images), 1))": "returned a ndarray of shape [5, 1], expected a list",
    "return np.float64(1)": "returned a float64 of shape [], expected a list",
    "return {}": "returned an empty dict",
    'return {"a": [1.0] * len(images), "b": None}': "returned None as 'b', expected a list",
    "return [[0.5]] * len(images)": "returned [0.5], which is not a number",
    'return [float("nan")] * len(images)': "returned nan, which is not finite",
    "return [1e300] * len(images)": "returned 1e+300, above the float32 limit 3.4e+38",
    "return [10**400] * len(images)": "which is not a number",
    "return helper(0)": "ZeroDivisionError: division by zero",
    "import no_such_package": "ModuleNotFoundError: No module named 'no_such_package'",
    "sys.exit(3)": "it called sys.exit(3)",
    "raise SystemExit": "it called sys.exit()",
    "time.sleep(60)": "no answer within 0.5 s",
    "while True: pass": "no answer within 0.5 s",
}
RAISED = ("helper", "import no", "exit", "Exit", "sleep", "while")


def scorer(folder: Path, line: str, name: str = "mine.py") -> str:
    (folder / name).write_text(
        "import os, sys, time\nimport numpy as np\ndef helper(x):\n    return 1 / x\n"
        f"def compute_score(images, prompts, metadata, **kwargs):\n    {line}\n"
    )
    return str(folder / name)


def trial(
    on: bool = True, call: dict[str, Any] | None = None, held_out: list[Prompt] | None = None, **scorers: ScorerConfig
) -> None:
    """Three images a group, five a micro-batch."""
    config = Config(
        reward=RewardConfig(scorers, trial=on),
        rollout=RolloutConfig(n=3, micro_batch_size=5),
        sampling=SamplingConfig(height=16, width=24, call=call or {}),
        validation=ValidationConfig(data="signs_val"),
    )
    manager = RewardManager(config.reward, Cluster(ClusterConfig(launcher="local")))
    try_scorers(manager, config, PROMPTS, held_out or [])


@pytest.mark.parametrize("line", WRONG)
def test_what_a_scorer_does_wrong_is_said_with_the_line_of_the_users_file(tmp_path: Path, line: str) -> None:
    path = scorer(tmp_path, line)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(RewardError) as caught:
        trial(mine=ScorerConfig(path=path, timeout=0.5 if "no answer" in WRONG[line] else 600))
    text = str(caught.value)
    assert text.startswith("reward.scorers.mine failed in a trial on grey images: ") and WRONG[line] in text
    assert "reward.trial=false" in text and "\n" not in text
    number = "4: return 1 / x" if "helper" in line else f"6: {line}" if any(w in line for w in RAISED) else "5: compute"
    assert f"({path}, line {number}" in text
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_scorer_gets_what_training_will_give_it(tmp_path: Path) -> None:
    line = 'open(kwargs["log"], "w").write(repr((images, prompts, metadata))); return [1] * len(images)'
    path, log = scorer(tmp_path, line), tmp_path / "log"
    mine = ScorerConfig(path=path, kwargs={"log": str(log)})

    def seen(**others: ScorerConfig) -> str:
        log.unlink(missing_ok=True)
        trial(**others)
        return log.read_text()

    whole = seen(mine=mine)
    assert whole.count("<PIL.Image.Image image mode=RGB size=24x16") == 5
    assert whole.count("'a cat'") == 2 and whole.count("'a dog'") == 1 and whole.count("'n': 2") == 2
    photos = seen(mine=replace(mine, data_sources=["photos"]), sharpness=ScorerConfig())
    assert "482" not in photos and photos.count("'n': 2") == 3
    Path(path).write_text(Path(path).read_text() + "compute_score.groupwise = True\n")
    group = seen(mine=mine)
    assert group.count("'n': 1") == group.count("size=24x16") == 3 and "a cat" not in group


def test_a_scorer_of_validation_gets_held_out_rows(tmp_path: Path) -> None:
    line = 'open(kwargs["log"], "w").write(repr(prompts)); return [1] * len(images)'
    mine = ScorerConfig(0, scorer(tmp_path, line), kwargs={"log": str(tmp_path / "log")}, during="validation")
    trial(held_out=[Prompt(0, "a bird")], mine=mine, sharpness=ScorerConfig())
    assert (tmp_path / "log").read_text() == repr(["a bird"] * 5)


@pytest.mark.parametrize("takes_frames", [True, False])
def test_a_scorer_of_videos_gets_videos(tmp_path: Path, takes_frames: bool) -> None:
    line = 'open(kwargs["log"], "w").write(f"{len(images)} {type(images[0]).__name__}"); return [1] * len(images)'
    path, log = scorer(tmp_path, line), tmp_path / "log"
    Path(path).write_text(Path(path).read_text() + f"compute_score.takes_frames = {takes_frames}\n")
    trial(call={"num_frames": 4}, mine=ScorerConfig(path=path, kwargs={"log": str(log)}))
    assert log.read_text() == ("5 list" if takes_frames else "20 Image")


def test_a_watched_scorer_that_fails_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = scorer(tmp_path, "return [1.0] * len(images)"), scorer(tmp_path, "time.sleep(60)", "bad.py")
    trial(mine=ScorerConfig(path=good), watched=ScorerConfig(0, bad, timeout=0.5))
    assert re.search(r"watched .*no answer.*bad\.py, line 6.*the run continues", caplog.text)


def test_some_images_without_a_score_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trial(mine=ScorerConfig(path=scorer(tmp_path, 'return [float("nan"), 1, 2, 3, 4]')))
    assert re.search(r"returned nan.*4 of 5 images have a score", caplog.text)


def test_a_repetition_may_succeed_as_in_training(tmp_path: Path) -> None:
    line = 'd = kwargs["d"]; os.path.exists(d) or [os.mkdir(d), sys.exit(1)]; return [1.0] * len(images)'
    trial(mine=ScorerConfig(path=scorer(tmp_path, line), kwargs={"d": str(tmp_path / "d")}))


def test_the_trial_can_be_left_out(tmp_path: Path) -> None:
    trial(False, mine=ScorerConfig(path=scorer(tmp_path, "sys.exit(3)")))


def test_cheap_scorers_of_gerl_are_tried_with_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    names = ("ocr", "sharpness", "colourfulness", "jpeg_compressibility", "jpeg_incompressibility")
    some: dict[str, Any] = {name: ScorerConfig(data_sources=["signs"]) for name in names}
    trial(**some)
    assert not caplog.records


def test_a_scorer_with_other_numbers_for_the_same_images_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "noisy.py").write_text(
        "import random\n"
        "def noisy(images, prompts, metadata):\n    return [random.random() for _ in images]\n"
        "def steady(images, prompts, metadata):\n    return [random.random() * 1e-5 for _ in images]\n"
    )
    path = str(tmp_path / "noisy.py")
    trial(noisy=ScorerConfig(path=path, function="noisy"), steady=ScorerConfig(path=path, function="steady"))
    assert [re.search(r"scorer (\w+) gives other numbers", said)[1] for said in caplog.messages] == ["noisy"]  # type: ignore[index]


def test_a_scorer_in_this_process_that_sleeps_beyond_its_timeout_is_interrupted(
    file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "import time\ndef compute_score(images, prompts, metadata):\n    time.sleep(600)\n"
    (tmp_path / "slow.py").write_text(text)
    made = manager(1, slow=ScorerConfig(1.0, str(tmp_path / "slow.py"), timeout=0.1), a=ScorerConfig(1.0, file))
    first, second = scored(made, samples((0, 1.0)), samples((1, 2.0)))
    for found in (first, second):
        assert found.totals == [None] and found.by_scorer["a"] != [None]
        ((failure,),) = found.failures
        assert failure.scorer == "slow" and "0.1 s" in failure.reason and "time.sleep(600)" in failure.reason
    assert made.metrics()["scorer/slow/retries"] == 2.0 and "built again" in caplog.text
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
