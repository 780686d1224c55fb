"""The rules of the house that a machine can check: floors, sizes, and who may import what."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE, MAX_FUNCTION = 400, 60

# Prefix of a module name -> floor; the longest prefix decides. A file imports only from lower floors; within its own
# floor only from its own package (`gerl.utils`, `gerl.workers`, ...; the files directly in gerl are one package).
FLOORS = {
    6: ("gerl.trainer.main_flowgrpo", "gerl.evaluate", "gerl.score", "gerl.export", "gerl.preflight"),
    5: ("gerl.trainer.ppo.ray_diffusion_trainer", "gerl.trainer.ppo.credit", "gerl.trainer.ppo.reward"),
    4: (
        "gerl.workers.actor",
        "gerl.workers.rollout",
        "gerl.workers.reward_manager",
        "gerl.workers.reward_worker",
        "gerl.workers.hybrid",
    ),
    3: ("gerl.algorithms",),
    2: ("gerl.workers.diffusers_model",),
    1: ("gerl.utils", "gerl.cluster"),
    0: (
        "gerl.errors",
        "gerl.config",
        "gerl.protocol",
        "gerl.trainer.ppo.core_algos",
        "gerl.workers.diffusers_model.kernels",
    ),
}
EXACT = {"gerl": 6}  # the package itself, not what is inside
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


FILES = {module_name(path): path for path in files("gerl") if path.name != "__init__.py" or path.read_text().strip()}
SOURCES = [path for path in files("gerl", "reward_models") if path.read_text().strip()]
SOURCE_IDS = [str(path.relative_to(ROOT)) for path in SOURCES]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def floors_of(module: str) -> list[int]:
    """The floors of the longest prefixes that match: exactly one for a module that has its place."""
    if module in EXACT:
        return [EXACT[module]]
    matches = [
        (prefix.count("."), floor)
        for floor, prefixes in FLOORS.items()
        for prefix in prefixes
        if module == prefix or module.startswith(prefix + ".")
    ]
    longest = max((length for length, _ in matches), default=0)
    return [floor for length, floor in matches if length == longest]


def package(module: str) -> str:
    """`gerl.utils` for everything in it, `gerl` for the files directly in gerl and the folder `gerl.config`."""
    name = ".".join(module.split(".")[:2])
    return "gerl" if name == "gerl.config" or (name in FILES and FILES[name].name != "__init__.py") else name


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything a file imports; `from a import b` gives `a.b`."""
    base = module_name(path).split(".")
    if path.name != "__init__.py":
        base = base[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = base[: len(base) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"


def resolve(name: str) -> str | None:
    """The module of gerl that `name` is or lies in; None for other packages and for empty packages."""
    parts = name.split(".")
    if parts[0] != "gerl":
        return None
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        if module in FILES:
            return module if end > 1 or len(parts) <= 2 else None
    return None


def allowed(importer: str, imported: str) -> bool:
    (own,), (other,) = floors_of(importer), floors_of(imported)
    return other < own or (other == own and package(importer) == package(imported))


@pytest.mark.parametrize("module", FILES)
def test_every_module_has_one_floor(module: str) -> None:
    assert len(floors_of(module)) == 1, f"{module}: put it into exactly one floor of the table"


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down(module: str) -> None:
    path = FILES[module]
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module} (floor {floors_of(module)[0]}) imports {target} "
        f"(floor {floors_of(target)[0]})"
        for line, name in imports(path)
        if (target := resolve(name)) and target != module and not allowed(module, target)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_imports() -> None:
    graph = {m: sorted({t for _, n in imports(p) if (t := resolve(n)) and t != m}) for m, p in FILES.items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for target in graph[module]:
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", SOURCES, ids=SOURCE_IDS)
def test_only_the_cluster_and_the_services_import_ray(path: Path) -> None:
    if module_name(path) not in ("gerl.cluster", "reward_models.replicas"):
        assert not [f"line {line}" for line, name in imports(path) if name.split(".")[0] == "ray"]


@pytest.mark.parametrize("path", SOURCES, ids=SOURCE_IDS)
def test_no_print_and_no_pickle(path: Path) -> None:
    wrong = [f"line {line}: imports {name}" for line, name in imports(path) if name.split(".")[0] in PICKLES]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            data_only = called == "torch.load" and any(
                k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords
            )
            if called in ("print", "torch.save", "torch.load") and not data_only:
                wrong.append(f"line {node.lineno}: calls {called}")
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False":
                    wrong.append(f"line {node.lineno}: allow_pickle={ast.unparse(keyword.value)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", SOURCES, ids=SOURCE_IDS)
def test_files_and_functions_are_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    wrong = [f"the file has {lines} lines, more than {MAX_FILE}"] if lines > MAX_FILE else []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                wrong.append(f"{node.name} in line {node.lineno} has {length} lines, more than {MAX_FUNCTION}")
    assert not wrong, "\n".join(wrong)


def test_the_rules_catch_what_they_should() -> None:
    assert floors_of("gerl.workers.diffusers_model.kernels") == [0]
    assert floors_of("gerl.workers.diffusers_model.replay") == [2]
    assert floors_of("gerl.utils.reward_score.ocr") == [1]
    assert floors_of("gerl.somewhere") == []
    assert resolve("gerl.config.Config") == "gerl.config" and resolve("torch.nn") is None
    assert allowed("gerl.config", "gerl.errors")
    assert not allowed("gerl.errors", "gerl.cluster")
    assert not allowed("gerl.trainer.ppo.core_algos", "gerl.config")
