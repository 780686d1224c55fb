"""Arguments in the style of other programs, and how they are written here: `key=value`."""

import shlex
from collections.abc import Callable, Sequence

from gerl.config import absent, other_name
from gerl.errors import ConfigError


def check_form(arguments: Sequence[str], nearest: Callable[[str], str | None], first: str) -> None:
    """Raise `ConfigError` for the first argument that has dashes, no equals sign, or spaces around it.

    Several keys of other programs are one error, with all that is to be written in their place.
    nearest: the key that a name is or is near to; None where nothing is near. first: the key that a value alone
    may be meant for. A `~key` of Hydra is left alone.
    """
    for i, argument in enumerate(arguments):
        before = arguments[i - 1] if i else ""
        after = arguments[i + 1] if i + 1 < len(arguments) else ""
        is_alone = _is_value(after)
        name, equals, value = argument.partition("=")
        if argument.startswith("-"):
            raise ConfigError(_without_dashes(arguments[i:], nearest))
        if after == "=":
            rest = arguments[i + 2] if i + 2 < len(arguments) else "VALUE"
            raise ConfigError(f"{name} = {rest}: no spaces around the equals sign, {_write(name, rest)}")
        if (not equals and after.startswith("=")) or (equals and not value and is_alone):
            given = after.removeprefix("=")
            raise ConfigError(f"{argument} {after}: no spaces around the equals sign, {_write(name, given)}")
        if equals or argument.startswith("~"):
            continue
        if nearest(name) == name:
            given = f"{argument} {after}" if is_alone else argument
            raise ConfigError(f"{given}: expected key=value, {_write(name, after if is_alone else 'VALUE')}")
        key, space, rest = name.partition(" ")
        if space and nearest(key) == key:
            raise ConfigError(f"{argument}: expected key=value, {_write(key, rest)}")
        if _is_assignment(before):
            quoted = shlex.quote(f"{before} {argument}")
            raise ConfigError(f"{argument}: expected key=value; if it belongs to {before}, put quotes: {quoted}")
        example = shlex.quote(f"{first}={argument}")
        raise ConfigError(f"{argument}: expected key=value, such as {example}; --help lists the keys")
    _check_names(arguments, nearest)


def _check_names(arguments: Sequence[str], nearest: Callable[[str], str | None]) -> None:
    """Raise `ConfigError` where several keys are those of another program; one alone is refused where it is read."""
    found = {}
    for argument in arguments:
        name, _, value = argument.lstrip("+").partition("=")
        meant = other_name(name)
        if meant and meant == nearest(name) and not argument.startswith("~"):
            found[name] = _written(meant, value)
    if len(found) > 1:
        *names, last = found
        raise ConfigError(
            f"{', '.join(names)} and {last} are keys of another program: write {' '.join(found.values())}; --help "
            "lists the keys, docs/coming_from.md compares them"
        )


def _is_assignment(argument: str) -> bool:
    return "=" in argument[1:] and not argument.startswith("-")


def _without_dashes(arguments: Sequence[str], nearest: Callable[[str], str | None]) -> str:
    """The sentence for arguments of which the first has dashes: what is to be written for all that have."""
    given: list[str] = []
    written: list[str] = []
    for argument, after in zip(arguments, [*arguments[1:], ""], strict=True):
        if not argument.startswith("-"):
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        key = nearest(name.replace("-", "_"))
        if key is None and not given:
            reason = f": {why}" if (why := absent(name.replace("-", "_"))) else ""
            return (
                f"{argument}: there is no such option{reason}; arguments are key=value without dashes, --help lists "
                "the keys"
            )
        if key is not None:
            is_alone = not equals and _is_value(after)
            given.append(f"{argument} {after}" if is_alone else argument)
            written.append(_written(key, value if equals else after if is_alone else "VALUE"))
    return f"{' '.join(given)}: drop the dashes, write {' '.join(written)}; --help lists the keys"


def _is_value(argument: str) -> bool:
    """Whether it may be the value of the argument before it."""
    return argument != "" and not _is_assignment(argument) and not argument.startswith("--")


def _write(name: str, value: str) -> str:
    return f"write {shlex.quote(f'{name}={value}')}"


def _written(keys: str, value: str) -> str:
    """The arguments that set each of `keys`, which have a space between them."""
    return " ".join(shlex.quote(f"{key}={value}") for key in keys.split())
