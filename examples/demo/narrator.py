"""Tells what the operator sees and does: every line comes from a status or an event, none is made up here.

Called by __main__.py while a step waits, whatever it waits for: a line's time is when it was seen, 0.4 s after it was so.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console

from examples.demo.kube import Kube


class Narrator:
    """Follows one TabletCluster and its events; prints each thing once, with the seconds from `start` until it was seen."""

    def __init__(self, kube: Kube, cluster: str, console: Console) -> None:
        self._kube = kube
        self._cluster = cluster
        self._console = console
        self._seen: set[tuple[str, int]] = set()
        self._last: dict[str, str] = {}
        self._held: list[tuple[float, str, str]] = []
        self.start = time.monotonic()

    def say(self, text: str, style: str = "") -> None:
        """Print one line with the time in front."""
        self._print(time.monotonic(), text, style)

    def catch_up(self) -> dict[str, Any]:
        """Print what is new in events and status; returns the cluster's status."""
        status = self.look()
        for seen_at, text, style in self._held:
            self._print(seen_at, text, style)
        self._held.clear()
        return status

    def look(self) -> dict[str, Any]:
        """As `catch_up`, without printing: what is seen now is printed later, with the time of now."""
        now = time.monotonic()
        for event in self._kube.events():
            if event.key in self._seen:
                continue
            self._seen.add(event.key)
            mark = "yellow" if event.warning else ""
            self._held.append(
                (now, f"event   {event.kind}/{event.name} {event.reason}: {event.message}", mark)
            )
        status = self._kube.status("TabletCluster", self._cluster)
        for key, text in _status_lines(status).items():
            if self._last.get(key) != text:
                self._last[key] = text
                self._held.append((now, f"status  {text}", ""))
        return status

    def _print(self, at: float, text: str, style: str) -> None:
        self._console.print(f"{at - self.start:6.1f} s  {text}", style=style, highlight=False, markup=False)


def _status_lines(status: dict[str, Any]) -> dict[str, str]:
    """The parts of a status that are worth a line each, by what they speak of."""
    lines: dict[str, str] = {}
    for one in status.get("conditions", ()):
        lines[f"condition {one['type']}"] = f"{one['type']}={one['status']} {one['reason']}: {one['message']}"
    tablets = status.get("tablets")
    if tablets:
        lines["tablets"] = "tablets: " + ", ".join(f"{value} {key}" for key, value in tablets.items())
    for heal in status.get("healing", {}).get("active", ()):
        done, total = heal.get("bytesDone"), heal.get("bytesTotal")
        size = f", {done} of {total} bytes" if total else ""
        if "etaSeconds" in heal:
            size += f", {heal['etaSeconds']} s left"
        following = f", then {heal['next']}" if heal.get("next") else ""
        what = f"tablet {heal['tablet']}" if "tablet" in heal else "cluster"  # some steps concern no tablet
        lines[f"heal {what}"] = f"{what}: {heal['step']}{size}{following} ({heal.get('reason', '')})"
    for member in status.get("members", ()):
        fate = f", {member['fate']}" if member.get("fate") else ""
        lines[f"member {member['name']}"] = (
            f"{member['name']} on {member.get('machine') or 'no machine'}: {member['state']}{fate}"
        )
    return lines
