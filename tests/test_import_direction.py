"""The house holds: imports point left, files and functions stay small, every file says what it is for."""

import ast
import sys
from pathlib import Path

import pytest

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
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 35
MAX_POSITIONAL_ARGUMENTS = 6
VAGUE_NAMES = {"utils.py", "helpers.py", "common.py", "misc.py"}

PACKAGE_FILES = sorted((ROOT / "hf_comera").rglob("*.py"))
SOURCE_FILES = PACKAGE_FILES + sorted((ROOT / "scripts").rglob("*.py"))
LAYER_FILES = [path for path in PACKAGE_FILES if path != ROOT / "hf_comera" / "__init__.py"]
ALL_FILES = SOURCE_FILES + sorted((ROOT / "tests").rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT / "hf_comera").parts[0].removesuffix(".py")


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """Line and full name of everything that ``path`` imports, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} is a relative import; start it with hf_comera"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    docstring_lines = first.end_lineno - first.lineno + 1 if has_docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring_lines


@pytest.mark.parametrize("path", LAYER_FILES, ids=name_of)
def test_imports_point_left(path):
    assert layer_of(path) in LAYERS, f"{name_of(path)} is in no known folder; the order is {' -> '.join(LAYERS)}"
    allowed = LAYERS[: LAYERS.index(layer_of(path)) + 1]
    for line, module in imported_modules(path):
        package, _, rest = module.partition(".")
        if package == "hf_comera":
            assert rest.partition(".")[0] in allowed, (
                f"{name_of(path)}:{line} imports {module}, but {layer_of(path)} may import only from {allowed}; "
                f"the order is {' -> '.join(LAYERS)}"
            )


@pytest.mark.parametrize("path", [path for path in LAYER_FILES if layer_of(path) == "tt"], ids=name_of)
def test_the_mathematics_needs_torch_only(path):
    for line, module in imported_modules(path):
        package = module.partition(".")[0]
        assert package in sys.stdlib_module_names | {"torch", "hf_comera"}, f"{name_of(path)}:{line} imports {module}"


@pytest.mark.parametrize("path", ALL_FILES, ids=name_of)
def test_file_is_named_described_and_small(path):
    text = path.read_text(encoding="utf-8")
    assert path.name not in VAGUE_NAMES, f"{name_of(path)}: name the file after the one thing in it"
    assert ast.get_docstring(ast.parse(text)), f"{name_of(path)}: the first line is a docstring that says its one job"
    num_lines = text.count("\n")
    assert num_lines <= MAX_FILE_LINES, f"{name_of(path)} has {num_lines} lines; split it by concept"


@pytest.mark.parametrize("path", SOURCE_FILES, ids=name_of)
def test_functions_are_short(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{name_of(path)}:{node.lineno} {node.name}"
            num_lines = lines_without_docstring(node)
            assert num_lines <= MAX_FUNCTION_LINES, f"{where} has {num_lines} lines without its docstring; split it"
            positional = [argument.arg for argument in node.args.posonlyargs + node.args.args]
            num_positional = len([name for name in positional if name not in {"self", "cls", "ctx"}])
            if any("custom_op" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue  # its arguments are the schema of an operator
            assert num_positional <= MAX_POSITIONAL_ARGUMENTS, f"{where} takes {num_positional} positional arguments"
