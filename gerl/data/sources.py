"""Prompts of `data.train` or `validation.data`, from all of their sources."""

import hashlib
import logging
import os
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import floor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING

import numpy as np

from gerl.config import Config, DataConfig, Source, sources
from gerl.config.blocks import HELD_OUT, template_columns
from gerl.data import tables
from gerl.data.code import code_digest, code_rows, folder_of
from gerl.data.preferences import merge_duplicates, with_images
from gerl.errors import DataError
from gerl.progress import waiting
from gerl.protocol import DATA_SOURCE, ORIGINAL, Prompt
from gerl.utils.condition_images import COLUMNS, files_of, problem_of, with_absolute_paths

if TYPE_CHECKING:
    from gerl.data.hub import HubRows

logger = logging.getLogger(__name__)
MOST_HELD_OUT = 64  # prompts of data.train that validation.data=auto holds out
DECODERS = 8  # threads that decode images
TABLES = (".jsonl", ".csv", ".parquet")  # prompt files that may have columns of images


def load(entries: object, data: DataConfig, name: str) -> list[Prompt]:
    """Load the prompts of every source of `entries`, the value of the key `name`, with consecutive ids.

    Raises `DataError`: a source is missing, cannot be read, or lacks a column; names the source.
    """
    prompts: list[Prompt] = []
    for number, source in enumerate(sources(entries, name)):
        try:
            rows = _rows(source, data, rows_have_images(data, name))
        except DataError as error:
            raise DataError(f"{name}={source.path}: {error}") from None
        prompts += [replace(prompt, id=len(prompts) + i, source=number) for i, prompt in enumerate(rows)]
    return prompts


def load_split(config: Config, key: str, entries: object) -> list[Prompt]:
    """Load the prompts of `entries`, the value of `key`; raises as `load` does.

    `validation.data=auto` splits `data.train`: its key loads the prompts to train on, `given="auto"` the held-out ones.
    """
    if entries != HELD_OUT and (key != "data.train" or config.validation.data != HELD_OUT):
        return load(entries, config.data, key)
    trained, held_out = hold_out(load(config.data.train, config.data, "data.train"), config.validation.share)
    return held_out if entries == HELD_OUT else trained


