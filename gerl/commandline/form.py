"""Arguments in the style of other programs, and how they are written here: `key=value`."""

import shlex
from collections.abc import Callable, Sequence

from gerl.errors import ConfigError


def check_form(arguments: Sequence[str], nearest: Callable[[str], str | None], first: str) -> None:
    """Raise `ConfigError` for the first argument that has dashes, no equals sign, or spaces around it.

    nearest: the key that a name is or is near to; None where nothing is near. first: the key that a value alone
    may be meant for. A `~key` of Hydra is left alone.
    """
    for i, argument in enumerate(arguments):
        before = arguments[i - 1] if i else ""
        after = arguments[i + 1] if i + 1 < len(arguments) else ""
        is_alone = after != "" and not _is_assignment(after) and not after.startswith("--")
        name, equals, value = argument.partition("=")
        if argument.startswith("-"):
            raise ConfigError(_without_dashes(argument, after if is_alone else "", nearest))
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


def _is_assignment(argument: str) -> bool:
    return "=" in argument[1:] and not argument.startswith("-")


def _without_dashes(argument: str, after: str, nearest: Callable[[str], str | None]) -> str:
    name, equals, value = argument.lstrip("-").partition("=")
    key = nearest(name.replace("-", "_"))
    if key is None:
        return f"{argument}: there is no such option; arguments are key=value without dashes, --help lists the keys"
    given = argument if equals or not after else f"{argument} {after}"
    return f"{given}: drop the dashes, {_write(key, value if equals else after or 'VALUE')}; --help lists the keys"


def _write(name: str, value: str) -> str:
    return f"write {shlex.quote(f'{name}={value}')}"
