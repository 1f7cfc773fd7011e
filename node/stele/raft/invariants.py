"""Checks of Raft's invariants: of one core's state, of one step, and of all cores of a group.

Tests and the simulator call them after every step; a node never does. Each raises InvariantViolation, which
says what was seen and what the paper demands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stele.model.errors import ensure
from stele.raft.core import RaftCore
from stele.raft.effects import Role
from stele.raft.progress import Progress
from stele.raft.status import PeerState


class StepMarks(NamedTuple):
    """What `check_step` compares before and after a step; cheap to take."""

    term: int
    voted_for: int | None
    role: Role
    commit_index: int
    handed_index: int
    last_term: int
    last_index: int
    config_index: int  # of the entry that brought the active configuration, -1 for the first
    term_committed: bool


_ROLE_STEPS: dict[Role, tuple[Role, ...]] = {
    Role.NON_PARTICIPANT: (Role.LEARNER, Role.FOLLOWER),
    Role.LEARNER: (Role.FOLLOWER, Role.NON_PARTICIPANT),
    Role.FOLLOWER: (Role.CANDIDATE, Role.LEARNER, Role.NON_PARTICIPANT),
    Role.CANDIDATE: (Role.LEADER, Role.FOLLOWER, Role.LEARNER, Role.NON_PARTICIPANT),
    Role.LEADER: (Role.FOLLOWER,),
}
"""Which role may follow which. A step of several events may change the role more than once."""


def step_marks(core: RaftCore) -> StepMarks:
    """What `check_step` compares, of a core now."""
    log = core.log
    return StepMarks(
        core.term,
        core.voted_for,
        core.role,
        core.commit_index,
        log.handed_index,
        log.last_term,
        log.last_index,
        log.config.opid_index,
        core.term_committed,
    )


def check(core: RaftCore) -> None:
    """Check a state: the order of the log's marks; a leader's vote, peers and commit index."""
    log = core.log
    ensure(
        log.start.index <= log.handed_index <= core.commit_index <= log.last_index,
        f"log marks out of order: start {log.start}, handed {log.handed_index}, commit {core.commit_index}, "
        f"last {log.last_opid}",
    )
    ensure(
        log.handed_index <= log.durable_index <= log.written_index <= log.issued_index <= log.last_index,
        f"log marks out of order: handed {log.handed_index}, durable {log.durable_index}, written "
        f"{log.written_index}, issued {log.issued_index}",
    )
    ensure(log.last_term <= core.term, f"entry of term {log.last_term} in a log at term {core.term}")
    if core.role is Role.LEADER:
        me = core.config.peer(core.self_replica)
        ensure(me is not None and me.votes, "the leader is not a voter of its configuration")
        ensure(not core.failed, "a FAILED replica leads")
        ensure(
            core.voted_for == core.self_replica, f"the leader of term {core.term} voted for {core.voted_for}"
        )
        for progress in core.progress:
            _check_progress(core, progress)
        _check_committed(core)


def _check_progress(core: RaftCore, progress: Progress) -> None:
    """Check the invariants that `Progress` states for its fields."""
    faults = [why for holds, why in _promises(core, progress) if not holds]
    ensure(not faults, f"leader {core.self_replica}, peer {progress.replica_id}: {'; '.join(faults)}")


def _promises(core: RaftCore, peer: Progress) -> tuple[tuple[bool, str], ...]:
    last, now = core.log.last_index, core.state.now_ms
    replicates = peer.state is PeerState.REPLICATE
    ends = [end for end, _ in peer.inflight]
    newest = peer.inflight[-1][1] if peer.inflight else 0
    member = core.config.peer(peer.replica_id) is not None
    times = [peer.base_ms, peer.moved_ms, peer.updated_ms, peer.probed_ms, peer.round_start_ms]
    times += [ms for ms in (peer.heard_ms, peer.behind_since_ms) if ms is not None]
    return (
        (0 <= peer.match < peer.next <= last + 1, f"match {peer.match}, next {peer.next}, log to {last}"),
        (
            not peer.probe_sent or peer.state is PeerState.PROBE,
            f"a probe is under way in state {peer.state.value}",
        ),
        (replicates or not ends, f"messages are in flight in state {peer.state.value}"),
        (
            all(a < b for a, b in zip([peer.match, *ends], [*ends, peer.next], strict=True)),
            f"in flight up to {ends}, match {peer.match}, next {peer.next}",
        ),
        (
            peer.inflight_bytes == sum(size for _, size in peer.inflight),
            f"{peer.inflight_bytes} bytes are in flight, and {list(peer.inflight)}",
        ),
        (
            peer.inflight_bytes - newest < peer.window_bytes,
            f"{peer.inflight_bytes} bytes are in flight, {newest} of them in the newest message; window "
            f"{peer.window_bytes}",
        ),
        (1 <= peer.window_bytes <= peer.window_bytes_max, f"a window of {peer.window_bytes} bytes"),
        (max(times) <= now, f"a time of {max(times)} ms lies in the future of {now} ms"),
        (peer.heard_ms is None or peer.heard_ms >= peer.base_ms, "heard before it was asked"),
        (peer.reading == 0 or (replicates and peer.reading <= peer.next), f"reads from {peer.reading}"),
        ((peer.departing_until_ms is None) is member, "it must be either departing or a peer"),
        (
            peer.hold_from in (None, core.pending_change_index),
            f"held from {peer.hold_from}; the pending change is {core.pending_change_index}",
        ),
        (member or not peer.promotes, "it is to be promoted, but is not a peer"),
        (
            peer.round_target <= last,
            f"its catch-up round ends at {peer.round_target}, behind the log's end at {last}",
        ),
    )


def _check_committed(core: RaftCore) -> None:
    """Check that a leader has committed all that it can. Otherwise a write would wait for the next turn."""
    if core.commit_index == core.log.last_index:
        return
    ends = {peer.replica_id: 0 if peer.failed else peer.match_index for peer in core.status().peers}
    ends[core.self_replica] = core.log.durable_index
    held = sorted(ends[voter.replica_id] for voter in core.config.voters)[-core.config.majority]
    ensure(
        held <= core.commit_index or core.log.term_at(held) != core.term,
        f"a majority holds {held}, and the leader has committed {core.commit_index} only",
    )


def check_step(before: StepMarks, after: StepMarks) -> None:
    """Check a step: what must never fall, and what must not change within a term."""
    ensure(after.term >= before.term, f"the term fell from {before.term} to {after.term}")
    if after.term == before.term and before.voted_for is not None:
        ensure(
            after.voted_for == before.voted_for,
            f"the vote of term {after.term} changed from {before.voted_for} to {after.voted_for}",
        )
    ensure(after.commit_index >= before.commit_index, f"the commit index fell below {before.commit_index}")
    ensure(
        after.handed_index >= before.handed_index,
        f"entries handed out were taken back below {before.handed_index}",
    )
    ensure(
        after.last_index >= before.commit_index, f"committed entries up to {before.commit_index} were dropped"
    )
    if before.role is Role.LEADER and after.role is Role.LEADER and before.term == after.term:
        ensure(
            after.last_index >= before.last_index, "a leader dropped entries of its own log (Raft figure 3)"
        )


def check_change_step(before: StepMarks, after: StepMarks) -> None:
    """Check that a leader changes members only once an entry of its term, and the last change, are committed.

    Dissertation 4.1, with its erratum.
    """
    if before.role is not Role.LEADER or after.role is not Role.LEADER or before.term != after.term:
        return
    if after.config_index > before.config_index:
        ensure(after.term_committed, f"members change before anything of term {after.term} is committed")
        ensure(
            before.config_index <= after.commit_index,
            f"members change while the change at {before.config_index} is not committed",
        )


def check_role_step(before: Role, after: Role) -> None:
    """Check one change of role, as RoleChanged reports it."""
    ensure(
        before is after or after in _ROLE_STEPS[before], f"role {before.value} cannot become {after.value}"
    )


def check_group(cores: Sequence[RaftCore]) -> None:
    """Check a group: one leader per term; logs match as far as memory holds them (Raft figure 3)."""
    leaders: dict[int, int] = {}
    for core in cores:
        if core.role is Role.LEADER:
            other = leaders.setdefault(core.term, core.self_replica)
            ensure(other == core.self_replica, f"{other} and {core.self_replica} both lead term {core.term}")
    for at, one in enumerate(cores):
        for two in cores[at + 1 :]:
            _check_matching(one, two)


def _check_matching(one: RaftCore, two: RaftCore) -> None:
    low = max(one.log.start.index, two.log.start.index)
    high = min(one.log.last_index, two.log.last_index)
    # Downwards: below the highest index where the terms agree, everything must agree.
    meet = high
    while meet >= low and one.log.term_at(meet) != two.log.term_at(meet):
        meet -= 1
    floor = min(one.commit_index, two.commit_index)
    ensure(
        meet >= min(floor, high) or (meet < low and floor <= low),
        f"replicas {one.self_replica} and {two.self_replica} both committed up to {floor} but agree only up "
        f"to {meet}",
    )
    low = max(low + 1, one.log.tail_first, two.log.tail_first)
    first, second = one.log.tail(), two.log.tail()
    for index in range(low, meet + 1):
        a = first[index - one.log.tail_first]
        b = second[index - two.log.tail_first]
        ensure(a == b, f"replicas {one.self_replica} and {two.self_replica} differ at {a.opid} / {b.opid}")
