"""Look at a reward before training on it: `python -m gerl.score images=FOLDER out=FOLDER [key=value ...]`."""

import contextlib
import csv
import difflib
import io
import logging
import re
import struct
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from gerl.cluster import Cluster, Pending
from gerl.commandline.command import run_command
from gerl.commandline.composition import compose_run
from gerl.config import ClusterConfig, Config, RewardConfig, keys
from gerl.errors import ConfigError, DataError, RewardError
from gerl.protocol import Images, Prompt, Sample, Scores
from gerl.rewards.checks import check_reward
from gerl.rewards.manager import RewardManager
from gerl.rewards.scorers import SCORERS
from gerl.run.signals import Signals
from gerl.score.gallery import COLUMNS, TOTAL, Card, summarise, thumbnail, write_gallery, write_tables
from gerl.utils.dataset import load_prompts

logger = logging.getLogger("gerl")

OWN = {
    "images": "a folder of images (png, jpg, webp), one such file, or a .jsonl or .csv file with the columns image "
    "and prompt; its other columns are metadata, its paths are relative to the file",
    "prompts": "with a folder: .txt, .jsonl or .parquet, row i for the i-th image by name (img2 comes before img10)",
    "prompt": "with a folder: one prompt for all images; without prompts and prompt: NAME.txt beside each image",
    "out": "folder for scores.csv, scores.jsonl and gallery.html",
    "batch": "images a call of a scorer; default: rollout.micro_batch_size, as in training",
}
READ = ("experiment", "data.prompt_key", "logger.progress")  # besides reward.*
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
TABLES = (".jsonl", ".csv")
WIDTH = 110  # characters of a line of the help


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    images: str
    out: Path
    prompts: str | None
    prompt: str | None
    batch: int
    config: Config


