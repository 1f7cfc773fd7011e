"""Parses a query of Flight SQL, a SELECT of columns of one table, into a ScanCommand. Pure.

With it, ADBC's driver for Flight SQL can read tables. Callers do joins, groups, order and limits themselves.
`stele.model.where` checks the conditions. Invariant: the time to parse grows linearly with the length of the
query. Queries of unknown callers are parsed on the event loop.
"""

from __future__ import annotations

import re
from collections import deque
from itertools import pairwise
from typing import NamedTuple

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
_TOKEN = re.compile(
    r"\s*(?:(?P<string>'(?:[^']|'')*')"
    r"|(?P<quoted>\"(?:[^\"]|\"\")+\"|`[^`]+`)"
    r"|(?P<word>[A-Za-z_][\w.-]*)"
    r"|(?P<sign>\S))"
)
_CLAUSES = frozenset(
    [
        "AS",
        "CROSS",
        "FULL",
        "GROUP",
        "HAVING",
        "INNER",
        "JOIN",
        "LEFT",
        "LIMIT",
        "NATURAL",
        "OFFSET",
        "ORDER",
        "RIGHT",
        "UNION",
    ]
)
_FORM = "expected SELECT COLUMNS FROM TABLE WHERE CONDITIONS"


class _Token(NamedTuple):
    """`kind`: string, quoted, word or sign. `start`, `end`: where it stands in the query."""

    kind: str
    text: str
    start: int
    end: int

    @property
    def is_name(self) -> bool:
        """Whether the token can name a table or a column."""
        return self.kind in ("word", "quoted")

    def says(self, word: str) -> bool:
        """Whether the token is this keyword or symbol."""
        return self.kind != "quoted" and self.text.upper() == word


_END = _Token("end", "the end", 0, 0)


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
        # Field 1 of a CommandStatementQuery is the query. A StringValue has the same layout.
        query = StringValue.FromString(command.value).value
    except DecodeError:
        raise Rejected(f"the {len(raw)} bytes are not a command of Flight SQL") from None
    return command_of_query(query)


def command_of_query(query: str) -> ScanCommand:
    """The command for `SELECT a, b FROM t WHERE c > 5 AND d = 'x'`. `*` names all columns. Names may be in double quotes.

    Any replica serves its tickets, because a driver of Flight SQL asks each address of a ticket only once,
    and leaders change.

    Raises:
        Rejected: it is another query.
    """
    return _Query(query).command()


class _Query:
    """Parses one query, in one pass over its tokens."""

    def __init__(self, query: str) -> None:
        self._query = query
        # Without blanks at the end: a search for a token there would try each of them anew.
        self._tokens = deque(
            _Token(str(m.lastgroup), m.group(str(m.lastgroup)), *m.span(str(m.lastgroup)))
            for m in _TOKEN.finditer(query.rstrip())
        )
        if self._tokens and self._tokens[-1].says(";"):
            self._tokens.pop()

    def command(self) -> ScanCommand:
        self._expect("SELECT")
        columns = self._columns()
        self._expect("FROM")
        table = self._name()
        where = ""
        if self._tokens:
            self._expect("WHERE")
            where = self._conditions()
        return ScanCommand(table=table, columns=columns, where=where, prepare=True)

    def _columns(self) -> tuple[str, ...]:
        """Parse the names of the columns. An empty result means all columns."""
        if self._next.says("*"):
            self._tokens.popleft()
            if self._next.says(","):
                raise self._refused("* already names all columns; remove the names after it")
            return ()
        names = [self._name()]
        while self._next.says(","):
            self._tokens.popleft()
            names.append(self._name())
        return tuple(names)

    def _conditions(self) -> str:
        """Return the rest of the query, as text. `stele.model.where` checks it later, with the table's
        columns."""
        if not self._tokens:
            raise self._refused(_FORM)
        first, last = self._tokens[0], self._tokens[-1]
        for before, token in pairwise(self._tokens):
            if token.kind == "word" and token.text.upper() in _CLAUSES and not before.says("AND"):
                raise self._not_served(token)
            if token.says(";"):
                raise self._refused(f"it has more than one statement; {_FORM}")
        return self._query[first.start : last.end]

    @property
    def _next(self) -> _Token:
        return self._tokens[0] if self._tokens else _END

    def _expect(self, word: str) -> None:
        token = self._next
        if token.says(word):
            self._tokens.popleft()
        elif token.says("("):
            raise self._refused(
                "functions and inner queries are not served; read the rows, and compute in your program"
            )
        elif token.kind == "word" and token.text.upper() in _CLAUSES:
            raise self._not_served(token)
        else:
            raise self._refused(f"{word} is expected, not {shown(token.text)}; {_FORM}")

    def _name(self) -> str:
        token = self._next
        if not token.is_name:
            raise self._refused(f"a name is expected, not {shown(token.text)}; {_FORM}")
        self._tokens.popleft()
        if token.says("DISTINCT") and self._next.is_name and not self._next.says("FROM"):
            raise self._not_served(token)
        if token.kind == "word":
            return token.text
        return token.text[1:-1].replace('""', '"') if token.text[0] == '"' else token.text[1:-1]

    def _not_served(self, token: _Token) -> Rejected:
        return self._refused(
            f"{token.text.upper()} is not served; read the rows, and do the rest in your program"
        )

    def _refused(self, why: str) -> Rejected:
        return Rejected(f"query {shown(self._query)}: {why}")
