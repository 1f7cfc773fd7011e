"""Asks, before a first master formats an empty volume, whether the cluster has formed already. Called by
formation.py, once.

A pod keeps --first-masters for as long as it lives. Its volume may be empty long after the cluster has
formed: the mount was late, or the disk was lost. The other first masters know from their volumes that the
cluster has formed.

Invariant: it returns only when every other first master has said that it is not formed. None of them has
voted yet, so no vote of an earlier volume of this master counts anywhere. First masters that ask at the same
time answer each other.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import structlog
from google.protobuf.empty_pb2 import Empty

from stele.model.errors import Code, Retryable, SteleError
from stele.rpc import server as rpc_server
from stele.rpc.budget import ByteBudget
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.identity import Identity, PeerBook
from stele.rpc.proto import tserver_pb2 as pb
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub
from stele.tserver.options import NodeOptions
from stele.tserver.volume import volume_empty

log = structlog.get_logger("stele.tserver")

_ASK_AGAIN_S = 0.5
_TIMEOUT_S = 2.0
_STATUS = "/stele.v1.TabletServerService/GetNodeStatus"


async def ensure_not_formed(options: NodeOptions) -> None:
    """Wait until all other first masters have said that the cluster has not formed.

    Raises:
        Fate: VolumeEmpty, a master said that the cluster has formed.
        Rejected: this process cannot listen.
    """
    others = {m.address: str(m.node_id) for m in options.first_masters if m.node_id != options.node_id}
    if not others:
        return
    # A first master may have been replaced by one that only --masters names. Such an address is asked without a node id.
    asked = {**dict.fromkeys(options.masters, ""), **others}
    server = await _serve(options)
    pool = ChannelPool(Identity(cluster_id=options.cluster_id, fork_id=options.fork_id))
    told: list[str] = []
    try:
        while True:
            answers = await asyncio.gather(*(_status(pool, *one) for one in asked.items()))
            found = dict(zip(asked, answers, strict=True))
            for address, status in found.items():
                if status is not None and status.formed and status.role == "master":
                    raise volume_empty(
                        options.data_dir,
                        f"master {id_from_pb(status.node_id)} at {address} says that the cluster has formed: "
                        "this first master's volume is gone; attach it, or replace this master",
                    )
            silent = [address for address in others if found[address] is None]
            if not silent:
                return
            if silent != told:
                told = silent
                log.info("asking the other first masters whether the cluster has formed", no_answer=silent)
            await asyncio.sleep(_ASK_AGAIN_S)
    finally:
        await pool.close()
        await rpc_server.stop(server, 0.2)


async def _status(pool: ChannelPool, address: str, node_id: str) -> pb.GetNodeStatusResponse | None:
    """The status of the master at `address`. None: the node that answers there is not `node_id`, or nobody
    answers.
    """
    try:
        answer: pb.GetNodeStatusResponse = await pool.unary(
            address,
            TabletServerServiceStub,
            "GetNodeStatus",
            pb.GetNodeStatusRequest(),
            timeout_s=_TIMEOUT_S,
            to_node=node_id,
        )
    except SteleError as exc:
        log.debug("no answer", master=address, error=str(exc))
        return None
    return answer


async def _serve(options: NodeOptions) -> grpc.aio.Server:
    identity = Identity(options.cluster_id, options.node_id, 0, options.fork_id)
    server = rpc_server.make_server(identity, PeerBook(), ByteBudget(1 << 20, 0))
    server.add_generic_rpc_handlers((_Unformatted(options),))
    await rpc_server.bind(server, options.listen)
    await server.start()
    return server


class _Unformatted(grpc.GenericRpcHandler):
    """Answers GetNodeStatus as a node without a format, and every other method with NOT_READY."""

    def __init__(self, options: NodeOptions) -> None:
        self._options = options

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a method, the same for all."""
        if handler_call_details.method == _STATUS:
            return grpc.unary_unary_rpc_method_handler(
                self._answer, pb.GetNodeStatusRequest.FromString, pb.GetNodeStatusResponse.SerializeToString
            )
        # As a message without fields any request can be read: all of its fields are unknown.
        return grpc.unary_unary_rpc_method_handler(_not_ready, Empty.FromString, Empty.SerializeToString)

    async def _answer(self, request: pb.GetNodeStatusRequest, context: Any) -> pb.GetNodeStatusResponse:
        options = self._options
        return pb.GetNodeStatusResponse(
            node_id=id_to_pb(options.node_id),
            cluster_id=id_to_pb(options.cluster_id),
            address=options.advertised,
            role=options.role,
            masters=options.masters,
            fork_id=options.fork_id,
        )


async def _not_ready(request: Any, context: Any) -> Any:
    raise Retryable(
        "this first master has not formatted its volume yet: it asks the others first", code=Code.NOT_READY
    )
