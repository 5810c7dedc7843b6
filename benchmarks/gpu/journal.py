"""The journal of the GPU report: a line of JSON for each event, from which an interrupted report goes on."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["CUTS_ALLOWED", "SETTLED", "Journal"]

CUTS_ALLOWED = 1
"""How often a case may be cut short from outside before it counts as one that never ends."""
SETTLED = ("passed", "failed", "skipped", "measured", "died")
"""Outcomes after which a case is not tried again."""
Event = dict[str, Any]


class Journal:
    """Events of all steps in the order in which they happened; several processes may append.

    Args:
        path: The file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, event: str, step: str = "", **details: Any) -> None:
        """Append one event; a line is written in one go, so that a process that dies leaves whole lines."""
        line = json.dumps({"event": event, "step": step, "time": round(time.time(), 2), **details})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def mend(self) -> None:
        """End the last line, where a machine went down while it was written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = self.path.read_bytes() if self.path.exists() else b""
        if content and not content.endswith(b"\n"):
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n")

    def events(self, step: str | None = None) -> Iterator[Event]:
        """All events, or those of a step; torn lines are left out."""
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue
            if step is None or event["step"] == step:
                yield event

    def header(self) -> Event | None:
        """What the report is of; None for a new one."""
        return next((event for event in self.events() if event["event"] == "report"), None)

    def outcomes(self, step: str) -> dict[str, Event]:
        """By case: the event that settled it."""
        return {event["case"]: event for event in self.events(step) if event.get("outcome") in SETTLED}

    def open_case(self, step: str) -> Event | None:
        """The case that was begun last, if nothing says how it ended."""
        begun = None
        for event in self.events(step):
            if event["event"] == "begin":
                begun = event
            elif "case" in event and event["event"] != "row":
                begun = None
        return begun

    def closed(self, step: str) -> Event | None:
        """The event that closed a step, if it is not to be gone on with."""
        return next((event for event in self.events(step) if event["event"] == "closed"), None)

    def spent(self, step: str | None = None) -> float:
        """Seconds that a step, or all of them, have taken so far."""
        return sum(event["seconds"] for event in self.events(step) if event["event"] == "spent")

    def rows(self, *steps: str) -> list[Event]:
        """Figures of some steps, or of all of them."""
        found = (event for event in self.events() if event["event"] == "row")
        return [event["row"] | {"step": event["step"]} for event in found if not steps or event["step"] in steps]

    def forget(self, steps: list[str]) -> None:
        """Leave out all that is known of some steps, so that they are done anew."""
        kept = [json.dumps(event) for event in self.events() if event["step"] not in steps]
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        part.replace(self.path)
