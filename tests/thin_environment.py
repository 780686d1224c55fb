"""Environments of Python that are made in a second and without a network, and a tiny package for them."""

import importlib.metadata
import sys
import sysconfig
import zipfile
from pathlib import Path
from venv import EnvBuilder

from packaging.requirements import Requirement


def bare_environment(folder: Path, *names: str) -> Path:
    """The interpreter of a new environment with links to the packages `names` and what they need, and no others."""
    packages, needed, left = new_environment(folder), set[str](), list(names)
    while left:
        if (name := left.pop().lower().replace("_", "-")) in needed:
            continue
        needed.add(name)
        distribution = importlib.metadata.distribution(name)
        asked = map(Requirement, distribution.requires or [])
        left += [one.name for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return folder / "bin" / "python"


def new_environment(folder: Path) -> Path:
    """Make an empty environment; returns the folder of its packages."""
    EnvBuilder(symlinks=True).create(folder)
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def thin_environment(folder: Path) -> Path:
    """The interpreter of a new environment on top of this one, whose packages it sees without copies of them."""
    packages = new_environment(folder)
    (packages / "below.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    return folder / "bin" / "python"


def tiny_package(folder: Path, name: str, value: float) -> Path:
    """A wheel of the package `name`, which has nothing but VALUE; returns the file."""
    folder.mkdir(exist_ok=True)
    wheel, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": f"VALUE = {value}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return wheel
