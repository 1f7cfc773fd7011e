"""Writes what replicas have in memory to files: only files are cut into parts."""

from __future__ import annotations

from stele.client import Client, Table
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerAdminServiceStub


def flush(client: Client, table: Table) -> None:
    """Flush each replica of a table with one tablet."""
    (tablet,) = table.asynchronous.locations.tablets
    request = tserver_pb2.FlushTabletRequest(tablet_id=id_to_pb(tablet.tablet_id))
    pool = client.asynchronous.pool
    for replica in tablet.replicas:
        client.run(
            pool.unary(replica.address, TabletServerAdminServiceStub, "FlushTablet", request, timeout_s=60)
        )
