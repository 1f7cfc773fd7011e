"""Queries of Flight SQL as commands: what is taken has its meaning, all else is refused in plain words."""

import contextlib
import time
from dataclasses import replace

import pyarrow.flight as fl
import pytest
from google.protobuf.any_pb2 import Any as AnyPB
from google.protobuf.wrappers_pb2 import BytesValue, StringValue
from hypothesis import given
from hypothesis import strategies as st

from stele.model.errors import Code, Rejected
from stele.rpc.flight_plan import command_of
from stele.rpc.flight_sql import command_of_query, command_of_sql
from stele.rpc.ticket import COMMAND_BYTES_MAX, ScanCommand

KIND = "type.googleapis.com/arrow.flight.protocol.sql."


def encoded(query: str, kind: str = "CommandStatementQuery") -> bytes:
    value = StringValue(value=query).SerializeToString()
    return AnyPB(type_url=KIND + kind, value=value).SerializeToString()


@pytest.mark.parametrize(
    ("query", "command"),
    [
        ("SELECT * FROM flights", ScanCommand(table="flights")),
        ("select a,b from t;", ScanCommand(table="t", columns=("a", "b"))),
        (" SELECT a ,\n b\nFROM t\nWHERE a > 5\n", ScanCommand(table="t", columns=("a", "b"), where="a > 5")),
        ('SELECT "a,b", "from" FROM "my ""t"""', ScanCommand(table='my "t"', columns=("a,b", "from"))),
        ("SELECT `a b` FROM `t`", ScanCommand(table="t", columns=("a b",))),
        (
            "SELECT a FROM t WHERE a = 'x FROM y WHERE; LIMIT' AND b IN (1, 2)",
            ScanCommand(table="t", columns=("a",), where="a = 'x FROM y WHERE; LIMIT' AND b IN (1, 2)"),
        ),
        (
            "SELECT a FROM t WHERE a = 'it''s;' ;",
            ScanCommand(table="t", columns=("a",), where="a = 'it''s;'"),
        ),
        ("SELECT a FROM a.b-c", ScanCommand(table="a.b-c", columns=("a",))),
        (
            "SELECT limit, distinct FROM order-lines",
            ScanCommand(table="order-lines", columns=("limit", "distinct")),
        ),
        (
            "SELECT a FROM t WHERE offset > 5 AND order = 'x'",
            ScanCommand(table="t", columns=("a",), where="offset > 5 AND order = 'x'"),
        ),
        (
            'SELECT "a" FROM "t" WHERE "limit" > 5',
            ScanCommand(table="t", columns=("a",), where='"limit" > 5'),
        ),
    ],
)
def test_a_select_of_columns_is_a_command(query: str, command: ScanCommand) -> None:
    command = replace(command, prepare=True)
    assert command_of_query(query) == command
    assert command_of(fl.FlightDescriptor.for_command(encoded(query))) == command


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("", "SELECT is expected, not 'the end'; expected SELECT COLUMNS FROM TABLE"),
        ("SELECT 1", "a name is expected, not '1'"),
        ("DELETE FROM t", "SELECT is expected, not 'DELETE'"),
        ("SELECT a FROM t, u", "WHERE is expected, not ','"),
        ("SELECT a FROM t; DROP TABLE t", "WHERE is expected, not ';'"),
        ("SELECT a FROM t WHERE a = 1; DROP TABLE t", "more than one statement"),
        ("SELECT a FROM t WHERE", "expected SELECT COLUMNS FROM TABLE"),
        ("SELECT a FROM (SELECT a FROM t)", "a name is expected, not '\\('"),
        ("SELECT count(*) FROM t", "functions and inner queries are not served"),
        ("SELECT a AS b FROM t", "AS is not served; read the rows"),
        ("SELECT DISTINCT a FROM t", "DISTINCT is not served"),
        ("SELECT a FROM t JOIN u", "JOIN is not served"),
        ("SELECT a FROM t WHERE a > 5 ORDER BY a", "ORDER is not served"),
        ("SELECT a FROM t LIMIT 5", "LIMIT is not served"),
        ("SELECT a FROM t GROUP BY a", "GROUP is not served"),
        ("SELECT a, FROM t", "FROM is expected, not 't'"),
        ("SELECT a b FROM t", "FROM is expected, not 'b'"),
        ("SELECT 'a' FROM t", "a name is expected"),
        ("SELECT a FROM 't'", "a name is expected"),
        ("SELECT *, a FROM t", "\\* already names all columns"),
        ("SELECT a FROM t\x00", "WHERE is expected"),
    ],
)
def test_any_other_query_is_refused_with_what_to_do(query: str, why: str) -> None:
    with pytest.raises(Rejected, match=why) as refused:
        command_of_query(query)
    assert refused.value.code is Code.INVALID_ARGUMENT


def test_other_commands_of_flight_sql_are_told_apart() -> None:
    with pytest.raises(Rejected, match="'CommandGetTables' is not served; only queries are") as refused:
        command_of_sql(encoded("", "CommandGetTables"))
    assert refused.value.code is Code.UNSUPPORTED_VERSION
    with pytest.raises(Rejected, match="not a command of Flight SQL"):
        command_of_sql(b"\x0a\xff\xff")
    broken = AnyPB(
        type_url=KIND + "CommandStatementQuery", value=BytesValue(value=b"\xff").SerializeToString()
    )
    with pytest.raises(Rejected, match="not a command of Flight SQL"):
        command_of_sql(broken.SerializeToString())
    with pytest.raises(Rejected, match="at most 65536 are allowed") as refused:
        command_of_sql(encoded("SELECT a FROM t WHERE a IN (" + "1," * COMMAND_BYTES_MAX + "1)"))
    assert refused.value.code is Code.TOO_LARGE


@given(st.one_of(st.text(), st.text(alphabet="SELECTFROMWHERE selectfromwhere*,;'\"`(x) ")))
def test_no_query_ends_in_a_traceback(query: str) -> None:
    try:
        command_of_sql(encoded(query))
    except Rejected as refused:
        assert refused.code is Code.INVALID_ARGUMENT


@given(st.binary(max_size=60))
def test_no_bytes_end_in_a_traceback(raw: bytes) -> None:
    with pytest.raises(Rejected):
        command_of_sql(b"\x0a" + raw)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT" + " " * 60_000,
        "SELECT a FROM t WHERE " + " " * 30_000 + "x" + " " * 30_000 + "a;;x",
        "SELECT a FROM t WHERE a = " + "'" * 60_001,
        "SELECT " + '`"' * 30_000,
        "SELECT " + "a," * 30_000,
    ],
)
def test_the_longest_queries_are_judged_in_one_pass(query: str) -> None:
    """Each takes a few hundredths of a second. A pattern that tries again from each place would take minutes."""
    begun = time.thread_time()
    with contextlib.suppress(Rejected):
        command_of_query(query)
    assert time.thread_time() - begun < 2
