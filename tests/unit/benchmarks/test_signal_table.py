"""The tables of benchmarks/signal_table.py, and that benchmarks/README.md has those of the results."""

import signal_table


def test_every_result_is_in_the_tables() -> None:
    assert {path.stem for path in signal_table.RESULTS.glob("*.json")} == set(signal_table.MEASURED)


def test_the_page_has_the_tables_of_the_results() -> None:
    section = f"{signal_table.BEGIN}\n\n{signal_table.tables()}\n\n{signal_table.END}"
    assert section in signal_table.README.read_text(encoding="utf-8"), "python benchmarks/signal_table.py writes it"
