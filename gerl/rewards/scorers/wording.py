"""The wording of instructions that a published reward model was trained with, read from its authors' code.

Their models grade well only if asked in these very words, which are theirs and not part of gerl. The file is parsed and
never run: their packages need versions of others that do not go with gerl.
"""

import ast
import importlib.util
from collections.abc import Collection
from pathlib import Path

from gerl.errors import RewardError


def code_folder(code: str | None, package: str, remedy: str) -> Path:
    """The folder `code`, or that of the installed `package`; without one raises `RewardError`, with the `remedy`."""
    if code is not None:
        folder = Path(code).expanduser()
        if not folder.is_dir():
            raise RewardError(f"code={code}: there is no such folder: {remedy}")
        return folder / package if (folder / package).is_dir() else folder
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise RewardError(f"the authors' wording of {package}'s instruction is missing: {remedy}")
    return Path(found.submodule_search_locations[0])


def constants(file: Path, names: Collection[str]) -> dict[str, str]:
    """The texts that a Python file assigns to `names` at its top level, without running it.

    Raises:
        RewardError: there is no such file, it is no Python, or it has no text of such a name.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise RewardError(
            f"code: {file} cannot be read ({type(error).__name__}: {error}): give the authors' code"
        ) from None
    found = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if missing := [name for name in names if name not in found]:
        raise RewardError(f"code: {file} has no text {missing[0]}: use the version of the authors' code that has it")
    return {name: found[name] for name in names}