def hold_out(prompts: Sequence[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Split `prompts` into those to train on and the `share` that is held out, each with consecutive ids.

    The choice depends on texts and condition images alone: equal prompts are on one side, and the order is irrelevant.
    """
    digests = {p.id: hashlib.sha256("\0".join(_identity(p)).encode("utf-8", "surrogatepass")).digest() for p in prompts}
    ranked = sorted(set(digests.values()))
    chosen = set(ranked[: min(int(share * len(ranked)), MOST_HELD_OUT)])
    sides: tuple[list[Prompt], list[Prompt]] = [], []
    for prompt in prompts:
        side = sides[digests[prompt.id] in chosen]
        if prompt.dataset_images and side is sides[1]:
            prompt = replace(prompt, dataset_images=())  # held-out images are sampled
        side.append(replace(prompt, id=len(side)))
    return sides


def rows_have_images(data: DataConfig, name: str) -> bool:
    """Whether the rows of the key `name` contain the images to train on."""
    return name == "data.regularise" or (name == "data.train" and data.train_on == "files")


def digest(entries: object, data: DataConfig, name: str) -> str:
    """Return the SHA-256 (hex) of the contents of the sources: the bytes of a file, the rows of a data set or of code.

    Depends on the order of the sources, not on weights and column names.
    """
    digests = []
    for source in sources(entries, name):
        try:
            of_source = _digest(source, data)
        except DataError as error:
            raise DataError(f"{name}={source.path}: {error}") from None
        digests.append(of_source if source.prompt_key is None else f"{of_source} {source.prompt_key}")
    if len(digests) == 1 and " " not in digests[0]:
        return digests[0]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _digest(source: Source, data: DataConfig) -> str:
    if source.on_hub:
        return _hub(source, data).digest
    if source.is_code:
        return code_digest(source.path, _prompt_key(source, data), source.kwargs or {})
    return tables.fingerprint(source.path)


def source_names(entries: object) -> str:
    """Return the names of the sources of `data.train` or `validation.data`, joined for a message."""
    if entries == HELD_OUT:
        return "those held out of data.train"
    return entries if isinstance(entries, str) else ", ".join(source.path for source in sources(entries, "data.train"))


def weights(entries: object) -> list[Fraction] | None:
    """Return the weight of each source of `data.train`; None for a single source or no weights: one pool of prompts."""
    parsed = [] if entries is None else sources(entries, "data.train")
    if len(parsed) < 2 or all(source.weight is None for source in parsed):
        return None
    return [Fraction(str(1.0 if source.weight is None else source.weight)) for source in parsed]


def max_prompts_per_step(shares: Sequence[Fraction], per_step: int) -> list[int]:
    """Return the maximum number of each source's prompts among the `per_step` of a step, as in `MixtureSchedule`.

    In a step of duration D, between w D - 1 and w D + 1 occurrences of each source are due. The maximum of source i is
    reached if it has w_i D + 1 and the others w_j D - 1, with the sum `per_step`.
    """
    parts = [share / sum(shares) for share in shares]
    if all((per_step * part).denominator == 1 for part in parts):
        return [int(per_step * part) for part in parts]
    return [min(per_step, floor((per_step + len(parts) - 2) * part + 1)) for part in parts]


def log_prompts(prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> None:
    """Log what makes a result doubtful: held-out prompts that are trained on, equal prompts, invisible ones."""
    if count := count_trained(prompts, held_out):
        logger.warning(
            "%d of %d held-out prompts are also trained on, so the held-out reward is not that of new prompts: remove "
            "them from data.train or validation.data",
            *(count, len(held_out)),
        )
    if repeated := len(prompts) - len({_identity(prompt) for prompt in prompts}):
        logger.info("%d of the %d prompts of data.train repeat another one", repeated, len(prompts))
    for name, texts in (("data.train", prompts), ("validation.data", held_out)):
        if blank := [prompt.id for prompt in texts if not _has_visible_character(prompt.text)]:
            logger.warning("%s: %d prompts have no visible character, the first is %d", name, len(blank), blank[0])


def count_trained(prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> int:
    """Return the number of `held_out` prompts that are among the trained `prompts`, with the same condition images."""
    trained = {_identity(prompt) for prompt in prompts}
    return sum(_identity(prompt) in trained for prompt in held_out)


def _identity(prompt: Prompt) -> tuple[str, ...]:
    """Return the text of a prompt and its condition images."""
    return prompt.text, *(str(prompt.metadata.get(column)) for column in COLUMNS)


def _has_visible_character(text: str) -> bool:
    return any(unicodedata.category(character)[0] not in "CZ" for character in text)


def check_images(prompts: Sequence[Prompt]) -> None:
    """Decode the image files of `prompts`, each once. Raises `DataError` naming those that cannot be used."""
    owners = {path: prompt for prompt in reversed(prompts) for path in files_of(prompt)}
    if not owners:
        return
    done, problems = 0, dict[str, str]()
    with (
        waiting(f"decoding {len(owners)} images of the prompts", lambda: f"{done} images"),
        ThreadPool(min(DECODERS, os.cpu_count() or 1)) as pool,  # Pillow decodes without Python's lock
    ):
        for path, problem in zip(owners, pool.imap(problem_of, owners, chunksize=16), strict=True):
            done += 1
            if problem:
                problems[path] = problem
                logger.error("prompt %d %r: %s", owners[path].id, owners[path].text[:80], problem)
    if problems:
        path, problem = next(iter(problems.items()))
        many = f"{len(problems)} of {len(owners)} images cannot be used, and the log names them; the first is that of "
        first = f"prompt {owners[path].id} {owners[path].text!r:.80}: {problem}"
        raise DataError(first if len(problems) == 1 else many + first)


def contrasted(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Give each prompt the text of another one as its `contrast`; "" if all texts are equal."""
    count, order = len(prompts), np.random.default_rng(0).permutation(len(prompts)).tolist()
    texts = [prompts[i].text for i in order]
    if len(set(texts)) < 2:
        return list(prompts)
    texts_of: dict[int, str] = {}
    for place, i in enumerate(order):
        following = (texts[(place + k) % count] for k in range(1, count))
        texts_of[i] = next(text for text in following if text != texts[place])
    return [replace(prompt, contrast=texts_of[i]) for i, prompt in enumerate(prompts)]


def limit_prompts(prompts: Sequence[Prompt], most: int | None, entries: object) -> list[Prompt]:
    """Return at most `most` of the `prompts`: the first of each source of `entries`, distributed as evenly as possible.

    Logs the number per source, and warns of a source that gets none.
    """
    if most is None or len(prompts) <= most:
        return list(prompts)
    sizes = Counter(prompt.source for prompt in prompts)
    shares = dict.fromkeys(sorted(sizes), 0)
    for _ in range(most):
        shares[min((s for s in shares if shares[s] < sizes[s]), key=lambda s: (shares[s], s))] += 1
    if len(shares) > 1:
        paths = {number: source.path for number, source in enumerate(sources(entries, "validation.data"))}
        parts = ", ".join(f"{shares[s]} of the {sizes[s]} of {paths[s]}" for s in shares)
        logger.info("validation.max_prompts=%d: %s", most, parts)
        if without := [paths[s] for s in shares if not shares[s]]:
            logger.warning(
                "validation.max_prompts=%d excludes %s from the validation: set it to %d or more",
                *(most, " and ".join(without), len(shares)),
            )
    chosen, left = list[Prompt](), Counter(shares)
    for prompt in prompts:
        if left[prompt.source]:
            left[prompt.source] -= 1
            chosen.append(prompt)
    return chosen


def check_mixture(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raise `DataError` if a source has fewer prompts than its weight requires per step."""
    shares = weights(config.data.train)
    if shares is None:
        return
    per_step, mixed = config.rollout.prompts_per_step, sources(config.data.train, "data.train")
    for number, (source, most) in enumerate(zip(mixed, max_prompts_per_step(shares, per_step), strict=True)):
        if (count := sum(prompt.source == number for prompt in prompts)) < most:
            raise DataError(
                f"data.train: {source.path} has {count} prompts, and its weight {float(shares[number]):g} of "
                f"{float(sum(shares)):g} requires up to {most} of the {per_step} of a step from it; lower its "
                "weight or rollout.prompts_per_step"
            )


def may_have_pictures(data: DataConfig) -> bool:
    """Whether a source of the training prompts may have columns of images."""
    trained = [] if data.train is None else sources(data.train, "data.train")
    return any(
        any(name in COLUMNS for name in _columns(source, data))
        if source.on_hub
        else source.is_code or Path(source.path).suffix.lower() in TABLES
        for source in trained
    )


def _rows(source: Source, data: DataConfig, has_images: bool) -> list[Prompt]:
    key = _prompt_key(source, data)
    template = data.template if source.template is None else source.template
    if source.on_hub:
        place, read_rows = Path.cwd(), list(_hub(source, data).rows)
    elif source.is_code:
        place, read_rows = folder_of(source.path), code_rows(source.path, key, source.kwargs or {})
        read_rows = _renamed(read_rows, _columns(source, data), key, "it")
    else:
        path = tables.resolve(source.path)
        place, read_rows = path.parent, tables.read_rows(path, key)
        if path.suffix.lower() != ".txt":
            read_rows = _renamed(read_rows, _columns(source, data), key, str(path))
    rows = []
    for where, row in read_rows:
        prompt = with_images(row, place, where) if has_images else row
        metadata = with_absolute_paths(prompt.metadata, place, where)
        if source.data_source is not None:
            metadata = {**metadata, DATA_SOURCE: source.data_source}
        if isinstance(metadata.get(DATA_SOURCE), list | dict):
            raise DataError(
                f"{where} has {DATA_SOURCE}={metadata[DATA_SOURCE]!r:.80}, which selects the scorers of the row: "
                "use a string or a number, or rename the column"
            )
        text = prompt.text
        if template is not None:
            metadata = {**metadata, ORIGINAL: text}
            text = filled(template, {**metadata, key: text, "prompt": text}, where)
        rows.append(replace(prompt, text=text, metadata=metadata))
    return merge_duplicates(rows) if has_images else rows


def filled(template: str, row: Mapping[str, object], where: str) -> str:
    """Return the template with the row's values in place of its columns; raises `DataError` if one has no value."""
    for name in template_columns(template, "data.template"):
        value = row.get(name)
        if value is None or isinstance(value, list | dict):
            columns = ", ".join(column for column in row if column != ORIGINAL)
            kind = "no" if value is None else f"a {type(value).__name__} as"
            raise DataError(
                f"{where} has {kind} {name!r}, which data.template={template!r:.80} needs; the row has {columns}"
            )
    parts = ((text, "" if column is None else row[column]) for text, column, *_ in Formatter().parse(template))
    return "".join(f"{text}{value}" for text, value in parts).strip()


def _renamed(
    rows: Sequence[tuple[str, Prompt]], columns: Mapping[str, str], prompt_key: str, path: str
) -> list[tuple[str, Prompt]]:
    """Rename metadata columns to gerl's names; raises `DataError` for a column that no row has."""
    present = dict.fromkeys([prompt_key, *(name for _, prompt in rows for name in prompt.metadata)])
    if absent := [theirs for theirs in columns.values() if theirs not in present]:
        raise DataError(f"{path} has no column {absent[0]!r}, only {', '.join(present)}: correct data.columns")
    renamed = []
    for where, prompt in rows:
        row = {prompt_key: prompt.text, **prompt.metadata}
        renamed_columns = {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}
        others = {name: value for name, value in prompt.metadata.items() if name not in columns.values()}
        renamed.append((where, replace(prompt, metadata={**others, **renamed_columns})))
    return renamed


def _hub(source: Source, data: DataConfig) -> "HubRows":
    from gerl.data.hub import hub_rows  # not at the top: it imports the Hub client, which files do not need

    stream = data.stream if source.stream is None else source.stream
    return hub_rows(source.path, _prompt_key(source, data), tuple(_columns(source, data).items()), stream)


def _prompt_key(source: Source, data: DataConfig) -> str:
    return data.prompt_key if source.prompt_key is None else source.prompt_key


def _columns(source: Source, data: DataConfig) -> Mapping[str, str]:
    return data.columns if source.columns is None else source.columns
