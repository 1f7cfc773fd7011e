"""Errors from the wire whose codes only a later program knows: their range says what they are."""

from __future__ import annotations

import json

import pytest

from stele.client.results import row_error_from_pb
from stele.model.errors import Code, Corrupt, InvariantViolation, Rejected, Retryable, SteleError
from stele.rpc.errors import error_from_json, error_from_pb
from stele.rpc.proto import common_pb2, tserver_pb2

LATER = [
    (12, Retryable, Code.UNAVAILABLE),
    (19, Retryable, Code.UNAVAILABLE),
    (48, Rejected, Code.INVALID_ARGUMENT),
    (49, Rejected, Code.INVALID_ARGUMENT),
    (55, Corrupt, Code.CORRUPT),
    (61, InvariantViolation, Code.INTERNAL),
]


@pytest.mark.parametrize(("number", "kind", "code"), LATER)
def test_a_code_of_a_later_program_is_judged_by_its_range(
    number: int, kind: type[SteleError], code: Code
) -> None:
    """Each was INTERNAL, "Stele is wrong": a plain refusal of a later node became an unknown outcome."""
    raw = json.dumps({"code": number, "message": "why"}).encode()
    for error in (error_from_pb(common_pb2.ErrorPB(code=number, message="why")), error_from_json(raw)):
        assert type(error) is kind and error.code is code
        assert error.args[0] == f"why (code {number}, which only a later release knows)"
    row = row_error_from_pb(tserver_pb2.RowErrorPB(row=3, code=number, message="why"))
    assert (row.row, row.code) == (3, code) and f"code {number}" in row.message


@pytest.mark.parametrize("code", [c for c in Code if c is not Code.OK])
def test_a_code_that_is_known_stays_as_it_is(code: Code) -> None:
    error = error_from_pb(common_pb2.ErrorPB(code=int(code), message="why"))
    assert error.code is code and error.args[0] == "why"


@pytest.mark.parametrize("number", [-1, -40])
def test_a_number_that_is_no_code_is_internal(number: int) -> None:
    error = error_from_json(json.dumps({"code": number, "message": "why"}).encode())
    assert error is not None and error.code is Code.INTERNAL
