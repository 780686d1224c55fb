from pathlib import Path

import fuzz
from drills import ALL

CASES = 300 if ALL else 25


def test_damaged_runs_dumps_drafts_and_loras_are_read_or_refused(tmp_path: Path) -> None:
    fuzz.make(tmp_path)
    offences = fuzz.fuzz(tmp_path, 0, range(CASES))
    assert not offences, "\n".join(offences)
