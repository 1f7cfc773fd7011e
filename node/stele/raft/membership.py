"""Which membership changes are safe. Pure functions over configurations and what the leader knows of its
peers.

Invariant: two configurations that follow each other differ by one voter at most, so their majorities meet
(dissertation 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stele.model.config import Configuration, MemberType, Peer
from stele.model.errors import Code
from stele.model.ids import OPID_NONE
from stele.raft.events import ChangeType, ProposeChange


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """What the leader knows of a peer, or of itself.

    `stuck`: the peer lacks entries, and acknowledges none.
    """

    match_index: int
    reachable: bool
    failed: bool
    has_data: bool
    stuck: bool = False

    @property
    def helps(self) -> bool:
        """Whether this peer can help to commit entries that are sent now."""
        return self.reachable and not self.stuck


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a change is refused."""

    code: Code
    message: str


_UNKNOWN = KnownPeer(0, False, False, False)


def changed_peers(config: Configuration, change: ProposeChange) -> tuple[Peer, ...] | Refusal:
    """The peers after a change, or why the change is malformed."""
    peer = change.peer
    present = config.peer(peer.replica_id)
    if change.change_type is ChangeType.ADD:
        if present is not None or config.peer_on(peer.node_id) is not None:
            return Refusal(
                Code.ALREADY_PRESENT,
                f"replica {peer.replica_id} or its node {peer.node_id} is a peer already",
            )
        return _well_formed(peer) or (*config.peers, peer)
    if present is None:
        return Refusal(
            Code.NOT_FOUND, f"replica {peer.replica_id} is not a peer of configuration {config.opid_index}"
        )
    if change.change_type is ChangeType.REMOVE:
        return tuple(p for p in config.peers if p is not present)
    modified = replace(
        present,
        member_type=peer.member_type,
        promote=peer.promote,
        address=peer.address or present.address,
        witness_start=present.witness_start if peer.member_type is MemberType.WITNESS else OPID_NONE,
    )
    # A MODIFY that changes nothing is a fence: it raises opid_index, so that orders planned before it are
    # refused (CAS).
    if peer.member_type is MemberType.WITNESS and present.member_type is not MemberType.WITNESS:
        return Refusal(
            Code.INVALID_ARGUMENT,
            f"replica {peer.replica_id}: a peer becomes a WITNESS only by being added as one",
        )
    return _well_formed(modified) or tuple(modified if p is present else p for p in config.peers)


def _well_formed(peer: Peer) -> Refusal | None:
    if peer.promote and peer.member_type is not MemberType.NON_VOTER:
        return Refusal(
            Code.INVALID_ARGUMENT, f"replica {peer.replica_id}: only a NON_VOTER can have promote set"
        )
    if peer.member_type is MemberType.WITNESS and peer.witness_start == OPID_NONE:
        return Refusal(Code.INVALID_ARGUMENT, f"replica {peer.replica_id}: a WITNESS needs witness_start")
    return None


def unsafe(
    before: Configuration,
    after: tuple[Peer, ...],
    seen: Mapping[int, KnownPeer],
    commit_index: int,
    term_at: Callable[[int], int | None],
) -> Refusal | None:
    """Why this step could cost the group its majority or its data; None if it is safe.

    The checks have a fixed order, and the first reason is given. So the same change is refused in the same
    words.
    """
    voters = tuple(p for p in after if p.votes)
    if not voters:
        return Refusal(Code.UNSAFE_CHANGE, "no voter would be left; add another voter first")
    return (
        _unready_voter(before, voters, seen)
        or _unreachable_majority(before, voters, seen)
        or _witness_start(before, voters, seen, commit_index, term_at)
        or _witness_majority(voters, seen)
    )


