"""Environments of Python that are made in a second and without a network, and a tiny package for them."""

import sys
import sysconfig
import zipfile
from pathlib import Path
from venv import EnvBuilder


def thin_environment(folder: Path) -> Path:
    """The interpreter of a new environment on top of this one, whose packages it sees without copies of them."""
    EnvBuilder(symlinks=True).create(folder)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
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
