"""Bounds the content of a heartbeat: cuts long texts, drops what cannot be parsed. Called by service.py.

A heartbeat is never refused for its content, because its node would then count as lost, with all its
replicas. The content that is kept goes into every cluster view, whose size is bounded (view_size.py).

Invariant: on return each text of the registration, each load and each status is within its bound. Identifiers
are valid. Configurations can be parsed and have plausible numbers.
"""

from __future__ import annotations

import asyncio

from stele.model.bounds import (
    ADDRESS_CHARS_MAX,
    INCARNATION_MAX,
    INDEX_MAX,
    LOAD_MAX,
    PLACE_CHARS_MAX,
    REPLICA_ID_MAX,
    STATUS_BYTES_MAX,
    TERM_MAX,
    TEXT_CHARS_MAX,
    VERSION_CHARS_MAX,
    WORD_CHARS_MAX,
    cut,
)
from stele.model.config import MemberType
from stele.rpc.proto import common_pb2, master_pb2

STATUSES_AT_ONCE = 128
"""The most statuses that are bounded in one step of the event loop: some 2 ms."""
_ID = 16
_MEMBER_TYPES = frozenset(int(kind) for kind in MemberType)
_REGISTRATION = (
    ("address", ADDRESS_CHARS_MAX),
    ("flight_address", ADDRESS_CHARS_MAX),
    ("machine", PLACE_CHARS_MAX),
    ("zone", PLACE_CHARS_MAX),
    ("version", VERSION_CHARS_MAX),
    ("role", WORD_CHARS_MAX),
)


async def bound_heartbeat(request: master_pb2.TSHeartbeatRequest) -> int:
    """Bound a heartbeat in place. Returns how many statuses were dropped, as too large or invalid.

    A full report has up to 2,000 statuses, so other tasks get a turn in between.
    """
    if request.HasField("registration"):
        bound_registration(request.registration)
    if request.load > LOAD_MAX:
        request.load = LOAD_MAX
    beyond = 0
    for number, status in enumerate(request.tablets, 1):
        if number % STATUSES_AT_ONCE == 0:
            await asyncio.sleep(0)
        bound_status(status)
        beyond += not _keeps(status)
    if beyond:
        kept = [status for status in request.tablets if _keeps(status)]
        del request.tablets[:]
        request.tablets.extend(kept)
    return beyond


def _keeps(status: common_pb2.ReplicaStatusPB) -> bool:
    return (
        len(status.tablet_id) == _ID
        and 0 < status.replica_id <= REPLICA_ID_MAX
        and status.term <= TERM_MAX
        and len(status.leader_node) in (0, _ID)
        and status.ByteSize() <= STATUS_BYTES_MAX
    )


def bound_registration(registration: master_pb2.NodeRegistrationPB) -> None:
    """Cut the texts of a node's registration."""
    for name, chars_max in _REGISTRATION:
        text = getattr(registration, name)
        if len(text) > chars_max:
            setattr(registration, name, cut(text, chars_max))


def bound_status(status: common_pb2.ReplicaStatusPB) -> None:
    """Cut the texts of a replica's status. Drop configurations that cannot be parsed, for example of a later
    version.
    """
    if status.HasField("committed_config") and not _sound(status.committed_config):
        status.ClearField("committed_config")
    if status.HasField("pending_config") and not _sound(status.pending_config):
        status.ClearField("pending_config")
    if status.load > LOAD_MAX:
        status.load = LOAD_MAX
    if len(status.error) > TEXT_CHARS_MAX:
        status.error = cut(status.error)
    if status.HasField("copy"):
        if len(status.copy.error) > TEXT_CHARS_MAX:
            status.copy.error = cut(status.copy.error)
        if len(status.copy.state) > WORD_CHARS_MAX:
            status.copy.state = cut(status.copy.state, WORD_CHARS_MAX)


def _sound(config: common_pb2.ConfigurationPB) -> bool:
    if not -1 <= config.opid_index <= INDEX_MAX or config.incarnation > INCARNATION_MAX:
        return False
    for peer in config.peers:
        if peer.member_type not in _MEMBER_TYPES or len(peer.node_id) != _ID:
            return False
        if not 0 < peer.replica_id <= REPLICA_ID_MAX:
            return False
    return True
