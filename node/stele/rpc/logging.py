"""Sets up structlog for a process, and keeps outsiders from filling the log. The command line calls it once.

Invariant: one event is one line, on standard error, with a time, a level, a logger and its ids as key-values.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

from stele.model.texts import printable

SOURCES_MAX = 1_024
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


def setup(*, json_lines: bool | None = None, level: str = "info", node_id: str = "") -> None:
    """Log to standard error, as JSON lines or text. None: text on a terminal, else JSON.

    Each line names `node_id` as `local_node`. Text has colours only on a terminal, and not if NO_COLOR is set
    (no-color.org)."""
    terminal = sys.stderr.isatty()
    if json_lines is None:
        json_lines = not terminal
    renderer: Any
    if json_lines:
        renderer = structlog.processors.JSONRenderer(default=str)
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=terminal and not os.environ.get("NO_COLOR"))
    escaped = [] if json_lines else [_escaped]
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        *([_naming(node_id)] if node_id else []),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if json_lines:
        processors.append(structlog.processors.format_exc_info)
    numeric = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*processors, *escaped, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(numeric),
        logger_factory=_named_logger,
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=max(numeric, logging.WARNING), handlers=[_OfLibraries()])


class _OfLibraries(logging.Handler):
    """Writes what libraries log (asyncio, kopf) as lines like ours."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            level = max((n for n in _LEVELS if n <= record.levelno), default=logging.DEBUG)
            fault = {"exc_info": record.exc_info} if record.exc_info else {}
            structlog.get_logger().log(level, record.getMessage(), library=record.name, **fault)
        except Exception:  # noqa: BLE001 - as any handler of this module
            self.handleError(record)


def _escaped(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape text from other processes, so that it cannot control the terminal or end a line."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = printable(value)
    return event


def _naming(node_id: str) -> Callable[[Any, str, MutableMapping[str, Any]], MutableMapping[str, Any]]:
    """Adds this node's id to each line, from any thread."""
    name = node_id[:8]

    def put(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["local_node"] = name
        return event

    return put


class _NamedLogger(structlog.WriteLogger):
    """Writes lines. Its name is the positional argument of `structlog.get_logger`."""


def _named_logger(*names: str) -> _NamedLogger:
    return _NamedLogger(sys.stderr)


class OncePer:
    """Logs each kind of fault once per source in `seconds`. The next line says how many were left out."""

    __slots__ = ("_clock", "_seconds", "_seen")

    def __init__(self, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._seen: dict[
            tuple[str, object], list[float]
        ] = {}  # (time of the last line, faults left out since)

    def tell(self, log: Callable[..., Any], event: str, source: str, fault: object, /, **fields: Any) -> bool:
        """Log `event` with `fields` by `log`, a logger's method, unless that was done in this period. Returns
        whether it logged.

        `fault`: one of a fixed set. Sources and faults beyond SOURCES_MAX share a line for each fault.
        """
        now = self._clock()
        key = (source, fault)
        seen = self._seen.get(key)
        if seen is None and len(self._seen) >= SOURCES_MAX:
            self._forget(now)
            if len(self._seen) >= SOURCES_MAX:
                key = ("", fault)
                seen = self._seen.get(key)
        if seen is not None and now - seen[0] < self._seconds:
            seen[1] += 1
            return False
        if seen is not None and seen[1]:
            fields["left_out"] = int(seen[1])
        self._seen[key] = [now, 0]
        log(event, **fields)
        return True

    def _forget(self, now: float) -> None:
        self._seen = {key: seen for key, seen in self._seen.items() if now - seen[0] < self._seconds}
