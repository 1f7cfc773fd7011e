"""Errors on the wire. Only here a `Code` becomes a gRPC status, and a gRPC status becomes a `SteleError`.

Called by the server's interceptor, the stream servers, the channel pool and the client. The gRPC status is
for tools and other languages; our programs read the code from the trailing metadata. Invariant: only the
message of a `SteleError`, or a fixed sentence, is sent; never a traceback.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import grpc
import structlog

from stele.model import bounds
from stele.model.errors import (
    Code,
    NotLeader,
    Rejected,
    Retryable,
    StartRefused,
    SteleError,
    error_for,
    let_go,
)
from stele.model.ids import is_id
from stele.model.jsons import parse_json
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.logging import OncePer
from stele.rpc.proto import common_pb2

log = structlog.get_logger("stele.rpc")

CODE_KEY = "stele-code"
LEADER_KEY = "stele-leader"
REFUSAL_KEY = "stele-refusal"
"""For a refused start of a node: the master's node id, the number of masters, the newest incarnation that it
knows."""
RETRY_KEY = "stele-retry-after-ms"
RETRY_AFTER_MS_MAX = 60_000
"""The longest retry-after hint that a caller accepts."""
_MESSAGE_BYTES_MAX = 2_000  # HTTP/2 libraries limit trailing metadata to 8 KiB
_INTERNAL = "the server failed to answer; its log says why"

_STATUS = {
    Code.OK: grpc.StatusCode.OK,
    Code.NOT_LEADER: grpc.StatusCode.FAILED_PRECONDITION,
    Code.NO_QUORUM: grpc.StatusCode.UNAVAILABLE,
    Code.THROTTLED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.NOT_READY: grpc.StatusCode.UNAVAILABLE,
    Code.TIMED_OUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Code.STEPPING_DOWN: grpc.StatusCode.UNAVAILABLE,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.UNKNOWN_OUTCOME: grpc.StatusCode.DEADLINE_EXCEEDED,
    Code.SNAPSHOT_NOT_READY: grpc.StatusCode.UNAVAILABLE,
    Code.DISK_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.ALREADY_PRESENT: grpc.StatusCode.ALREADY_EXISTS,
    Code.CAS_FAILED: grpc.StatusCode.ABORTED,
    Code.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.UNSUPPORTED_VERSION: grpc.StatusCode.UNIMPLEMENTED,
    Code.TABLET_DELETED: grpc.StatusCode.NOT_FOUND,
    Code.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Code.CORRUPT: grpc.StatusCode.DATA_LOSS,
    Code.IO_ERROR: grpc.StatusCode.INTERNAL,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
}

_once = OncePer()
_KNOWN = frozenset(map(int, Code))
_PLAINEST = (
    (Code.INVALID_ARGUMENT, Code.UNAVAILABLE),
    (Code.CORRUPT, Code.INVALID_ARGUMENT),
    (Code.INTERNAL, Code.CORRUPT),
)
"""(first number above the range, the code that stands for unknown ones in it)."""

# A status without our code comes from gRPC itself, or from a server that is not Stele's.
_FOREIGN = {
    grpc.StatusCode.UNAVAILABLE: Code.UNAVAILABLE,
    grpc.StatusCode.CANCELLED: Code.UNAVAILABLE,
    grpc.StatusCode.ABORTED: Code.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Code.TIMED_OUT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Code.TOO_LARGE,
    grpc.StatusCode.UNIMPLEMENTED: Code.UNSUPPORTED_VERSION,
    grpc.StatusCode.INVALID_ARGUMENT: Code.INVALID_ARGUMENT,
}

_FOREIGN_SERVER = "another program listens there, not a Stele server"
_PLAIN = (
    ("Connection refused", "connection refused"),
    ("before receiving SETTINGS", "no answer"),
    ("timeout", "no answer"),
    ("timed out", "no answer"),
    ("No route to host", "no route to the host"),
    ("Network is unreachable", "the network is unreachable"),
    ("Failed parsing HTTP/2", _FOREIGN_SERVER),
    ("Received http2 header with status", _FOREIGN_SERVER),
    ("Connection reset", "the server closed the connection"),
    ("Socket closed", "the server closed the connection"),
)
"""Phrases of gRPC, and what they mean. The first one found counts."""


def status_of(code: Code) -> grpc.StatusCode:
    """The gRPC status for `code`. Codes without one of their own are FAILED_PRECONDITION."""
    return _STATUS.get(code, grpc.StatusCode.FAILED_PRECONDITION)


def code_of(number: int) -> Code:
    """The code for a number from the wire. A number that only a later release knows becomes the general code
    of its range."""
    try:
        return Code(number)
    except ValueError:
        return next((code for below, code in _PLAINEST if 0 < number < below), Code.INTERNAL)


def with_number(number: int, message: str) -> str:
    """Return the message. If this program does not know the code, add its number."""
    return message if number in _KNOWN else f"{message} (code {number}, which only a later release knows)"


def error_from(number: int, message: str, leader_hint: str = "", retry_after_ms: int = 0) -> SteleError:
    """The exception for a code, message and hints from the wire."""
    code = code_of(number)
    if code is Code.NOT_LEADER:
        return NotLeader(message, leader_hint=leader_hint)
    error = error_for(code, with_number(number, message))
    error.retry_after_ms = max(0, min(retry_after_ms, RETRY_AFTER_MS_MAX))
    return error


def outcome_of(error: SteleError) -> str:
    """The outcome of a request that ended with this error, as metrics tell it: retry, rejected or failed."""
    return (
        "retry" if isinstance(error, Retryable) else "rejected" if isinstance(error, Rejected) else "failed"
    )


def as_stele_error(exc: BaseException, *, where: str) -> SteleError:
    """`exc` if it is a SteleError; otherwise an INTERNAL without details, which is logged here once.

    For code that answers a request: drops the traceback, so that nothing of the request outlives the answer."""
    if isinstance(exc, SteleError):
        let_go(exc)
        return exc
    _once.tell(log.error, "a request failed because of a bug", where, type(exc), where=where, exc_info=exc)
    let_go(exc)
    return SteleError(_INTERNAL, code=Code.INTERNAL)


async def abort_with(context: Any, exc: SteleError) -> NoReturn:
    """End a call on the server with `exc`: its status and message, with code and leader hint as trailing
    metadata."""
    trailing = [(CODE_KEY, str(int(exc.code)))]
    if isinstance(exc, NotLeader) and exc.leader_hint:
        trailing.append((LEADER_KEY, exc.leader_hint))
    if isinstance(exc, StartRefused):
        trailing.append((REFUSAL_KEY, f"{exc.master} {exc.masters} {exc.newest}"))
    if exc.retry_after_ms:
        trailing.append((RETRY_KEY, str(exc.retry_after_ms)))
    await context.abort(status_of(exc.code), message_of(exc), tuple(trailing))
    raise exc


def from_rpc_error(exc: BaseException, *, where: str = "") -> SteleError:
    """The error of a failed call. `exc` is a grpc.RpcError. `where` names the server in the message."""
    if isinstance(exc, SteleError):
        return exc
    if not isinstance(exc, grpc.aio.AioRpcError):
        return error_for(Code.UNAVAILABLE, f"{where}: {exc}" if where else str(exc))
    details = exc.details() or exc.code().name
    trailing = {key: value for key, value in exc.trailing_metadata() or ()}
    number = bounds.digits(str(trailing.get(CODE_KEY, "")))
    if number is not None:
        if REFUSAL_KEY in trailing:
            return _start_refused(code_of(number), details, str(trailing[REFUSAL_KEY]))
        retry_after_ms = bounds.digits(str(trailing.get(RETRY_KEY, ""))) or 0
        return error_from(number, details, str(trailing.get(LEADER_KEY, "")), retry_after_ms)
    code = _FOREIGN.get(exc.code(), Code.INTERNAL)
    details = _plain(exc.code(), details)
    return error_for(code, f"{where}: {details}" if where else details)


def _start_refused(code: Code, message: str, refusal: str) -> SteleError:
    master, *rest = refusal.split(" ")
    numbers = [bounds.digits(text) for text in rest]
    if len(numbers) != 2 or None in numbers or not is_id(master):
        return error_for(code, message)
    masters, newest = (number or 0 for number in numbers)
    return StartRefused(message, code=code, master=master, masters=masters, newest=newest)


def was_answered(error: SteleError) -> bool:
    """Whether a Stele program answered the call that ended in `error`, which `from_rpc_error` made."""
    call = error.__cause__
    return isinstance(call, grpc.aio.AioRpcError) and any(
        key == CODE_KEY for key, _ in call.trailing_metadata() or ()
    )


def error_to_pb(exc: SteleError) -> common_pb2.ErrorPB:
    """An error as a message of a stream."""
    hint = exc.leader_hint if isinstance(exc, NotLeader) else ""
    return common_pb2.ErrorPB(
        code=int(exc.code),
        message=message_of(exc),
        leader_hint=id_to_pb(hint),
        retry_after_ms=min(exc.retry_after_ms, RETRY_AFTER_MS_MAX),
    )


def error_from_pb(pb: common_pb2.ErrorPB) -> SteleError:
    """The error in a message of a stream."""
    return error_from(pb.code, pb.message, id_from_pb(pb.leader_hint), pb.retry_after_ms)


def error_to_json(exc: SteleError) -> bytes:
    """An error for Arrow Flight: the extra info of its status."""
    hint = exc.leader_hint if isinstance(exc, NotLeader) else ""
    return json.dumps({"code": int(exc.code), "message": message_of(exc), "leader": hint}).encode()


def error_from_json(raw: bytes) -> SteleError | None:
    """The error in a Flight status's extra info; None if there is none of ours."""
    try:
        fields = parse_json(raw)
        return error_from(int(fields["code"]), str(fields["message"]), str(fields.get("leader", "")))
    except (ValueError, TypeError, KeyError):
        return None


def _plain(status: grpc.StatusCode, details: str) -> str:
    """gRPC's message in plain words, if it is known."""
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer"
    for found, meaning in _PLAIN:
        if found in details:
            return meaning
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return "the server there does not know this request; is it a Stele master or node of this version?"
    return details


def message_of(exc: SteleError) -> str:
    """The message, cut to what is sent: headers are bounded, and a byte that does not print takes three
    there."""
    return str(exc.args[0]).encode("utf-8", "replace")[:_MESSAGE_BYTES_MAX].decode("utf-8", "ignore")
