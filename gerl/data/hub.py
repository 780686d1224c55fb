"""Rows of data sets of the Hugging Face Hub, or of local folders, loaded with the package `datasets`."""

import contextlib
import errno
import functools
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from PIL import Image

from gerl.config.blocks import HubParts, hub_parts
from gerl.data.tables import MOST_ROWS, Row, split_row
from gerl.errors import DataError, causes
from gerl.progress import waiting
from gerl.protocol import Prompt
from gerl.utils.condition_images import BROKEN
from gerl.utils.files import reason, write_file
from gerl.utils.hub_errors import UNREACHED

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)
PATIENCE = 10.0  # seconds to wait for the Hub's first answer
BATCH = 1000  # rows converted at a time
INSTALL = "pip install 'gerl[hub]'"
Columns = tuple[tuple[str, str], ...]  # gerl's name, the data set's name


@dataclass(frozen=True)
class HubRows:
    """Prompts with their positions, and a digest of all columns except images and bytes."""

    rows: tuple[tuple[str, Prompt], ...]
    digest: str


def hub_rows(source: str, prompt_key: str, columns: Columns = (), stream: int | None = None) -> HubRows:
    """Read the rows of `hf:owner/name[/config][@revision][split]`, or of a local folder, `hf:./folder[split]`.

    columns: mapping of gerl's column names to the data set's; image columns are kept only if named here, as paths of
    files in the cache of `datasets`. stream: number of first rows to read, without downloading the rest. Data sets of
    the Hub are read once per process. Raises `DataError`: data set, split, configuration or column is missing, or
    cannot be reached or read.
    """
    parts = hub_parts(source, "data.train")
    return (_read if parts.local else _read_cached)(source, parts, prompt_key, columns, stream)


def _read(source: str, parts: HubParts, prompt_key: str, columns: Columns, stream: int | None) -> HubRows:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"data sets of the Hub need the package datasets ({error}): run {INSTALL}") from None
    if parts.local:
        folder = Path(parts.path).expanduser()
        if not folder.is_dir():
            what = "is a file: remove hf:" if folder.is_file() else "does not exist: correct the path"
            raise DataError(f"the folder {folder} {what}")
        parts = HubParts(str(folder), None, parts.split, None, local=True)
    unreached: Exception | None = None
    try:
        if not parts.local:  # one request, since `datasets` retries for long
            HfApi().dataset_info(parts.path, revision=parts.revision, timeout=PATIENCE)
    except (OfflineModeIsEnabled, *UNREACHED) as error:
        unreached = error
    except HfHubHTTPError as error:
        raise DataError(_explain(parts, error)) from error
    try:
        with waiting(f"reading {source}"), _offline(datasets, unreached is not None):
            named = dict(columns)
            return _convert(_tables(datasets, source, parts, stream, prompt_key, named), source, prompt_key, named)
    except DataError:
        raise
    except Exception as error:  # of the network, the disk, the Hub and the files, without a common class
        raise DataError(_explain(parts, unreached or error, error)) from error


_read_cached = functools.lru_cache(maxsize=8)(_read)


@contextlib.contextmanager
def _offline(datasets: Any, cached: bool) -> Iterator[None]:
    """Make `datasets` read its cache at once if the Hub does not answer, instead of retrying for half a minute."""
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if cached:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _tables(
    datasets: Any, source: str, parts: HubParts, stream: int | None, prompt_key: str, columns: dict[str, str]
) -> Iterator["pyarrow.Table"]:
    """Yield the rows of the split as tables of at most `BATCH` rows, images as stored."""
    builder = datasets.load_dataset_builder(parts.path, parts.config, revision=parts.revision)
    split = _split(source, parts, list(builder.info.splits or builder.config.data_files or ()))
    if builder.info.features:  # known before the download
        _check_columns(list(builder.info.features), prompt_key, columns)
    if stream is None:
        builder.download_and_prepare()
        rows = builder.as_dataset(split=split)
        if len(rows) > MOST_ROWS:
            raise DataError(f"it has {len(rows)} rows, at most {MOST_ROWS} are supported: set data.stream to fewer")
    else:
        if "[" in split or "+" in split:
            raise DataError(f"data.stream={stream} reads the first rows of a split, not of {split}: remove one")
        rows = builder.as_streaming_dataset(split=split).take(stream)
    yield from rows.with_format("arrow").iter(batch_size=BATCH)


def _split(source: str, parts: HubParts, splits: list[Any]) -> str:
    names = [str(name) for name in splits]
    if parts.split is None:
        if len(names) == 1:
            return names[0]
        example = f"{source}[{names[0] if names else 'train'}]"
        raise DataError(f"it has the splits {', '.join(names) or 'that its page lists'}: name one, such as {example}")
    wanted = [re.sub(r"\[.*", "", part).strip() for part in parts.split.split("+")]
    if names and (absent := [name for name in wanted if name not in (*names, "all")]):
        raise DataError(f"it has no split {absent[0]}, only {', '.join(names)}: use one of them in the brackets")
    return parts.split


