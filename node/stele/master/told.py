"""What a heartbeat tells, within bounds: texts are cut, and a status that is too large is left out. Called by service.py.

A heartbeat is never refused for a long text: its node would count as lost, with all its replicas. Every view of the
cluster holds what is kept of it, in one message of 16 MiB.

Invariant: on return no text of the registration, and no status, is larger than its bound.
"""

from __future__ import annotations

from stele.model.bounds import (
    ADDRESS_CHARS_MAX,
    PLACE_CHARS_MAX,
    STATUS_BYTES_MAX,
    TEXT_CHARS_MAX,
    VERSION_CHARS_MAX,
    WORD_CHARS_MAX,
    cut,
)
from stele.rpc.proto import common_pb2, master_pb2

_REGISTRATION = (
    ("address", ADDRESS_CHARS_MAX),
    ("flight_address", ADDRESS_CHARS_MAX),
    ("machine", PLACE_CHARS_MAX),
    ("zone", PLACE_CHARS_MAX),
    ("version", VERSION_CHARS_MAX),
    ("role", WORD_CHARS_MAX),
)


def bound_heartbeat(request: master_pb2.TSHeartbeatRequest) -> int:
    """Cut what is too long; how many statuses were left out because the rest of them is too large."""
    if request.HasField("registration"):
        bound_registration(request.registration)
    beyond = 0
    for status in request.tablets:
        if status.error or status.HasField("copy"):
            bound_status(status)
        beyond += status.ByteSize() > STATUS_BYTES_MAX
    if beyond:
        kept = [status for status in request.tablets if status.ByteSize() <= STATUS_BYTES_MAX]
        del request.tablets[:]
        request.tablets.extend(kept)
    return beyond


def bound_registration(registration: master_pb2.NodeRegistrationPB) -> None:
    """Cut the texts of a node's registration."""
    for name, chars_max in _REGISTRATION:
        text = getattr(registration, name)
        if len(text) > chars_max:
            setattr(registration, name, cut(text, chars_max))


def bound_status(status: common_pb2.ReplicaStatusPB) -> None:
    """Cut the texts of a replica's status."""
    if len(status.error) > TEXT_CHARS_MAX:
        status.error = cut(status.error)
    if status.HasField("copy"):
        if len(status.copy.error) > TEXT_CHARS_MAX:
            status.copy.error = cut(status.copy.error)
        if len(status.copy.state) > WORD_CHARS_MAX:
            status.copy.state = cut(status.copy.state, WORD_CHARS_MAX)
