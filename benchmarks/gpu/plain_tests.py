"""Tests marked ``gpu`` without pytest: a plain loop over functions, fixtures and tables of cases, for the GPU report.

Of pytest it has what these tests use. A test that wants more of it is skipped, and the reason says what it wanted.
"""

import contextlib
import functools
import importlib
import inspect
import itertools
import re
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.worker import Cases

__all__ = ["run"]

ROOT = Path(__file__).resolve().parents[2]


class SkippedError(Exception):
    """What ``pytest.skip`` raises."""


class Failed(AssertionError):  # noqa: N818 - the name that tests know
    """What ``pytest.fail`` raises."""


@dataclass
class Param:
    """``pytest.param``."""

    values: tuple[Any, ...]
    marks: tuple[Any, ...] = ()
    id: str | None = None


@dataclass
class Mark:
    """``pytest.mark.name(...)``, which as a decorator goes to the marks of a function."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take arguments, or decorate."""
        if len(args) == 1 and not kwargs and inspect.isfunction(args[0]):
            args[0].__dict__.setdefault("marks", []).append(self)
            return args[0]
        return Mark(self.name, args, kwargs)


class Marks:
    """``pytest.mark``."""

    def __getattr__(self, name: str) -> Mark:
        return Mark(name)


class MonkeyPatch:
    """``monkeypatch``, as far as tests on a GPU use it."""

    def __init__(self) -> None:
        self.undone = contextlib.ExitStack()

    @classmethod
    @contextlib.contextmanager
    def context(cls) -> Iterator["MonkeyPatch"]:
        """One that is undone at the end."""
        patch = cls()
        with patch.undone:
            yield patch

    def setattr(self, target: Any, name: Any, value: Any = None, raising: bool = True) -> None:
        """Of an object, or by the full name."""
        if isinstance(target, str):
            module, _, attribute = target.rpartition(".")
            target, name, value = importlib.import_module(module), attribute, name
        self.undone.callback(setattr, target, name, getattr(target, name))
        setattr(target, name, value)

    def setitem(self, target: Any, key: Any, value: Any) -> None:
        """Of a dictionary."""
        back = (target.__setitem__, key, target[key]) if key in target else (target.pop, key, None)
        self.undone.callback(*back)
        target[key] = value

    def setenv(self, name: str, value: str) -> None:
        """Of the environment."""
        self.setitem(importlib.import_module("os").environ, name, value)

    def delenv(self, name: str, raising: bool = True) -> None:
        """Of the environment."""
        environment = importlib.import_module("os").environ
        if name in environment:
            self.undone.callback(environment.__setitem__, name, environment[name])
            del environment[name]


def fixture(function: Callable[..., Any] | None = None, **settings: Any) -> Any:
    """``pytest.fixture``; every scope is that of a test."""

    def decorate(made: Callable[..., Any]) -> Callable[..., Any]:
        made.__dict__["fixture"] = settings
        return made

    return decorate if function is None else decorate(function)


class raises:  # noqa: N801 - the name that tests know
    """``pytest.raises``."""

    def __init__(self, expected: Any, match: str = "") -> None:
        self.expected, self.match = expected, match

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, _: Any) -> bool:
        if kind is None:
            raise Failed(f"{self.expected} was not raised")
        return issubclass(kind, self.expected) and re.search(self.match, str(error)) is not None


def _raise(kind: type[Exception]) -> Any:
    def stop(reason: str = "") -> None:
        raise kind(reason)

    stop.__dict__["Exception"] = kind
    return stop


def pytest_module() -> types.ModuleType:
    """A module in the place of pytest."""
    module = types.ModuleType("pytest")
    module.__dict__.update(
        mark=Marks(), fixture=fixture, raises=raises, MonkeyPatch=MonkeyPatch,
        fail=_raise(Failed), skip=_raise(SkippedError),
        param=lambda *values, marks=(), id=None: Param(
            values, tuple(marks) if isinstance(marks, list | tuple) else (marks,), id
        ),
    )  # fmt: skip
    return module


def run(cases: Cases) -> None:
    """All tests of the step; says on stdout what it skipped."""
    sys.modules["pytest"] = pytest_module()
    print("pytest is not installed: tests run one after the other, without it.")
    wants_gpu, word = cases.settings["mark"] == "gpu", cases.settings.get("keyword", "")
    for path in test_files(cases.settings["paths"]):
        name = str(path.relative_to(ROOT))
        try:
            tests = list(Tests(path).found(wants_gpu))
        except Exception as error:  # a module that wants more of pytest, or a package that is not here
            cases.run(name, functools.partial(_skip, f"{name} could not be read: {error!r}"))
            continue
        for test, call in tests:
            if not (word.startswith("not ") and word.removeprefix("not ") in test):
                run_test(cases, f"{name}::{test}", call)


def _skip(reason: str) -> list[Any]:
    from benchmarks.gpu.worker import SkippedError as LeftOutError

    print(reason)
    raise LeftOutError(reason)


def run_test(cases: Cases, name: str, call: Callable[[], None]) -> None:
    """One test as a case."""
    if name in cases.settled:
        return
    if cases.time_is_up():
        sys.exit(0)
    cases.begin(name)
    try:
        call()
    except SkippedError as reason:
        print(f"skipped: {name}: {reason}")
        cases.end(name, "skipped", str(reason))
    except Exception as error:
        traceback.print_exc()
        cases.end(name, "failed", repr(error))
        cases.leave_if_sick()
    else:
        cases.end(name, "passed")


