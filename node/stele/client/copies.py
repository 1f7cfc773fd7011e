"""Tells whether replicas that heals and moves made hold the same rows as another voter, by the masters'
records. Used by the command line.

Pure but for `compared_copies`, which fetches the view. Invariant: a replica without a comparison on record never counts as equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stele.driver.view import DROPPED_MARK
from stele.driver.wire import copy_record_from_pb
from stele.model.amounts import duration, plural
from stele.model.copies import CopyRecord
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import master_pb2

if TYPE_CHECKING:
    from stele.client import AsyncClient


@dataclass(frozen=True, slots=True)
class ReplicaCopy:
    """A replica that a heal or a move made.

    Attributes:
        tablet_id: Its tablet, 32 hex digits.
        table_name: The table of that tablet.
        node_id: The node that has the replica, 32 hex digits.
        other_node_id: The node of the voter that it was compared with; "" if it waits, or if that voter is gone.
        record: Its last comparison (`stele.model.copies.CopyRecord`).
        age_s: How long ago it was recorded, in seconds; 0 if it waits.
    """

    tablet_id: str
    table_name: str
    node_id: str
    other_node_id: str
    record: CopyRecord
    age_s: float

    def in_words(self, names: Mapping[str, str] | None = None) -> str:
        """The result as a sentence. `names`: of nodes, by id."""
        c, ago = self.record, f"{duration(self.age_s)} ago"
        me = f"replica {c.replica_id} on {_name(self.node_id, names)}"
        if c.waits:
            return f"{me} waits to be compared with another voter; a driver does so"
        other = f"replica {c.other_id}" + (
            f" on {_name(self.other_node_id, names)}" if self.other_node_id else ", which is gone"
        )
        what = "key" if c.index else "row"
        mine = f"{plural(c.rows, what)} with checksum {c.checksum:016x}"
        if c.equal:
            return f"{me} held the same {what}s as {other} when compared {ago}: {mine}"
        its = f"{c.other_rows:,} with {c.other_checksum:016x}"
        return f"{me} DIFFERS from {other}, found {ago}: {mine}, there {its}; {self.advice}"

    @property
    def advice(self) -> str:
        """What to do about a difference."""
        move = f"`stele tablet move {self.tablet_id[:8]} --from NODE --to NODE` replaces the wrong one"
        table = self.table_name.removesuffix(DROPPED_MARK)
        return (
            move if self.record.index else f"`stele table verify {table}` compares all replicas, and {move}"
        )

    def to_json(self) -> dict[str, object]:
        """For programs. Numbers of 64 bits are text."""
        c = self.record
        return {
            "tablet": self.tablet_id,
            "replica": c.replica_id,
            "node": self.node_id,
            "result": c.result,
            "comparedWith": c.other_id or None,
            "otherNode": self.other_node_id or None,
            "ageSeconds": None if c.waits else round(self.age_s),
            "snapshot": str(c.snapshot),
            "index": c.index,
            "rows": c.rows,
            "checksum": f"{c.checksum:016x}",
            "otherRows": c.other_rows,
            "otherChecksum": f"{c.other_checksum:016x}",
            "cause": c.cause or None,
        }


def _name(node_id: str, names: Mapping[str, str] | None) -> str:
    return (names or {}).get(node_id) or f"node {node_id[:8]}"


async def compared_copies(client: AsyncClient, table: str = "") -> list[ReplicaCopy]:
    """The replicas that heals and moves made, of one table or of all. A table that was never healed has none.

    If several replicas of a tablet were found equal, only the newest one stays on record.

    Raises:
        SteleError: no master leads.

    Example: `await compared_copies(client, "readings")` is `[]` until a replica of its tablets was replaced.
    """
    from stele.client.admin import cluster_view

    view = await cluster_view(client.masters)
    return [copy for copy in copies_in(view) if not table or copy.table_name == table]


def copies_in(view: master_pb2.GetClusterViewResponse) -> list[ReplicaCopy]:
    """Return the replicas that heals and moves made, from a view of the cluster."""
    return [copy for tablet in view.tablets for copy in copies_of(tablet, view.now_us)]


def copies_of(tablet: master_pb2.TabletViewPB, now_us: int) -> list[ReplicaCopy]:
    """The replicas of one tablet that heals and moves made. `now_us`: the master's wall clock in the view, in
    microseconds since 1970."""
    nodes = {peer.replica_id: id_from_pb(peer.node_id) for peer in tablet.committed_config.peers}
    return [
        ReplicaCopy(
            tablet_id=id_from_pb(tablet.tablet_id),
            table_name=tablet.table_name,
            node_id=nodes.get(pb.replica_id, ""),
            other_node_id=nodes.get(pb.other_replica, ""),
            record=copy_record_from_pb(pb),
            age_s=max(0, now_us - pb.at_us) / 1e6 if pb.other_replica else 0.0,
        )
        for pb in tablet.copies
    ]


def differing(copies: Iterable[ReplicaCopy]) -> list[ReplicaCopy]:
    """Those of `copies` that hold other rows than another voter."""
    return [copy for copy in copies if copy.record.differs]


def summed_up(copies: Sequence[ReplicaCopy]) -> str:
    """Say in one line how many copies were compared; "" if there are no copies."""
    if not copies:
        return ""
    done = [copy for copy in copies if not copy.record.waits]
    parts = [f"copies compared: {len(done)} of {len(copies)}"]
    if done:
        parts.append(f"the last {duration(min(copy.age_s for copy in done))} ago")
    if differ := len(differing(copies)):
        parts.append(f"{plural(differ, 'replica')} {'DIFFERS' if differ == 1 else 'DIFFER'}")
    return ", ".join(parts)
