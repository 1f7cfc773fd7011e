"""The nodes of a cluster as its masters know them, and the calls of a master to them. See masters.py.

A node keeps its promise to masters: it refuses orders of a master that a newer one has replaced.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import ClusterId, OpId
from stele.rpc.convert import id_from_pb, id_to_pb, opid_from_pb
from stele.rpc.identity import Identity
from stele.rpc.proto import tserver_pb2
from tests.master.harness import CLUSTER, Node

if TYPE_CHECKING:
    from tests.sim.masters import Masters
    from tests.sim.node import SimNode

_ORDER_TIMEOUT_S = 0.7


class Server(Node):
    """A node of the cluster, as masters know it. It makes and deletes replicas as they order."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{0xA00 + number:032x}", f"m{number}", f"z{number % 2}")
        self._newest = OpId(0, 0)

    def order(self, method: str, request: Any) -> Any:
        """Carry an order out.

        Raises:
            Rejected: STALE_EPOCH, a newer master was heard.
        """
        if method == "GetNodeStatus":
            return tserver_pb2.GetNodeStatusResponse(node_id=id_to_pb(self.node_id), incarnation=1)
        opid = opid_from_pb(request.catalog_opid)
        if opid.term < self._newest.term:
            raise Rejected("a newer master orders", code=Code.STALE_EPOCH)
        self._newest = max(self._newest, opid)
        tablet_id = id_from_pb(request.tablet_id)
        if method == "CreateTablet":
            own = [p for p in request.config.peers if id_from_pb(p.node_id) == self.node_id]
            leads = id_from_pb(request.leader_hint) == self.node_id
            self.replicas.setdefault((tablet_id, own[0].replica_id), leads)  # type: ignore[arg-type]
        elif method == "DeleteTablet":
            for key in [k for k in self.replicas if k[0] == tablet_id and request.replica_id in (0, k[1])]:
                del self.replicas[key]
        return None


class Pool:
    """The calls of one master to nodes. See ChannelPool."""

    def __init__(self, masters: Masters, node: SimNode) -> None:
        self.identity = Identity(ClusterId(CLUSTER), node.node_id, 1)
        self._masters = masters
        self._node = node

    async def unary(
        self,
        address: str,
        stub_class: type,
        method: str,
        request: Any,
        *,
        timeout_s: float = 5.0,
        to_node: str = "",
    ) -> Any:
        """See ChannelPool."""
        world, node = self._masters.world, self._node
        server, life = self._masters.servers[to_node], node.life
        future = asyncio.get_running_loop().create_future()

        def arrives() -> None:
            if self._masters.lost():
                return
            try:
                answer, error = server.order(method, request), None
            except SteleError as exc:
                answer, error = None, exc
            if not self._masters.lost():
                world.at(world.now + world.latency(), returns, answer, error)

        def returns(answer: Any, error: SteleError | None) -> None:
            if node.life != life or future.done():
                return
            node.soon(lambda: _settle(future, answer, error))

        world.met[f"an order: {method}"] += 1
        world.at(world.now + world.latency(), arrives)
        try:
            async with asyncio.timeout(min(timeout_s, _ORDER_TIMEOUT_S)):
                return await future
        except TimeoutError:
            raise Retryable(f"{method}: no answer", code=Code.TIMED_OUT) from None


def _settle(future: asyncio.Future[Any], answer: Any, error: SteleError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(answer)
    else:
        future.set_exception(error)
