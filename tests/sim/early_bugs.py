"""Faults of writes that are acknowledged in memory, for `tests/sim/bugs.py`. Each docstring says which rule it breaks."""

from __future__ import annotations

from stele.model import writeop
from stele.raft.leader import Leader
from stele.raft.peers import Peers
from stele.raft.ports import Done
from stele.tablet.applying import Applying
from stele.tablet.machine import Outcome
from stele.wal.stream import StreamLog

_foreseen = Applying.foreseen


def held_by_a_majority(peers: Peers, own_written: int) -> int:
    """A majority is enough. Then one of them that loses power makes a majority without the write."""
    held = [own_written]
    for voter in peers.voters:
        if voter in peers.progress:
            held.append(max(peers.progress[voter].match, peers.progress[voter].written))
    return sorted(held)[(len(held) - 1) // 2]


def only_what_is_committed(leader: Leader) -> int:
    """A read need not see what was acknowledged before its commit."""
    return leader.state.commit_index


def called_synced(applying: Applying, payload: bytes, timestamp: int) -> Outcome | None:
    """A client hears that its write is synced, although it is only in memory."""
    return None if _foreseen(applying, payload, timestamp) is None else Outcome(timestamp)


def whatever_it_does(applying: Applying, payload: bytes, timestamp: int) -> Outcome | None:
    """A block whose rows may be refused is told as done."""
    header, _ = writeop.decode(payload)
    return Outcome(timestamp, in_memory=True) if applying._once.surely_new(header, timestamp) else None


def before_it_is_written(stream: StreamLog, done: Done) -> None:
    """A log says that entries are written while they wait in its queue."""
    done()
