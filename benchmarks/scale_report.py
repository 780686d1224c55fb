"""What `scale.py` makes of its measurements: the fit and its errors, the simulated sizes, and the table."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from scale_model import Fit, Network, Record, Work, errors, fit, fit_collective, lost, step_seconds
from sections import write_section
from sizing import SHARE, config_of, facts_of, on

from gerl.preflight.sizing.facts import Facts
from gerl.preflight.sizing.hardware import GPUS

RESULTS = Path(__file__).parent / "results" / "scale"
MEASURED, SIMULATED, BEFORE = (RESULTS / f"{name}.json" for name in ("measured", "simulated", "before"))
PAGE = Path(__file__).parent / "README.md"
BEGIN = "<!-- scale: begin, written by python benchmarks/scale.py table -->"
END = "<!-- scale: end -->"
RECIPE, GPU = "flux1_dev_pickscore", "h100-80gb"
WORKERS = (1, 8, 16, 32, 64, 128, 256)
WEAK, STRONG = 36, 64 * 24  # images: of a worker (as published: 48 x 24 on 32 GPUs), of a step
MOST = 8  # images of a micro-batch
SCORERS = {"fast": (1, 0.01), "slow": (4, 0.2)}  # processes a node of 8 GPUs, seconds an image
SPREAD = 0.01  # standard deviation of the speeds of GPUs of a kind


def load(file: Path) -> Record:
    """A file of results."""
    found: Record = json.loads(file.read_text(encoding="utf-8"))
    return found


def write(file: Path, found: Record) -> None:
    """Write a file of results."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def rows_of(measured: Record, *kinds: str) -> list[Record]:
    """The measured steps of some kinds of sessions, with what is the same of all steps of a session."""
    sessions = [session for session in measured["sessions"] if session["kind"] in kinds]
    names = ("kind", "lora", "pace", "score", "staleness", "idle_cpu")
    return [{k: s[k] for k in names if k in s} | step for s in sessions for step in s["steps"]]


# --- the fit


def fitted(measured: Record) -> Record:
    """The driver's costs, and how far they are from what was measured: of all sizes, and of sizes left out."""
    rows = rows_of(measured, "real", "echo")
    costs, found = fit(rows), {}
    for kind in ("real", "echo"):
        own = rows_of(measured, kind)
        largest = max(row["workers"] for row in own)
        smaller = fit([row for row in own if row["workers"] < largest])
        left_out = errors(smaller, [row for row in own if row["workers"] == largest])
        found[kind] = {"largest": largest, "error": errors(costs, own), "error_largest_left_out": left_out}
    collective = [
        {"workers": session["workers"], **one}
        for session in measured["sessions"]
        for one in session.get("collective", [])
    ]
    hop, byte = fit_collective(collective)
    return {
        "costs": costs,
        **found,
        "collective": {"hop_s": hop, "byte_s": byte},
        "keep_s_a_byte": slope([s["bytes"] * 0.8 for s in measured["snapshots"]], "keep_s", measured),
        "loop": [check(row, hop, byte, costs) for row in rows_of(measured, "real", "echo", "slow0", "slow1")],
    }


def slope(sizes: Sequence[float], name: str, measured: Record) -> float:
    """Seconds a byte of the largest snapshot; of its file four fifths are the state."""
    return float(measured["snapshots"][-1][name] / sizes[-1])


def check(row: Record, hop: float, byte: float, costs: Fit) -> Record:
    """The simulated step of a measured one, for what its calls took, and its relative error."""
    calls, images = row["calls"], row["images"]
    network = Network(inside=1 / byte, hop=hop, gpus=row["workers"])
    draw, update, keep = (
        row.get("pace", 0.0),
        2 * row.get("pace", 0.0),
        0.0,
    )  # an echo sleeps for all of its images in each update
    if calls:
        draw = calls["sample"]["mean_s"] * calls["sample"]["calls"] / images
        update = calls["accumulate"]["mean_s"] * calls["accumulate"]["calls"] / images
        inside = "reduce_gradient" in calls and "reduce_gradient" not in row["messages"]  # not a call of its own
        step = calls["step"]["mean_s"] - (calls["reduce_gradient"]["mean_s"] if inside else 0.0)
        keep = 2 * step + (calls["finish_step"]["mean_s"] if "finish_step" in row["messages"] else 0.0)
    work = Work(
        row["workers"], images, images // row["micro_batches"], draw, update, keep=keep,
        scorers=1, score=row.get("score", 0.0), staleness=row.get("staleness", 0), gradient=4.0 * row.get("lora", 0),
    )  # fmt: skip
    seconds = step_seconds(work, costs, network)
    return {"kind": row["kind"], "workers": row["workers"], "images": images, "simulated_s": seconds} | {
        "measured_s": row["step_s"], "error": seconds / row["step_s"] - 1, "staleness": work.staleness
    }  # fmt: skip


# --- the simulation


def flux() -> tuple[float, float, Facts]:
    """Seconds an image of drawing and of the update of the recipe on a GPU, and what was found of it."""
    facts = facts_of(RECIPE)
    assert isinstance(facts, Facts)
    checkpointing = on(RECIPE, facts, (GPU, 8)).layout.checkpointing
    rate = SHARE / 100 * GPUS[GPU].peak * facts.images
    return facts.rollout.total / rate, facts.updates[checkpointing].total / rate, facts


