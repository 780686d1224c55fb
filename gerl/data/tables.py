"""Prompt files and other user tables: images to score or to train on, and columns with known names."""

import codecs
import csv
import difflib
import hashlib
import io
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from gerl.config import Config
from gerl.config.schema import DEEPEST, is_flat
from gerl.errors import DataError
from gerl.protocol import Prompt
from gerl.utils.condition_images import COLUMNS, with_absolute_paths
from gerl.utils.files import reason

SHIPPED = Path(__file__).resolve().parents[1] / "assets" / "prompts"
Row = dict[str, object]  # column -> value
SUFFIXES = (".txt", ".jsonl", ".csv", ".parquet")
BEGINNINGS = {  # byte order marks; the first match counts
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# characters within a line that other programs treat as a line end
BREAKS = re.compile("[\v\f\x1c-\x1e\x85\u2028\u2029]")
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}  # of tables that are not comma-separated
MOST_ROWS = 10**7  # of a .parquet file: a few kB can hold billions of equal rows


def load_prompts(source: str, prompt_key: str = "prompt") -> list[Prompt]:
    """Read a prompt file; ids are 0, 1, ... in file order.

    `source` is a .txt (a prompt per line), .jsonl, .csv (with a header) or .parquet file, relative to the current
    directory, or the bare name of a list shipped with gerl. Blank lines are skipped. Columns other than `prompt_key`
    become metadata, image columns with absolute paths. Raises `DataError`: the file is missing, empty, unreadable or
    ambiguous, or a row lacks a prompt or an image file.
    """
    path = resolve(source)
    return [
        replace(prompt, metadata=with_absolute_paths(prompt.metadata, path.parent, where))
        for where, prompt in read_rows(path, prompt_key)
    ]


def read_rows(path: Path, prompt_key: str) -> list[tuple[str, Prompt]]:
    """Read the unmodified prompts of a .txt, .jsonl, .csv (with a header) or .parquet file, with their positions.

    Empty cells of a .csv file are omitted from the metadata. Errors as in `load_prompts`.
    """
    rows: list[tuple[str, Row]]
    match path.suffix.lower():
        case ".txt":
            rows = [(where, {prompt_key: _one_line(text, where)}) for where, text in _lines(path)]
        case ".jsonl":
            rows = [(where, _json_row(line, where)) for where, line in _lines(path)]
        case ".csv":
            rows = _csv_rows(path, prompt_key)
        case _:
            rows = [(f"{path}, row {n}", row) for n, row in enumerate(_parquet_rows(path), start=1)]
    if not rows:
        raise DataError(f"{path} has no prompts: add at least one, one per line or row")
    return [(where, Prompt(i, *split_row(row, prompt_key, where))) for i, (where, row) in enumerate(rows)]


def fingerprint(source: str) -> str:
    """Return the SHA-256 (hex) of the bytes of a prompt file, given as in `load_prompts`."""
    return hashlib.sha256(_bytes(resolve(source))).hexdigest()


def resolve(source: str) -> Path:
    """Resolve `source` to an existing file with a known suffix; raises `DataError` otherwise."""
    try:
        path = Path(source).expanduser()
        if not path.suffix and path.name == source and not path.exists():
            if (shipped := next((p for s in SUFFIXES if (p := SHIPPED / (source + s)).is_file()), None)) is not None:
                return shipped
            names = sorted({file.stem for file in SHIPPED.iterdir() if file.suffix in SUFFIXES})
            raise DataError(
                f"there is no prompt list {source!r}: gerl ships {', '.join(names)}; or give the path of a "
                f"{_either(SUFFIXES)} file"
            )
        if not path.exists():
            raise DataError(f"prompt file {source} does not exist{_near(path)}")
        if not path.is_file():
            raise DataError(f"{source} is not a file: expected a {_either(SUFFIXES)} file of prompts")
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, ~nobody, a folder of another user
        raise DataError(f"prompt file {source!r:.200} cannot be opened ({reason(error)}): correct the path") from None
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"prompt file {source} has the suffix {path.suffix!r}: it must be {_either(SUFFIXES)}")
    return path


