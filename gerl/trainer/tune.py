"""Search for the preset and learning rate that reach a reward: `gerl tune within=2h [reward=0.9] [key=value ...]`.

Successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943): all candidates train with a small budget, the best
third with three times as much, and so on; the last one gets half of the whole budget. Each trial is a run of its own,
trained from the start to the end of a linear learning-rate schedule: how good a rate is shows only at the end of a run.
Later rounds train k times as many steps as the first with 1 / sqrt(k) of the rate: a rate that is best for a short run
is too large for a long one (Defazio et al. 2023, arXiv 2310.07831; Schaipp et al. 2025, arXiv 2501.18965).
A trial of two steps, the screen, measures what a step of each preset costs, and drops presets that cannot train.

The folder has the trials, `tune.json` with their results, `report.html` and `best.yaml`, an experiment file. The same
command with `out=FOLDER` resumes it.
"""

import json
import logging
import math
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from gerl.commandline import signals
from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import run_command
from gerl.commandline.composition import compose_run, key_of, quoted, shipped
from gerl.commandline.form import either, near_names
from gerl.config.bounded_text import read_json, read_log
from gerl.config.reading import typed
from gerl.errors import ConfigError, TrainingError
from gerl.progress import duration
from gerl.run.checkpoint import alive_since
from gerl.run.choice import choice_of
from gerl.run.session import METRICS
from gerl.run.tracking import read_metrics
from gerl.run.validation import Estimate, estimate_gain, load_validation, validation_steps
from gerl.trainer.sweep import HELD_OUT, run_training
from gerl.utils.files import reason, write_file
from gerl.utils.pages import render

logger = logging.getLogger("gerl")
PRESETS = "awm_fast,few_step_grpo,flow_grpo,mix_grpo,rwr,dgpo"
RATES = "3e-4,1e-3,3e-3"
SCREEN_STEPS, FEWEST_STEPS = 2, 4  # trainer steps of the screen, and of any other trial
KEEP = 3  # one of so many trials continues
CURVE = 3  # validations of the last trial, after the first
POLL = 0.2  # seconds
LAST = 0.5  # share of the budget for the last trial
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
OWN = (
    "algorithm", "actor.lr", "actor.lr_schedule", "trainer.steps", "trainer.epochs", "trainer.hours", "trainer.stop_at",
    "validation.every", "hydra.run.dir",
)  # fmt: skip
TRIALS, RESULTS, REPORT, BEST = "trials", "tune.json", "report.html", "best.yaml"
End = Literal["continued", "kept", "dropped", "failed", "waiting"]


@dataclass(frozen=True)
class Options:
    """Keys of the command itself, in addition to those of a run."""

    within: str | None = key("2h, 90m or 1d; the time for all trials together")
    evaluations: int | None = key(
        "100000; instead of within, the denoiser's evaluations on one image, forward and backward, of all trials",
        unit="an integer of at least 1",
        low=1,
    )
    reward: str | None = key("0.9; end with the first trial whose held-out reward is at least this")
    presets: str = key("A,B; the algorithm presets to try", PRESETS)
    rates: str = key("3e-4,1e-3; the learning rates to try with each", RATES)
    out: Path | None = key("a new folder for the trials and the report, or the folder of a search to resume")


PARSER = Parser(
    "the search",
    "python -m gerl.trainer.tune",
    "within=2h | evaluations=N [reward=R] [experiment=NAME|FILE.yaml] [key=value ...]",
    "Try presets and learning rates with growing budgets, and train the best one with half of the budget.",
    Options,
    rest=True,
    notes="The other keys are those of training, and the same for all trials: python -m gerl.trainer.main_flowgrpo "
    "--help all lists them.",
)


@dataclass(frozen=True)
class Request:
    """A search: what all trials share, what they try, and their budget in `unit`s."""

    keys: tuple[str, ...]
    presets: tuple[str, ...]
    rates: tuple[str, ...]
    budget: float
    unit: Literal["evaluations", "seconds"]
    target: float | None = None


@dataclass(frozen=True)
class Trial:
    """A candidate in a round; round 0 is the screen.

    rate: the learning rate in the first round; later rounds lower it, see `Search.learning_rate`.
    """

    preset: str
    rate: str
    round: int

    @property
    def name(self) -> str:
        return f"{self.round}_{self.preset}" + (f"_{self.rate}" if self.round else "")


