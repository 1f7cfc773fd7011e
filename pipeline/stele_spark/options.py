"""The options of a read or a write, checked. Used by source.py and sink.py; asks nobody.

Invariant: an unknown option is refused. A misspelt `where` would read the whole table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stele.model import texts
from stele.model.errors import Rejected, SteleError
from stele.model.nearest import did_you_mean

WRITE_OPS = ("upsert", "insert", "insert_ignore", "update", "update_ignore", "delete", "delete_ignore")
OPTIONS = {
    "masters": "host:port of the masters, separated by commas",
    "table": "the name of a table",
    "where": "for reads: comparisons joined by AND",
    "snapshot": "for reads: a hybrid time, or an ISO 8601 time",
    "op": f"for writes: {', '.join(WRITE_OPS)}",
    "op_column": "for writes: a column of the frame that has the operation of each row",
    "rejects": "for writes: a folder for refused rows, as Parquet",
}
ONLY_OF = {"where": "read", "snapshot": "read", "op": "write", "op_column": "write", "rejects": "write"}


@contextmanager
def one_sentence() -> Iterator[None]:
    """Within the block, in a Spark worker: errors of Stele show only their message, without the worker's
    traceback.

    Spark reads the setting from the environment when it formats an exception
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
class Options:
    """The options of one read or write, checked."""

    masters: tuple[str, ...]
    table: str
    snapshot: int
    where: str
    op: str
    op_column: str = ""
    rejects: str = ""

    @staticmethod
    def parse(raw: dict[str, str]) -> Options:
        """Check the options that the user gave.

        Raises:
            Rejected: naming every option that is missing or wrong.
        """
        given = {key.lower(): value for key, value in raw.items()}
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
        op = given.get("op", "upsert").lower()
        if op not in WRITE_OPS:
            faults.append(f'"op" is {op!r}: expected one of {", ".join(WRITE_OPS)}')
        op_column = given.get("op_column", "")
        if op_column and "op" in given:
            faults.append('"op" and "op_column" are both given: give one of them')
        refuse(faults)
        table, where, rejects = given["table"], given.get("where", ""), given.get("rejects", "")
        return Options(masters, table, snapshot, where, op, op_column, rejects)


def _unknown(given: dict[str, str]) -> list[str]:
    if "provider" in given:  # CREATE TABLE; Spark would pass no options to readers of such a table
        return ["CREATE TABLE is not supported; use CREATE TEMPORARY VIEW ... USING stele OPTIONS (...)"]
    if "path" in given or "paths" in given:  # Spark's names for the argument of load() and save()
        return ['load() and save() take no path; name the table with option("table", ...)']
    unknown = [f'"{key}"{did_you_mean(key, OPTIONS)}' for key in given if key not in OPTIONS]
    there = ", ".join(f'"{key}" ({what})' for key, what in OPTIONS.items())
    return [f"unknown option {', '.join(unknown)}; options are {there}"] if unknown else []


def refuse(faults: list[str]) -> None:
    """Raise Rejected with all faults, if there are any."""
    if faults:
        raise Rejected(f"data source stele: {'; '.join(faults)}")