@dataclass(frozen=True)
class Item:
    """An image file, how it is called, and the prompt it was drawn for."""

    path: Path
    name: str
    prompt: Prompt


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, see `run_command`.

    Images without a score are no error as long as there is one with a score.
    """
    return run_command(argv, help_text, lambda arguments: run(parse(arguments)))


def run(request: Request) -> list[Card]:
    """Check everything that can be checked, score, write; returns a card per image, in their order.

    Raises:
        GerlError: something is wrong with images, prompts or scorers, or no image has a total; what was scored is
            written.
    """
    reward = request.config.reward
    items = read_items(request)
    try:
        check_reward(reward, [item.prompt for item in items])
    except DataError as error:
        raise DataError(f"images={request.images}: {error}") from None
    for item in items:
        read_pixels(item)  # so that one that cannot be read is known before the work
    make_folder(request.out)
    logger.info("%d images; scorers: %s", len(items), ", ".join(reward.scorers))
    cards: dict[int, Card] = {}
    shown = request.config.logger.progress
    progress = tqdm(total=len(items), unit="image", disable=not shown)
    try:
        with Signals(), logging_redirect_tqdm() if shown else contextlib.nullcontext(), progress:
            for batch, scored in score(reward, items, request.batch):
                cards |= zip(batch, scored, strict=True)
                progress.update(len(batch))
                if reward.on_error == "stop":
                    stop_at_failure(scored)
    finally:
        if cards:
            write(request, [cards[i] for i in sorted(cards)])
    if all(card.values[TOTAL] is None for card in cards.values()):
        raise RewardError(f"no image has all its scores; the first failure: {cards[0].failure}; repair the scorer")
    return [cards[i] for i in range(len(items))]


def parse(arguments: Sequence[str]) -> Request:
    """The command line as a request; raises `ConfigError` for what is missing, unknown or contradicts itself.

    Without `experiment` only the scorers that are named take part, or `ocr` if there are none.
    """
    own: dict[str, str] = {}
    overrides: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        key = name.lstrip("+~")
        if name in OWN and equals:
            own[name] = value
        elif key in READ or key.split(".")[0] == "reward":
            overrides.append(argument)
        elif not equals:
            raise ConfigError(f"{argument}: expected key=value; --help lists the keys")
        else:
            near = difflib.get_close_matches(key, [*OWN, *READ], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join([*OWN, *READ])} and reward.*"
            raise ConfigError(f"{key}: scoring has no such key; {hint}")
    for name in ("images", "out"):
        if not own.get(name, "").strip():
            raise ConfigError(f"{name} is missing: give {name}={OWN[name].split(',')[0]}; --help shows all")
    if "prompts" in own and "prompt" in own:
        raise ConfigError("prompts and prompt are both given: keep the file or the one prompt for all")
    if not own.get("prompt", "one").strip():
        raise ConfigError("prompt is empty: give the prompt that the images were drawn for")
    if not any(override.startswith("experiment=") for override in overrides):
        overrides.insert(0, "experiment=plain")
    config = compose_run(overrides).config
    if taken := [name for name in config.reward.scorers if name in COLUMNS]:
        raise ConfigError(f"reward.scorers.{taken[0]}: this name is a column of scores.csv, choose another")
    batch = own.get("batch", str(config.rollout.micro_batch_size))
    if not batch.isdecimal() or int(batch) < 1:
        raise ConfigError(f"batch={batch}: it must be a number of images, at least 1")
    out = Path(own["out"]).expanduser()
    return Request(own["images"], out, own.get("prompts"), own.get("prompt"), int(batch), config)


def help_text() -> str:
    """The keys that scoring reads, with explanations."""
    reward = (
        "The reward is configured as in training. Without experiment=NAME|FILE.yaml (also the config.yaml of a run), "
        f"only the scorers named here take part, or ocr if there are none. gerl has {', '.join(SCORERS)}."
    )
    lines = [
        "usage: python -m gerl.score images=FOLDER|FILE [prompts=FILE|prompt=TEXT] out=FOLDER [key=value ...]",
        "",
        "Score images with a reward, before training on it.",
        *(textwrap.fill(f"  {name:<9}{text}", WIDTH, subsequent_indent=" " * 11) for name, text in OWN.items()),
        "",
        textwrap.fill(reward, WIDTH),
    ]
    for name, f in keys():
        if name.startswith("reward.") or name in READ:
            lines.append(f"  {name}\n      {f.metadata['help']}")
    return "\n".join(lines) + "\n"


def read_items(request: Request) -> list[Item]:
    """The images and their prompts, in order.

    Raises:
        DataError: there are none, or something is missing or does not go together.
    """
    path = Path(request.images).expanduser()
    if path.is_file() and path.suffix.lower() in TABLES:
        if request.prompts is not None or request.prompt is not None:
            key = "prompts" if request.prompts is not None else "prompt"
            raise ConfigError(f"{key} is given, but images={request.images} has prompts of its own: leave it out")
        return _listed(path, request.config.data.prompt_key)
    if path.is_dir():
        files = [f for f in path.iterdir() if f.suffix.lower() in SUFFIXES and f.name[0] != "." and f.is_file()]
        if not files:
            raise DataError(f"images={request.images} has no image: put {', '.join(SUFFIXES)} files into the folder")
    elif path.is_file() and path.suffix.lower() in SUFFIXES:
        files = [path]
    else:
        what = f"is no {', '.join(SUFFIXES + TABLES)} file" if path.is_file() else "does not exist"
        raise DataError(f"images={request.images} {what}: give a folder of images, or a .jsonl or .csv file of them")
    files.sort(key=lambda file: (_natural(file.name), file.name))
    prompts = _prompts_of(files, request)
    return [Item(file, file.name, prompt) for file, prompt in zip(files, prompts, strict=True)]


def _natural(name: str) -> list[str | int]:
    """A key that sorts img2 before img10: text and numbers take turns."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def _prompts_of(files: Sequence[Path], request: Request) -> list[Prompt]:
    if request.prompt is not None:
        return [Prompt(i, request.prompt.strip()) for i in range(len(files))]
    if request.prompts is None:
        return [Prompt(i, _sidecar(file)) for i, file in enumerate(files)]
    try:
        prompts = load_prompts(request.prompts, request.config.data.prompt_key)
    except DataError as error:
        raise DataError(f"prompts={request.prompts}: {error}") from None
    if len(prompts) != len(files):
        raise DataError(
            f"prompts={request.prompts} has {len(prompts)} prompts for the {len(files)} images of "
            f"images={request.images}: give one per image, in the order of their names, or prompt=TEXT for all"
        )
    return prompts


