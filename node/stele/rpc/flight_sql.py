"""The one question of Flight SQL that is answered: a SELECT of columns of one table, as a ScanCommand. Pure.

So ADBC's driver for Flight SQL reads tables. What joins, groups, sorts or limits is left to the program that reads.
Invariant: a query has its SQL meaning, or it is refused. `stele.model.where` judges its conditions.
"""

from __future__ import annotations

import re
from itertools import pairwise

from google.protobuf.any_pb2 import Any as AnyPB
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import StringValue

from stele.model.column import shown
from stele.model.errors import Code, Rejected
from stele.rpc.ticket import COMMAND_BYTES_MAX, ScanCommand

ANY_TAG = b"\x0a"
"""The first byte of an encoded Any. A command of ours begins with its version."""
_KIND = "type.googleapis.com/arrow.flight.protocol.sql."
_QUERY = f"{_KIND}CommandStatementQuery"
_NAME = r"""(?:"(?:[^"]|"")+"|`[^`]+`|[A-Za-z_][\w.-]*)"""
_SELECT = re.compile(
    rf"\s*SELECT\s+(?P<columns>.+?)\s+FROM\s+(?P<table>{_NAME})(?:\s+WHERE\s+(?P<where>.+?))?\s*;?\s*",
    re.IGNORECASE | re.DOTALL,
)
_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`""")
_ELSEWHERE = re.compile(r"\b(JOIN|GROUP|HAVING|ORDER|LIMIT|OFFSET|UNION|DISTINCT|AS)\b", re.IGNORECASE)
_FORM = "expected SELECT COLUMNS FROM TABLE WHERE CONDITIONS"


def command_of_sql(raw: bytes) -> ScanCommand:
    """The command of an encoded Any that holds a CommandStatementQuery.

    Raises:
        Rejected: TOO_LARGE; UNSUPPORTED_VERSION: another command of Flight SQL; INVALID_ARGUMENT: another query.
    """
    if len(raw) > COMMAND_BYTES_MAX:
        raise Rejected(
            f"the query has {len(raw)} bytes; at most {COMMAND_BYTES_MAX} are allowed; name fewer values",
            code=Code.TOO_LARGE,
        )
    try:
        command = AnyPB.FromString(raw)
        if command.type_url != _QUERY:
            kind = command.type_url.removeprefix(_KIND)
            raise Rejected(
                f"Flight SQL's {shown(kind)} is not served; only queries are", code=Code.UNSUPPORTED_VERSION
            )
        # A StringValue is what the first field of a CommandStatementQuery is: the query.
        query = StringValue.FromString(command.value).value
    except DecodeError:
        raise Rejected(f"the {len(raw)} bytes are not a command of Flight SQL") from None
    return command_of_query(query)


def command_of_query(query: str) -> ScanCommand:
    """The command for `SELECT a, b FROM t WHERE c > 5 AND d = 'x'`. `*` names all columns. Names may be in double quotes.

    Any replica serves its tickets, since a driver asks each address of a ticket once, and leaders change.

    Raises:
        Rejected: it is another query.
    """
    if "\x00" in query:
        raise _refused(query, f"it has a zero byte; {_FORM}")
    outside = _QUOTED.sub(lambda found: "x" * len(found.group()), query)
    other = _ELSEWHERE.search(outside)
    if other is not None:
        raise _refused(
            query, f"{other.group().upper()} is not served; read the rows, and do the rest in your program"
        )
    found = _SELECT.fullmatch(outside)
    if found is None:
        raise _refused(query, _FORM)
    columns, table = query[slice(*found.span("columns"))], query[slice(*found.span("table"))]
    if "(" in outside[slice(*found.span("columns"))]:
        raise _refused(query, "functions are not served; read the rows, and compute in your program")
    listed = [part.strip() for part in _split(columns)]
    if not all(re.fullmatch(_NAME, name) for name in (table, *listed) if name != "*"):
        raise _refused(query, f"a name is a word, or stands in double quotes; {_FORM}")
    if "*" in listed and listed != ["*"]:
        raise _refused(query, "* stands alone, and means all columns")
    return ScanCommand(
        table=_plain(table),
        columns=() if listed == ["*"] else tuple(_plain(part) for part in listed),
        where=query[slice(*found.span("where"))] if found.group("where") else "",
        prepare=True,
    )


def _split(columns: str) -> list[str]:
    """Parts between commas that are not within quotes."""
    outside = _QUOTED.sub(lambda found: "x" * len(found.group()), columns)
    cuts = [-1, *(at for at, sign in enumerate(outside) if sign == ","), len(columns)]
    return [columns[begin + 1 : end] for begin, end in pairwise(cuts)]


def _plain(name: str) -> str:
    """A name without its quotes."""
    if name[0] == '"':
        return name[1:-1].replace('""', '"')
    return name.strip("`")


def _refused(query: str, why: str) -> Rejected:
    return Rejected(f"query {shown(query)}: {why}")
