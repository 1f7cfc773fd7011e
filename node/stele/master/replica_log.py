"""Implements the catalog port on a raft replica. Used by server.py. It only wraps payloads.

Invariant: a proposal's future belongs to the replica, so a caller that stops waiting does not stop the
proposal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from stele.consensus.replica import Replica
from stele.model import writeop
from stele.model.config import Configuration
from stele.model.errors import Code, SteleError, error_for, let_go
from stele.model.kvop import KeyOperation, encode_operations
from stele.model.writeop import BodyKind, WriteHeader
from stele.tablet.keyspace import KeySpace

_FRESH_WITHIN_S = 1.0
"""How long a follower waits for its leader's answer, and until it has applied the entries up to the answer.
"""


class ReplicaCatalogLog:
    """See CatalogLog. `find` returns the present replica of the catalog tablet, or None."""

    def __init__(self, find: Callable[[], Replica | None]) -> None:
        self._find = find
        self._listeners: list[Callable[[], None]] = []
        self._watched: Replica | None = None

    def watch(self) -> None:
        """Follow the roles of the present replica. Call it again when another replica may have replaced
        it."""
        replica = self._find()
        if replica is not None and replica is not self._watched:
            self._watched = replica
            replica.add_role_listener(lambda role, term, leader: self._notify())
        elif replica is None and self._watched is not None:
            self._watched = None
            self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    @property
    def key_space(self) -> KeySpace | None:
        """See CatalogLog."""
        replica = self._find()
        machine = replica.machine if replica is not None else None
        return machine if isinstance(machine, KeySpace) else None

    @property
    def is_leader(self) -> bool:
        """See CatalogLog."""
        replica = self._find()
        return replica is not None and replica.is_leader and self.key_space is not None

    @property
    def term(self) -> int:
        """See CatalogLog."""
        replica = self._find()
        return replica.term if replica is not None else 0

    @property
    def leader_node(self) -> str:
        """See CatalogLog."""
        replica = self._find()
        peer = replica.leader_peer() if replica is not None else None
        return peer.node_id if peer is not None else ""

    async def fresh(self, max_age_ms: int) -> bool:
        """See CatalogLog."""
        replica = self._find()
        if replica is None or replica.started is None or replica.is_leader:
            return False
        try:
            async with asyncio.timeout(_FRESH_WITHIN_S):
                since_us = replica.host.steady_us() - 1_000 * max_age_ms
                await replica.following.fresh(since_us, at_once=False)
        except (SteleError, TimeoutError) as exc:
            let_go(exc)
            return False
        return True

    @property
    def committed_config(self) -> Configuration:
        """See CatalogLog."""
        replica = self._find()
        return replica.committed_config if replica is not None else Configuration(-1, ())

    async def propose(self, operations: Sequence[KeyOperation]) -> None:
        """See CatalogLog."""
        body = encode_operations(operations)
        header = WriteHeader(writeop.NO_CLIENT, 0, 0, 0, writeop.digest(body), kind=BodyKind.KEYSPACE)
        replica = self._require()
        replica.check_leader()
        space = self.key_space
        if space is None:
            raise error_for(Code.NOT_READY, "this master's catalog replica holds no rows; ask another")
        token = space.begin_pending([])
        try:
            space.reserve(token, operations)
            future = replica.writes.submit(writeop.encode(header, body))
        except BaseException:
            space.end_pending(token)
            raise
        future.add_done_callback(lambda _: space.end_pending(token))
        outcome = await replica.writes.outcome(future, None)
        if outcome.code is not Code.OK:
            raise error_for(outcome.code, outcome.message)

    async def read_barrier(self) -> None:
        """See CatalogLog."""
        await self._require().reads.linearizable_read()

    def on_role_change(self, listener: Callable[[], None]) -> None:
        """See CatalogLog."""
        self._listeners.append(listener)
        listener()

    def _require(self) -> Replica:
        replica = self._find()
        if replica is None:
            raise error_for(Code.NOT_READY, "this master holds no catalog replica yet; ask another")
        return replica
