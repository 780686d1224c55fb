"""Kernel launches, copies and synchronisations of a denoising step, counted without a GPU.

    python benchmarks/launches.py [PIPELINE ...]
    python benchmarks/launches.py --capture

Pipelines with as many layers as the published ones, at tiny widths, with classifier-free guidance and four images per
call, on the simulated accelerator of tests/pretended.py. Writes the table in benchmarks/README.md. `--capture` writes
the table of operations that prevent capturing a denoiser's call in a CUDA graph, for every denoiser in tests/zoo.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent)]

from sections import write_section  # noqa: E402
from step_costs import DEPTHS, Cost, costs, inside_the_denoiser  # noqa: E402
from zoo.entries import ENTRIES  # noqa: E402

BEGIN, END = "<!-- launches: begin, written by python benchmarks/launches.py -->", "<!-- launches: end -->"
CAPTURE = "<!-- capture: begin, written by python benchmarks/launches.py --capture -->", "<!-- capture: end -->"


def cell(cost: Cost) -> str:
    return f"{cost.launches:,} / {cost.to_device} / {cost.waits}"


def capture() -> str:
    """Return a table of the denoisers, grouped by the operations that prevent capturing their calls in a CUDA graph."""
    groups: dict[str, set[str]] = {"nothing": set(), "copies to the device": set(), "synchronisations": set()}
    for entry in ENTRIES:
        if "replay" not in entry.fails:
            classes, found = inside_the_denoiser(entry)
            what = "synchronisations" if found["sync"] + found["to host"] else "copies to the device"
            groups[what if found else "nothing"] |= set(classes)
    groups["copies to the device"] -= groups["synchronisations"]
    groups["nothing"] -= groups["synchronisations"] | groups["copies to the device"]
    rows = [f"| {what} | {len(names)} | {', '.join(sorted(names))} |" for what, names in groups.items()]
    return "\n".join(["| prevents capture | number | denoisers |", "|---|---|---|", *rows])


def main(names: Sequence[str]) -> int:
    if names == ["--capture"]:
        write_section(HERE / "README.md", *CAPTURE, capture())
        return 0
    lines = [
        "| pipeline | stock | record | more | forward and backward | replay | more |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names or list(DEPTHS):
        found = costs(name, deep=True)
        more = {
            kind: f"{found[kind].launches / found[base].launches - 1:.2%}"
            for kind, base in (("record", "stock"), ("replay", "bare"))
        }
        cells = [cell(found["stock"]), cell(found["record"]), more["record"]]
        cells += [cell(found["bare"]), cell(found["replay"]), more["replay"]]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    write_section(HERE / "README.md", BEGIN, END, "\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
