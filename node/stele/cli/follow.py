"""Lines of JSON for a program that follows a command: progress once a second, then the result or the error.

With STELE_TERMINATION_LOG the last line is also written to that file, where Kubernetes finds it. Invariant: the last line
says how the command ended, and is printed before it ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import click

from stele.cli.errors import BUG, TRY_AGAIN, exit_code
from stele.cli.output import say, show_json
from stele.model import texts
from stele.model.clock import physical_us
from stele.model.errors import Code, Rejected, SteleError

F = TypeVar("F", bound=Callable[..., Any])
_EVERY_S = 1.0
_MESSAGE_CHARS = 1_500
_VARIABLE = "STELE_TERMINATION_LOG"
AGAIN = frozenset((Code.CHANGE_IN_PROGRESS, Code.SNAPSHOT_TOO_OLD, Code.SCHEMA_MISMATCH))
"""Refusals after which the very same command may succeed."""


def follow_option(command: F) -> F:
    """Add the option --json-progress to a command."""
    return click.option(
        "--json-progress",
        "follow",
        is_flag=True,
        help="Print lines of JSON for programs: progress, then the result or the error.",
    )(command)


def refuse_both(follow: bool, as_json: bool) -> None:
    """Raises UsageError if both forms of JSON are asked for."""
    if follow and as_json:
        raise click.UsageError("--json and --json-progress exclude each other; give one of them")


class Following:
    """While it is open, it prints lines if `on`. Its methods may be called in any thread."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self._lock = threading.Lock()
        self._last_s = -_EVERY_S

    def progress(self, **known: int | list[str] | None) -> None:
        """Print how far the command is, at most once a second. None: a number that is not known."""
        if not self.on:
            return
        with self._lock:
            if time.monotonic() - self._last_s < _EVERY_S:
                return
            self._last_s = time.monotonic()
            _line({"progress": {name: value for name, value in known.items() if value is not None}})

    def result(self, found: dict[str, Any]) -> None:
        """Print the result, once all is done."""
        if self.on:
            self._end({"result": found})

    def __enter__(self) -> Following:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Print the error. A refusal that may pass ends the process with TRY_AGAIN."""
        if not self.on or exc is None or not isinstance(exc, Exception):
            return
        if isinstance(exc, click.exceptions.Exit):
            return
        message = str(exc.args[0]) if exc.args else type(exc).__name__
        code = exc.code if isinstance(exc, SteleError) else None
        passes = isinstance(exc, Rejected) and code in AGAIN
        ends_with = TRY_AGAIN if passes else exit_code(exc) if isinstance(exc, SteleError) else BUG
        self._end(
            {
                "error": {
                    "code": code.name if code is not None else "",
                    "message": message[:_MESSAGE_CHARS],
                    "again": ends_with == TRY_AGAIN,
                }
            }
        )
        if passes and code is not None:
            say(f"stele: {code.name}: {message}", err=True)
            sys.exit(TRY_AGAIN)

    def _end(self, last: dict[str, Any]) -> None:
        with self._lock:
            text = _line(last)
        if path := os.environ.get(_VARIABLE):
            Path(path).write_text(text + "\n")


def moment_from(text: str) -> datetime:
    """The time that --at gives. Raises Rejected."""
    try:
        return datetime.fromtimestamp(physical_us(texts.snapshot(text)) / 1e6, UTC)
    except ValueError as exc:
        raise Rejected(f"--at {text}: expected a hybrid time or an ISO 8601 time ({exc})") from exc


def moment_of(snapshot: int) -> str:
    """The time of a hybrid time, as Kubernetes writes it."""
    return datetime.fromtimestamp(physical_us(snapshot) / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _line(what: dict[str, Any]) -> str:
    show_json(what, one_line=True)
    sys.stdout.flush()
    return json.dumps(what, default=str)
