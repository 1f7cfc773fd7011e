"""Makes a replica the only voter of its tablet after a lost majority: says what to write, in which order. The
caller writes. Used on a running node and on a volume that no process uses.

1. the superblock with the higher incarnation: from here on the replica hears no former peer, and leads
   nobody;
2. in its log a PROMOTE record, and a configuration of itself alone as the next entry, in one sync.

Invariant: a crash between the two leaves a replica that can do nothing until the same order comes again. All
that its log holds is kept, whether it was committed or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stele.consensus.superblock import DataState, Superblock
from stele.model.config import Configuration, MemberType, Peer, encode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Rejected
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId, StreamKey
from stele.model.incarnation import is_given_up, shown, within_reach
from stele.wal.stream import StreamLog


@dataclass(frozen=True, slots=True)
class SoleVoter:
    """The order to make a replica the only voter.

    `incarnation`: that of the tablet from now on. `term`: higher than any term that a replica reported.
    `at_least`: the replica's log must reach up to this entry.
    """

    key: StreamKey
    incarnation: int
    term: int
    at_least: OpId = OPID_NONE
    reason: str = ""


def check_order(block: Superblock, last_logged: OpId, order: SoleVoter) -> None:
    """Refuse an order that this replica cannot carry out.

    Raises:
        Rejected: STALE_INCARNATION, the order is of another incarnation with no more recoveries than the
            replica's, or with far too many more. CAS_FAILED, the replica's log is shorter than the
            administrator saw. INVALID_ARGUMENT, the replica holds no rows.
    """
    own = block.tablet_incarnation
    told = order.incarnation
    if not told or is_given_up(told, own) or not within_reach(told, own):
        raise Rejected(
            f"replica {order.key} is of incarnation {shown(own)}; the order is for {shown(told)}; run the command again",
            code=Code.STALE_INCARNATION,
        )
    if block.data_state is not DataState.READY:
        raise Rejected(
            f"replica {order.key} is {block.data_state.name}: it has no rows of its own; choose another replica"
        )
    if last_logged < order.at_least:
        raise Rejected(
            f"the log of replica {order.key} ends at {last_logged}, but the order expects {order.at_least}; "
            f"run the command again to see what would be lost",
            code=Code.CAS_FAILED,
        )


def with_incarnation(block: Superblock, order: SoleVoter) -> Superblock:
    """The superblock with the order's incarnation. It is written before the records of `make_sole_voter`."""
    return replace(block, tablet_incarnation=order.incarnation, leader_hint=block.replica_id)


def is_done(config: Configuration, order: SoleVoter) -> bool:
    """Whether `config`, the last configuration of the replica's log, shows that the order was carried out."""
    return config.incarnation >= order.incarnation


def make_sole_voter(
    stream: StreamLog, node_id: NodeId, address: str, order: SoleVoter, done: Callable[[], None]
) -> Configuration:
    """Append the records that make the replica the only voter. Returns the new configuration.

    `done` is called once they are synced. The term is also above every term that this replica knows. The
    PROMOTE record is its vote for itself in that term.

    Raises:
        SteleError: as appends to StreamLog.
    """
    replica_id: ReplicaId = stream.key.replica_id
    last = stream.last_opid
    term = max(order.term, stream.hard_state.term + 1, last.term + 1)
    peer = Peer(node_id, replica_id, address, MemberType.VOTER)
    config = Configuration(last.index + 1, (peer,), order.incarnation)
    entry = Entry(term, config.opid_index, EntryKind.CONFIG, 0, encode_configuration(config))
    stream.append_promote(term, replica_id)
    stream.append_entries((entry,), done)
    return config
