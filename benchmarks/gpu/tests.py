"""Steps "tests-..." and "sanitizer-..." of the GPU report: tests one after the other, each a case in the journal."""

import importlib.util
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from benchmarks.gpu.worker import Cases

__all__ = ["run"]

ORDERLY = (0, 1, 5)
"""Exit status of pytest: all passed, some failed, there were none."""
OPTIONS = [
    "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "--import-mode=importlib", "--strict-markers",
    # Of the settings of pyproject.toml: no other selection of tests, and no plugin that may be missing here. Other
    # versions of torch warn of other things, which says nothing about a GPU.
    "-o", "addopts=", "-o", "minversion=1", "-W", "default", "--disable-warnings",
]  # fmt: skip


def run(cases: Cases) -> None:
    """All tests that are selected and have not been settled."""
    if importlib.util.find_spec("pytest") is None:
        importlib.import_module("benchmarks.gpu.plain_tests").run(cases)
        return
    import pytest

    settings = cases.settings
    words = [*OPTIONS, "-m", settings["mark"], *settings["paths"]]
    if settings.get("keyword"):
        words += ["-k", settings["keyword"]]
    watcher = Watcher(cases, spread=settings.get("spread", False))
    status = int(pytest.main(words, plugins=[watcher]))
    if watcher.stopped:
        sys.exit(0)
    if status not in ORDERLY:
        sys.exit(f"pytest ended with {status}")


class Watcher:
    """A plugin of pytest: leaves out what is settled, writes each test into the journal, and stops in time."""

    def __init__(self, cases: Cases, *, spread: bool) -> None:
        self.cases, self.spread, self.stopped = cases, spread, False
        self.reports: list[Any] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out what is settled."""
        left = [item for item in items if item.nodeid not in self.cases.settled]
        items[:] = spread_over_functions(left) if self.spread else left

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported; one that needs a package that is not here is left out."""
        if not report.failed or report.nodeid in self.cases.settled:
            return
        text = str(report.longrepr)
        missing = "ModuleNotFoundError" in text
        self.cases.begin(report.nodeid)
        self.cases.end(report.nodeid, "skipped" if missing else "failed", last_line(text))

    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        """A test begins, if there is time."""
        if self.cases.time_is_up():
            self.stopped = True
            item.session.shouldstop = "the time is up"
            return True
        self.reports = []
        self.cases.begin(item.nodeid)
        return None

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Setup, call and teardown of a test, one after the other."""
        self.reports.append(report)
        if report.when != "teardown":
            return
        bad = next((each for each in self.reports if each.failed), None)
        skipped = next((each for each in self.reports if each.skipped), None)
        if bad is not None:
            self.cases.end(report.nodeid, "failed", last_line(str(bad.longrepr)))
            self.cases.leave_if_sick()
        elif skipped is not None:
            self.cases.end(report.nodeid, "skipped", last_line(str(skipped.longrepr)))
        else:
            self.cases.end(report.nodeid, "passed")


def spread_over_functions(items: Sequence[Any]) -> list[Any]:
    """The first case of every test function, then the second of each, and so on."""
    functions: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    return [item for turn in zip_longest(*functions.values()) for item in turn if item is not None]


def last_line(text: str) -> str:
    """Where and why: pytest ends with the place, and begins lines of the error with ``E``."""
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join([*errors[:2], *lines[-1:]])
