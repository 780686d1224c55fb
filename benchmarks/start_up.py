"""The time from command to first step: `python benchmarks/start_up.py [CHECKOUT ...] [--rounds N]`.

A round takes half a minute. It times the default run (`experiment=signs`) over Ray and in process, up to the first call
that samples, and the answer to a mistyped key, each between two processes that only import diffusers and peft. Printed
are medians with their range: seconds, and the ratio to these two imports, which cancels the load of the machine.
"""

import argparse
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BARE = [sys.executable, "-c", "import diffusers, peft"]
RUN = [sys.executable, "-u", "-m", "gerl.trainer.main_flowgrpo", "logger.level=debug"]
CASES = {"Ray": ["cluster.launcher=ray"], "in process": ["cluster.launcher=local"], "typo": ["actor.rl=1"]}
FIRST = "step 0: held-out prompts"  # the line before the first call that samples
logger = logging.getLogger("start_up")


def seconds(command: list[str], checkout: Path = ROOT) -> float:
    """Seconds from the start of a process to the first step, or else to its end; it is ended then."""
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=checkout, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    stepped = any(FIRST in line for line in process.stderr)  # reads up to that line
    if not stepped:
        process.wait()
    passed = time.perf_counter() - start
    process.terminate()
    process.communicate()
    if command != BARE and not stepped and not set(CASES["typo"]) <= set(command):
        raise SystemExit(f"{' '.join(command)} ended before its first step")
    return passed


def described(values: list[float]) -> str:
    return f"{statistics.median(values):5.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT], help="to compare (default: this one)")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    times: dict[tuple[Path, str], list[float]] = {}
    ratios: dict[tuple[Path, str], list[float]] = {}
    bare = [seconds(BARE)]
    for _ in range(arguments.rounds):
        for case, keys in CASES.items():
            for checkout in arguments.checkouts:
                with tempfile.TemporaryDirectory() as folder:
                    passed = seconds([*RUN, *keys, f"hydra.run.dir={folder}/run"], checkout.resolve())
                bare.append(seconds(BARE))
                times.setdefault((checkout, case), []).append(passed)
                ratios.setdefault((checkout, case), []).append(2 * passed / (bare[-2] + bare[-1]))
    logger.info("%-24s %s s", "import diffusers, peft", described(bare))
    for checkout, case in times:
        name = case if len(arguments.checkouts) == 1 else f"{checkout.name} {case}"
        logger.info("%-24s %s s, ratio %s", name, described(times[checkout, case]), described(ratios[checkout, case]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
