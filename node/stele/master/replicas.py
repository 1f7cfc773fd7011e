"""Sets the replication factor of a table, as an administrator asks. Called by service.py on the leader.

Writes rows only. A driver then adds and removes replicas, one at a time. Invariant: only factors are recorded
for which there are enough nodes on record.
"""

from __future__ import annotations

from dataclasses import replace

from stele.master.leadership import Leadership
from stele.master.placement import check_replication_factor
from stele.master.port import swap
from stele.master.records import TableRecord
from stele.master.tables import ROOM_LOCK, check_replicas, check_there, check_view_bytes
from stele.master.versions import require_version
from stele.master.view_size import all_view_bytes, wanted_replicas
from stele.model.errors import Rejected
from stele.model.schema import REPLICATION_FACTORS
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import master_pb2


async def set_replication_factor(
    lead: Leadership, request: master_pb2.SetReplicationFactorRequest
) -> TableRecord:
    """Set the replication factor of a table or key space. Setting the present one changes nothing.

    Raises:
        Rejected: NOT_FOUND. INVALID_ARGUMENT, it is not one of REPLICATION_FACTORS, or there are too few
            machines or too little room for it. TOO_LARGE, the tables would no longer fit into one view.
            UNSUPPORTED_VERSION, the change needs a cluster version that is not finalized.
        Retryable: NOT_READY, too few nodes answer now.
    """
    factor = request.replication_factor
    if factor not in REPLICATION_FACTORS:
        raise Rejected(f"replication factor {factor}: expected 1, 3, 5 or 7")
    table_id = lead.catalog.table(id_from_pb(request.table_id), request.name).table_id
    async with lead.locks.hold(tables=(f"id/{table_id}", ROOM_LOCK)):
        table = lead.catalog.tables[table_id]
        check_there(table)
        if table.replication_factor == factor:
            return table
        require_version(lead, 2, f"replication factor {factor} of {table.name!r}")
        changed = replace(
            table, replication_factor=factor, replication_factor_before=table.replication_factor
        )
        if factor > table.replication_factor:
            _check_growth(lead, table, changed)
        await lead.commit([swap(table, changed)])
        return changed


def _check_growth(lead: Leadership, table: TableRecord, changed: TableRecord) -> None:
    """Refuse a factor for which there are too few machines, or no room for the additional replicas."""
    more_by_hand = [t for t in lead.catalog.current_tablets(table.table_id) if t.by_hand.extra]
    if more_by_hand:
        raise Rejected(
            f"replication factor {changed.replication_factor} of {table.name!r}: tablet "
            f"{more_by_hand[0].tablet_id[:8]} has replicas that were added by hand and would come on top; "
            "release it first, with `stele tablet release`"
        )
    lead.check_settled()
    candidates = lead.candidates()
    check_replication_factor(
        changed.replication_factor, len({c.machine for c in candidates}), len(lead.active_machines())
    )
    tablets = len(lead.catalog.current_tablets(table.table_id))
    more = tablets * (changed.replication_factor - table.replication_factor)
    where = f"replication factor {changed.replication_factor} of {table.name!r}"
    check_replicas(
        lead, wanted_replicas(lead.catalog, changed), f"{where}: {more} more replicas", "add nodes"
    )
    roomy = {c.machine for c in candidates if not c.full}
    if len(roomy) < changed.replication_factor:
        raise Rejected(
            f"{where}: only {len(roomy)} machines "
            "have a node with room on its disk, and each replica needs its own; enlarge volumes or add nodes"
        )
    check_view_bytes(
        lead, all_view_bytes(lead.catalog, changed), f"{where}: its replicas would make views larger"
    )