def _sidecar(file: Path) -> str:
    beside = file.with_suffix(".txt")
    if not beside.is_file():
        raise DataError(
            f"{file} has no prompt: write it to {beside.name} beside it, or give prompts=FILE or prompt=TEXT"
        )
    text = _text(beside).strip()
    if not text:
        raise DataError(f"{beside} is empty: write the prompt of {file.name} into it")
    return text


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text ({error}): save it anew") from None


def _listed(path: Path, prompt_key: str) -> list[Item]:
    """The items of a .jsonl or .csv file."""
    prompts = (
        load_prompts(str(path), prompt_key, pictures=False)
        if path.suffix.lower() == ".jsonl"
        else _csv(path, prompt_key)
    )
    items = []
    for prompt in prompts:
        image = prompt.metadata.get("image")
        if not isinstance(image, str) or not image:
            raise DataError(f"{path}, row {prompt.id + 1} has image={image!r}: give the path of the image there")
        metadata = {name: value for name, value in prompt.metadata.items() if name != "image"}
        file = path.parent / Path(image).expanduser()
        items.append(Item(file, image, Prompt(prompt.id, prompt.text, metadata)))
    return items


def _csv(path: Path, prompt_key: str) -> list[Prompt]:
    """The rows of a .csv file with a header; an empty cell is no metadata."""
    prompts = []
    try:
        for i, row in enumerate(csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)):
            if None in row:
                raise DataError(f"{path}, row {i + 1} has more cells than the header: quote what has a comma in it")
            cells = {name: value for name, value in row.items() if value}
            if not (text := cells.pop(prompt_key, "").strip()):
                raise DataError(
                    f"{path}, row {i + 1} has no {prompt_key!r}: add it, or name its column in data.prompt_key"
                )
            prompts.append(Prompt(i, text, cells))
    except csv.Error as error:
        raise DataError(f"{path} is no readable .csv file ({error}): write it anew") from None
    if not prompts:
        raise DataError(f"{path} has no rows: put a header with image and {prompt_key} and at least one row in it")
    return prompts


def read_pixels(item: Item) -> np.ndarray:
    """The image [H, W, 3] uint8, turned upright; transparency is dropped, as pipelines do.

    Raises:
        DataError: it is missing, cannot be read, or has more than 8 bits a channel.
    """
    try:
        with Image.open(item.path) as image:
            if image.mode[0] in "IF":
                raise DataError(f"{item.path} has more than 8 bits a channel (mode {image.mode}): save it with 8")
            upright: Image.Image = ImageOps.exif_transpose(image)
            return np.asarray(upright.convert("RGB"))
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
        missing = isinstance(error, FileNotFoundError)
        reason = "does not exist" if missing else f"cannot be read as an image ({' '.join(str(error).split())})"
        raise DataError(f"{item.path} {reason}: {'correct the path' if missing else 'replace or remove it'}") from None


