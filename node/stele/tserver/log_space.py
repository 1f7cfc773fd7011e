"""Which part of the node's log nobody needs any more, for all its replicas at once. Called by maintenance."""

from __future__ import annotations

import contextlib
from typing import Any

from stele.consensus.ports import Host
from stele.consensus.replica import Replica, ReplicaState
from stele.model.errors import Rejected
from stele.model.ids import OPID_NONE, OpId, StreamKey
from stele.tserver.replicas import Replicas


class LogSpace:
    """Lets the log drop segments, and tells the replicas whose log now begins later."""

    def __init__(self, replicas: Replicas, node_log: Any, host: Host) -> None:
        self._replicas = replicas
        self._node_log = node_log
        self._host = host
        self._starts: dict[StreamKey, OpId] = {}

    async def collect(self) -> None:
        """One round.

        Raises:
            Corrupt: IO_ERROR, the log has failed.
        """
        now_ms = self._host.now_ms()
        for replica in self._replicas:
            if replica.running:
                replica.anchor_log(now_ms)
            elif replica.state is ReplicaState.FAILED:
                self._let_go(replica)
        await self._host.in_thread(self._node_log.collect)
        starts: dict[StreamKey, OpId] = {}
        for replica in self._replicas:
            stream, key = replica.stream, replica.superblock.key
            if stream is None or not replica.running:
                continue
            starts[key] = stream.start
            if stream.start not in (OPID_NONE, self._starts.get(key)):
                replica.log_collected(stream.start)
        self._starts = starts

    def _let_go(self, replica: Replica) -> None:
        """What a FAILED replica's log holds is held by a majority without it once more is committed than it ever had:
        it did not acknowledge that. Until then it may be one of a majority, and the only one that is left of it."""
        if replica.superblock.young_witness:
            return
        with contextlib.suppress(Rejected):  # what created its stream may have been lost
            stream = self._node_log.stream(replica.superblock.key)
            if replica.committed_elsewhere > stream.last_opid.index:
                stream.let_go()
