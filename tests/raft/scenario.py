"""Runs scenarios written in prose: one sentence per line, what a group of real cores does and what must hold then.

Called by test_scenarios.py. A line that starts with `>` is what the group says after the sentence above it; it is
compared with what happens, or written anew (`python -m tests.raft.scenario --rewrite`).

The world is simple: a message waits until it is delivered; disks are quick unless a sentence stalls one; all clocks
agree. Invariant: after each sentence every core keeps `stele.raft.invariants`.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stele.model.config import Configuration, MemberType, Peer
from stele.model.entry import Entry, EntryKind
from stele.model.ids import NodeId, OpId, ReplicaId
from stele.raft.effects import (
    Role,
)
from stele.raft.events import (
    ChangeType,
    Compacted,
    DataArrived,
    Event,
    Fitness,
    InitialState,
    PeerFailed,
    Propose,
    ProposeChange,
    ReportFailed,
    RequestRead,
    SyncStalled,
    Tick,
    TransferLeadership,
)
from stele.raft.invariants import check_group
from tests.raft.group import Group, ScenarioError, describe_config, name

_TYPES = {"voter": MemberType.VOTER, "learner": MemberType.NON_VOTER, "witness": MemberType.WITNESS}


def _peer(text: str) -> Peer:
    """`4`, `4 learner`, `4 pre-follower`, `4 witness from 1.3`."""
    words = text.split()
    kind = words[1] if len(words) > 1 else "voter"
    promote = kind == "pre-follower"
    member_type = MemberType.NON_VOTER if promote else _TYPES[kind]
    number = int(words[0].lstrip("n"))
    peer = Peer(NodeId(f"{number:032x}"), ReplicaId(number), f"10.0.0.{number}:7050", member_type, promote)
    return replace(peer, witness_start=_opid(words[3])) if member_type is MemberType.WITNESS else peer


def _opid(text: str) -> OpId:
    term, index = text.split(".")
    return OpId(int(term), int(index))


class Scenario(Group):
    """One group and its story."""

    def run(self, text: str, *, rewrite: bool) -> str:
        """Take a file's sentences; the file as it should be.

        Raises:
            ScenarioError: where what happens is not what is written, unless rewriting.
        """
        out: list[str] = []
        lines = text.splitlines()
        at = 0
        while at < len(lines):
            line = lines[at].strip()
            at += 1
            if not line or line.startswith("#"):
                if line.startswith("# Scenario"):
                    self.__init__()  # type: ignore[misc]
                out.append(line)
                continue
            expected = []
            while at < len(lines) and lines[at].lstrip().startswith(">"):
                expected.append(lines[at].strip())
                at += 1
            self.said = []
            self._sentence(line)
            said = [f"> {s}" for s in self.said]
            if said != expected and not rewrite:
                raise ScenarioError(
                    "\n".join([f"line {at}: {line}", "written:", *expected, "happened:", *said])
                )
            out += [line, *said]
        return "\n".join(out) + "\n"

    def _sentence(self, line: str) -> None:
        for pattern, act in _SENTENCES:
            found = re.fullmatch(pattern, line)
            if found is not None:
                act(self, *found.groups())
                check_group([m.core for m in self.members.values() if m.core is not None])
                return
        raise ScenarioError(f"not understood: {line}")

    # Sentences: making a group

    def group(self, peers: str) -> None:
        config = Configuration(-1, tuple(_peer(p) for p in peers.split(", ")))
        for peer in config.peers:
            self._add(peer.replica_id, InitialState(0, None, OpId(0, 0), config))

    def one_entry_each(self) -> None:
        self.options = replace(self.options, batch_bytes_max=1, probe_bytes_max=1)

    def group_with_logs(self, terms: str) -> None:
        """`n1 1 1 2, n2 1`: one log per replica, by the terms of its entries; all have seen the highest term."""
        logs = [
            (int(w[0].lstrip("n")), [int(t) for t in w[1:]])
            for w in (part.split() for part in terms.split(", "))
        ]
        config = Configuration(-1, tuple(_peer(str(number)) for number, _ in logs))
        newest = max(t for _, log in logs for t in log)
        for number, log in logs:
            entries = tuple(
                Entry(t, i, EntryKind.WRITE, 0, f"{t}.{i}".encode()) for i, t in enumerate(log, start=1)
            )
            self._add(number, InitialState(newest, None, OpId(0, 0), config, entries))

    def new_replica(self, number: str, start: str, kind: str | None) -> None:
        """A fresh replica, outside of any configuration or from a copy's checkpoint."""
        opid = _opid(start)
        config = Configuration(-1, ())
        if opid.index:
            source = next(
                m for m in self.members.values() if m.core is not None and m.core.log.last_index >= opid.index
            )
            assert source.core is not None
            config = source.core.log.config_at(opid.index)
        initial = InitialState(opid.term, None, opid, config, commit_index=opid.index)
        self._add(int(number), replace(initial, witness_without_data=kind is not None))

    # Sentences: what happens

    def campaigns(self, number: str) -> None:
        core = self._core(number)
        core.state.timer.due_ms = self.now
        self._feed(int(number), Tick(self.now))

    def deliver_all(self) -> None:
        for _ in range(10_000):
            if not self.wire:
                return
            self._deliver_at(0)
        raise ScenarioError("messages never end")

    def deliver_one(self, sender: str, to: str) -> None:
        for at, (frm, dest, _) in enumerate(self.wire):
            if (frm, dest) == (int(sender), int(to)):
                self._deliver_at(at)
                return
        raise ScenarioError(f"nothing is under way from n{sender} to n{to}")

    def drop_all(self) -> None:
        self.wire.clear()

    def cut_off(self, numbers: str) -> None:
        inside = [int(n.lstrip("n")) for n in numbers.split(", ")]
        for one in self.members:
            for two in self.members:
                if (one in inside) != (two in inside):
                    self.blocked.append((one, two))

    def rejoin(self) -> None:
        self.blocked.clear()

    def passes(self, milliseconds: str) -> None:
        """Time passes in steps of a heartbeat, everything is delivered after each."""
        end = self.now + int(milliseconds)
        while self.now < end:
            self.now = min(self.now + 25, end)
            for number, member in list(self.members.items()):
                if member.core is not None and self.now >= member.core.next_deadline_ms:
                    self._feed(number, Tick(self.now))
            self.deliver_all()

    def writes(self, number: str, count: str | None) -> None:
        for _ in range(int(count or 1)):
            self.contexts += 1
            self._feed(
                int(number), Propose(self.contexts, EntryKind.WRITE, f"write {self.contexts}".encode())
            )

    def reads(self, number: str) -> None:
        self.contexts += 1
        self._feed(int(number), RequestRead(self.contexts))

    def change(self, number: str, verb: str, peer: str, cas: str | None) -> None:
        kind = {"add": ChangeType.ADD, "remove": ChangeType.REMOVE, "make": ChangeType.MODIFY}[verb]
        self.contexts += 1
        expected = self._core(number).config.opid_index if cas is None else int(cas)
        self._feed(int(number), ProposeChange(self.contexts, kind, _peer(peer), expected))

    def transfer(self, number: str, target: str) -> None:
        self.contexts += 1
        to = None if target == "anybody" else ReplicaId(int(target.lstrip("n")))
        self._feed(int(number), TransferLeadership(self.contexts, to, self.now))

    def crashes(self, number: str) -> None:
        member = self.members[int(number)]
        member.core = None
        member.log.crash(random.Random(0))
        member.waiting = []
        self.wire = [w for w in self.wire if w[1] != int(number)]

    def restarts(self, number: str, rows: str | None, hint: str | None) -> None:
        member = self.members[int(number)]
        member.stalled = False
        self._start(member, None if hint is None else int(hint), 0 if rows is None else _opid(rows).index)

    def disk_stalls(self, number: str) -> None:
        self.members[int(number)].stalled = True

    def disk_goes_on(self, number: str) -> None:
        self.members[int(number)].stalled = False
        self._sync(int(number))

    def event(self, number: str, what: str, about: str | None) -> None:
        events: dict[str, Event] = {
            "says that its sync stalls": SyncStalled(self.now),
            "has FAILED": ReportFailed("damage"),
            "gets its rows": DataArrived(),
            "has a wrong clock": Fitness(False),
            "has a right clock again": Fitness(True),
        }
        if what == "sees the node fail of":
            self._feed(int(number), PeerFailed(ReplicaId(int((about or "").lstrip("n")))))
        elif what == "drops its log up to":
            self._feed(int(number), Compacted(_opid(about or "")))
        else:
            self._feed(int(number), events[what])

    # Sentences: what must hold

    def is_role(self, number: str, role: str, term: str) -> None:
        core = self._core(number)
        seen = f"{core.role.value.lower()} of term {core.term}"
        self._demand(seen == f"{role} of term {term}", f"n{number} is {seen}")

    def has_log(self, number: str, terms: str) -> None:
        log = self._core(number).log
        seen = " ".join(str(log.term_at(i)) for i in range(log.start.index + 1, log.last_index + 1))
        self._demand(seen == terms, f"n{number} has the log {seen}")

    def has_committed(self, number: str, index: str) -> None:
        seen = self._core(number).commit_index
        self._demand(seen == int(index), f"n{number} has committed up to {seen}")

    def knows_term_committed(self, number: str, what: str) -> None:
        status = self._core(number).status()
        seen = f"its leader is {name(status.leader)}, term {'' if status.term_committed else 'not '}known committed"
        self._demand(status.term_committed == (what == "something"), f"n{number} does not: {seen}")

    def has_config(self, number: str, config: str) -> None:
        seen = describe_config(self._core(number).config)
        self._demand(seen == config, f"n{number} has configuration {seen}")

    def all_agree(self) -> None:
        cores = [
            m.core
            for m in self.members.values()
            if m.core is not None and m.core.role is not Role.NON_PARTICIPANT
        ]
        seen = {(c.term, c.leader, c.log.last_opid, c.commit_index) for c in cores}
        self._demand(len(seen) == 1, f"they differ: {sorted(map(str, seen))}")

    def _demand(self, true: bool, seen: str) -> None:
        if not true:
            raise ScenarioError(f"not so: {seen}")


