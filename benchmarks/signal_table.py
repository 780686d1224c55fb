"""The tables of benchmarks/README.md from benchmarks/results/signal/*.json: `python benchmarks/signal_table.py`.

Each file is the report of `python -m gerl.preflight rollout.prompts_per_step=8 model.lora_targets=null KEYS signal=N
out=FILE`.
"""

import json
from pathlib import Path
from typing import Any

from sections import write_section

HERE = Path(__file__).parent
RESULTS, README = HERE / "results" / "signal", HERE / "README.md"
BEGIN, END = "<!-- signal: begin, written by python benchmarks/signal_table.py -->", "<!-- signal: end -->"
PUBLISHED = "algorithm.timestep_weights=uniform sampling.same_init_noise=false"  # of Flow-GRPO
# file -> the keys it was measured with
MEASURED = {
    "flow_grpo": "algorithm=flow_grpo",
    "flow_grpo_uniform": f"algorithm=flow_grpo {PUBLISHED}",
    "cps": f"algorithm=flow_grpo sampling.kernel=cps {PUBLISHED}",
    "precise": f"algorithm=flow_grpo sampling.kernel=precise {PUBLISHED}",
    "precise_whole": f"algorithm=flow_grpo sampling.kernel=precise sampling.window_range=[0,9] {PUBLISHED}",
    "grpo_guard": "algorithm=grpo_guard",
    "branch_grpo": "algorithm=branch_grpo",
    "tempflow_grpo": "algorithm=tempflow_grpo rollout.prompts_per_step=2",
}


def shown(cosine: dict[str, float] | None) -> str:
    return "-" if cosine is None else f"{cosine['mean']:.3f} ± {cosine['error']:.3f}"


def row(keys: str, found: dict[str, Any]) -> str:
    """The numbers of one measurement: by step its share and cosine, and the best of the choices."""
    largest = max(found["steps"], key=lambda step: step["share"])
    by_name = {choice["name"]: choice["cosine"] for choice in found["choices"]}
    windows = [(name, c) for name, c in by_name.items() if name.startswith("window") and c]
    best = max(windows, key=lambda entry: entry[1]["mean"], default=(None, None))
    window = f"{shown(best[1])} {best[0].removeprefix('window_range=')}" if best[0] else "-"
    noise = by_name.get("timestep_weights=std2_over_jacobian")
    share = f"{largest['share']:.1%} in step {largest['facts']['step']} of {len(found['steps'])}"
    advice = f"`{found['recommended']['name']}`" if found["recommended"] else "nothing"
    return f"| `{keys}` | {share} | {shown(found['update']['cosine'])} | {shown(noise)} | {window} | {advice} |"


def steps(names: list[str]) -> list[str]:
    """Cosine and share of each step, a column for each file."""
    found = {name: json.loads((RESULTS / f"{name}.json").read_text())["steps"] for name in names}
    lines = ["| step | " + " | ".join(f"`{name}`" for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for k in sorted({step["facts"]["step"] for each in found.values() for step in each}):
        cells = []
        for each in found.values():
            at = next((step for step in each if step["facts"]["step"] == k), None)
            cells.append("-" if at is None else f"{shown(at['cosine'])}, {at['share']:.1%}")
        lines.append(f"| {k} | {' | '.join(cells)} |")
    return lines


def tables() -> str:
    """What was recommended for each file, and what its steps have."""
    head = "| keys | largest share of the squared gradient | cosine as configured | with std2_over_jacobian"
    lines = [f"{head} | best earlier end | recommended |", "|---|---|---|---|---|---|"]
    lines += [row(keys, json.loads((RESULTS / f"{name}.json").read_text())) for name, keys in MEASURED.items()]
    return "\n".join([*lines, "", "Cosine and share of each step, as configured:", "", *steps(list(MEASURED))])


if __name__ == "__main__":
    write_section(README, BEGIN, END, tables())
