"""Checks for features that need a newer version of a package than gerl itself."""

import re
from functools import cache
from importlib.metadata import version

from gerl.errors import VersionError


def require(package: str, lowest: str, feature: str) -> None:
    """Raise `VersionError` if `package` is older than `lowest`; `feature` is the subject of the sentence."""
    if not has(package, lowest):
        raise VersionError(
            f"{feature} needs {package} {lowest} or newer, and {version(package)} is installed: "
            f"pip install '{package}>={lowest}'"
        )


@cache
def has(package: str, lowest: str) -> bool:
    """Whether the installed `package` is at least of version `lowest`; raises `PackageNotFoundError`."""
    return _numbers(version(package)) >= _numbers(lowest)


def _numbers(text: str) -> list[int]:
    """Return the numbers of a release, such as 2, 13 of `2.13.0+cpu`, without zeros at the end."""
    numbers = [int(number) for number in re.match(r"[\d.]*", text)[0].split(".") if number]  # type: ignore[index]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


# argument of diffusers' `from_pretrained` for the dtype, which older versions would ignore under its new name
DTYPE = "dtype" if has("diffusers", "0.40") else "torch_dtype"
