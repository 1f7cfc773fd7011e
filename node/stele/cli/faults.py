"""Why rows of a load were not written: the first of them told, all of them into a file where one is given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from stele.cli.output import say
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
    """Of one load. `rejects`: where each refused row goes, as a JSON object on a line."""

    def __init__(self, rejects: BinaryIO | None = None) -> None:
        self._told: list[str] = []
        self._count = 0
        self._rejects = rejects

    def add(self, source: Source, row_errors: Sequence[RowError]) -> None:
        """What became of one file."""
        refused = [_Refused(source.place(e.row), e.code.name, e.message) for e in row_errors]
        refused += [_Refused(line, Code.INVALID_ARGUMENT.name, why) for line, why in source.lines.errors]
        refused.sort()
        self._show(source, refused[: _SHOWN - len(self._told)])
        if self._rejects is not None and refused:
            self._keep(self._rejects, source, refused)
        self._count += len(refused)

    def _show(self, source: Source, shown: Sequence[_Refused]) -> None:
        unread = {line for line, _ in source.lines.errors}
        found = source.spans({each.place for each in shown})
        for place, code, why in shown:
            first, last = found[place].first, found[place].last
            hint = f" (lines {first} to {last} are one row by their quotes: is one not closed?)"
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

    def tell(self) -> None:
        """One line for each of the first rows."""
        for line in self._told:
            say(line, err=True)
        if self._count > len(self._told):
            say(f"... and {self._count - len(self._told)} more", err=True)

    def refuse(self, written: int, kept_in: str | None = None) -> None:
        """Raises Rejected if there was one; with their number."""
        if not self._count:
            return
        where = f"; they are in {kept_in}" if kept_in else ""
        raise Rejected(
            f"{self._count} of {written + self._count} rows were refused, the others are written{where}"
        )
