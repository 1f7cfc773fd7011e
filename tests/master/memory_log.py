"""The catalog port in memory: real key spaces, one shared list of entries, no raft. Fakes only what raft would decide."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from stele.model import writeop
from stele.model.config import Configuration, Peer
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, NotLeader, Retryable, error_for
from stele.model.ids import NodeId, ReplicaId
from stele.model.kvop import KeyOperation, encode_operations
from stele.model.writeop import BodyKind, WriteHeader
from stele.tablet.keyspace import BYTES_MAX, KeySpace


class MemoryGroup:
    """The replicas of one catalog tablet. `elect` makes one of them lead; nobody does at first."""

    def __init__(self, directory: Path, node_ids: Sequence[str], bytes_max: int = BYTES_MAX) -> None:
        self.term = 0
        self.leader = ""
        self.entries: list[Entry] = []
        peers = tuple(Peer(NodeId(n), ReplicaId(i + 1), f"127.0.0.{i + 1}:1") for i, n in enumerate(node_ids))
        self.config = Configuration(-1, peers)
        self.members = {
            n: MemoryLog(self, n, KeySpace.create(directory / n, bytes_max=bytes_max)) for n in node_ids
        }
        self.lose_next: str = ""
        """What becomes of the next proposal: "" committed; "lost" or "unknown": the leader steps down, and it is
        dropped, or committed without an answer."""

    def elect(self, node_id: str, *, unknown_to: str = "") -> None:
        """Make `node_id` lead a new term ("": nobody). The member `unknown_to` is cut off: it hears of nothing more, and
        if it led it believes so still."""
        if unknown_to:
            self.members[unknown_to].cut_off = (self.term, self.leader)
        self.term += 1
        self.leader = node_id
        for member in self.members.values():
            member.tell()

    def append(self, payload: bytes) -> Entry:
        """Commit one entry everywhere."""
        entry = Entry(self.term, len(self.entries) + 1, EntryKind.WRITE, len(self.entries) + 1, payload)
        self.entries.append(entry)
        return entry


class MemoryLog:
    """See CatalogLog."""

    def __init__(self, group: MemoryGroup, node_id: str, key_space: KeySpace) -> None:
        self._group = group
        self._node_id = node_id
        self._listeners: list[Callable[[], None]] = []
        self.key_space: KeySpace | None = key_space
        self.cut_off: tuple[int, str] | None = None
        self.behind_ms: int | None = 0
        """How long ago its leader was heard, and all applied that was committed then."""

    def tell(self) -> None:
        for listener in self._listeners:
            listener()

    @property
    def is_leader(self) -> bool:
        return self.leader_node == self._node_id

    @property
    def term(self) -> int:
        return self.cut_off[0] if self.cut_off is not None else self._group.term

    @property
    def leader_node(self) -> str:
        return self.cut_off[1] if self.cut_off is not None else self._group.leader

    async def fresh(self, max_age_ms: int) -> bool:
        return bool(self.leader_node) and self.behind_ms is not None and self.behind_ms <= max_age_ms

    @property
    def committed_config(self) -> Configuration:
        return self._group.config

    async def propose(self, operations: Sequence[KeyOperation]) -> None:
        body = encode_operations(operations)
        header = WriteHeader(writeop.NO_CLIENT, 0, 0, 0, writeop.digest(body), kind=BodyKind.KEYSPACE)
        await self.read_barrier()
        if self.key_space is not None:
            self.key_space.check_operations(operations)
        fate, self._group.lose_next = self._group.lose_next, ""
        if fate != "lost":
            entry = self._group.append(writeop.encode(header, body))
            reached = {n: m for n, m in self._group.members.items() if m.cut_off is None}
            outcomes = {n: m.apply(entry) for n, m in reached.items()}
            code, message = outcomes[self._node_id]
        if fate:
            self._group.elect("")
            raise Retryable("leadership was lost meanwhile", code=Code.UNKNOWN_OUTCOME)
        if code is not Code.OK:
            raise error_for(code, message)

    def apply(self, entry: Entry) -> tuple[Code, str]:
        if self.key_space is None:
            return Code.OK, ""
        outcome = self.key_space.apply(entry)
        return outcome.code, outcome.message

    async def read_barrier(self) -> None:
        await asyncio.sleep(0)
        if not self.is_leader:
            raise NotLeader("not the leader", leader_hint=self.leader_node)
        if self.cut_off is not None:
            raise Retryable("no majority answers", code=Code.NO_QUORUM)

    def on_role_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)
        listener()
