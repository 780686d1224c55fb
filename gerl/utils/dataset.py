"""Prompt files."""

import csv
import difflib
import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path

from gerl.config.schema import DEEPEST, is_flat
from gerl.errors import DataError
from gerl.protocol import Prompt
from gerl.utils.condition_images import with_absolute_paths
from gerl.utils.files import reason

SHIPPED = Path(__file__).resolve().parents[1] / "assets" / "prompts"
Row = dict[str, object]  # column -> value
SUFFIXES = (".txt", ".jsonl", ".csv", ".parquet")
MOST_ROWS = 10**7  # of a .parquet file: a few kB can hold billions of equal rows


def load_prompts(source: str, prompt_key: str = "prompt") -> list[Prompt]:
    """Read a prompt file; ids are 0, 1, ... in file order.

    `source` is a .txt (a prompt per line), .jsonl, .csv (with a header) or .parquet file, relative paths from the
    current directory, or the bare name of a list shipped with gerl. Blank lines are skipped. Columns other than
    `prompt_key` become metadata, those that name pictures with absolute paths.

    Raises:
        DataError: the file is missing, empty, unreadable, or has a row without a prompt or with a picture that is not
            there.
    """
    path = resolve(source)
    return [
        replace(prompt, metadata=with_absolute_paths(prompt.metadata, path.parent, where))
        for where, prompt in read_rows(path, prompt_key)
    ]


def read_rows(path: Path, prompt_key: str) -> list[tuple[str, Prompt]]:
    """The prompts of a .txt, .jsonl, .csv (with a header) or .parquet file as they are, each with where it stands.

    An empty cell of a .csv file is no metadata. Errors as in `load_prompts`.
    """
    rows: list[tuple[str, Row]]
    match path.suffix.lower():
        case ".txt":
            rows = [(where, {prompt_key: text}) for where, text in _lines(path)]
        case ".jsonl":
            rows = [(where, _json_row(line, where)) for where, line in _lines(path)]
        case suffix:
            table = _csv_rows(path) if suffix == ".csv" else _parquet_rows(path)
            rows = [(f"{path}, row {n}", row) for n, row in enumerate(table, start=1)]
    if not rows:
        raise DataError(f"{path} has no prompts: put at least one in it, one per line or row")
    return [(where, Prompt(i, *split_row(row, prompt_key, where))) for i, (where, row) in enumerate(rows)]


def fingerprint(source: str) -> str:
    """SHA-256 (hex) of the bytes of a prompt file, given as in `load_prompts`."""
    return hashlib.sha256(_bytes(resolve(source))).hexdigest()


def resolve(source: str) -> Path:
    """The file that `source` stands for: an existing file with a known suffix; raises `DataError` otherwise."""
    try:
        path = Path(source).expanduser()
        if not path.suffix and path.name == source and not path.exists():
            return _shipped(source)
        if not path.exists():
            raise DataError(f"prompt file {source} does not exist{_near(path)}")
        if not path.is_file():
            raise DataError(f"{source} is not a file: give a {_either(SUFFIXES)} file of prompts")
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, ~nobody, a folder that is not ours
        raise DataError(f"prompt file {source!r:.200} cannot be opened ({reason(error)}): correct the path") from None
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"prompt file {source} has the suffix {path.suffix!r}: it must be {_either(SUFFIXES)}")
    return path


def _shipped(name: str) -> Path:
    for suffix in SUFFIXES:
        if (SHIPPED / (name + suffix)).is_file():
            return SHIPPED / (name + suffix)
    names = sorted({path.stem for path in SHIPPED.iterdir() if path.suffix in SUFFIXES})
    raise DataError(
        f"there is no prompt list {name!r}: gerl ships {', '.join(names)}; or give the path of a "
        f"{_either(SUFFIXES)} file"
    )