def make_folder(out: Path) -> None:
    """Create the output folder; raises `ConfigError` if that is not possible."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: the folder cannot be made ({error.strerror}); choose another") from None


def score(reward: RewardConfig, items: Sequence[Item], batch_size: int) -> Iterator[tuple[list[int], list[Card]]]:
    """Score batches of images; yields the indices of a batch and its cards.

    The images of a prompt are a group: where a scorer compares them, they are in one batch, which may then be larger.
    """
    with Cluster(ClusterConfig(launcher="local")) as here:
        manager = RewardManager(reward, here)
        groups: dict[str, list[int]] = {}
        for i, item in enumerate(items):
            groups.setdefault(item.prompt.text, []).append(i)
        ids = {text: number for number, text in enumerate(groups)}
        together = list(groups.values()) if manager.groupwise else [[i] for i in range(len(items))]
        for batch in _batches(together, batch_size):
            chosen = [items[i] for i in batch]
            prompts = [replace(item.prompt, id=ids[item.prompt.text]) for item in chosen]
            images = Images(0, [read_pixels(item) for item in chosen], 0.0)
            scoring = manager.open([[Sample(prompt, i, 0, 0) for i, prompt in zip(batch, prompts, strict=True)]])
            scoring.add(0, Pending("image reader", value=images))
            (scores,) = scoring.finish()
            yield batch, [_card(item, images.pixels[i], scores, i) for i, item in enumerate(chosen)]


def _batches(together: Iterable[list[int]], size: int) -> Iterator[list[int]]:
    """Batches of at least one of `together` and, beyond that, at most `size` indices."""
    batch: list[int] = []
    for members in together:
        if batch and len(batch) + len(members) > size:
            yield batch
            batch = []
        batch = batch + members
    if batch:
        yield batch


def _card(item: Item, pixels: np.ndarray, scores: Scores, i: int) -> Card:
    causes = dict.fromkeys(f"{failure.scorer}: {failure.reason}" for failure in scores.failures[i])
    values = {TOTAL: scores.totals[i]} | {name: column[i] for name, column in scores.by_scorer.items()}
    return Card(item.path, item.name, item.prompt.text, thumbnail(pixels), values, "; ".join(causes))


def stop_at_failure(cards: Iterable[Card]) -> None:
    """Raise `RewardError` for the first card without a total, as `reward.on_error=stop` asks for."""
    for card in cards:
        if card.values[TOTAL] is None:
            raise RewardError(
                f"{card.path} has no score: {card.failure}; repair the scorer, or list such images with "
                "reward.on_error=drop_group"
            )


def write(request: Request, cards: Sequence[Card]) -> None:
    """Write `scores.csv`, `scores.jsonl` and `gallery.html` and report the summary; raises `GerlError` if it cannot."""
    reward, out = request.config.reward, request.out
    known = list(dict.fromkeys(name for card in cards for name in card.values))
    # A scorer that failed in the first batch shows its further columns late: they belong beside it all the same.
    columns = dict.fromkeys(c for name in reward.scorers for c in known if c == name or c.startswith(f"{name}/"))
    cards = [replace(card, values={name: card.values.get(name) for name in (TOTAL, *columns)}) for card in cards]
    write_tables(out, cards)
    weights = {name: scorer.weight for name, scorer in reward.scorers.items() if scorer.weight != 0}
    write_gallery(out / "gallery.html", Path(request.images).expanduser().resolve().name, cards, weights)
    logger.info("%s", closing_screen(out, cards))


def closing_screen(out: Path, cards: Sequence[Card]) -> str:
    """Mean, std, least and greatest score of each column, the failures, and where things lie."""
    width = max(len(name) for name in cards[0].values)
    lines = ["", f"{'':<{width}} {'images':>7} {'mean':>10} {'std':>10} {'min':>10} {'max':>10}"]
    for name in cards[0].values:
        s = summarise(name, [card.values[name] for card in cards])
        numbers = " ".join(f"{number:>10.4g}" for number in (s.mean, s.std, s.low, s.high))
        lines.append(f"{name:<{width}} {s.count:>7} {numbers}")
    failed = [card for card in cards if card.failure]
    if failed:
        first = f"the first, {failed[0].name}: {failed[0].failure}"
        lines.append(f"failures: {len(failed)} of {len(cards)} images; {first}")
    lines += ["", *(f"{out / name}" for name in ("scores.csv", "scores.jsonl", "gallery.html"))]
    return "\n".join(lines)