@dataclass
class Result:
    """A trial that ended.

    lr: the learning rate of its run. cost: in the budget's unit; evaluations are those of training, seconds also those
    of start and validation. per_step: mean cost of a trainer step, without start and validation.
    """

    preset: str
    rate: str
    round: int
    steps: int
    reward: float | None
    cost: float
    per_step: float
    lr: float
    error: str = ""


class Content(TypedDict):
    """Types of `tune.json`."""

    request: dict[str, Any]
    results: list[Result]


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line and return the exit code, see `run_command`."""
    return run_command(argv, lambda: PARSER.help(program), tune)


def tune(arguments: Sequence[str]) -> Path:
    """Search, train the best candidate, write the report; returns the folder. Raises `ConfigError`, `TrainingError`."""
    request, folder = parse(arguments)
    search = Search(request, folder)
    search.open()
    try:
        search.run()
    except KeyboardInterrupt as error:
        signals.answered()
        error.add_note(f"the same command with {typed({'out': str(folder)})} resumes the search")
        raise
    return folder


def parse(arguments: Sequence[str]) -> tuple[Request, Path]:
    """Return the search that the command line asks for, and its folder; raises `ConfigError`."""
    options, overrides = PARSER.parse(arguments)
    for override in overrides:
        if (name := key_of(override)) in OWN:
            raise ConfigError(f"{override}: the search sets {name} itself; presets, rates and out choose what it tries")
    if (options.within is None) == (options.evaluations is None):
        raise ConfigError("give the budget of all trials together, either within=2h or evaluations=100000")
    presets, rates = options.presets.split(","), options.rates.split(",")
    if unknown := [name for name in presets if name not in shipped("algorithm")]:
        near = near_names(unknown[0], shipped("algorithm"))
        hint = f"did you mean {either(near)}?" if near else f"choose from {', '.join(shipped('algorithm'))}"
        raise ConfigError(f"presets: there is no preset {unknown[0]!r}; {hint}")
    if slow := [rate for rate in rates if number(rate, "rates") <= 0]:
        raise ConfigError(f"rates: {slow[0]} is not above 0")
    composed = compose_run([*overrides, f"algorithm={presets[0]}"])
    if not composed.config.validation.data:
        raise ConfigError("the search compares rewards of held-out prompts: set validation.data")
    target = None if options.reward is None else number(options.reward, "reward")
    budget = seconds(options.within) if options.within is not None else float(options.evaluations or 0)
    unit: Literal["evaluations", "seconds"] = "evaluations" if options.within is None else "seconds"
    folder = options.out or composed.run_dir.with_name(f"tune_{composed.run_dir.name}")
    return Request(tuple(overrides), tuple(presets), tuple(rates), budget, unit, target), folder


def number(text: str, name: str) -> float:
    """Return a finite number; raises `ConfigError` with the key's name."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{name}: {text!r} is not a number")
    return value


def seconds(text: str) -> float:
    """Return the seconds of a duration such as `90m`; raises `ConfigError`."""
    amount, unit = text[:-1], UNITS.get(text[-1:])
    if unit is None or not amount.replace(".", "", 1).isdecimal() or float(amount) <= 0:
        raise ConfigError(f"within={text}: give a duration, such as 90m, 2h or 1d")
    return float(amount) * unit


# --- The search


