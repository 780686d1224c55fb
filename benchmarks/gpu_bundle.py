"""The wheels that a usual GPU image lacks for gerl: collected where there is a network, installed where there is none.

`python benchmarks/gpu.py --bundle FOLDER [--python 3.12] [--ocr]` collects them in the versions of constraints.txt, for
the Python of the GPU's machine, without torch, transformers, peft, accelerate and Ray. Standard library only.
"""

import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
IMAGE = "torch transformers peft accelerate".split()  # what the GPU's machine has, with all that they require
NEEDED = """diffusers requests urllib3 certifi charset-normalizer idna importlib-metadata zipp pillow hydra-core
omegaconf antlr4-python3-runtime lazy-importer pydantic pydantic_core annotated-types typing-inspection rapidfuzz pytest
pluggy iniconfig pygments hypothesis sortedcontainers""".split()
OCR = "rapidocr shapely pyclipper colorlog".split()  # for images that have opencv and onnxruntime
SOURCES = ("antlr4-python3-runtime",)  # published without a wheel
LARGEST = 30e6  # bytes of a bundle without --ocr
GLIBC = range(39, 16, -1)  # minor versions, of tags manylinux_2_N


class BundleError(Exception):
    """A bundle cannot be made or installed."""


def pinned(names: Sequence[str], constraints: Path = CHECKOUT / "constraints.txt") -> list[str]:
    """Return `name==version` of `names`; raises `BundleError` for a package that is not pinned."""
    lines = constraints.read_text(encoding="utf-8").splitlines()
    pins = {canonical(line.partition("==")[0]): line for line in lines if "==" in line and not line.startswith("#")}
    for name in names:
        if canonical(name) not in pins:
            raise BundleError(f"{constraints.name} has no version of {name}: add it")
    return [pins[canonical(name)] for name in names]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def collect(folder: Path, python: str, ocr: bool) -> float:
    """Download the wheels into `folder`, for `python` on this machine's processor; returns their size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):  # a second version of a package would be installed over the first
        old.unlink()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    tags = ["manylinux2014", "manylinux1", *(f"manylinux_2_{minor}" for minor in GLIBC)]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    target += [f"--platform={tag}_{platform.machine()}" for tag in tags]
    names = NEEDED + (OCR if ocr else [])
    sources = pinned([name for name in names if name in SOURCES])
    call([*pip, "download", "--no-deps", *target, "-d", str(folder), *pinned([n for n in names if n not in SOURCES])])
    call([*pip, "wheel", "--no-deps", "-w", str(folder), *sources])
    size = float(sum(wheel.stat().st_size for wheel in folder.glob("*.whl")))
    if not ocr and size > LARGEST:
        raise BundleError(f"{folder} has {size / 1e6:.0f} MB, more than {LARGEST / 1e6:.0f} MB: see what has grown")
    return size


def call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise BundleError(f"pip cannot get the wheels ({said[-1]}): check --python and the network")


def lacking(bundle: Path) -> list[str]:
    """Return the packages of `bundle` that this environment lacks or has in an older version."""
    found: list[str] = []
    for wheel in sorted(bundle.glob("*.whl")):
        name, number = wheel.name.split("-")[:2]
        try:
            if numbers(version(name)) < numbers(number):
                found.append(name)
        except PackageNotFoundError:
            found.append(name)
    return found


def numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])


def install(bundle: Path, site: Path) -> list[str]:
    """Unpack `bundle` into the folder `site` if a package is missing; return the missing packages.

    All of it, since its packages fit each other. Raises `BundleError` for a bundle made for another Python.
    """
    if not any(bundle.glob("*.whl")):
        raise BundleError(f"{bundle} has no wheels: collect them where there is a network, by gpu.py --bundle {bundle}")
    missing = lacking(bundle)
    if missing and not (site / "complete").exists():
        shutil.rmtree(site, ignore_errors=True)
        for wheel in sorted(bundle.glob("*.whl")):
            check_python(wheel)
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        (site / "complete").touch()
    return missing


def check_python(wheel: Path) -> None:
    """Raise `BundleError` for a wheel of another Python than this one."""
    python, abi = wheel.stem.split("-")[-3:-1]
    here = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if python.startswith("cp") and abi != "abi3" and here not in python.split("."):
        wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise BundleError(f"{wheel.name} is not for this Python: collect the bundle with --python {wanted}")


def described(folder: Path) -> Iterator[str]:
    """Return a line per wheel, largest first."""
    for wheel in sorted(folder.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size):
        yield f"{wheel.stat().st_size / 1e6:6.2f} MB  {wheel.name}"