def _near(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f", nor does its folder {folder.absolute()}: correct the path"
    files = sorted(other for other in folder.iterdir() if other.suffix in SUFFIXES)
    # without the suffix, which would make every name look alike
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
    """Read text in UTF-8, or in the encoding of its byte order mark; raises `DataError` for another encoding."""
    content = _bytes(path)
    encoding = next((name for mark, name in BEGINNINGS.items() if content.startswith(mark)), "utf-8")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise DataError(
            f"{path}:{line} has a NUL byte, as in UTF-16 and damaged files: save it as UTF-8, or recreate it"
        )
    return re.sub(r"(?m)^\ufeff", "", text)  # of concatenated files


def _lines(path: Path) -> list[tuple[str, str]]:
    """Return (file:line, text) of every non-blank line, without surrounding whitespace."""
    # not splitlines(), which also breaks at characters such as U+2028 that are legal inside JSON strings
    lines = enumerate(re.split("\r\n|\n|\r", read_text(path)), start=1)
    return [(f"{path}:{n}", line.strip()) for n, line in lines if line.strip()]


def _one_line(text: str, where: str) -> str:
    if mark := BREAKS.search(text):
        raise DataError(
            f"{where} contains the character U+{ord(mark[0]):04X}, which other programs treat as a line end: "
            "replace it with a plain line end or a space"
        )
    return text


def _json_row(line: str, where: str) -> Row:
    def build(pairs: list[tuple[str, object]]) -> Row:
        _check_once([name for name, _ in pairs], where)
        return dict(pairs)

    try:
        row = json.loads(line, object_pairs_hook=build)
    except json.JSONDecodeError as error:
        if line[0] == "[" or line == "{":
            raise DataError(
                f"{where} begins a list or an object that spans several lines: a .jsonl file has one object per "
                'line, such as {"prompt": "a red cube"}, without brackets and commas around them'
            ) from None
        raise DataError(f"{where} is not valid JSON ({error.msg}, column {error.colno}): correct the line") from error
    except ValueError:
        raise DataError(f"{where} has a number with thousands of digits: correct the line") from None
    except RecursionError:
        row = None
    if row is None or not is_flat(row):
        raise DataError(f"{where} has more than {DEEPEST} nested objects or lists: correct the line")
    if not isinstance(row, dict):
        raise DataError(f'{where} is not a JSON object: write rows such as {{"prompt": "a red cube"}}')
    if "\\u" in line:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise DataError(f"{where} has an unpaired surrogate (\\ud800 to \\udfff): correct it") from None
    return row


def _check_once(names: list[str], where: str) -> None:
    """Raise `DataError` for a repeated column, one of which would be lost."""
    if twice := next((name for i, name in enumerate(names) if name and name in names[:i]), None):
        raise DataError(f"{where} has {twice!r} twice: rename or remove one")


def _csv_rows(path: Path, prompt_key: str) -> list[tuple[str, Row]]:
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    rows: list[tuple[str, Row]] = []
    header: list[str] = []
    try:
        while True:
            where = f"{path}:{reader.line_num + 1}"
            cells = next(reader, None)
            if cells is None:
                return rows
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = _header(cells, prompt_key, where)
            elif len(cells) > len(header):
                raise DataError(f"{where} has more cells than the header: quote cells that contain a comma")
            else:
                named = zip(header, cells, strict=False)
                rows.append((where, {prompt_key: "", **{name: cell for name, cell in named if name and cell}}))
    except csv.Error as error:
        raise DataError(
            f"{path}:{reader.line_num} is not a readable row of a .csv file ({error}): correct it"
        ) from None


def _header(cells: list[str], prompt_key: str, where: str) -> list[str]:
    """Return the column names; raises `DataError` if `prompt_key` is missing, or a name is repeated."""
    names = [cell.strip() for cell in cells]
    _check_once(names, where)
    if prompt_key in names:
        return names
    problem = f"{where} has no column {prompt_key!r}, only {', '.join(names):.200}"
    for mark, spelled in SEPARATORS.items():
        if prompt_key in [part.strip().strip('"') for part in ",".join(cells).split(mark)]:
            raise DataError(f"{problem}: is it separated by {spelled}? Use commas instead")
    raise DataError(
        f"{problem}: set data.prompt_key to the one with the prompt or, if this is already a row, add a header row "
        "above it"
    )


def _parquet_rows(path: Path) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"reading {path} needs pyarrow ({error}): run pip install 'gerl[parquet]'") from error
    # errors of pyarrow for a damaged file, or a value without a Python object, such as the year 300000
    damage = (pyarrow.ArrowException, OSError, ValueError, ArithmeticError, LookupError, TypeError, MemoryError)
    try:
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(_bytes(path)))
        if (count := file.metadata.num_rows) > MOST_ROWS:
            raise DataError(f"{path} has {count} rows: at most {MOST_ROWS} are supported, split it")
        table = file.read()
        table.validate(full=True)  # otherwise a truncated column could be read beyond its end
    except damage as error:
        raise DataError(f"{path} is not a readable Parquet file ({reason(error):.300}): recreate it") from None
    _check_once(table.column_names, str(path))
    rows: list[Row] = [{} for _ in range(table.num_rows)]
    for name, column in zip(table.column_names, table.columns, strict=True):
        for n, cell in enumerate(column):
            try:
                rows[n][name] = cell.as_py()
            except damage as error:
                raise DataError(
                    f"{path}, row {n + 1}: {name} cannot be read ({reason(error):.300}): correct it, or remove the "
                    "column"
                ) from None
    return rows


