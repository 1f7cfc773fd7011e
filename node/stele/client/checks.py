"""Checks whether a request would be refused, before a command asks its user to confirm it.

Used by the command line. Changes nothing. A check reads one view of the cluster, so the masters check again when
they are asked to act.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stele.client.altering import range_steps, steps_of
from stele.client.health import examine
from stele.client.nodes import (
    NodeStatus,
    cluster_view,
    node_called,
    node_status_of,
    refuse_leaving,
    status_in,
)
from stele.client.table import AsyncTable
from stele.driver.versions import ClusterVersions, versions_of
from stele.driver.view import Wanted
from stele.model.alter import altered
from stele.model.amounts import plural
from stele.model.errors import Code, Rejected
from stele.model.ranges import with_steps
from stele.model.split_json import shown_range
from stele.rpc.masters import Masters
from stele.rpc.proto import master_pb2

_NAMED_MAX = 5


async def check_retire(masters: Masters, given: str, *, timeout_s: float = 15.0) -> NodeStatus:
    """Return the node that `retire_node` would retire. Raises what `retire_node` raises."""
    pb = await cluster_view(masters, timeout_s=timeout_s)
    node = node_called(given, list(pb.nodes))
    refuse_leaving(pb, node, Wanted.RETIRED)
    return status_in(pb, node)


async def check_forget(masters: Masters, given: str, *, timeout_s: float = 15.0) -> NodeStatus:
    """Return the node that `forget_node` would forget. Raises what `forget_node` raises."""
    node = await node_status_of(masters, given, timeout_s=timeout_s)
    if node.seen == "live":
        raise Rejected(
            f"node {node.label} sends heartbeats, so it is not gone; drain it instead",
            code=Code.UNSAFE_CHANGE,
        )
    if node.seen != "retired" and not node.empty:
        on_it = plural(node.replicas or node.copies, "replica" if node.replicas else "copy under way")
        raise Rejected(
            f"node {node.label} cannot be forgotten, because configurations still name it ({on_it}); heal first, "
            "with the operator or `stele driver run`",
            code=Code.UNSAFE_CHANGE,
        )
    return node


async def check_finalize(masters: Masters, *, timeout_s: float = 15.0) -> ClusterVersions:
    """Return the cluster's versions, if `finalize_version` would succeed. Raises what `finalize_version`
    raises."""
    return finalizable(await cluster_view(masters, timeout_s=timeout_s))


def finalizable(view: master_pb2.GetClusterViewResponse) -> ClusterVersions:
    """The versions in a view, if the newest one is finalized or can be.

    Raises:
        Rejected: UNSAFE_CHANGE: there is a newer version, but a member is silent, or does not read it.
    """
    found = versions_of(view)
    if found.finalized >= found.newest:
        return found
    silent = {node.node_id for node in examine(view).silent}
    lagging = [
        f"{m.label} is silent, so what it runs is not known; start it, or retire it"
        if m.node_id in silent
        else f"{m.label} runs release {m.release or '(unknown)'}, which reads cluster version {m.reads}; upgrade it"
        for m in found.members
        if m.node_id in silent or m.reads < found.newest
    ]
    if lagging:
        more = f"; {len(lagging) - _NAMED_MAX} more" if len(lagging) > _NAMED_MAX else ""
        raise Rejected(
            f"cluster version {found.newest} cannot be finalized: {'; '.join(lagging[:_NAMED_MAX])}{more}",
            code=Code.UNSAFE_CHANGE,
        )
    return found


def check_alter(
    table: AsyncTable,
    *,
    add: Iterable[Sequence[Any]],
    drop: Sequence[str],
    rename: Mapping[str, str],
    defaults: Mapping[str, str | None],
    add_ranges: Iterable[Sequence[Any]],
    drop_ranges: Iterable[Sequence[Any]],
) -> None:
    """Refuse changes of a table that the masters would refuse. Raises Rejected, which lists all faults."""
    part = table.partition_schema
    columns = steps_of(add, drop, rename, defaults)
    ranges = range_steps(part, table.schema, add_ranges, drop_ranges)
    faults = []
    try:
        if ranges and part.range is not None:
            columns_of_ranges = [table.schema.by_id[i] for i in part.range.column_ids]
            show = functools.partial(shown_range, columns=columns_of_ranges)
            with_steps(part.range, ranges, show)
    except Rejected as exc:
        faults.append(str(exc.args[0]))
    try:
        if columns:
            altered(table.schema, columns)
    except Rejected as exc:
        faults.append(str(exc.args[0]).removeprefix("alter: "))
    if faults:
        raise Rejected(f"alter table {table.name!r}: {'; '.join(faults)}")
