"""The report on rows that a load did not write. Prints the first ones; writes all of them to a file if one
is given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from stele.cli.output import say
from stele.model.amounts import refused_of
from stele.model.errors import Code, Rejected

if TYPE_CHECKING:
    from stele.cli.source import Source
    from stele.model.block import RowError

_SHOWN = 20


class _Refused(NamedTuple):
    place: int
    code: str
    why: str


class Faults:
    """The refused rows of one load."""

    def __init__(self) -> None:
        self._told: list[str] = []
        self.count = 0
        """The number of refused rows so far."""
        self._rejects: BinaryIO | None = None

    def keep_in(self, rejects: BinaryIO) -> None:
        """Also write all refused rows and their reasons to this file, one JSON object a line."""
        self._rejects = rejects

    def add(self, source: Source, row_errors: Sequence[RowError]) -> None:
        """Add the refused rows of one file."""
        refused = [_Refused(source.place(e.row), e.code.name, e.message) for e in row_errors]
        refused += [_Refused(line, Code.INVALID_ARGUMENT.name, why) for line, why in source.lines.errors]
        refused.sort()
        self._show(source, refused[: _SHOWN - len(self._told)])
        if self._rejects is not None and refused:
            self._keep(self._rejects, source, refused)
        self.count += len(refused)

    def _show(self, source: Source, shown: Sequence[_Refused]) -> None:
        unread = {line for line, _ in source.lines.errors}
        found = source.spans({each.place for each in shown})
        for place, code, why in shown:
            first, last = found[place].first, found[place].last
            hint = f" (quotes join lines {first} to {last} into one row: is a quote not closed?)"
            also = hint if last > first and place in unread else ""
            self._told.append(f"{Path(source.input.name).name} {source.unit} {first}: {code} {why}{also}")

    def _keep(self, sink: BinaryIO, source: Source, refused: Sequence[_Refused]) -> None:
        places = {each.place for each in refused}
        rows, found = source.rows(places), source.spans(places)
        for place, code, why in refused:
            told: dict[str, Any] = {"file": source.input.name, "code": code, "why": why}
            if source.unit == "line":
                told |= {"line": found[place].first, "row": rows[place]}
            else:
                told |= {"number": place, "values": rows[place]}
            sink.write(json.dumps(told, allow_nan=False).encode() + b"\n")

    def report(self, kept_in: str | None = None) -> None:
        """Print one line for each of the first refused rows, and the file that has them all, if there is one."""
        for line in self._told:
            say(line, err=True)
        if self.count > len(self._told):
            say(f"... and {self.count - len(self._told)} more", err=True)
        if self.count and kept_in:
            say(f"the {self.count} rows that were refused so far are in {kept_in}", err=True)

    def refuse(self, written: int, kept_in: str | None = None) -> None:
        """Raises Rejected, with the number of refused rows, if there are any."""
        if not self.count:
            return
        kept = f", and {'is' if self.count == 1 else 'are'} in {kept_in}" if kept_in else ""
        others = "the others were written" if written else "none was written"
        raise Rejected(f"{refused_of(self.count, written)}{kept}; {others}")
