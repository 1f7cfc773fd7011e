"""A group of real cores in the simplest world there is; what scenarios are played on.

A message waits until it is delivered; disks are quick unless one is stalled; all clocks agree. Says in words what the
cores do. Invariant: after each event a core keeps `stele.raft.invariants`.
"""

from __future__ import annotations

from dataclasses import replace

from stele.model.config import Configuration, MemberType
from stele.model.entry import Entry, EntryKind
from stele.model.ids import ReplicaId
from stele.raft import RaftCore, RaftOptions
from stele.raft.effects import (
    ChangeCommitted,
    ChangeRefused,
    Committed,
    ConfigChanged,
    Effect,
    PeerForgot,
    PeerNeedsCopy,
    PeerReached,
    PeerSound,
    Persist,
    ProposalLost,
    ProposalRefused,
    Proposed,
    ReadLog,
    ReadReady,
    ReadRefused,
    Role,
    RoleChanged,
    Send,
    TransferDone,
    TransferFailed,
)
from stele.raft.events import (
    Event,
    InitialState,
    LogRead,
    Persisted,
    Received,
    Start,
)
from stele.raft.invariants import check, check_step, step_marks
from stele.raft.messages import Message
from stele.raft.ports import fold_records, persist_calls
from tests.raft.memory_log import MemoryLog


class ScenarioError(AssertionError):
    """A sentence that is not understood, or not true."""


def name(replica_id: int | None) -> str:
    return "nobody" if replica_id is None else f"n{replica_id}"


def describe_config(config: Configuration) -> str:
    marks = {MemberType.VOTER: "", MemberType.NON_VOTER: " learner", MemberType.WITNESS: " witness"}
    parts = (f"n{p.replica_id}{' pre-follower' if p.promote else marks[p.member_type]}" for p in config.peers)
    return f"{config.opid_index} ({', '.join(parts)})"


class _Staggered:
    """Chance without chance: the lower a replica's number, the sooner it campaigns."""

    def __init__(self, number: int) -> None:
        self._number = number

    def randint(self, a: int, b: int, /) -> int:
        """From `a` on, 40 apart."""
        return min(a + 40 * (self._number - 1), b)


class _Member:
    def __init__(self, replica_id: int, initial: InitialState) -> None:
        self.initial = initial
        self.log = MemoryLog()
        self.log.end_snapshot(initial.log_start, initial.config)
        if initial.term:
            self.log.append_term(initial.term)
        if initial.entries:
            self.log.append_entries(initial.entries)
        self.log.sync(self.log.pending)
        self.core: RaftCore | None = None
        self.replica_id = ReplicaId(replica_id)
        self.stalled = False
        self.durable = 0
        self.waiting: list[Send] = []


