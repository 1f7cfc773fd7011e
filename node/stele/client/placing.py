"""Placement of one tablet's replicas by hand: move, add, remove, take back. Used by the command line and by
programs of administrators.

The masters record what is asked for, and a driver carries it out. Only `release_tablet` undoes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from stele.client.admin import cluster_view, node_called, tablet_called
from stele.driver.wire import by_hand_from_pb
from stele.model.by_hand import NOT_BY_HAND, ByHand
from stele.rpc.convert import id_from_pb
from stele.rpc.masters import Masters
from stele.rpc.proto import master_pb2 as pb

_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Placed:
    """The placement that is now asked for a tablet. `replicas`: how many replicas it is to have."""

    tablet_id: str
    table_name: str
    by_hand: ByHand
    replicas: int


async def move_replica(
    masters: Masters, tablet: str, source: str, target: str, *, owner: str = "", reason: str = ""
) -> Placed:
    """Move a tablet's replica from one node to another. The new one votes before the old one is removed.

    `tablet`: its id, or the first digits. `source`, `target`: name, id, or at least eight digits of a node.

    Raises:
        Rejected: NOT_FOUND; INVALID_ARGUMENT, the target cannot hold the replica, with the reason.
        Retryable: no master leads, or the target is not heard.
    """
    view = await cluster_view(masters, timeout_s=_TIMEOUT_S)
    request = pb.PlaceTabletRequest(
        what=pb.MOVE_REPLICA,
        from_node=node_called(source, list(view.nodes)).node_id,
        to_node=node_called(target, list(view.nodes)).node_id,
        owner=owner,
        reason=reason,
    )
    return await _place(masters, view, tablet, request, 0)


async def add_replica(
    masters: Masters, tablet: str, target: str = "", *, owner: str = "", reason: str = ""
) -> Placed:
    """Add a replica beyond the replication factor of the tablet's table. `target`: "" for the driver's choice.

    Raises what `move_replica` raises; also INVALID_ARGUMENT if there are too few machines.
    """
    view = await cluster_view(masters, timeout_s=_TIMEOUT_S)
    node = node_called(target, list(view.nodes)).node_id if target else b""
    request = pb.PlaceTabletRequest(what=pb.ADD_REPLICA, to_node=node, owner=owner, reason=reason)
    return await _place(masters, view, tablet, request, 1)


async def remove_replica(
    masters: Masters, tablet: str, source: str, *, owner: str = "", reason: str = ""
) -> Placed:
    """Remove a replica that `add_replica` added, or another one in its place. Never below the factor.

    Raises what `move_replica` raises; also UNSAFE_CHANGE if the tablet would lose its majority.
    """
    view = await cluster_view(masters, timeout_s=_TIMEOUT_S)
    node = node_called(source, list(view.nodes)).node_id
    request = pb.PlaceTabletRequest(what=pb.REMOVE_REPLICA, from_node=node, owner=owner, reason=reason)
    return await _place(masters, view, tablet, request, -1)


async def release_tablet(masters: Masters, tablet: str) -> Placed:
    """Cancel everything that was asked for by hand: the tablet is placed like all others. Raises Rejected
    NOT_FOUND."""
    view = await cluster_view(masters, timeout_s=_TIMEOUT_S)
    return await _place(masters, view, tablet, pb.PlaceTabletRequest(what=pb.RELEASE_PLACEMENT), 0)


async def _place(
    masters: Masters,
    view: pb.GetClusterViewResponse,
    tablet: str,
    request: pb.PlaceTabletRequest,
    more: int,
) -> Placed:
    found = tablet_called(tablet, view)
    request.tablet_id = found.tablet_id
    if more:
        request.replicas = max(0, found.replication_factor + more)
    answer = await masters.call("PlaceTablet", request, timeout_s=_TIMEOUT_S)
    by_hand = by_hand_from_pb(answer.by_hand) if answer.HasField("by_hand") else NOT_BY_HAND
    replicas = found.replication_factor - found.by_hand.extra + by_hand.extra
    return Placed(id_from_pb(found.tablet_id), found.table_name, by_hand, replicas)
