"""The first and the last validation of a run side by side: how many prompts gained, and their pictures."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gerl.pages.images import thumbnail
from gerl.pages.page import Card, Picture
from gerl.run.validation import Validation

SMALL = 256  # pixels; up to this width pictures are kept exactly and shown with sharp pixels
EQUAL = 5e-4  # rewards that are nearer than this look the same with three digits
FEATURED, LOSSES = 4, 5


@dataclass(frozen=True)
class Gain:
    """A held-out prompt with its rewards, means over its images; None: not scored."""

    index: int  # its first image
    prompt: str
    before: float | None
    after: float | None

    @property
    def value(self) -> float | None:
        """How much the reward rose."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def trend(self) -> str:
        """up, down or flat; flat also where it is not known."""
        return "flat" if self.value is None or abs(self.value) < EQUAL else "up" if self.value > 0 else "down"


@dataclass(frozen=True)
class Section:
    """Cards under a heading; `name` is its anchor."""

    name: str
    title: str
    cards: Sequence[Card]


@dataclass(frozen=True)
class BeforeAfter:
    """The comparison; without a `last` validation there is nothing to compare yet."""

    first: Validation
    last: Validation | None
    gains: list[Gain] = field(init=False)  # of the prompts that both have at the same place
    pictured: list[int] = field(init=False)  # those of them that have a picture in both

    def __post_init__(self) -> None:
        first, other = self.first, self.last or self.first
        before, after = (one.by_prompt(one.rewards) for one in (first, other))
        rows = zip(first.first_rows, other.first_rows, before, after, strict=False)
        gains = [Gain(i, first.prompts[i], a, b) for i, j, a, b in rows if first.prompts[i] == other.prompts[j]]
        object.__setattr__(self, "gains", gains)
        shown = set(first.shown) & set(other.shown)
        object.__setattr__(self, "pictured", [gain.index for gain in gains if gain.index in shown])

    @cached_property
    def known(self) -> list[float]:
        """The gains of the prompts that were scored both times."""
        return [gain.value for gain in self.gains if gain.value is not None]

    @property
    def counts(self) -> str:
        """How many of all held-out prompts gained and lost, in words."""
        trends = [gain.trend for gain in self.gains if gain.value is not None]
        better, equal, worse = (trends.count(trend) for trend in ("up", "flat", "down"))
        missing = len(self.gains) - len(trends)
        note = f", {missing} without a reward" if missing else ""
        return f"{better} better, {equal} equal, {worse} worse of {len(self.gains)} held-out prompts{note}"

    @cached_property
    def featured(self) -> list[Card]:
        """Pairs for the top of the page, spread evenly over the file whatever they gained."""
        count = min(FEATURED, len(self.pictured))
        return [self._card(self.pictured[k * len(self.pictured) // count]) for k in range(count)]

    @cached_property
    def sections(self) -> list[Section]:
        """All pairs with pictures: those that gained, those that lost, each the largest change first, and the rest."""
        if self.last is None or not self.known:
            return [Section("all", "", [self._card(i) for i in self.pictured])] if self.pictured else []
        by_index = {gain.index: gain for gain in self.gains}
        shown = [by_index[i] for i in self.pictured]
        found = []
        for trend, name in (("up", "better"), ("down", "worse"), ("flat", "equal")):
            chosen = sorted((g for g in shown if g.trend == trend), key=lambda g: -abs(g.value or 0.0))
            order = ", largest change first" if trend != "flat" and chosen[1:] else ""
            if chosen:
                title = f"{len(chosen)} {name} of the {len(shown)} shown{order}"
                found.append(Section(name, title, [self._card(g.index) for g in chosen]))
        return found

    @cached_property
    def losses(self) -> list[Gain]:
        """The prompts that lost most, of all held-out ones."""
        down = [gain for gain in self.gains if gain.trend == "down"]
        return sorted(down, key=lambda gain: gain.value or 0.0)[:LOSSES]

    def _card(self, index: int) -> Card:
        gain = next(gain for gain in self.gains if gain.index == index)
        validations = [v for v in (self.first, self.last) if v is not None]
        change = "" if self.last is None or gain.value is None else f"{gain.value:+.3f}"
        trend = gain.trend if self.last is not None else "flat"
        return Card([_picture(v, index) for v in validations], (), gain.prompt, gain=change, trend=trend)


def _picture(validation: Validation, index: int) -> Picture:
    value = validation.rewards[index]
    reward = "not scored" if value is None else f"{value:.3f}"
    pixels = validation.pixels[validation.shown.index(index)]
    uri = thumbnail(pixels, width=384, exact=SMALL)
    return Picture(uri, f"{validation.prompts[index]}, reward {reward}", note=reward)