def test_files(paths: Sequence[str]) -> list[Path]:
    """Files of tests, in order."""
    found = [[ROOT / path] if path.endswith(".py") else sorted((ROOT / path).glob("test_*.py")) for path in paths]
    return [path for group in found for path in group if "pytest" in path.read_text(encoding="utf-8")]


class Tests:
    """The tests of a file, with the fixtures that it sees."""

    def __init__(self, path: Path) -> None:
        folders = path.relative_to(ROOT).parts[:-1]
        names = [".".join([*folders[: depth + 1], "conftest"]) for depth in range(len(folders))]
        existing = [name for name in names if (ROOT / f"{name.replace('.', '/')}.py").exists()]
        modules = [importlib.import_module(name) for name in [*existing, ".".join([*folders, path.stem])]]
        self.functions = {
            name: value for name, value in vars(modules[-1]).items()
            if name.startswith("test_") and inspect.isfunction(value) and value.__module__ == modules[-1].__name__
        }  # fmt: skip
        self.fixtures = {
            name: value for module in modules for name, value in vars(module).items()
            if inspect.isfunction(value) and "fixture" in vars(value)
        }  # fmt: skip

    def found(self, wants_gpu: bool) -> Iterator[tuple[str, Callable[[], None]]]:
        """Every case of every test, on a GPU or off it."""
        for name, function in self.functions.items():
            marks = vars(function).get("marks", [])
            for chosen in self.choices(function, marks):
                all_marks = [*marks, *(mark for param in chosen.values() for mark in param.marks)]
                needs_gpu = any(mark.name == "gpu" for mark in all_marks)
                if needs_gpu == wants_gpu and not any(mark.name in ("slow", "network") for mark in all_marks):
                    words = "-".join(param.id or "" for param in chosen.values())
                    test = f"{name}[{words}]" if chosen else name
                    yield test, lambda f=function, c=chosen, m=all_marks: self.call(f, c, m)

    def choices(self, function: Any, marks: Sequence[Mark]) -> Iterator[dict[str, Param]]:
        """One value for each table and each fixture that has several, in all combinations."""
        tables: list[tuple[str, list[Param]]] = []
        for mark in marks:
            if mark.name == "parametrize":
                names, rows = mark.args[:2]
                names = names if isinstance(names, str) else ",".join(names)
                single = "," not in names
                tables.append((names, _params(rows, mark.kwargs.get("ids"), single)))
        for name in self.needed(function, marks):
            params = vars(self.fixtures[name])["fixture"].get("params") if name in self.fixtures else None
            if params:
                tables.append((name, _params(params, None, True)))
        for row in itertools.product(*(params for _, params in tables)):
            yield {names: param for (names, _), param in zip(tables, row, strict=True)}

    def needed(self, function: Any, marks: Sequence[Mark]) -> list[str]:
        """Names of fixtures: automatic ones, those of marks, arguments, and what these need in turn."""
        names = [name for name, value in self.fixtures.items() if vars(value)["fixture"].get("autouse")]
        names += [name for mark in marks if mark.name == "usefixtures" for name in mark.args]
        found: list[str] = []
        queue = [*names, *inspect.signature(function).parameters]
        while queue:
            name = queue.pop(0)
            if name not in found:
                found.append(name)
                queue += inspect.signature(self.fixtures[name]).parameters if name in self.fixtures else []
        return found

    def call(self, function: Any, chosen: dict[str, Param], marks: Sequence[Mark]) -> None:
        """Run one case, with its fixtures around it."""
        for mark in marks:
            if mark.name == "skipif" and mark.args[0]:
                raise SkippedError(mark.kwargs.get("reason", ""))
        values: dict[str, Any] = {}
        for names, param in chosen.items():
            given = param.values if "," in names else (param.values[0],)
            values |= zip([name.strip() for name in names.split(",")], given, strict=True)
        with contextlib.ExitStack() as stack:
            made: dict[str, Any] = {name: value for name, value in values.items() if name not in self.fixtures}
            for name in self.needed(function, marks):
                if name == "request":  # each fixture has one of its own
                    continue
                self.make(name, made, values, stack)
            function(**{name: made[name] for name in inspect.signature(function).parameters})

    def make(self, name: str, made: dict[str, Any], values: dict[str, Any], stack: contextlib.ExitStack) -> Any:
        """The value of a fixture, made once."""
        if name in made:
            return made[name]
        if name == "monkeypatch":
            made[name] = stack.enter_context(MonkeyPatch.context())
        elif name == "tmp_path":
            made[name] = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        elif name not in self.fixtures:
            raise SkippedError(f"it needs {name!r} of pytest")
        else:
            function = self.fixtures[name]
            node = types.SimpleNamespace(get_closest_marker=lambda _: None)
            arguments = {
                each: types.SimpleNamespace(param=values.get(name), node=node)
                if each == "request" else self.make(each, made, values, stack)
                for each in inspect.signature(function).parameters
            }  # fmt: skip
            if inspect.isgeneratorfunction(function):
                made[name] = stack.enter_context(contextlib.contextmanager(function)(**arguments))
            else:
                made[name] = function(**arguments)
        return made[name]


def _params(rows: Sequence[Any], ids: Any, single: bool) -> list[Param]:
    """Rows of a table as params, with names."""
    found = []
    for number, row in enumerate(rows):
        param = row if isinstance(row, Param) else Param((row,) if single else tuple(row))
        simple = [str(value) for value in param.values if isinstance(value, str | int | float | None)]
        own = ids[number] if isinstance(ids, list | tuple) else None
        found.append(Param(param.values, param.marks, param.id or own or f"{number} {' '.join(simple)}".strip()))
    return found