def _near(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f", nor does its folder {folder.absolute()}: correct the path"
    files = sorted(other for other in folder.iterdir() if other.suffix in SUFFIXES)
    # Without the suffix, which would make every name look alike.
    near = difflib.get_close_matches(path.stem, dict.fromkeys(file.stem for file in files), n=3, cutoff=0.65)
    if near:
        return f" in {folder.absolute()}: did you mean {_either([f.name for f in files if f.stem in near][:3])}?"
    return f" in {folder.absolute()}: correct the path"


def _either(names: tuple[str, ...] | list[str]) -> str:
    return " or ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"prompt file {path} cannot be read ({error.strerror}): check its permissions") from error


def read_text(path: Path) -> str:
    """The text of a prompt file; raises `DataError` if it cannot be read as UTF-8."""
    try:
        return _bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"prompt file {path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error


def _lines(path: Path) -> list[tuple[str, str]]:
    """(file:line, text) of every line that is not blank, without surrounding whitespace."""
    # Not splitlines(): it also breaks at characters such as U+2028, which are legal inside JSON strings.
    lines = enumerate(read_text(path).replace("\r\n", "\n").split("\n"), start=1)
    return [(f"{path}:{n}", line.strip()) for n, line in lines if line.strip()]


def _json_row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not valid JSON ({error.msg}, column {error.colno}): correct the line") from error
    except ValueError:
        raise DataError(f"{where} has a number of thousands of digits: correct the line") from None
    except RecursionError:
        row = None
    if row is None or not is_flat(row):
        raise DataError(f"{where} has more than {DEEPEST} objects or lists inside each other: correct the line")
    if not isinstance(row, dict):
        raise DataError(f'{where} is not a JSON object: write rows such as {{"prompt": "a red cube"}}')
    if "\\u" in line:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise DataError(f"{where} has half a character (\\ud800 to \\udfff without its pair): correct it") from None
    return row


def _csv_rows(path: Path) -> list[Row]:
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True))
    except csv.Error as error:
        raise DataError(f"{path} is no readable .csv file ({error}): write it anew") from None
    for n, row in enumerate(rows, start=1):
        if None in row:
            raise DataError(f"{path}, row {n} has more cells than the header: quote what has a comma in it")
    return [{name: value for name, value in row.items() if value} for row in rows]


def _parquet_rows(path: Path) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"reading {path} needs pyarrow ({error}): run pip install 'gerl[parquet]'") from error
    # What a damaged file makes pyarrow raise, or a value for which Python has no object, such as the year 300000.
    damage = (pyarrow.ArrowException, OSError, ValueError, ArithmeticError, LookupError, TypeError, MemoryError)
    try:
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(_bytes(path)))
        if (count := file.metadata.num_rows) > MOST_ROWS:
            raise DataError(f"{path} has {count} rows: at most {MOST_ROWS} are read, split it")
        table = file.read()
        table.validate(full=True)  # else a column cut short could be read beyond its end
    except damage as error:
        raise DataError(f"{path} is not a readable Parquet file ({reason(error):.300}): write it anew") from None
    rows: list[Row] = [{} for _ in range(table.num_rows)]
    for name, column in zip(table.column_names, table.columns, strict=True):
        for n, cell in enumerate(column):
            try:
                rows[n][name] = cell.as_py()
            except damage as error:
                raise DataError(
                    f"{path}, row {n + 1}: {name} cannot be read ({reason(error):.300}): correct it, or leave the "
                    "column out"
                ) from None
    return rows


def split_row(row: Row, prompt_key: str, where: str) -> tuple[str, Row]:
    """The prompt of a row and its other columns."""
    if prompt_key not in row:
        columns = ", ".join(row) or "none"
        raise DataError(f"{where} has no {prompt_key!r}, only {columns}: add it, or name the column in data.prompt_key")
    text = row[prompt_key]
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise DataError(
            f"{where} has {prompt_key}={text!r:.80}: a prompt must be a text that is not empty, without NUL"
        )
    return text.strip(), {name: value for name, value in row.items() if name != prompt_key}
