"""Verifies the starts of nodes: the master calls the node back at its address. Used by service.py, on every
master.

Anybody can send a heartbeat in a node's name. So the master asks the process at the address that a start has
registered whether it is that start. A later start replaces an earlier one only if the earlier one does not
answer. An earlier start is refused only if the later one confirms itself; otherwise the later one is forgotten.
The log position of a start is used to judge other starts only after it has confirmed itself.

Invariant: heartbeats alone, however many, never displace a live node, nor keep one out. At most one call to a
node is under way for its heartbeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from stele.master.liveness import Liveness, NodeLife, refuse_older
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import start_digest
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import master_pb2, tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub

log = structlog.get_logger("stele.master")

ASK_TIMEOUT_S = 1.0
"""The timeout of a call to a node: half of a heartbeat's timeout, since a call to a dead address gets no
answer.
"""


class Starts:
    """Calls nodes back. `liveness()`: the present Liveness. `alive_ms`: nodes silent for longer are not
    asked.
    """

    def __init__(
        self, pool: ChannelPool, liveness: Callable[[], Liveness], now_ms: Callable[[], int], alive_ms: int
    ) -> None:
        self._pool = pool
        self._liveness = liveness
        self._now_ms = now_ms
        self._alive_ms = alive_ms
        self._calls: dict[str, asyncio.Task[tserver_pb2.GetNodeStatusResponse | None]] = {}
        self._proving: dict[str, asyncio.Task[None]] = {}

    async def ensure_gone(self, request: master_pb2.TSHeartbeatRequest) -> None:
        """Check that no other start of the node still runs, before this one replaces it.

        A later start that was heard and does not confirm itself is forgotten: its heartbeat may have been
        forged.

        Raises:
            Rejected: STALE_INCARNATION, another start still runs. Other codes as `refuse_older`.
            Retryable: THROTTLED, as `_asked`.
        """
        node_id = id_from_pb(request.node_id)
        own = self._pool.identity
        if node_id == own.node_id and request.incarnation != own.incarnation:
            raise _still_runs(node_id, own.incarnation, "as this master")
        life = self._liveness().nodes.get(node_id)
        if life is None or (request.incarnation, request.start) == (life.incarnation, life.start):
            return
        if request.incarnation == life.incarnation and life.last_start is not None:
            return  # an older copy of the volume, which `refuse_older` judges
        address = life.registration.address if life.registration is not None else ""
        if request.incarnation < life.incarnation:
            await self._ensure_true(life, address, request)
        elif address and self._is_live(life):
            known = life.incarnation
            exactly = request.incarnation == known  # its number does not tell it from the other
            if await self._asked(address, life, exactly=exactly):
                raise _still_runs(node_id, known, f"at {address}")

    async def _ensure_true(
        self, life: NodeLife, address: str, request: master_pb2.TSHeartbeatRequest
    ) -> None:
        """Forget the newest start heard, unless it confirms itself at `address`."""
        if life.proven:
            return
        if life.last_start is not None:
            refuse_older(request, life.last_start)
        newest = life.incarnation, life.start
        confirmed = bool(address) and await self._asked(address, life)
        if confirmed and (life.incarnation, life.start) == newest:
            life.proven = True
        if confirmed or life.proven:
            return
        # Nobody has confirmed one that was heard meanwhile either.
        log.warning(
            "a start of a node was announced, but does not answer at its address: ignored",
            node=life.node_id,
            address=address,
            incarnation=life.incarnation,
        )
        self._liveness().forget_start(life)

    async def _asked(self, address: str, life: NodeLife, *, exactly: bool = False) -> bool:
        """Whether the node's present start answers at `address`. `exactly`: as `_is`.

        Heartbeats that come during a call share its answer. So a flood of forged heartbeats keeps no true one
        out.

        Raises:
            Retryable: THROTTLED, the node answers, but to a call that an earlier heartbeat began.
        """
        node_id, incarnation, digest = life.node_id, life.incarnation, start_digest(life.start)
        call = self._calls.get(node_id)
        joins = call is not None
        if call is None:
            call = asyncio.get_running_loop().create_task(self._call(address, node_id))
            self._calls[node_id] = call
            call.add_done_callback(lambda _: self._calls.pop(node_id, None))
        answer = await asyncio.shield(call)
        runs = answer is not None and _is(answer, incarnation, digest, exactly=exactly)
        if runs and joins:
            raise Retryable(
                f"another start of node {node_id[:8]} answered just before; try again", code=Code.THROTTLED
            )
        return runs

    def _is_live(self, life: NodeLife) -> bool:
        return life.heard and self._now_ms() - life.heard_ms <= self._alive_ms

    def prove(self, life: NodeLife) -> None:
        """Ask the process at a start's address whether it is this start. The answer goes to `life.proven`
        later.
        """
        if life.proven or life.registration is None or life.node_id in self._proving:
            return
        task = asyncio.get_running_loop().create_task(self._prove(life, life.registration.address))
        self._proving[life.node_id] = task
        task.add_done_callback(lambda _: self._proving.pop(life.node_id, None))

    async def _prove(self, life: NodeLife, address: str) -> None:
        incarnation, start = life.incarnation, life.start
        answer = await self._call(address, life.node_id) if address else None
        if answer is not None and _is(answer, incarnation, start_digest(start)):
            if (life.incarnation, life.start) == (incarnation, start):
                life.proven = True
        else:
            log.debug("a node does not answer at its registered address", node=life.node_id, address=address)

    async def _call(self, address: str, node_id: str) -> tserver_pb2.GetNodeStatusResponse | None:
        """The answer of the node at `address` about itself. None: no such node answers."""
        try:
            answer: tserver_pb2.GetNodeStatusResponse = await self._pool.unary(
                address,
                TabletServerServiceStub,
                "GetNodeStatus",
                tserver_pb2.GetNodeStatusRequest(),
                timeout_s=ASK_TIMEOUT_S,
                to_node=node_id,
            )
        except SteleError:
            return None
        return answer if id_from_pb(answer.node_id) == node_id else None

    async def close(self) -> None:
        """Cancel all calls."""
        tasks = [*self._proving.values(), *self._calls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is(
    answer: tserver_pb2.GetNodeStatusResponse, incarnation: int, digest: int, *, exactly: bool = False
) -> bool:
    """Whether the answer is of this start of its node.

    A node of an earlier release does not name its start. Then its incarnation decides, unless `exactly`.
    """
    if answer.incarnation != incarnation:
        return False
    return answer.start_digest == digest or not (answer.start_digest or exactly)


def _still_runs(node_id: str, incarnation: int, where: str) -> Rejected:
    return Rejected(
        f"incarnation {incarnation} of node {node_id[:8]} still answers {where}; two processes use its id: stop one of "
        "them, and start a copy of a cluster under a fork id of its own (--fork-id)",
        code=Code.STALE_INCARNATION,
    )
