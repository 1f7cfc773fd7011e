"""Checks messages of other replicas against the bounds of `stele.model.bounds` before the core sees them.

Owned by StartedReplica, called for every message. A message that breaks a bound is dropped and reported to
the host. It makes no replica FAILED. Faults that only the log can show are left to the core, which ignores
such a message (`MessageIgnored`).

Invariants: entries that pass have consecutive indexes, and terms that never fall and do not exceed the
message's. Configurations among them have voters. A message with a term far above the replica's raises the
replica's term by TERM_JUMP_MAX only. So a replica that was away for long catches up in steps. No single
message brings a term near its highest value.
"""

from __future__ import annotations

from stele.consensus.ports import Host
from stele.consensus.timestamps import decode_ceiling
from stele.model.bounds import (
    ADDRESS_CHARS_MAX,
    INCARNATION_MAX,
    INDEX_MAX,
    PEERS_MAX,
    REPLICA_ID_MAX,
    TERM_JUMP_MAX,
    TERM_MAX,
    TIME_MAX,
)
from stele.model.clock import physical_us, utc
from stele.model.config import Configuration, decode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Corrupt, SteleError
from stele.model.ids import NodeId
from stele.raft.core import RaftCore
from stele.raft.messages import Message, UpdateRequest, UpdateResponse


class MessageBounds:
    """The bounds on messages to one replica."""

    __slots__ = ("_core", "_host")

    def __init__(self, core: RaftCore, host: Host) -> None:
        self._core = core
        self._host = host

    def admit(self, from_node: NodeId, message: Message) -> Message | None:
        """Return the message for the core, which may differ from the one received.

        None: it was dropped, and the host was told.
        """
        term_max = self._core.term + TERM_JUMP_MAX
        if message.term > term_max:
            if message.term > TERM_MAX or term_max > TERM_MAX:
                self._host.dropped(from_node, "term", f"term {message.term}; at most {TERM_MAX}")
                return None
            # The core takes from such an answer only that there is a higher term.
            return UpdateResponse(term_max, False)
        if type(message) is UpdateRequest and message.entries:
            fault = self._fault(message)
            if fault is not None:
                self._host.dropped(from_node, *fault)
                return None
        return message

    def _fault(self, update: UpdateRequest) -> tuple[str, str] | None:
        """(cause, why) of the first entry that breaks a bound; None if there is none."""
        index, term, term_max = update.preceding.index, update.preceding.term, update.term
        latest, write = self._host.latest_time(), EntryKind.WRITE
        for entry in update.entries:
            index += 1
            if entry.index != index or not term <= entry.term <= term_max:
                return "entries", (
                    f"entry {entry.opid} of an update of term {term_max}; expected {index} of term {term} or "
                    f"above"
                )
            term = entry.term
            if entry.timestamp > latest or entry.kind is not write:
                fault = _entry_fault(entry, TIME_MAX if index <= update.commit_index else latest)
                if fault is not None:
                    return fault
        return None


def _entry_fault(entry: Entry, latest: int) -> tuple[str, str] | None:
    time = entry.timestamp
    if entry.kind is EntryKind.CEILING:
        try:
            time = max(time, decode_ceiling(entry.payload))
        except Corrupt as exc:
            return "entries", f"entry {entry.opid}: {exc.args[0]}"
    if time > latest:
        return "time", (
            f"entry {entry.opid} is of {utc(physical_us(time))}; the latest time allowed is "
            f"{utc(physical_us(latest))}"
        )
    if entry.kind is EntryKind.CONFIG:
        try:
            fault = configuration_fault(decode_configuration(entry.payload))
        except SteleError as exc:
            fault = str(exc.args[0])
        if fault:
            return "configuration", f"entry {entry.opid}: {fault}"
    return None


def configuration_fault(config: Configuration) -> str:
    """Why no leader could have made this configuration; "" if one could."""
    if not config.voters:
        return "a configuration without voters"
    if len(config.peers) > PEERS_MAX:
        return f"a configuration of {len(config.peers)} peers; at most {PEERS_MAX}"
    if not -1 <= config.opid_index <= INDEX_MAX:
        return f"a configuration of index {config.opid_index}; at most {INDEX_MAX}"
    if not 0 <= config.incarnation <= INCARNATION_MAX:
        return f"a configuration of incarnation {config.incarnation}; at most {INCARNATION_MAX}"
    if len({peer.replica_id for peer in config.peers}) < len(config.peers):
        return "a configuration that names a replica twice"
    for peer in config.peers:
        if not 0 < peer.replica_id <= REPLICA_ID_MAX:
            return f"a configuration with replica {peer.replica_id}; expected 1 to {REPLICA_ID_MAX}"
        if len(peer.address) > ADDRESS_CHARS_MAX:
            return f"a configuration with an address of {len(peer.address)} characters; at most {ADDRESS_CHARS_MAX}"
    return ""