def _convert(tables: Iterator["pyarrow.Table"], source: str, prompt_key: str, columns: dict[str, str]) -> HubRows:
    rows: list[tuple[str, Prompt]] = []
    summed = hashlib.sha256()
    for table in tables:
        pictures = {field.name for field in table.schema if _is_picture(field.type)}.difference(columns.values())
        left_out = [f.name for f in table.schema if f.name in pictures or str(f.type) in ("binary", "large_binary")]
        _check_columns(table.column_names, prompt_key, columns)
        if left_out and not rows:
            logger.info(
                "%s: the columns %s hold images or bytes and are skipped; data.columns={image: %s} passes an image "
                "to the pipeline",
                *(source, ", ".join(left_out), left_out[0]),
            )
        for row in table.drop_columns(left_out).to_pylist():
            where = f"row {len(rows) + 1}"
            stored = {name: value for name, value in row.items() if value is not None}
            plain = {name: value for name, value in stored.items() if not _is_picture(table.schema.field(name).type)}
            summed.update(json.dumps(plain, default=str, sort_keys=True).encode())
            text, _ = split_row(stored, prompt_key, where)
            metadata: Row = {k: v for k, v in plain.items() if k != prompt_key and k not in columns.values()}
            metadata |= {ours: _value(stored[name], where) for ours, name in columns.items() if name in stored}
            rows.append((where, Prompt(len(rows), text, metadata)))
    if not rows:
        raise DataError("it has no rows: use a split that has some")
    return HubRows(tuple(rows), summed.hexdigest())


def _check_columns(names: list[str], prompt_key: str, columns: dict[str, str]) -> None:
    if prompt_key not in names:
        raise DataError(
            f"it has no column {prompt_key!r}, only {', '.join(names)}: set data.prompt_key to the one with the prompt"
        )
    if absent := [theirs for theirs in columns.values() if theirs not in names]:
        raise DataError(f"it has no column {absent[0]!r}, only {', '.join(names)}: correct data.columns")


def _is_picture(kind: "pyarrow.DataType") -> bool:
    import pyarrow.types

    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        kind = kind.value_type
    return pyarrow.types.is_struct(kind) and {field.name for field in kind} == {"bytes", "path"}


def _value(value: Any, where: str) -> Any:
    """Return a cell named by `data.columns`; images are saved and returned as paths."""
    if isinstance(value, list):
        return [_value(part, where) for part in value]
    if not isinstance(value, dict) or set(value) != {"bytes", "path"}:
        return value
    if value["bytes"] is None:
        return str(Path(value["path"]).absolute())
    return _save_image(value["bytes"], where)


def _save_image(content: bytes, where: str) -> str:
    import datasets

    try:
        with Image.open(io.BytesIO(content)) as image:
            suffix = str(image.format).lower()
    except BROKEN as error:
        raise DataError(f"{where} has an image that cannot be read ({reason(error)}): remove the column") from None
    name = hashlib.sha256(content).hexdigest()
    path = Path(datasets.config.HF_DATASETS_CACHE) / "gerl_pictures" / name[:2] / f"{name}.{suffix}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path.with_name(f"{os.getpid()}-{path.name}"), content)
        path.with_name(f"{os.getpid()}-{path.name}").replace(path)
    return str(path)


def _explain(parts: HubParts, first: Exception, last: Exception | None = None) -> str:
    hub = constants.ENDPOINT
    chain = list(causes(first))
    text = " ".join(str(last or first).split())
    if any(getattr(cause, "errno", None) == errno.ENOSPC or "No space left" in str(cause) for cause in chain):
        return (
            "it does not fit on the disk: free up space, set HF_HOME to a folder on a larger disk, or set data.stream"
        )
    if any(isinstance(cause, GatedRepoError) for cause in chain) or "is a gated dataset" in text:
        return f"it is gated: accept its terms at {hub}/datasets/{parts.path}, then log in with 'hf auth login'"
    if any(isinstance(cause, RevisionNotFoundError) for cause in chain):
        return f"it has no revision {parts.revision}: correct the part after the @"
    if any(isinstance(cause, RepositoryNotFoundError) for cause in chain):
        return f"{hub} has no such data set, or a private one: correct the name, or log in with 'hf auth login'"
    if isinstance(first, OfflineModeIsEnabled):
        return "it is not in this machine's cache, and HF_HUB_OFFLINE is set: unset it, or use a file"
    if isinstance(first, UNREACHED):
        return (
            f"it is not in this machine's cache, and {hub} cannot be reached ({reason(first):.200}): connect this "
            "machine to it, or use a file"
        )
    if match := re.search(r"available configs: \[([^\]]*)\]|not found\. Available: \[([^\]]*)\]", text):
        names = (match[1] or match[2] or "").replace("'", "")
        example = f"hf:{parts.path}/{names.split(',')[0].strip()}[{parts.split or 'train'}]"
        return f"it has the configurations {names:.300}: choose one of them, such as {example}"
    if "scripts are no longer supported" in text:
        return "it is a script, which datasets no longer runs: use a data set of files, or convert it to a file"
    return f"the package datasets cannot read it ({text:.300}): correct the name, or use a file"
