"""Commands of Flight clients, as people write them: nothing in them is guessed or dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stele.model.errors import Code, Rejected
from stele.rpc.ticket import ScanCommand

WHOLE = {"table": "flights", "columns": ["carrier"], "where": "arr_delay > 60", "limit": 5, "resumable": True}


def decoded(fields: Any) -> ScanCommand:
    return ScanCommand.decode(b"\x01" + json.dumps(fields).encode())


def test_a_command_is_read() -> None:
    command = decoded(WHOLE)
    assert command == ScanCommand("flights", "", ("carrier",), 0, "arr_delay > 60", 5, True, False)
    assert ScanCommand.decode(command.encode()) == command
    assert decoded({"table": "t"}) == decoded({"table": "t", "where": None, "limit": None, "columns": None})
    assert decoded({"table": "t", "limit": 0}).limit == 0


def test_what_a_later_program_does_not_ask_for_is_no_fault() -> None:
    """Programs send all fields that they know. One that asks for nothing may be left out."""
    assert decoded({**WHOLE, "sampled": False, "descending": None, "hint": "", "parts": []}) == decoded(WHOLE)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"were": "arr_delay > 60"}, "unknown field \"were\"; did you mean 'where'?"),
        ({"zzz": 1}, 'unknown field "zzz"; known fields are table, tablet, columns'),
        ({"columns": "carrier"}, 'columns: "carrier"; expected a list'),
        ({"columns": ["carrier", 1]}, "columns[1]: 1; expected a text"),
        ({"where": ["arr_delay > 60"]}, 'where: ["arr_delay > 60"]; expected a text'),
        ({"limit": 1.9}, "limit: 1.9; expected a whole number, 0 to"),
        ({"limit": "5"}, 'limit: "5"; expected a whole number'),
        ({"limit": -1}, "limit: -1; expected 0 to"),
        ({"snapshot": True}, "snapshot: true; expected a whole number"),
        ({"resumable": "false"}, 'resumable: "false"; expected true or false'),
        ({"statistics": 0}, "statistics: 0; expected true or false"),
        ({"table": 5}, "table: 5; expected a text"),
        ({"table": "x" * 500, "tablet": {}}, "tablet: {}; expected a text"),
    ],
)
def test_what_is_no_command_is_told(changed: dict[str, Any], told: str) -> None:
    """A condition under a wrong name was dropped, and the whole table read."""
    with pytest.raises(Rejected) as caught:
        decoded({**WHOLE, **changed})
    assert told in str(caught.value) and caught.value.code is Code.INVALID_ARGUMENT


def test_all_faults_are_told_together() -> None:
    with pytest.raises(Rejected) as caught:
        decoded({"tabel": "flights", "limit": "x", "resumable": 1})
    told = str(caught.value)
    assert all(word in told for word in ("'table'", "limit: ", "resumable: "))
    for other in ([], "flights", 7):
        with pytest.raises(Rejected, match=r"the body: .*expected an object"):
            decoded(other)