class Group:
    """Its members, and what is under way between them."""

    def __init__(self) -> None:
        self.now = 1000
        self.members: dict[int, _Member] = {}
        self.wire: list[tuple[int, int, Message]] = []
        self.said: list[str] = []
        self.blocked: list[tuple[int, int]] = []
        self.contexts = 0
        self.options = RaftOptions()

    def _add(self, number: int, initial: InitialState) -> None:
        member = self.members[number] = _Member(number, initial)
        self._start(member, None)

    def _start(self, member: _Member, hint: int | None, rows: int = 0) -> None:
        loaded = fold_records(member.log.load())
        assert loaded.config is not None
        initial = replace(
            member.initial,
            term=loaded.hard_state.term,
            voted_for=loaded.hard_state.voted_for,
            log_start=loaded.start,
            config=loaded.config,
            entries=loaded.entries,
            commit_index=max(rows, loaded.start.index),
            leader_hint=None if hint is None else ReplicaId(hint),
        )
        member.durable = 0
        member.core = RaftCore(self.options, member.replica_id, initial, _Staggered(member.replica_id))
        self._feed(member.replica_id, Start(self.now))

    def _deliver_at(self, at: int) -> None:
        sender, to, message = self.wire.pop(at)
        if (sender, to) in self.blocked or self.members[to].core is None:
            return
        self._feed(to, Received(ReplicaId(sender), message, self.now))

    def _core(self, number: str) -> RaftCore:
        core = self.members[int(number)].core
        if core is None:
            raise ScenarioError(f"n{number} is down")
        return core

    def _feed(self, number: int, event: Event) -> None:
        member = self.members[number]
        core = member.core
        if core is None:
            raise ScenarioError(f"n{number} is down")
        before = step_marks(core)
        effects = core.step(event)
        check_step(before, step_marks(core))
        check(core)
        for effect in effects:
            self._do(member, effect)
        if not member.stalled:
            self._sync(number)

    def _sync(self, number: int) -> None:
        member = self.members[number]
        while member.log.pending and not member.stalled:
            member.log.sync(member.log.pending)

    def _do(self, member: _Member, effect: Effect) -> None:
        me = f"n{member.replica_id}"
        say = self.said.append
        match effect:
            case Persist(id=persist_id):
                for call in persist_calls(member.log, effect, lambda: self._persisted(member, persist_id)):
                    call()
            case Send(after=after):
                if after > member.durable:
                    member.waiting.append(effect)
                else:
                    self._post(member, effect)
            case Committed(entries):
                say(f"{me} commits {', '.join(_tell(e) for e in entries)}")
            case Proposed(_, opid):
                say(f"{me} proposes {opid}")
            case ProposalRefused(_, code, message) | ReadRefused(_, code, message):
                say(f"{me} refuses: {code.name}: {message}")
            case ChangeRefused(_, code, message):
                say(f"{me} refuses the change: {code.name}: {message}")
            case TransferFailed(_, code, message):
                say(f"{me} gives up the transfer: {code.name}: {message}")
            case ProposalLost(opid):
                say(f"{me} loses {opid}")
            case ReadReady(_, index):
                say(f"{me} may serve the read at {index}")
            case RoleChanged(role, term, leader, cause, serves):
                extra = " and does not serve" if role is Role.LEADER and not serves else ""
                say(f"{me} is {role.value.lower()} of term {term}{extra}, led by {name(leader)}: {cause}")
            case ConfigChanged(config, committed, cause):
                say(
                    f"{me} {'has committed' if committed else 'takes'} configuration {describe_config(config)}: {cause}"
                )
            case ChangeCommitted():
                say(f"{me} has made the change")
            case TransferDone():
                say(f"{me} has handed over")
            case PeerNeedsCopy(replica_id, cause):
                say(f"{me} finds that n{replica_id} needs a copy: {cause}")
            case PeerForgot(replica_id, cause):
                say(f"{me} finds that n{replica_id} forgot: {cause}")
            case PeerReached(replica_id, reached, cause):
                how = "answers again" if reached else "does not answer"
                say(f"{me} finds that n{replica_id} {how}: {cause}")
            case PeerSound(replica_id, sound, cause):
                how = "is sound again" if sound else "has FAILED"
                say(f"{me} finds that n{replica_id} {how}: {cause}")
            case ReadLog(to, first_index, _):
                say(f"{me} reads its log from {first_index} for n{to}")
                entries = []
                while (entry := member.log.entry(first_index + len(entries))) is not None:
                    entries.append(entry)
                self._feed(member.replica_id, LogRead(to, first_index, tuple(entries)))

    def _persisted(self, member: _Member, persist_id: int) -> None:
        member.durable = persist_id
        ready = [s for s in member.waiting if s.after <= persist_id]
        member.waiting = [s for s in member.waiting if s.after > persist_id]
        for send in ready:
            self._post(member, send)
        self._feed(member.replica_id, Persisted(persist_id))

    def _post(self, member: _Member, send: Send) -> None:
        self.wire.append((member.replica_id, send.to, send.message))


def _tell(entry: Entry) -> str:
    return f"{entry.opid}" if entry.kind is EntryKind.WRITE else f"{entry.opid} {entry.kind.name}"