def split_row(row: Row, prompt_key: str, where: str) -> tuple[str, Row]:
    """Return the prompt of a row and its other columns."""
    if prompt_key not in row:
        columns = ", ".join(row) or "none"
        raise DataError(f"{where} has no {prompt_key!r}, only {columns}: add it, or set data.prompt_key to the column")
    text = row[prompt_key]
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise DataError(f"{where} has {prompt_key}={text!r:.80}: a prompt must be a non-empty string without NUL")
    return text.strip(), {name: value for name, value in row.items() if name != prompt_key}


# --- Prompt columns with a known name that the pipeline does not receive

NEGATIVE = ("negative_prompt", "negative")
ELSEWHERE: dict[str, str] = yaml.safe_load(Path(__file__).with_name("columns.yaml").read_text(encoding="utf-8"))
PROMPTS = ("prompt", "caption", "captions", "description", "text")  # additional texts of a row
WRITTEN = "text"  # column from which `ocr` reads the text to render
FOR_ALL = "sampling.call.{} applies to all prompts"


def unused_columns(prompts: Sequence[Prompt], config: Config, accepted: Collection[str]) -> list[str]:
    """Return a warning about columns that seem intended for a pipeline with the `accepted` arguments, if any."""
    there = {name for prompt in prompts for name, value in prompt.metadata.items() if value is not None}
    accepted_columns = {name for name in COLUMNS if name in accepted}
    unused = {name: why for name in sorted(there - accepted_columns) if (why := _remedy(name, config, accepted))}
    if not unused:
        return []
    parts = ", ".join(f"{name} ({why})" for name, why in unused.items())
    return [f"prompt columns that are passed to scorers but not to the pipeline: {parts}"]


def _remedy(name: str, config: Config, accepted: Collection[str]) -> str:
    """Return the key or source that replaces the column `name` in a run; "" for an unknown name."""
    if name in COLUMNS or (name in NEGATIVE and NEGATIVE[0] not in accepted):
        return "the pipeline takes no such argument"
    if name in PROMPTS:
        is_read = name == WRITTEN and "ocr" in config.reward.scorers
        return "" if is_read else "the prompt column is set by data.prompt_key"
    if name in ELSEWHERE or name not in accepted:
        return ELSEWHERE.get(name, "")
    return f"pictures are given in {', '.join(COLUMNS)}" if "image" in name else FOR_ALL.format(name)
