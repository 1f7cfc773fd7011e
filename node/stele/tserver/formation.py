"""How a volume becomes a node's (`take_volume`), and how first masters become a cluster (`Formation`).

Invariant: a volume is formatted in two cases only. The masters never saw this node id; or this is a first
master, and no other first master is formed. A first master does not vote or serve until all first masters are
known to have formatted. Its first replica of the catalog never starts once a later replica has come to this
node.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace

import structlog

from stele.consensus.ports import InThread
from stele.consensus.replica import Replica
from stele.consensus.superblock import DataState, Superblock
from stele.model.config import Configuration, Peer
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import CATALOG_TABLET_ID, NodeId, ReplicaId, TableId
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.identity import Identity
from stele.rpc.proto import master_pb2
from stele.rpc.proto.master_pb2_grpc import MasterServiceStub
from stele.rpc.resolve import join_address, split_address
from stele.rpc.server import check_free
from stele.tserver.formation_check import ensure_not_formed
from stele.tserver.manager import TabletManager
from stele.tserver.node_record import is_formatted
from stele.tserver.options import NodeOptions
from stele.tserver.replicas import Replicas
from stele.tserver.volume import (
    Volume,
    format_volume,
    lock_directory,
    open_volume,
    volume_empty,
)

log = structlog.get_logger("stele.tserver")

CATALOG_TABLE_ID = TableId("0" * 32)
CATALOG_NAME = "stele.catalog"
_ASK_AGAIN_S = 0.5


async def take_volume(options: NodeOptions) -> Volume:
    """Lock and open the volume. Format it first if it is empty and may be formatted.

    Raises:
        Fate: this process may not run on the volume.
        Rejected: this process could not listen; nothing was written.
    """
    fd = lock_directory(options.data_dir)
    try:
        await _can_listen(options)
        return await _open_or_format(options, fd)
    except BaseException:
        os.close(fd)
        raise


async def _open_or_format(options: NodeOptions, fd: int) -> Volume:
    directory = options.data_dir
    if is_formatted(directory):
        return open_volume(
            directory,
            fd,
            options.cluster_id,
            options.node_id,
            options.role,
            fork_id=options.fork_id,
            masters=options.masters,
        )
    if options.role == "master" and not options.first_masters and not options.join:
        raise volume_empty(
            directory,
            "neither --first-masters nor --join allows formatting it: this master's volume is gone; attach it, or replace this master",
        )
    fork_id = options.fork_id
    if options.first_masters:
        await ensure_not_formed(options)
    elif options.masters:
        formed, fork_id = await _ask_masters(options)
        if formed:
            raise volume_empty(
                directory,
                f"the masters have seen node {options.node_id} with a formatted volume: it is lost; start a "
                f"new node",
            )
    first = tuple((m.node_id, m.address) for m in options.first_masters)
    log.info("formatting the volume", role=options.role, first_masters=len(first))
    return format_volume(
        directory,
        fd,
        options.cluster_id,
        options.node_id,
        options.role,
        first_masters=first,
        fork_id=fork_id,
        masters=options.masters,
    )


async def _can_listen(options: NodeOptions) -> None:
    """Check that the ports are free. Called before the masters are asked, because they may take long to answer. Raises
    Rejected."""
    host, _ = split_address(options.listen)
    await check_free(options.listen, "--listen")
    for flag, port in options.other_ports:
        await check_free(join_address(host, port), flag)


async def _ask_masters(options: NodeOptions) -> tuple[bool, str]:
    """Ask the leading master until it answers. Returns whether this node was seen with a formatted volume, and
    the fork id."""
    # The node is not on record yet. So it calls like a client, without a node id.
    pool = ChannelPool(Identity(cluster_id=options.cluster_id, fork_id=options.fork_id or None))
    request = master_pb2.RegisterNodeRequest(node_id=id_to_pb(options.node_id), role=options.role)
    told = ""
    try:
        while True:
            for address in options.masters:
                try:
                    answer = await pool.unary(
                        address, MasterServiceStub, "RegisterNode", request, timeout_s=2.0
                    )
                    return bool(answer.formed), pool.identity.fork_id or ""
                except Retryable as exc:
                    if str(exc) != told:
                        told = str(exc)
                        log.info("asking the masters", master=address, answer=told)
            await asyncio.sleep(_ASK_AGAIN_S)
    finally:
        await pool.close()


class Formation:
    """A first master's part in forming the cluster, from its format until it votes. On every other node it
    does nothing."""

    def __init__(
        self,
        volume: Volume,
        replicas: Replicas,
        manager: TabletManager,
        in_thread: InThread,
    ) -> None:
        self._volume = volume
        self._replicas = replicas
        self._manager = manager
        self._in_thread = in_thread

    async def make_first_catalog(self) -> None:
        """On a first master that is not formed, make its first replica of the catalog, without starting it.

        Makes none if a later replica is here. In that case the others formed a catalog without this volume,
        and a driver copied it here.
        """
        record = self._volume.record
        if record.formed or not record.first_masters:
            return
        if any(record.is_later_catalog(key) for key in (*self._replicas.keys(), *self._replicas.tombstones)):
            await self._manager.whole(self._join())
            return
        self._replicas.add_listener(self._started)
        config = first_configuration(record.first_masters)
        mine = config.peer_on(record.node_id)
        if mine is None:
            raise Rejected(f"--first-masters does not name this node, {record.node_id}")
        await self._manager.create(
            Superblock(
                tablet_id=CATALOG_TABLET_ID,
                replica_id=mine.replica_id,
                table_id=CATALOG_TABLE_ID,
                table_name=CATALOG_NAME,
                kind="keyspace",
                data_state=DataState.READY,
                leader_hint=config.peers[0].replica_id,
            ),
            config,
        )

    async def confirm(self, masters: Sequence[tuple[str, str]]) -> None:
        """Record that all first masters have formatted, so that this one votes from now on. Idempotent.

        `masters`: (node_id, format_id) of each.

        Raises:
            Rejected: this node is not listed with its own format id, or the list is not that of
                --first-masters.
            Retryable: NOT_READY while its own replica of the catalog is being made.
        """
        record = self._volume.record
        if record.role != "master" or not record.first_masters:
            raise Rejected(f"node {record.node_id} is not a first master; there is nothing to confirm")
        if (record.node_id, record.format_id) not in [(n, f) for n, f in masters]:
            raise Rejected(
                f"first master {record.node_id} has format id {record.format_id}, which is not listed: its "
                f"volume was formatted again after the list was made; replace this master",
                code=Code.PERMISSION_DENIED,
            )
        if sorted(n for n, _ in masters) != sorted(n for n, _ in record.first_masters):
            raise Rejected(
                "the masters listed are not those that --first-masters named; start all first masters with the same list"
            )
        if not record.formed and not self._replicas.holds(CATALOG_TABLET_ID):
            raise Retryable(
                "this master's replica of the catalog is not made yet; try again", code=Code.NOT_READY
            )
        await self._manager.whole(self._form())

    async def _form(self) -> None:
        """Mark the volume as formed, and start the catalog's replica. Runs to its end even if the caller is
        cancelled. Otherwise a formed master could be left whose catalog is not started.
        """
        if not self._volume.record.formed:
            await self._in_thread(lambda: self._volume.update(lambda record: replace(record, formed=True)))
            log.info("formation confirmed", masters=len(self._volume.record.first_masters))
        await self._manager.release_held()

    def _started(self, replica: Replica) -> None:
        record = self._volume.record
        if not record.formed and record.is_later_catalog(replica.superblock.key):
            self._manager.carry_out(self._join())

    async def _join(self) -> None:
        """Remove the first replica before the volume counts as formed, because a formed volume starts every
        replica of the catalog."""
        await self._manager.drop_held()
        await self._in_thread(lambda: self._volume.update(lambda record: replace(record, formed=True)))
        log.info("the catalog was copied here: this first master needs no confirmation any more")


def first_configuration(first_masters: Sequence[tuple[str, str]]) -> Configuration:
    """The first configuration of the catalog: replica_ids 1 to n in the order of --first-masters."""
    return Configuration(
        -1,
        tuple(
            Peer(NodeId(node_id), ReplicaId(number), address)
            for number, (node_id, address) in enumerate(first_masters, 1)
        ),
    )
