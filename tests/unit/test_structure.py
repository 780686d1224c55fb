"""The rules of the code base that a machine can check: layers, no circles, no pickles, short functions."""

import ast
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_FUNCTION = 60  # one subject, one file, however long: files and packages have no limit

# From the ground up, as docs/map.py draws them. A package is a folder or a file of gerl; it imports only from packages
# in lower layers, and from itself.
LAYERS = (
    ("errors", "plugins"),
    ("protocol",),
    ("config",),
    ("objects", "progress", "utils"),
    ("commandline", "engine"),
    ("data", "cluster"),
    ("model", "rewards", "run"),
    ("algorithms",),
    ("workers",),
    ("trainer",),
    ("export", "preflight", "evaluate", "score", "verify", "vote", "watch", "web"),
    ("api", "web.studio"),
    ("program",),
    ("__init__", "__main__"),
)
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}
BY_NAME = {"import_module", "lazy"}  # functions that import the module named by their first argument
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py") if p.read_text().strip())


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def package(path: Path) -> str:
    """Return the package or top-level module of gerl that a file belongs to; the studio is a package of its own."""
    inside = path.relative_to(ROOT / "gerl").with_suffix("").parts
    return ".".join(inside[:2]) if inside[:2] == ("web", "studio") else inside[0]


def is_signpost(path: Path) -> bool:
    """Whether a file only shows where what had this name is now: an import and nothing else."""
    body = [node for node in tree(path).body if not isinstance(node, ast.Expr)]
    return path.name != "__init__.py" and all(isinstance(node, ast.ImportFrom) for node in body)


SOURCES = files("gerl", "reward_models")
SIGNPOSTS = {module_name(path): path for path in files("gerl") if is_signpost(path)}
FILES = {module_name(path): path for path in files("gerl") if not is_signpost(path)}


def of_signposts(path: Path) -> set[int]:
    """The lines of a file that only show users where a name is now: those of a module's `__getattr__`."""
    named = (node for node in tree(path).body if isinstance(node, ast.FunctionDef) and node.name == "__getattr__")
    return {line for node in named for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything a file imports: at its head, in functions, for types alone, and by name.

    `from a import b` gives `a.b`, and so does `import_module("a.b")`, or `lazy`.
    """
    base = module_name(path).split(".")
    if path.name != "__init__.py":
        base = base[:-1]
    skipped = of_signposts(path)
    for node in ast.walk(tree(path)):
        if getattr(node, "lineno", 0) in skipped:
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in BY_NAME and node.args:
            if isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = base[: len(base) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"


def resolve(name: str) -> str | None:
    """The module of gerl that `name` is or lies in; None for other packages."""
    parts = name.split(".")
    ends = range(len(parts), 1 if len(parts) > 1 else 0, -1) if parts[0] == "gerl" else ()
    return next((module for end in ends if (module := ".".join(parts[:end])) in {**FILES, **SIGNPOSTS}), None)


def may_import(importer: str, imported: str) -> bool:
    """Whether one package may import from another, given by their names."""
    return importer == imported or LAYER_OF[imported] < LAYER_OF[importer]


def test_every_package_has_one_layer() -> None:
    assert {package(path) for path in files("gerl")} == set(LAYER_OF) and len(LAYER_OF) == sum(map(len, LAYERS))


def test_imports_go_down() -> None:
    wrong = []
    for path in FILES.values():
        for line, name in imports(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            if (target := resolve(name)) in SIGNPOSTS:
                wrong.append(f"{where} imports {target}, which is for users: import what it names")
            elif target and not may_import(package(path), package(FILES[target])):
                wrong.append(f"{where}: {package(path)} imports {target} of a layer not below it")
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_imports() -> None:

    def targets(module: str, path: Path) -> set[str]:
        return {t for _, name in imports(path) if (t := resolve(name)) and t != module}

    graph = {module: sorted(targets(module, path)) for module, path in FILES.items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for target in graph.get(module, ()):
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_only_the_cluster_and_the_services_import_ray() -> None:
    others = [p for p in SOURCES if not module_name(p).startswith(("gerl.cluster.", "reward_models.replicas"))]
    wrong = [f"{p}:{line}" for p in others for line, name in imports(p) if name.split(".")[0] == "ray"]
    assert not wrong, "\n".join(wrong)


def prints_and_pickles(path: Path) -> Iterator[str]:
    for line, name in imports(path):
        if name.split(".")[0] in PICKLES:
            yield f"{path}:{line}: imports {name}"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            data_only = called == "torch.load" and keywords.get("weights_only") == "True"
            if called in ("print", "torch.save", "torch.load") and not data_only:
                yield f"{path}:{node.lineno}: calls {called}"
            if keywords.get("allow_pickle", "False") != "False":
                yield f"{path}:{node.lineno}: allow_pickle={keywords['allow_pickle']}"


def test_no_print_and_no_pickle() -> None:
    wrong = [sentence for path in SOURCES for sentence in prints_and_pickles(path)]
    assert not wrong, "\n".join(wrong)


def test_functions_are_short() -> None:
    wrong = []
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION:
                    wrong.append(f"{path}:{node.lineno}: {node.name} has {length} lines, more than {MAX_FUNCTION}")
    assert not wrong, "\n".join(wrong)


def test_the_rules_catch_what_they_should() -> None:
    assert resolve("gerl.config.Config") == "gerl.config" and resolve("torch.nn") is None
    assert resolve("gerl.utils.reward_score.SCORERS") in SIGNPOSTS
    assert may_import("config", "errors") and may_import("workers", "workers")
    assert not may_import("errors", "cluster") and not may_import("score", "export")
    assert not any(may_import(a, b) or may_import(b, a) for layer in LAYERS for a, b in combinations(layer, 2))