def micro_batch(images: int, updates: int) -> int:
    """The most images of a micro-batch of which a worker has as many in each update."""
    return max((n for n in range(1, MOST + 1) if images % (n * updates) == 0), default=1)


def work_of(workers: int, mode: str, scorer: str, staleness: int, split: bool, keep: float, spread: float) -> Work:
    """The recipe on so many GPUs."""
    draw, update, facts = flux()
    own = WEAK if mode == "weak" else STRONG // workers
    updates = config_of(RECIPE).actor.updates_per_step
    processes, score = SCORERS[scorer]
    actors = round(workers * update / (draw + update)) if split else 0
    return Work(
        workers - actors, own * workers, micro_batch(own, updates), draw, update, updates, actors, staleness,
        scorers=max(1, processes * workers // 8), score=score, gradient=4.0 * facts.lora, keep=keep * 4.0 * facts.lora,
        tape=facts.tape if split else 0.0, spread=spread,
    )  # fmt: skip


def simulated(measured: Record) -> Record:
    """Efficiency at all sizes, and what stands in its way."""
    found, rows, network = fitted(measured), [], Network()
    for mode in ("weak", "strong"):
        for split, staleness in ((False, 0), (False, 1), (False, 2), (True, 0), (True, 1), (True, 2)):
            for scorer in SCORERS:
                for workers in WORKERS if not split else WORKERS[1:]:
                    works = [
                        work_of(workers, mode, scorer, staleness, split, found["keep_s_a_byte"], spread)
                        for spread in (0.0, SPREAD)
                    ]
                    seconds = [step_seconds(work, found["costs"], network) for work in works]
                    causes = lost(works[1], found["costs"], network) if not split else {}
                    rows.append(
                        {"mode": mode, "layout": "split" if split else "hybrid", "staleness": staleness}
                        | {"scorer": scorer, "workers": workers, "step_s": seconds[0], "ideal_s": works[0].ideal}
                        | {"efficiency": works[0].ideal / seconds[0], "efficiency_spread": works[0].ideal / seconds[1]}
                        | {"lost": causes, "measured": False, "split_actors": works[0].actors}
                    )
    draw, update, facts = flux()
    model = {"recipe": RECIPE, "gpu": GPU, "draw_s": draw, "update_s": update, "lora": facts.lora}
    return {"model": model, "fit": found, "rows": rows}


# --- the table


def cell(rows: Sequence[Record], **wanted: object) -> str:
    """The efficiency of a row; with GPUs that differ, where that is asked for."""
    name = str(wanted.pop("column", "efficiency"))
    for row in rows:
        if all(row[key] == value for key, value in wanted.items()):
            return f"{row[name]:.3f}"
    return ""


def bottleneck(rows: Sequence[Record], **wanted: object) -> str:
    """The two largest causes of what is lost, with their shares."""
    (row,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    most = sorted(row["lost"].items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name} {100 * share:.1f} %" for name, share in most if share > 0.0005)


def table(found: Record) -> str:
    """The table of the README."""
    heads = (
        *("GPUs", "weak, fast scorer", "GPUs differ by 1 %", "slow scorer", "slow, staleness 1", "slow, staleness 2"),
        *("strong, fast scorer", "split, fast, staleness 1 (predicted)", "lost most to (weak, fast, GPUs differ)"),
    )
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    rows = found["rows"]
    for workers in WORKERS:
        here = {"workers": workers, "layout": "hybrid"}
        fast = here | {"mode": "weak", "scorer": "fast", "staleness": 0}
        slow = here | {"mode": "weak", "scorer": "slow"}
        cells = [
            str(workers),
            cell(rows, **fast),
            cell(rows, **fast, column="efficiency_spread"),
            *(cell(rows, **slow, staleness=k) for k in (0, 1, 2)),
            cell(rows, **(fast | {"mode": "strong"})),
            cell(rows, **(fast | {"layout": "split", "staleness": 1})),
            bottleneck(rows, **fast),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(found: Record) -> str:
    """What the fit found, in sentences."""
    fit_, lines = found["fit"], []
    for kind, words in (("real", "gerl's workers"), ("echo", "workers that compute nothing")):
        own = fit_[kind]
        mean, most = fmean(map(abs, own["error"])), max(map(abs, own["error"]))
        out = max(map(abs, own["error_largest_left_out"]))
        lines.append(
            f"* {words}, up to {own['largest']}: the CPU seconds of the driver in a step are predicted to "
            f"{100 * mean:.0f} % on average, {100 * most:.0f} % at most; those of {own['largest']} workers by the "
            f"smaller sizes to {100 * out:.0f} %."
        )
    by_kind: dict[str, list[float]] = {}
    for one in fit_["loop"]:
        by_kind.setdefault(f"{one['kind']}", []).append(abs(one["error"]))
    said = ", ".join(f"{name} {100 * fmean(e):.0f} % (at most {100 * max(e):.0f} %)" for name, e in by_kind.items())
    lines.append(f"* The simulated step against the measured one: {said}.")
    return "\n".join(lines)


def section(found: Record) -> str:
    """What stands between the markers of the README."""
    return f"{table(found)}\n\n{summary(found)}"


def write_table() -> None:
    """Put the table into the README."""
    write_section(PAGE, BEGIN, END, section(load(SIMULATED)))