class Search:
    """The rounds of a search, in a folder whose results are kept."""

    def __init__(self, request: Request, folder: Path) -> None:
        self.request, self.folder = request, folder
        self.results: dict[str, Result] = {}

    @property
    def in_time(self) -> bool:
        """Whether the budget is time."""
        return self.request.unit == "seconds"

    def open(self) -> None:
        """Create the folder, or read the results in it; raises `ConfigError` if it is of another search."""
        file = self.folder / RESULTS
        asked = json.loads(json.dumps(asdict(self.request)))
        if file.exists():
            try:
                stored = TypeAdapter(Content).validate_python(read_json(file))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{file} cannot be read ({reason(error)}): repair it, or choose a new out") from None
            if changed := [name for name, value in stored["request"].items() if asked.get(name) != value]:
                raise ConfigError(f"out={self.folder}: there {', '.join(changed)} were others; choose a new folder")
            for result in stored["results"]:
                self.results[Trial(result.preset, result.rate, result.round).name] = result
            logger.info("resumed the search in %s after %d trials", self.folder, len(self.results))
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(f"out={self.folder}: the folder is not empty and has no {RESULTS}; choose another")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.save()

    def save(self) -> None:
        """Write the results and the report."""
        content = {"request": asdict(self.request), "results": [asdict(result) for result in self.results.values()]}
        write_file(self.folder / RESULTS, json.dumps(content, indent=2) + "\n")
        write_file(self.folder / REPORT, self.report())

    def run(self) -> None:
        """Run what is missing of the screen and the rounds, and write `best.yaml`."""
        first = self.request.rates[(len(self.request.rates) - 1) // 2]
        screened = [
            self.measure(Trial(preset, first, 0), SCREEN_STEPS, SCREEN_STEPS) for preset in self.request.presets
        ]
        able = [result for result in screened if not result.error]
        if not able:
            raise TrainingError(f"no preset can train here: {screened[0].preset}: {screened[0].error}")
        for trials, budget in self.rounds(able):
            validations = CURVE if len(trials) == 1 else 1  # of the others only the end counts
            for trial in trials:
                steps = self.steps(trial, budget)
                self.measure(trial, steps, max(1, steps // validations))
            if self.best is not None and self.reached(self.best):
                break
        if self.best is None:
            raise TrainingError(f"all trials failed; the first: {next(iter(self.results.values())).error}")
        self.conclude(self.best)

    def rounds(self, able: Sequence[Result]) -> Iterator[tuple[list[Trial], float]]:
        """Yield the trials of each round and the budget of each trial; the results of a round decide the next."""
        middle = (len(self.request.rates) - 1) // 2  # of two the first
        rates = sorted(self.request.rates, key=lambda rate: abs(self.request.rates.index(rate) - middle))
        candidates = [(result.preset, rate) for rate, result in product(rates, able)]
        per_step = {result.preset: result.per_step for result in able}
        chosen = affordable(candidates, per_step, self.left(1))
        if len(chosen) < len(candidates):
            tried = ", ".join(f"{preset} with {rate}" for preset, rate in chosen)
            logger.warning("the budget allows %d of %d candidates: %s", len(chosen), len(candidates), tried)
        counts, shares = schedule(len(chosen))
        for i, count in enumerate(counts):
            yield [Trial(*pair, i + 1) for pair in chosen], self.left(i + 1) * shares[i] / sum(shares[i:]) / count
            if i + 1 < len(counts):
                ended = [self.results[Trial(*pair, i + 1).name] for pair in chosen]
                ranked = sorted((r for r in ended if r.reward is not None), key=lambda r: -(r.reward or 0.0))
                chosen = [(r.preset, r.rate) for r in ranked[: counts[i + 1]]]
                if not chosen:
                    return

    def left(self, number: int) -> float:
        """Return the budget that the rounds before `number` left."""
        return self.request.budget - sum(result.cost for result in self.results.values() if result.round < number)

    def latest(self, preset: str) -> Result:
        """Return the preset's latest trial that trained."""
        return [result for result in self.results.values() if result.preset == preset and result.per_step][-1]

    def steps(self, trial: Trial, budget: float) -> int:
        """Return the number of trainer steps that `budget` allows, `FEWEST_STEPS` at least."""
        latest = self.latest(trial.preset)
        fixed = latest.cost - latest.steps * latest.per_step  # start and validation, which take time
        steps = round((budget - fixed) / latest.per_step)
        if steps < FEWEST_STEPS:
            logger.warning("trial %s exceeds its budget: it takes %d steps at least", trial.name, FEWEST_STEPS)
        return max(FEWEST_STEPS, steps)

    def learning_rate(self, trial: Trial, steps: int) -> float:
        """Return the learning rate for a run of `steps`: the candidate's, over the root of the relative length."""
        first = self.results.get(Trial(trial.preset, trial.rate, 1).name)
        longer = steps / first.steps if first is not None and trial.round > 1 else 1.0
        return float(f"{float(trial.rate) / math.sqrt(max(longer, 1.0)):.3g}")

    def reached(self, result: Result) -> bool:
        target = self.request.target
        return target is not None and result.reward is not None and result.reward >= target

    @property
    def best(self) -> Result | None:
        """The trial with the best held-out reward of all rounds; a longer trial of a later round may end lower."""
        validated = [result for result in self.results.values() if result.reward is not None]
        return max(validated, key=lambda result: (result.reward, result.round), default=None)

    def measure(self, trial: Trial, steps: int, every: int) -> Result:
        """Run a trial with a validation every so many steps, or return its result if it is known."""
        if trial.name in self.results:
            return self.results[trial.name]
        logger.info("trial %s: %d steps", trial.name, steps)
        place, start = self.folder / TRIALS / trial.name, time.monotonic()
        place.parent.mkdir(exist_ok=True)
        if alive_since(place) is not None:  # started by a search that was killed
            logger.info("trial %s, started by a search that was killed, is still stopping: waiting", trial.name)
            while alive_since(place) is not None:
                time.sleep(POLL)
        if not (place / "checkpoints").exists():
            shutil.rmtree(place, ignore_errors=True)  # of a trial that was cut off
        with place.with_name(f"{trial.name}.log").open("wb") as log:
            code = run_training(self.arguments(trial, steps, every), log)
        elapsed = time.monotonic() - start if self.in_time else None
        result = read_result(trial, place, steps, self.learning_rate(trial, steps), code, elapsed)
        self.results[trial.name] = result
        self.save()
        shown = "" if result.reward is None else f": {result.reward:.3f}"
        logger.info("trial %s ended%s%s", trial.name, shown, f": {result.error}" if result.error else "")
        return result

    def arguments(self, trial: Trial, steps: int, every: int) -> list[str]:
        """Return the command line of a trial, which resumes from its checkpoint if there is one."""
        place = self.folder / TRIALS / trial.name
        fixed = {
            "algorithm": trial.preset, "actor.lr": f"{self.learning_rate(trial, steps):g}",
            "actor.lr_schedule": "linear", "trainer.steps": steps, "validation.every": every,
        }  # fmt: skip
        resume = {"checkpoint.resume": "auto"} if (place / "checkpoints").exists() else {}
        few = {"validation.max_prompts": 1} if trial.round == 0 else {}
        chosen = fixed | resume | few
        common = [k for k in self.request.keys if key_of(k) not in chosen]
        return [*common, *(f"{name}={value}" for name, value in chosen.items()), f"hydra.run.dir={quoted(str(place))}"]

    # --- What is left at the end

    def conclude(self, best: Result) -> None:
        """Write the experiment file of the best trial, and log where everything is."""
        place = self.folder / TRIALS / Trial(best.preset, best.rate, best.round).name
        head = f"# Found by {' '.join(self.command())}: held-out reward {best.reward:.3f} after {best.steps} steps.\n"
        write_file(self.folder / BEST, head + (place / "config.yaml").read_text(encoding="utf-8"))
        self.save()
        gain = self.gain(best)
        interval = "" if gain is None else f", {gain.mean:+z.3f} ({gain.low:+z.3f} to {gain.high:+z.3f})"
        choice = choice_of(place)
        step = best.steps if choice is None else choice.offered
        lora = place / "checkpoints" / f"step_{step}" / "lora"
        logger.info(
            "\nbest: %s with actor.lr=%s: held-out reward %.3f%s\nLoRA: %s\nreport: %s\nto train it again: %s",
            *(best.preset, f"{best.lr:g}", best.reward, interval),
            *(choice.why if choice is not None and step is None else lora, self.folder / REPORT),
            f"gerl train experiment={self.folder / BEST}",
        )

    def command(self) -> list[str]:
        """Return the command line of this search."""
        request = self.request
        budget = (
            f"evaluations={request.budget:.0f}" if request.unit == "evaluations" else f"within={request.budget:.0f}s"
        )
        target = [] if request.target is None else [f"reward={request.target:g}"]
        lists = [f"presets={','.join(request.presets)}", f"rates={','.join(request.rates)}"]
        return ["gerl", "tune", budget, *target, *lists, *(typed(dict([k.split("=", 1)])) for k in request.keys)]

    def gain(self, result: Result) -> Estimate | None:
        """Return the gain of a trial over its first validation, None with fewer than two validations."""
        place = self.folder / TRIALS / Trial(result.preset, result.rate, result.round).name
        steps = validation_steps(place)
        if len(steps) < 2:
            return None
        first, last = (load_validation(place, steps[i], pictures=False) for i in (0, -1))
        return estimate_gain(first.ids or range(len(first.prompts)), first.rewards, last.rewards)

    def report(self) -> str:
        """Render the page: the trials of each round, and why they were dropped."""
        results = sorted(self.results.values(), key=lambda r: (r.round, -(r.reward if r.reward is not None else -1e9)))
        last = max((result.round for result in results), default=0)
        rounds = []
        for number in sorted({0, *(result.round for result in results)}):
            of_round = [result for result in results if result.round == number]
            rounds.append({"number": number, "trials": [(result, self.verdict(result, last)) for result in of_round]})
        gain = None if self.best is None else self.gain(self.best)
        spent = sum(result.cost for result in results)
        return render(
            "tune.html.j2",
            title="gerl tune",
            command=" ".join(self.command()),
            unit=self.request.unit,
            rounds=rounds,
            best=self.best,
            gain=gain,
            spent=self.shown(spent).removesuffix(" evaluations"),
            budget=self.shown(self.request.budget),
            shown=self.shown,
            folder=TRIALS,
            name=lambda result: Trial(result.preset, result.rate, result.round).name,
        )

    def shown(self, cost: float) -> str:
        return duration(cost) if self.in_time else f"{cost:,.0f} evaluations"

    def verdict(self, result: Result, last: int) -> str:
        """Return why a trial continued or was dropped."""
        if result.error:
            return result.error
        if result.round == 0:
            tried = last < 2 or any(r.preset == result.preset for r in self.results.values() if r.round == 1)
            return "can train" if tried else f"dropped: {FEWEST_STEPS} steps exceed a trial's budget in the first round"
        if Trial(result.preset, result.rate, result.round + 1).name in self.results:
            return "continued"
        peers = [r.reward for r in self.results.values() if r.round == result.round and r.reward is not None]
        rank = sum(reward > (result.reward or 0.0) for reward in peers) + 1
        if result.round == last:
            return "reached the target" if self.reached(result) else f"rank {rank} of {len(peers)}"
        return f"dropped: rank {rank} of {len(peers)}"


def schedule(candidates: int) -> tuple[list[int], list[float]]:
    """Return the number of trials of each round, and the rounds' shares of the budget."""
    counts = [candidates]
    while counts[-1] > 1:
        counts.append(math.ceil(counts[-1] / KEEP))
    early = len(counts) - 1
    return counts, [(1 - LAST) / early] * early + [LAST] if early else [1.0]


def affordable(
    candidates: Sequence[tuple[str, str]], per_step: Mapping[str, float], budget: float
) -> list[tuple[str, str]]:
    """Return the candidates (preset, rate) of which each can take `FEWEST_STEPS` in the first round.

    The dearest are dropped, of equally dear ones the last. per_step: the cost of a preset's trainer step.
    """
    affordable_trials = list(candidates)
    while len(affordable_trials) > 1:
        cost, last = max((per_step[preset], i) for i, (preset, _) in enumerate(affordable_trials))
        if FEWEST_STEPS * cost <= budget * schedule(len(affordable_trials))[1][0] / len(affordable_trials):
            break
        del affordable_trials[last]
    return affordable_trials


def total(row: Mapping[str, Any], *names: str) -> float:
    """Return the sum of the metrics that a row has."""
    return sum(row.get(name) or 0.0 for name in names)


def read_result(trial: Trial, place: Path, steps: int, lr: float, code: int, elapsed: float | None) -> Result:
    """Read the result of a trial from its run folder; `elapsed`: seconds it took, if the budget is one of time.

    The screen fails also if all images of each prompt have equal rewards.
    """
    rows = read_metrics(place / METRICS) if (place / METRICS).exists() else []
    error = ""
    if code:
        lines = read_log(place.with_name(f"{trial.name}.log"))
        last = lines[-1] if lines else f"it ended with exit code {code} before it wrote a line"
        error = next((line.removeprefix("error: ") for line in lines[::-1] if line.startswith("error: ")), last)
    rewards = [float(row[HELD_OUT]) for row in rows if row.get(HELD_OUT) is not None]
    trained = [row for row in rows if row["step"]]
    evaluations = [total(row, "evaluations/forward", "evaluations/backward") for row in trained]
    times = [total(row, "timing/step_s") - total(row, "timing/validation_s") for row in trained]
    costs = evaluations if elapsed is None else times
    cost, per_step = (sum(evaluations) if elapsed is None else elapsed), (statistics.fmean(costs) if costs else 0.0)
    if not error and trial.round == 0 and trained and all(row.get("group/zero_std_fraction") == 1.0 for row in trained):
        error = "all images of each prompt had the same reward in the first two steps"
    reward = rewards[-1] if rewards and not error and trial.round else None
    return Result(trial.preset, trial.rate, trial.round, steps, reward, cost, per_step, lr, error)


if __name__ == "__main__":
    signals.exit_with(main())
