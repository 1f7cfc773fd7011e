"""Verifies the starts of nodes: the master calls the node back at its address. Used by service.py, on every
master.

Anybody can send a heartbeat in a node's name. So a later start does not replace one that still answers at its
registered address. A start's log position is used to judge other starts only after a process at its address
has confirmed it.

Invariant: a heartbeat alone never displaces a live node. At most one call per node is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from stele.master.liveness import Liveness, NodeLife
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import master_pb2, tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub

log = structlog.get_logger("stele.master")

ASK_TIMEOUT_S = 1.0
"""Half of a heartbeat's timeout, since a call to a dead address gets no answer."""


class Starts:
    """Calls nodes back. `liveness()`: the present Liveness; `alive_ms`: nodes silent for longer are not
    asked."""

    def __init__(
        self, pool: ChannelPool, liveness: Callable[[], Liveness], now_ms: Callable[[], int], alive_ms: int
    ) -> None:
        self._pool = pool
        self._liveness = liveness
        self._now_ms = now_ms
        self._alive_ms = alive_ms
        self._asking: set[str] = set()
        self._proving: dict[str, asyncio.Task[None]] = {}

    async def ensure_gone(self, request: master_pb2.TSHeartbeatRequest) -> None:
        """Check that no other start of the node still runs, before a later one replaces it.

        Raises:
            Rejected: STALE_INCARNATION, another start still runs.
            Retryable: THROTTLED, a call to the other start is under way.
        """
        node_id = id_from_pb(request.node_id)
        own = self._pool.identity
        if node_id == own.node_id and request.incarnation != own.incarnation:
            raise _still_runs(node_id, own.incarnation, "as this master")
        life = self._liveness().nodes.get(node_id)
        if life is None or request.incarnation <= life.incarnation or not self._is_live(life):
            return
        address = life.registration.address if life.registration is not None else ""
        if not address:
            return
        if node_id in self._asking:
            raise Retryable(
                f"this master already calls an earlier start of node {node_id}; try again",
                code=Code.THROTTLED,
            )
        self._asking.add(node_id)
        try:
            earlier = life.incarnation
            if await self._runs(address, node_id, earlier):
                raise _still_runs(node_id, earlier, f"at {address}")
        finally:
            self._asking.discard(node_id)

    def _is_live(self, life: NodeLife) -> bool:
        return life.heard and self._now_ms() - life.heard_ms <= self._alive_ms

    def prove(self, life: NodeLife) -> None:
        """Ask the process at a start's address whether it is this start. Later, `life.proven` has the
        answer."""
        if life.proven or life.registration is None or life.node_id in self._proving:
            return
        task = asyncio.get_running_loop().create_task(self._prove(life, life.registration.address))
        self._proving[life.node_id] = task
        task.add_done_callback(lambda _: self._proving.pop(life.node_id, None))

    async def _prove(self, life: NodeLife, address: str) -> None:
        incarnation, start = life.incarnation, life.start
        if address and await self._runs(address, life.node_id, incarnation):
            if (life.incarnation, life.start) == (incarnation, start):
                life.proven = True
        else:
            log.debug("a node does not answer at its registered address", node=life.node_id, address=address)

    async def _runs(self, address: str, node_id: str, incarnation: int) -> bool:
        """Whether this start of the node answers at `address`."""
        try:
            answer = await self._pool.unary(
                address,
                TabletServerServiceStub,
                "GetNodeStatus",
                tserver_pb2.GetNodeStatusRequest(),
                timeout_s=ASK_TIMEOUT_S,
                to_node=node_id,
            )
        except SteleError:
            return False
        return id_from_pb(answer.node_id) == node_id and answer.incarnation == incarnation

    async def close(self) -> None:
        """Cancel all calls."""
        tasks = list(self._proving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _still_runs(node_id: str, incarnation: int, where: str) -> Rejected:
    return Rejected(
        f"incarnation {incarnation} of node {node_id} still answers {where}; two processes use its id: stop one of "
        "them, and start a copy of a cluster under a fork id of its own (--fork-id)",
        code=Code.STALE_INCARNATION,
    )
