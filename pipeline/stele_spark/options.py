"""Parses and checks the options of a read, a stream or a write. Used by source.py, stream.py and sink.py;
asks no server.

Invariant: an unknown option is refused. Otherwise a misspelt `where` would read the whole table.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stele.model import texts
from stele.model.bounds import HISTORY_MAX_MS
from stele.model.errors import Rejected, SteleError
from stele.model.holds import BYTES_DEFAULT, BYTES_MAX, BYTES_MIN, EXPIRES_MAX_MS, EXPIRES_MIN_MS, name_of
from stele.model.nearest import did_you_mean

WRITE_OPS = ("upsert", "insert", "insert_ignore", "update", "update_ignore", "delete", "delete_ignore")
TABLE, EARLIEST, LATEST = STARTS = ("table", "earliest", "latest")
"""Named places where a stream may start. It may also start at a time."""
VERSIONS = ("every", "newest")
CURSOR_EXPIRES_S = 86_400
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,3})?")
"""Seconds with up to three decimals, because the command of Flight has milliseconds."""
_STALENESS_MAX_S = HISTORY_MAX_MS // 1_000
SPLIT_BYTES, _SPLIT_BYTES_MIN, _SPLIT_BYTES_MAX = 64 << 20, 1 << 16, 1 << 40
OPTIONS = {
    "masters": "host:port of the masters, separated by commas",
    "table": "the name of a table",
    "columns": "for reads: the columns to read, separated by commas",
    "where": "for reads: comparisons joined by AND",
    "snapshot": "for reads: a hybrid time, or an ISO 8601 time",
    "maxStaleness": "for reads: how many seconds old rows may be; followers serve them",
    "splitBytes": "for reads and streams: about how many bytes of files a task reads",
    "zone": "for reads and streams: where tasks run; replicas there are read first",
    "op": f"for writes: {', '.join(WRITE_OPS)}",
    "op_column": "for writes: a column of the frame that has the operation of each row",
    "rejects": "for writes: a folder for refused rows, as Parquet",
    "job": "for writes: a name; rows that another save() with this name has written count as done",
    "startingSnapshot": f"for streams: {', '.join(STARTS)}, a hybrid time, or an ISO 8601 time",
    "maxRowsPerTrigger": "for streams: about how many changes a batch has at most",
    "versions": "for streams: every change, or the newest one of each key in a batch",
    "cursor": "for streams: the name of a hold that keeps history for this stream",
    "cursorExpiresInS": "for streams: how many seconds the hold outlasts the stream",
    "cursorMaxBytes": "for streams: how many bytes of old rows the hold may keep in each replica of a tablet",
}
_OF_SPARK = ("checkpointlocation",)
"""Options of Spark itself, which Spark passes on to the sink of a stream."""
_NAMES = {name.lower(): name for name in OPTIONS}
_USES = {
    "for reads:": ("read",),
    "for reads and streams:": ("read", "stream"),
    "for streams:": ("stream",),
    "for writes:": ("write",),
}
ONLY_OF = {
    name: uses for name, what in OPTIONS.items() for begin, uses in _USES.items() if what.startswith(begin)
}


@contextmanager
def one_sentence() -> Iterator[None]:
    """A context. In a Spark worker, an error of Stele that leaves it shows only its message, without the
    worker's traceback.

    Spark reads the setting for this from the environment when it formats an exception
    (`pyspark.util.handle_worker_exception`). The worker ends with that exception, so functions of the user
    never lose their tracebacks.
    """
    try:
        yield
    except SteleError as exc:
        main = getattr(sys.modules["__main__"], "__spec__", None)
        if main is not None and main.name.startswith("pyspark."):
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise exc from None


@dataclass(frozen=True, slots=True)
class Following:
    """The options of a stream. `start`: one of STARTS, or a hybrid time; "" if not given. `rows_max`: changes
    in a batch; 0 for no limit. `every`: read every change of a key, not only the newest. `cursor`: "" for
    none.
    """

    start: str | int = ""
    rows_max: int = 0
    every: bool = True
    cursor: str = ""
    cursor_expires_s: int = CURSOR_EXPIRES_S
    cursor_bytes_max: int = BYTES_DEFAULT


@dataclass(frozen=True, slots=True)
class Options:
    """The checked options of one read, stream or write. `is_stream`: an option that only streams have was
    given. `columns`: empty for all columns of the table. `max_staleness_s`: None for rows of the present, or
    of `snapshot`.
    """

    masters: tuple[str, ...]
    table: str
    snapshot: int
    where: str
    op: str
    op_column: str = ""
    rejects: str = ""
    job: str = ""
    following: Following = Following()
    is_stream: bool = False
    columns: tuple[str, ...] = ()
    split_bytes: int = SPLIT_BYTES
    zone: str = ""
    max_staleness_s: float | None = None

    @staticmethod
    def parse(raw: dict[str, str]) -> Options:
        """Check the options that the user gave.

        Raises:
            Rejected: an option is missing or wrong. The message names all such options.
        """
        given = {key.lower(): value for key, value in raw.items() if key.lower() not in _OF_SPARK}
        faults = _unknown(given)
        masters = tuple(part.strip() for part in given.get("masters", "").split(",") if part.strip())
        if not masters:
            faults.append(f'"masters" is missing: {OPTIONS["masters"]}')
        if not given.get("table"):
            faults.append(f'"table" is missing: {OPTIONS["table"]}')
        snapshot, text = 0, given.get("snapshot", "0")
        try:
            snapshot = texts.snapshot(text)
        except ValueError as exc:
            faults.append(f'"snapshot" is {text!r}: expected a hybrid time or an ISO 8601 time ({exc})')
        max_staleness_s = _staleness_s(given, faults)
        if max_staleness_s is not None and snapshot:
            faults.append('"snapshot" and "maxStaleness" are both given: give one of them')
        op = given.get("op", "upsert").lower()
        if op not in WRITE_OPS:
            faults.append(f'"op" is {op!r}: expected one of {", ".join(WRITE_OPS)}')
        op_column = given.get("op_column", "")
        if op_column and "op" in given:
            faults.append('"op" and "op_column" are both given: give one of them')
        columns = tuple(part.strip() for part in given.get("columns", "").split(","))
        if "columns" in given and not all(columns):
            faults.append(
                f'"columns" is {given["columns"]!r}: expected names of columns, separated by commas'
            )
        split_bytes = _whole(given, "splitBytes", SPLIT_BYTES, _SPLIT_BYTES_MIN, _SPLIT_BYTES_MAX, faults)
        following = _following(given, faults)
        refuse(faults)
        table, where, rejects, job = (given.get(key, "") for key in ("table", "where", "rejects", "job"))
        is_stream = any(ONLY_OF.get(_NAMES[key]) == ("stream",) for key in given)
        wanted = columns if "columns" in given else ()
        return Options(
            masters,
            table,
            snapshot,
            where,
            op,
            op_column,
            rejects,
            job,
            following,
            is_stream,
            wanted,
            split_bytes,
            given.get("zone", ""),
            max_staleness_s,
        )

    @staticmethod
    def not_of(use: str, raw: dict[str, str]) -> list[str]:
        """Faults of options that were given, but do not apply to this use: "read", "stream" or "write"."""
        given = {_NAMES[key.lower()] for key in raw if key.lower() in _NAMES}
        return [
            f'"{name}" is an option of a {uses[0]}, not of a {use}'
            for name, uses in ONLY_OF.items()
            if name in given and use not in uses
        ]


def _following(given: dict[str, str], faults: list[str]) -> Following:
    start: str | int = given.get("startingsnapshot", "").lower()
    if start and start not in STARTS:
        try:
            start = texts.snapshot(given["startingsnapshot"])
            if not start:
                raise ValueError("0 is not a time")
        except ValueError as exc:
            faults.append(
                f'"startingSnapshot" is {given["startingsnapshot"]!r}: expected {", ".join(STARTS)}, a hybrid time or an '
                f"ISO 8601 time ({exc})"
            )
    versions = given.get("versions", VERSIONS[0]).lower()
    if versions not in VERSIONS:
        faults.append(f'"versions" is {versions!r}: expected {" or ".join(VERSIONS)}')
    if cursor := given.get("cursor", ""):
        try:
            name_of(cursor)
        except ValueError as exc:
            faults.append(f'"cursor": {exc}')
    else:
        faults += [f'"{_NAMES[key]}" needs "cursor"' for key in given if key in _OF_CURSORS]
    return Following(
        start,
        _whole(given, "maxRowsPerTrigger", 0, 1, (1 << 63) - 1, faults),
        versions == "every",
        cursor,
        _whole(
            given,
            "cursorExpiresInS",
            CURSOR_EXPIRES_S,
            EXPIRES_MIN_MS // 1_000,
            EXPIRES_MAX_MS // 1_000,
            faults,
        ),
        _whole(given, "cursorMaxBytes", BYTES_DEFAULT, BYTES_MIN, BYTES_MAX, faults),
    )


_OF_CURSORS = ("cursorexpiresins", "cursormaxbytes")


def _whole(given: dict[str, str], name: str, otherwise: int, least: int, most: int, faults: list[str]) -> int:
    text = given.get(name.lower(), "")
    if not text:
        return otherwise
    if not (text.isdecimal() and text.isascii() and least <= int(text) <= most):
        faults.append(f'"{name}" is {text!r}: expected a whole number from {least} to {most}')
        return otherwise
    return int(text)


def _staleness_s(given: dict[str, str], faults: list[str]) -> float | None:
    text = given.get("maxstaleness")
    if text is None:
        return None
    if _SECONDS.fullmatch(text) is None or float(text) > _STALENESS_MAX_S:
        faults.append(
            f'"maxStaleness" is {text!r}: expected seconds from 0 to {_STALENESS_MAX_S}, such as 5 or 0.5'
        )
        return None
    return float(text)


def _unknown(given: dict[str, str]) -> list[str]:
    if "provider" in given:  # CREATE TABLE; Spark would pass no options to readers of such a table
        return ["CREATE TABLE is not supported; use CREATE TEMPORARY VIEW ... USING stele OPTIONS (...)"]
    if "path" in given or "paths" in given:  # Spark's names for the argument of load() and save()
        return ['load() and save() take no path; name the table with option("table", ...)']
    unknown = [f'"{key}"{did_you_mean(key, OPTIONS)}' for key in given if key not in _NAMES]
    there = ", ".join(f'"{key}" ({what})' for key, what in OPTIONS.items())
    return [f"unknown option {', '.join(unknown)}; options are {there}"] if unknown else []


def refuse(faults: list[str]) -> None:
    """Raise Rejected with all faults, if there are any."""
    if faults:
        raise Rejected(f"data source stele: {'; '.join(faults)}")
