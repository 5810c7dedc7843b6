"""The house holds: imports point left and never in a circle, and every file is named and described by its subject."""

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYERS = (
    "tt",
    "ops",
    "modules",
    "memory",
    "compress",
    "hub",
    "adapters",
    "optim",
    "training",
    "parallel",
    "cli",
    "__main__",
)
SCRIPT_FOLDERS = {"loop": {"loop"}, "codebert": {"loop", "codebert"}, "mnli": {"loop", "mnli"}}
"""From which of these folders the files of each may import."""
VAGUE_NAMES = {"utils.py", "helpers.py", "common.py", "misc.py"}

# Where names of modules begin, and what lies there.
TREES = {"hf_comera": ROOT, "benchmarks": ROOT, **dict.fromkeys(SCRIPT_FOLDERS, ROOT / "scripts")}
LAYER_FILES = [path for path in sorted((ROOT / "hf_comera").rglob("*.py")) if path.parent != ROOT / "hf_comera"]
LAYER_FILES += [path for path in (ROOT / "hf_comera").glob("*.py") if path.name != "__init__.py"]
ALL_FILES = [path for name in ("hf_comera", "scripts", "benchmarks", "tests") for path in (ROOT / name).rglob("*.py")]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT / "hf_comera").parts[0].removesuffix(".py")


def read(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(path: Path, *, for_types: bool = True) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that ``path`` imports, inside functions too.

    Args:
        path: The file.
        for_types: Also what is imported only where types are checked, which no run does.
    """
    queue: list[ast.AST] = [read(path)]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.If) and not for_types and ast.unparse(node.test) == "TYPE_CHECKING":
            queue += node.orelse
            continue
        queue += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} is a relative import; start it with the package"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_imports_point_left():
    for path in LAYER_FILES:
        assert layer_of(path) in LAYERS, f"{name_of(path)} is in no known folder; the order is {' -> '.join(LAYERS)}"
        allowed = LAYERS[: LAYERS.index(layer_of(path)) + 1]
        for line, module in imported_modules(path):
            package, _, rest = module.partition(".")
            if package == "hf_comera":
                assert rest.partition(".")[0] in allowed, (
                    f"{name_of(path)}:{line} imports {module}, but {layer_of(path)} may import only from {allowed}; "
                    f"the order is {' -> '.join(LAYERS)}"
                )


def test_the_mathematics_needs_torch_only():
    for path in (ROOT / "hf_comera" / "tt").rglob("*.py"):
        for line, module in imported_modules(path):
            package = module.partition(".")[0]
            known = sys.stdlib_module_names | {"torch", "hf_comera"}
            assert package in known, f"{name_of(path)}:{line} imports {module}"


def test_library_and_scripts_import_nothing_beside_them():
    """The library serves the scripts, and both serve the benchmarks; nothing of them knows who it serves."""
    outside = {"benchmarks", "scripts", "tests"}
    for path in ALL_FILES:
        top, *rest = path.relative_to(ROOT).parts
        if top == "scripts":
            parts_of_others = SCRIPT_FOLDERS.keys() - SCRIPT_FOLDERS.get(rest[0], SCRIPT_FOLDERS.keys())
        elif top == "hf_comera":
            parts_of_others = SCRIPT_FOLDERS.keys()
        else:
            continue
        for line, module in imported_modules(path):
            assert module.partition(".")[0] not in outside | parts_of_others, (
                f"{name_of(path)}:{line} imports {module}"
            )


def test_scripts_has_only_what_is_launched_at_its_top():
    for path in (ROOT / "scripts").glob("*.py"):
        launched = [
            node for node in read(path).body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
        ]
        assert launched, f"{name_of(path)} is not launched; it belongs into a folder of scripts/"


def test_no_file_imports_itself_in_a_circle():
    modules = {}
    for top, base in TREES.items():
        for path in (base / top).rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    def file_of(name: str) -> str:
        """The module that holds a name; empty for that of another package."""
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    graph = {
        module: {file_of(name) for _, name in imported_modules(path, for_types=False)} - {module, ""}
        for module, path in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(f"imports run in a circle: {' <- '.join(error.args[1])}") from None


def test_files_are_named_and_described():
    for path in ALL_FILES:
        assert path.name not in VAGUE_NAMES, f"{name_of(path)}: name the file after the one subject in it"
        assert ast.get_docstring(read(path)), f"{name_of(path)}: the first line is a docstring that says its subject"


def test_tests_mirror_the_sources():
    """``test_<file>.py`` or ``test_<file>_<aspect>.py`` in the same folder; others stand in folders of their own."""
    mirrors = {
        "hf_comera": ROOT / "tests",
        "scripts": ROOT / "tests" / "scripts",
        "benchmarks": ROOT / "tests/benchmarks",
    }
    for top, mirror in mirrors.items():
        for folder in [path for path in (ROOT / top).rglob("*") if path.is_dir() and path.name != "__pycache__"]:
            sources = {folder.name, *(path.stem for path in folder.glob("*.py"))}
            for test in (mirror / folder.relative_to(ROOT / top)).glob("test_*.py"):
                name = test.stem.removeprefix("test_") + "_"
                assert any(name.startswith(f"{source}_") for source in sources), (
                    f"{name_of(test)} is named after no file of {name_of(folder)}"
                )