_N = r"n(\d+)"
_SENTENCES: tuple[tuple[str, Callable[..., None]], ...] = (
    (r"a group of (.+)", Scenario.group),
    (r"a group with logs (.+)", Scenario.group_with_logs),
    (r"messages carry one entry each", Scenario.one_entry_each),
    (rf"a new replica {_N} from (\d+\.\d+)( without rows)?", Scenario.new_replica),
    (rf"{_N} campaigns", Scenario.campaigns),
    (r"deliver all", Scenario.deliver_all),
    (rf"deliver from {_N} to {_N}", Scenario.deliver_one),
    (r"drop all", Scenario.drop_all),
    (r"cut off (.+)", Scenario.cut_off),
    (r"all can talk again", Scenario.rejoin),
    (r"(\d+) ms pass", Scenario.passes),
    (rf"{_N} writes(?: (\d+))?", Scenario.writes),
    (rf"{_N} reads", Scenario.reads),
    (
        rf"{_N} is asked to (add|remove|make) (n\d+(?: voter| learner| pre-follower| witness from \d+\.\d+)?)(?: at (-?\d+))?",
        Scenario.change,
    ),
    (rf"{_N} is asked to hand over to (anybody|n\d+)", Scenario.transfer),
    (rf"{_N} crashes", Scenario.crashes),
    (rf"{_N} restarts(?: with rows up to (\d+\.\d+))?(?:, told that n(\d+) leads)?", Scenario.restarts),
    (rf"the disk of {_N} stalls", Scenario.disk_stalls),
    (rf"the disk of {_N} goes on", Scenario.disk_goes_on),
    (
        rf"{_N} (says that its sync stalls|has FAILED|gets its rows|has a wrong clock|has a right clock again)()",
        Scenario.event,
    ),
    (rf"{_N} (sees the node fail of|drops its log up to) (\S+)", Scenario.event),
    (rf"{_N} is (leader|follower|candidate|learner|non_participant) of term (\d+)", Scenario.is_role),
    (rf"{_N} has the log ([\d ]*)", Scenario.has_log),
    (rf"{_N} has committed up to (\d+)", Scenario.has_committed),
    (rf"{_N} knows (something|nothing) of its leader's term to be committed", Scenario.knows_term_committed),
    (rf"{_N} has configuration (.+)", Scenario.has_config),
    (r"all agree", Scenario.all_agree),
)


def scenario_files() -> list[Path]:
    """All scenario files."""
    return sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


if __name__ == "__main__":
    if sys.argv[1:] != ["--rewrite"]:
        sys.exit("usage: python -m tests.raft.scenario --rewrite")
    for path in scenario_files():
        path.write_text(Scenario().run(path.read_text(), rewrite=True))
