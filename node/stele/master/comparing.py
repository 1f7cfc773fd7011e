"""Records whether replicas made by heals and moves hold the same rows as another voter. Called by service.py
on the leader.

The batch that ends a replica's intent (driving.py) also records that the replica waits to be compared.
Invariants: a record names only members of the configuration. It is written only under the driver's epoch in
force.
"""

from __future__ import annotations

from dataclasses import replace

from stele.driver.wire import copy_record_from_pb
from stele.master import driving
from stele.master.leadership import Leadership
from stele.master.port import swap
from stele.model.copies import CopyRecord, with_record
from stele.model.errors import Code, Rejected
from stele.model.ids import TabletId
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import master_pb2


async def record_check(lead: Leadership, request: master_pb2.RecordCheckRequest) -> CopyRecord:
    """Record how a replica compared with another voter. Returns the record.

    Raises:
        Rejected: STALE_EPOCH. NOT_FOUND, there is no such tablet. INVALID_ARGUMENT, the request does not name
            two replicas. CAS_FAILED, one of them is no member any more.
    """
    tablet_id, told = TabletId(id_from_pb(request.tablet_id)), copy_record_from_pb(request.copy)
    what = f"comparison of replica {told.replica_id} of tablet {tablet_id[:8]}"
    if not told.replica_id or told.other_id in (0, told.replica_id):
        raise Rejected(f"{what} with replica {told.other_id}; expected two replicas of the tablet")
    async with lead.locks.hold(tablets=(tablet_id,)):
        driving.check_epoch(lead, request.epoch)
        tablet = lead.catalog.tablet(tablet_id)
        config = driving.newest_config(lead, tablet_id)
        for replica_id in (told.replica_id, told.other_id):
            if config.peer(replica_id) is None:
                raise Rejected(
                    f"{what}: replica {replica_id} was replaced meanwhile, so nothing is recorded",
                    code=Code.CAS_FAILED,
                )
        cause = next((c.cause for c in tablet.copies if c.replica_id == told.replica_id), told.cause)
        record = replace(told, cause=cause, at_us=lead.wall_us())
        recorded = replace(tablet, copies=with_record(tablet.copies, record, config))
        await driving.commit_order(lead, request.epoch, [swap(tablet, recorded)])
    return record
