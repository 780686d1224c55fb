"""The block `episode`: several turns per prompt, taken by policies in several roles."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from gerl.config.schema import Block, key, shown
from gerl.errors import ConfigError

NextState = Literal["best", "sample", "each"]
Returns = Literal["turn", "last", "sum"]
TURN = ("role", "request", "images")  # keys of a turn
OWN = ("kind", "pipeline", "tokens", "temperature", "kept")  # keys of a role besides those of the configuration
ASKED = "Describe an image in one sentence that a painter can follow exactly: {prompt}"  # request of a text role
BLOCKS = ("model", "sampling", "rollout", "algorithm", "actor")  # whose keys a role may have of its own
NAME = re.compile(r"[A-Za-z]\w*")
Training = Annotated[str | list[str] | dict[str, int], PlainValidator(lambda value: value)]  # checked by `check`


@dataclass(frozen=True)
class TurnConfig:
    """A turn: its role, the text passed to the model instead of the prompt, and the samples per state.

    `request`: a template such as `write {text}`, or FILE.py:function; None: the prompt. `images`: None: `rollout.n`.
    """

    role: str
    request: str | None = None
    images: int | None = None


@dataclass(frozen=True)
class TextRole:
    """A language model that rewrites prompts, in at most `tokens`; the first `kept` texts are the prompt itself."""

    tokens: int = 64
    temperature: float = 1.0
    kept: int = 0


@dataclass(frozen=True)
class EpisodeConfig(Block):
    turns: list[dict[str, Any]] = key(
        [],
        "turns of an episode, in order: {role: NAME, request: what the model is asked instead of the prompt (a "
        "template such as 'write {prompt}', or FILE.py:function), images: samples per state}; []: one turn, "
        "docs/episodes.md",
    )
    roles: dict[str, dict[str, Any]] = key(
        {},
        "policies besides the run's own: NAME -> keys that differ from the run's, such as {model.lora_rank: 16, "
        "sampling.call: {strength: 0.6}}; pipeline: the class of its pipeline; kind: text is a language model that "
        "rewrites prompts, with tokens, temperature, and kept: how many of its texts are the prompt itself",
    )
    next: NextState = key(
        "best", "images of a turn that the next one starts from, per group: the best, a random one, or each of them"
    )
    returns: Returns = key(
        "turn",
        "reward of an image: that of its own turn; the mean of its descendants in the last turn; or the sum of both "
        "over the turns to come (last and sum need next=each)",
    )
    train: Training = key(
        "all", "roles that are trained: all; a list; or {alternate: N}, one role at a time, each for N steps"
    )

    def check(self) -> None:
        if not self.turns:
            if self.roles:
                raise ConfigError("episode.roles: there are no episode.turns in which they act; set those")
            return
        for entry in self.turns:
            _check_turn(entry)
        for name, keys in self.roles.items():
            _check_role(name, keys)
        acting = [turn.role for turn in self.parsed]
        if idle := [name for name in self.roles if name not in acting]:
            raise ConfigError(f"episode.roles.{idle[0]}: no turn has this role; remove it, or add a turn")
        unnamed = list(dict.fromkeys(name for name in acting if name not in self.roles))
        if len(unnamed) != 1:
            listed = ", ".join(unnamed) or "none"
            raise ConfigError(
                "episode.turns: exactly one role is the run's own, with the keys of the run, and is not in "
                f"episode.roles; here {listed}: name the others there"
            )
        for turn in self.parsed:
            if turn.images is not None and turn.role == unnamed[0]:
                raise ConfigError(
                    f"episode.turns: {turn.role} has the keys of the run; set rollout.n instead of images"
                )
            if self.images_of(turn.role) != turn.images:
                raise ConfigError(f"episode.turns: the turns of {turn.role} have different images; give them the same")
        for number, turn in enumerate(self.parsed):
            if self.is_text(turn.role) and number:
                raise ConfigError(f"episode.turns: {turn.role} rewrites prompts, which only the first turn does")
        if self.is_text(acting[-1]):
            raise ConfigError(f"episode.turns: no turn samples images of the prompts of {acting[-1]}; add one")
        images = [turn for turn in self.parsed if not self.is_text(turn.role)]
        if images[0].role != unnamed[0]:
            raise ConfigError(
                f"episode.turns: {images[0].role} samples the first images and is in episode.roles, but the run's own "
                f"role does that; give its keys to the run, and those of {unnamed[0]} to episode.roles"
            )
        if self.returns != "turn" and len(images) > 1 and self.next != "each":
            raise ConfigError(
                f"episode.returns={self.returns}: with next={self.next} not every image has descendants; use next=each"
            )
        self._check_training(list(dict.fromkeys(acting)))

    def _check_training(self, roles: list[str]) -> None:
        train = self.train
        if isinstance(train, Mapping):
            every = train.get("alternate")
            if list(train) != ["alternate"] or type(every) is not int or every < 1:
                raise ConfigError(f"episode.train={shown(train)}: expected {{alternate: N}}, N steps per role")
        elif isinstance(train, list | tuple):
            if unknown := [name for name in train if name not in roles]:
                raise ConfigError(f"episode.train: there is no role {unknown[0]!r}, only {', '.join(roles)}")
            if not train:
                raise ConfigError("episode.train=[]: no role would be trained; name at least one")
        elif train != "all":
            raise ConfigError(f"episode.train={shown(train)}: it must be all, a list of roles, or {{alternate: N}}")

    @cached_property
    def parsed(self) -> list[TurnConfig]:
        """Return the turns."""
        return [TurnConfig(**entry) for entry in self.turns]

    @cached_property
    def all_roles(self) -> list[str]:
        """Return the roles in the order in which they first act."""
        return list(dict.fromkeys(turn.role for turn in self.parsed))

    @property
    def own_role(self) -> str:
        """Return the role whose keys are the run's own."""
        return next(name for name in self.all_roles if name not in self.roles)

    def images_of(self, role: str) -> int | None:
        """Return the samples per state of a role; None: `rollout.n`."""
        return next(turn.images for turn in self.parsed if turn.role == role)

    def text_role(self, role: str) -> TextRole:
        """Return the settings of a role that rewrites prompts."""
        options = {
            name: self.roles[role][name] for name in ("tokens", "temperature", "kept") if name in self.roles[role]
        }
        return TextRole(**options)

    def is_text(self, role: str) -> bool:
        """Whether `role` rewrites prompts."""
        return self.roles.get(role, {}).get("kind", "images") == "text"

    def trains(self, role: str) -> bool:
        """Whether some step trains `role`."""
        return not isinstance(self.train, list | tuple) or role in self.train

    def trained(self, step: int) -> list[str]:
        """Return the roles that trainer step `step` (from 1) trains."""
        if isinstance(self.train, Mapping):
            return [self.all_roles[(step - 1) // self.train["alternate"] % len(self.all_roles)]]
        return self.all_roles if self.train == "all" else list(self.train)


def _check_turn(entry: Mapping[str, Any]) -> None:
    for name in entry:
        if name not in TURN:
            raise ConfigError(f"episode.turns has an entry with {name}; allowed are {', '.join(TURN)}")
    role, request, images = (entry.get(name) for name in TURN)
    if not isinstance(role, str) or not NAME.fullmatch(role):
        raise ConfigError(f"episode.turns has an entry with role={shown(role)}: it must be a name such as edit")
    if request is not None and not (isinstance(request, str) and request.strip()):
        raise ConfigError(f"episode.turns has an entry with request={shown(request)}: it must be a text")
    if images is not None and (type(images) is not int or images < 1):
        raise ConfigError(f"episode.turns has an entry with images={shown(images)}: it must be at least 1")


def _check_role(name: str, keys: Mapping[str, Any]) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(f"episode.roles has {name!r}: a role is a name of letters, digits and underscores")
    for key_name in keys:
        if key_name not in OWN and str(key_name).partition(".")[0] not in BLOCKS:
            raise ConfigError(
                f"episode.roles.{name}.{key_name}: a role has keys of {', '.join(BLOCKS)} of its own, and "
                f"{' and '.join(OWN)}; set it for the whole run, or remove it"
            )
    kind = keys.get("kind", "images")
    if kind not in ("images", "text"):
        raise ConfigError(f"episode.roles.{name}.kind={shown(kind)}: it must be images or text")
    for key_name in [
        key_name for key_name in OWN[1:] if key_name in keys and (key_name == "pipeline") == (kind == "text")
    ]:
        other = "text" if kind == "images" else "images"
        raise ConfigError(f"episode.roles.{name}.{key_name}: it is for a role of kind={other}; remove it")
    if kind == "text":
        _check_text(name, keys)


def _check_text(name: str, keys: Mapping[str, Any]) -> None:
    tokens, temperature, kept = (keys.get(key, default) for key, default in asdict(TextRole()).items())
    if "model.path" not in keys and "path" not in (keys.get("model") or {}):
        raise ConfigError(f"episode.roles.{name}: set its model.path, a causal language model of transformers")
    if type(tokens) is not int or tokens < 1:
        raise ConfigError(f"episode.roles.{name}.tokens={shown(tokens)}: it must be at least 1")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or temperature <= 0:
        raise ConfigError(f"episode.roles.{name}.temperature={shown(temperature)}: it must be greater than 0")
    if type(kept) is not int or kept < 0:
        raise ConfigError(f"episode.roles.{name}.kept={shown(kept)}: it must be at least 0")
