"""`gerl tune`: budgets and rounds, what a trial's folder says, refusals, and a search that is stopped and resumed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gerl.errors import ConfigError, TrainingError
from gerl.run.session import METRICS
from gerl.trainer import tune
from gerl.trainer.tune import Request, Result, Search, Trial, affordable, parse, read_result

RATES = ("1e-4", "1e-3", "1e-2")
REQUEST = Request(("experiment=signs",), ("awm_fast", "rwr"), RATES, 90_000, "evaluations")


def result(preset: str, rate: str, number: int, reward: float | None, cost: float = 100.0, error: str = "") -> Result:
    return Result(preset, rate, number, 2, reward, cost, 50.0, float(rate), error)


def search(folder: Path, *found: Result, request: Request = REQUEST) -> Search:
    made = Search(request, folder)
    made.results = {Trial(r.preset, r.rate, r.round).name: r for r in found}
    return made


def play(made: Search, rewards: dict[tuple[str, str], float]) -> list[tuple[list[str], float]]:
    """The rounds of a search whose candidates have these rewards and spend their budgets."""
    able = [made.results[Trial(preset, "1e-3", 0).name] for preset in made.request.presets]
    rounds = []
    for trials, budget in made.rounds(able):
        for trial in trials:
            reward = rewards[trial.preset, trial.rate]
            made.results[trial.name] = result(trial.preset, trial.rate, trial.round, reward, cost=budget)
        rounds.append(([trial.name for trial in trials], budget))
    return rounds


SCREENED = (result("awm_fast", "1e-3", 0, None), result("rwr", "1e-3", 0, None))
REWARDS = {("awm_fast", rate): reward for rate, reward in zip(RATES, (0.5, 0.9, 0.1), strict=True)}
REWARDS |= {("rwr", rate): reward for rate, reward in zip(RATES, (0.6, 0.8, 0.2), strict=True)}


# --- Rounds and budgets


def test_a_third_continues_and_the_last_trial_gets_half_of_the_budget(tmp_path: Path) -> None:
    first, second, last = play(search(tmp_path, *SCREENED), REWARDS)
    left = 90_000 - 200
    assert len(first[0]) == 6 and first[1] == pytest.approx(left / 4 / 6)
    assert second == (["2_awm_fast_1e-3", "2_rwr_1e-3"], pytest.approx(left / 4 / 2))
    assert last == (["3_awm_fast_1e-3"], pytest.approx(left / 2))


def test_a_small_budget_tries_fewer_candidates_with_the_middle_rates_first(tmp_path: Path) -> None:
    request = Request(REQUEST.keys, REQUEST.presets, REQUEST.rates, 1_100, "evaluations")
    first, last = play(search(tmp_path, *SCREENED, request=request), REWARDS)
    assert first[0] == ["1_awm_fast_1e-3", "1_rwr_1e-3"] and last == (["2_awm_fast_1e-3"], 450.0)
    least = Request(REQUEST.keys, REQUEST.presets, REQUEST.rates, 400, "evaluations")
    assert play(search(tmp_path, *SCREENED, request=least), REWARDS) == [(["1_awm_fast_1e-3"], 200.0)]


def test_a_small_budget_drops_the_dearest_presets_first(tmp_path: Path) -> None:
    costs = {"awm_fast": 100.0, "few_step_grpo": 150.0, "rwr": 3000.0}
    candidates = [(preset, rate) for rate in RATES for preset in costs]
    assert affordable(candidates, costs, 10**6) == candidates
    cheap = [pair for pair in candidates if pair[0] != "rwr"]
    assert affordable(candidates, costs, 4 * 6 * 4 * 150) == cheap  # two rounds share half of it, before the last trial
    assert affordable(candidates, costs, 4 * 6 * 4 * 150 - 1) == cheap[:-1]
    assert affordable(candidates, costs, 1) == [("awm_fast", "1e-4")]


def test_a_failed_trial_does_not_continue(tmp_path: Path) -> None:
    made = search(tmp_path, *SCREENED)
    rounds = made.rounds(SCREENED)
    trials, _ = next(rounds)
    for trial in trials:
        made.results[trial.name] = result(trial.preset, trial.rate, 1, None, error="it diverged")
    assert list(rounds) == [] and made.best is None


def test_what_a_round_leaves_is_for_the_later_ones(tmp_path: Path) -> None:
    made = search(tmp_path, *SCREENED)
    rounds = made.rounds(SCREENED)
    trials, _ = next(rounds)
    for trial in trials:
        made.results[trial.name] = result(trial.preset, trial.rate, 1, 0.5, cost=0)
    assert next(rounds)[1] == pytest.approx((90_000 - 200) / 3 / 2)


def test_steps_follow_from_the_cost_of_the_latest_trial(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trial = Trial("rwr", "1e-3", 1)
    made = search(tmp_path, *SCREENED)
    assert made.steps(trial, 1_000) == 20 and not caplog.text
    assert made.steps(trial, 1) == 4 and "exceeds its budget" in caplog.text
    # 40 of 140 seconds were start and validation
    slow = search(tmp_path, Result("rwr", "1e-3", 0, 2, None, 140.0, 50.0, 1e-3))
    assert slow.steps(trial, 1_040) == 20


def test_a_longer_run_has_a_smaller_rate(tmp_path: Path) -> None:
    made = search(tmp_path, *SCREENED, result("rwr", "1e-2", 1, 0.5))  # of two steps
    assert [made.learning_rate(Trial("rwr", "1e-2", k), 8) for k in (0, 1, 2, 3)] == [1e-2, 1e-2, 5e-3, 5e-3]
    assert made.learning_rate(Trial("rwr", "1e-2", 2), 1) == 1e-2
    keys = made.arguments(Trial("rwr", "1e-2", 2), 8, 8)
    assert "actor.lr=0.005" in keys and "trainer.steps=8" in keys


# --- Results


def rows(folder: Path, *found: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in found))


def step(number: int, tied: float = 0.5, **more: float) -> dict[str, Any]:
    own = {"evaluations/forward": 30.0, "evaluations/backward": 10.0, "timing/step_s": 3.0, "timing/validation_s": 1.0}
    return {"step": number, "time": "", "group/zero_std_fraction": tied, **own, **more}


def test_a_result_has_reward_and_cost(tmp_path: Path) -> None:
    rows(tmp_path / "a", {"step": 0, "time": "", "val/reward/mean": 0.5}, step(1), step(2, **{"val/reward/mean": 0.75}))
    found = read_result(Trial("awm", "1e-3", 1), tmp_path / "a", 2, 1e-3, 0, None)
    assert found == Result("awm", "1e-3", 1, 2, 0.75, 80.0, 40.0, 1e-3)
    assert read_result(Trial("awm", "1e-3", 1), tmp_path / "a", 2, 1e-3, 0, 12.5) == Result(
        "awm", "1e-3", 1, 2, 0.75, 12.5, 2.0, 1e-3
    )


def test_the_screen_drops_presets_without_differences_between_rewards(tmp_path: Path) -> None:
    rows(tmp_path / "a", step(1, tied=1.0), step(2, tied=1.0))
    assert "same reward" in read_result(Trial("awm", "1e-3", 0), tmp_path / "a", 2, 1e-3, 0, None).error
    assert not read_result(Trial("awm", "1e-3", 1), tmp_path / "a", 2, 1e-3, 0, None).error


def test_an_error_of_a_trial_is_its_own_sentence(tmp_path: Path) -> None:
    trial = Trial("refl", "1e-3", 0)
    (tmp_path / f"{trial.name}.log").write_text("loading\nerror: the scores have no gradient\nits folder is removed\n")
    found = read_result(trial, tmp_path / trial.name, 2, 1e-3, 2, None)
    assert (found.error, found.reward, found.cost) == ("the scores have no gradient", None, 0)


def test_a_trial_that_died_before_its_first_line_is_an_error(tmp_path: Path) -> None:
    trial = Trial("refl", "1e-3", 0)
    (tmp_path / f"{trial.name}.log").touch()
    assert "137" in read_result(trial, tmp_path / trial.name, 2, 1e-3, 137, None).error


def test_the_report_says_why_a_trial_was_dropped(tmp_path: Path) -> None:
    made = search(tmp_path, *SCREENED)
    play(made, REWARDS)
    page = made.report()
    assert "dropped: rank 3 of 6" in page and page.count("continued") == 3 and "rank 1 of 1" in page
    assert "0.900" in page and "Spent: 90,000 of 90,000 evaluations" in page


def test_the_best_trial_may_be_of_an_early_round(tmp_path: Path) -> None:
    found = [result("awm_fast", "1e-3", 1, 0.7), result("awm_fast", "1e-4", 1, 0.6), result("awm_fast", "1e-3", 2, 0.5)]
    made = search(tmp_path, *SCREENED, *found)
    assert made.best is found[0] and "0.700" in made.report()
    assert "dropped: 4 steps exceed" in made.report()  # no trial of rwr
    again = search(tmp_path, *SCREENED, *found[:2], result("awm_fast", "1e-3", 2, 0.7))
    assert again.best is not None and again.best.round == 2


# --- The command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["experiment=signs"], "within=2h or evaluations"),
        (["within=2h", "evaluations=100"], "within=2h or evaluations"),
        (["within=2"], "such as 90m"),
        (["within=0h"], "such as 90m"),
        (["evaluations=100", "presets=awm,awm_fst"], "'awm_fst'; did you mean 'awm_fast'"),
        (["evaluations=100", "rates=1e-3,-1"], "-1 is not above 0"),
        (["evaluations=100", "rates=fast"], "'fast' is not a number"),
        (["evaluations=100", "reward=nan"], "'nan' is not a number"),
        (["evaluations=100", "actor.lr=1e-3"], "the search sets actor.lr itself"),
        (["evaluations=100", "validation.data=null"], "set validation.data"),
        (["evaluations=100", "actor.lrr=1"], "actor.lr"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_a_sentence(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(arguments)


def test_a_folder_of_another_search_or_of_something_else_is_refused(tmp_path: Path) -> None:
    search(tmp_path / "a").open()
    other = Request(REQUEST.keys, REQUEST.presets, REQUEST.rates, 1, "evaluations")
    with pytest.raises(ConfigError, match="budget"):
        search(tmp_path / "a", request=other).open()
    with pytest.raises(ConfigError, match="not empty"):
        search(tmp_path).open()


def test_a_search_that_is_stopped_continues_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def train(arguments: list[str], log: Any) -> int:
        given = {key: value.strip("'") for key, _, value in (argument.partition("=") for argument in arguments)}
        calls.append(Path(given["hydra.run.dir"]).name)
        if len(calls) == 5:
            raise KeyboardInterrupt
        preset, steps = given["algorithm"], int(given["trainer.steps"])
        rate = min(RATES, key=lambda name: abs(math.log(float(name) / float(given["actor.lr"]))))
        trained = [step(k) for k in range(1, steps)] + [step(steps, **{"val/reward/mean": REWARDS[preset, rate]})]
        rows(Path(given["hydra.run.dir"]), *trained)
        (Path(given["hydra.run.dir"]) / "config.yaml").write_text(f"preset: {preset}\n")
        return 0

    monkeypatch.setattr(tune, "run_training", train)
    arguments = ["evaluations=90000", "presets=awm_fast,rwr", "rates=1e-4,1e-3,1e-2", f"out={tmp_path / 'found'}"]
    with pytest.raises(KeyboardInterrupt) as stopped:
        tune.tune(arguments)
    assert f"out={tmp_path / 'found'}" in stopped.value.__notes__[0]
    assert tune.tune(arguments) == tmp_path / "found"
    assert len(calls) == len(set(calls)) + 1 == 2 + 6 + 2 + 1 + 1  # one began anew
    best = (tmp_path / "found" / "best.yaml").read_text()
    assert best.startswith("# Found by gerl tune evaluations=90000 ") and best.endswith("preset: awm_fast\n")
    before = len(calls)
    tune.tune(arguments)
    assert len(calls) == before


def test_the_search_ends_at_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(REQUEST.keys, ("awm_fast",), REQUEST.rates, 90_000, "evaluations", target=0.85)
    made = search(tmp_path, result("awm_fast", "1e-3", 0, None), request=request)
    made.open()
    monkeypatch.setattr(Search, "conclude", lambda self, best: None)
    monkeypatch.setattr(
        Search, "measure", lambda self, trial, steps, every: self.results.setdefault(
            trial.name, result(trial.preset, trial.rate, trial.round, REWARDS[trial.preset, trial.rate])
        )
    )  # fmt: skip
    made.run()
    assert max(found.round for found in made.results.values()) == 1


def test_without_a_preset_that_can_train_there_is_no_search(tmp_path: Path) -> None:
    made = search(tmp_path, *(result(p, "1e-3", 0, None, error="no gradient") for p in REQUEST.presets))
    with pytest.raises(TrainingError, match="awm_fast: no gradient"):
        made.run()