def _unready_voter(
    before: Configuration, voters: tuple[Peer, ...], seen: Mapping[int, KnownPeer]
) -> Refusal | None:
    for peer in voters:
        old = before.peer(peer.replica_id)
        known = seen.get(peer.replica_id, _UNKNOWN)
        if old is None and peer.member_type is MemberType.WITNESS and len(before.voters) > 1:
            continue  # a majority of the new configuration does not need it
        if old is not None and old.member_type is peer.member_type:
            continue
        if known.failed:
            return Refusal(
                Code.UNSAFE_CHANGE,
                f"replica {peer.replica_id} is FAILED and must not vote again; copy it under a new "
                f"replica_id",
            )
        if old is None or not known.reachable:
            return Refusal(
                Code.UNSAFE_CHANGE,
                f"replica {peer.replica_id} does not answer this leader; add it as a NON_VOTER with promote, "
                f"and it becomes a voter once it answers and has caught up",
            )
        if not known.has_data:
            return Refusal(
                Code.UNSAFE_CHANGE, f"replica {peer.replica_id} holds no rows yet; wait for its copy"
            )
    return None


def _unreachable_majority(
    before: Configuration, voters: tuple[Peer, ...], seen: Mapping[int, KnownPeer]
) -> Refusal | None:
    old_voters = before.voters
    if len(old_voters) == 1:
        return None
    old_ids = tuple(p.replica_id for p in old_voters)
    known = {p.replica_id: seen.get(p.replica_id, _UNKNOWN) for p in voters if p.replica_id in old_ids}
    helping = [f for f in known.values() if f.helps]
    majority = len(voters) // 2 + 1
    if len(helping) >= majority:
        return None
    # The new configuration is in force before it is committed, and only its own voters can commit it. A
    # removed voter that comes back cannot help.
    stuck = [str(n) for n, f in known.items() if f.reachable and f.stuck]
    if stuck:
        return Refusal(
            Code.UNSAFE_CHANGE,
            f"{len(helping)} of the {len(voters)} voters of the new configuration can be reached and keep up "
            f"(one that is being added does not count), but {majority} are needed; replica {', '.join(stuck)} answers but "
            f"acknowledges no new entry: its disk may hang, or it needs a copy; wait, or restart its node",
        )
    return Refusal(
        Code.UNSAFE_CHANGE,
        f"{len(helping)} of the {len(voters)} voters of the new configuration can be reached (one that is "
        f"being added does not count), but {majority} are needed; first remove or demote the dead voters",
    )


def _witness_start(
    before: Configuration,
    voters: tuple[Peer, ...],
    seen: Mapping[int, KnownPeer],
    commit_index: int,
    term_at: Callable[[int], int | None],
) -> Refusal | None:
    for peer in voters:
        if peer.member_type is not MemberType.WITNESS or before.peer(peer.replica_id) is not None:
            continue
        start = peer.witness_start
        if start.index > commit_index or term_at(start.index) != start.term:
            return Refusal(
                Code.UNSAFE_CHANGE,
                f"witness_start {start} is not a committed entry of the leader's log (committed up to "
                f"{commit_index})",
            )
        for other in voters:
            known = seen.get(other.replica_id, _UNKNOWN)
            # A voter that needs a copy or has FAILED never gets the entries below the start, with or without the witness.
            catches_up = known.helps and not known.failed
            if other.member_type is MemberType.VOTER and catches_up and known.match_index < start.index:
                return Refusal(
                    Code.UNSAFE_CHANGE,
                    f"replica {other.replica_id} holds the log only up to {known.match_index}, below "
                    f"witness_start {start}",
                )
    return None


def _witness_majority(voters: tuple[Peer, ...], seen: Mapping[int, KnownPeer]) -> Refusal | None:
    starts = [p.witness_start.index for p in voters if p.member_type is MemberType.WITNESS]
    if not starts:
        return None
    highest = max(starts)
    lacking = [
        p
        for p in voters
        if p.member_type is MemberType.VOTER and seen.get(p.replica_id, _UNKNOWN).match_index < highest
    ]
    majority = len(voters) // 2 + 1
    if len(starts) + len(lacking) >= majority:
        return Refusal(
            Code.UNSAFE_CHANGE,
            f"{len(starts)} witnesses and {len(lacking)} voters that lack a witness's start could be a "
            f"majority of {len(voters)} without the rows; promote a witness or wait first",
        )
    return None
