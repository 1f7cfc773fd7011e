"""A tablet that lost its majority: which replicas survive, what may be lost, and the request to continue with
one survivor.

Used by `stele tablet recover` and by programs of administrators. `judge` is pure; `look_for_survivors` asks every node for
what it has. Changes nothing by itself: `recover` asks the masters, which refuse while a majority is heard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stele.client.health import SILENT_MS, state_name
from stele.model.clock import physical_us, utc
from stele.model.config import Configuration, Peer
from stele.model.errors import Code, Rejected, SteleError
from stele.model.ids import CATALOG_TABLET_ID, OpId
from stele.model.incarnation import is_given_up, shown
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import config_from_pb, id_from_pb, id_to_pb, opid_from_pb, opid_to_pb
from stele.rpc.masters import Masters
from stele.rpc.proto import common_pb2, consensus_pb2, master_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub

_ASK_TIMEOUT_S = 4.0
_TABLETS_AT_ONCE = 500
_TIMEOUT_S = 15.0

Answers = Mapping[str, Sequence[common_pb2.ReplicaStatusPB] | None]
"""By node id: the replicas that the node has; None: it did not answer."""


@dataclass(frozen=True, slots=True)
class Member:
    """A voter of the tablet's configuration. `state`: as text. `lost`: it cannot answer. `asked`: False if
    its node, which the masters hear, gave this program no answer."""

    replica_id: int
    node: str
    state: str
    lost: bool
    asked: bool = True


@dataclass(frozen=True, slots=True)
class Survivor:
    """A replica with rows that answers. `last_logged`: the end of its log; `committed`: what it knows to be committed.

    `newest`: hybrid time of the newest write that it has; 0 if none."""

    replica_id: int
    node_id: str
    node: str
    incarnation: int
    last_logged: OpId
    committed: OpId
    term: int
    newest: int
    bytes_on_disk: int
    rows: int
    leads: bool = False

    def rank(self, incarnation: int) -> tuple[bool, int, OpId, OpId, int]:
        """Return a key to sort by: the most advanced survivor has the highest. `incarnation`: the tablet's
        incarnation."""
        there = not is_given_up(self.incarnation, incarnation)
        return there, self.incarnation, self.last_logged, self.committed, -self.replica_id


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a recovery of one tablet would do. `survivors`: the most advanced first. `refused`: why it cannot be done; "" if it can.

    `may_lose`: what may be lost, in one sentence.
    """

    tablet_id: str
    table_name: str
    incarnation: int
    term: int
    replication_factor: int
    voters: tuple[Member, ...]
    survivors: tuple[Survivor, ...]
    may_lose: str
    refused: str

    @property
    def lost(self) -> tuple[Member, ...]:
        """The voters that cannot answer."""
        return tuple(m for m in self.voters if m.lost)


async def look_for_survivors(
    pool: ChannelPool,
    view: master_pb2.GetClusterViewResponse,
    tablet_ids: Collection[bytes],
    *,
    role: str = "node",
) -> list[Recovery]:
    """Ask all nodes, silent ones too, for their replicas of these tablets. Returns what a recovery of each tablet would do,
    in the order of `view`.

    `role`: of the nodes that hold them; the catalog's are masters.
    """
    nodes = [n for n in view.nodes if n.registration.role == role and n.registration.address]
    answers = await asyncio.gather(*(_replicas_on(pool, n, sorted(tablet_ids)) for n in nodes))
    told = {id_from_pb(n.node_id): a for n, a in zip(nodes, answers)}
    wanted = set(tablet_ids)
    return [judge(t, view, told) for t in view.tablets if t.tablet_id in wanted]


async def _replicas_on(
    pool: ChannelPool, node: master_pb2.NodeViewPB, tablet_ids: Sequence[bytes]
) -> list[common_pb2.ReplicaStatusPB] | None:
    found: list[common_pb2.ReplicaStatusPB] = []
    try:
        for at in range(0, len(tablet_ids), _TABLETS_AT_ONCE):
            answer = await pool.unary(
                node.registration.address,
                ConsensusServiceStub,
                "GetConsensusState",
                consensus_pb2.GetConsensusStateRequest(tablet_ids=tablet_ids[at : at + _TABLETS_AT_ONCE]),
                timeout_s=_ASK_TIMEOUT_S,
                to_node=id_from_pb(node.node_id),
            )
            found += answer.replicas
    except SteleError:
        return None
    return found


def judge(
    tablet: master_pb2.TabletViewPB, view: master_pb2.GetClusterViewResponse, answers: Answers
) -> Recovery:
    """What a recovery of one tablet would do, by the masters' view and what the nodes answered."""
    nodes = {id_from_pb(n.node_id): n for n in view.nodes}
    mine = {
        node_id: [s for s in told if s.tablet_id == tablet.tablet_id]
        for node_id, told in answers.items()
        if told is not None
    }
    config = config_from_pb(tablet.committed_config)
    voters = tuple(_member(p, config.incarnation, nodes, mine) for p in config.voters)
    survivors = sorted(
        (_survivor(s, n, nodes) for n, told in mine.items() for s in told if _has_rows(s)),
        key=lambda s: s.rank(config.incarnation),
        reverse=True,
    )
    terms = [s.term for told in mine.values() for s in told]
    return Recovery(
        id_from_pb(tablet.tablet_id),
        tablet.table_name,
        config.incarnation,
        max([tablet.term, *terms]),
        tablet.replication_factor,
        voters,
        tuple(survivors),
        _may_lose(survivors, [p for p in config.voters], voters, nodes, view.now_us),
        _refusal(tablet, view, config, voters, survivors, nodes, mine),
    )


def _has_rows(status: common_pb2.ReplicaStatusPB) -> bool:
    runs = status.state in (common_pb2.RUNNING, common_pb2.CONFIGURING)
    return runs and status.data_state == common_pb2.READY and status.has_data


def _member(
    peer: Peer,
    incarnation: int,
    nodes: Mapping[str, master_pb2.NodeViewPB],
    mine: Mapping[str, Sequence[common_pb2.ReplicaStatusPB]],
) -> Member:
    node = nodes.get(peer.node_id)
    name = _name(peer.node_id, nodes)
    if peer.node_id not in mine:
        if node is not None and node.ever_heard and node.heartbeat_age_ms <= SILENT_MS:
            return Member(
                peer.replica_id, name, "the masters hear its node, but it does not answer here", False, False
            )
        return Member(peer.replica_id, name, _silence(node), True)
    status = next((s for s in mine[peer.node_id] if s.replica_id == peer.replica_id), None)
    if status is None:
        return Member(peer.replica_id, name, "its node answers, but does not have it", True)
    if is_given_up(status.tablet_incarnation, incarnation):
        said = f"an earlier recovery gave it up: it is of incarnation {shown(status.tablet_incarnation)}"
        return Member(peer.replica_id, name, said, True)
    if status.data_state != common_pb2.READY and status.state != common_pb2.RUNNING:
        return Member(peer.replica_id, name, common_pb2.DataStatePB.Name(status.data_state), True)
    if status.state in (common_pb2.FAILED, common_pb2.STOPPED):
        return Member(peer.replica_id, name, f"{state_name(status)}: {status.error or 'stopped'}", True)
    return Member(
        peer.replica_id, name, f"{state_name(status)}, log ends at {_opid(status.last_logged)}", False
    )


def _silence(node: master_pb2.NodeViewPB | None) -> str:
    if node is None:
        return "its node is unknown to the masters"
    since = "" if node.ever_heard else " at least"
    return f"its node is silent for {node.heartbeat_age_ms / 1000:,.0f} s{since}"


def _survivor(
    status: common_pb2.ReplicaStatusPB, node_id: str, nodes: Mapping[str, master_pb2.NodeViewPB]
) -> Survivor:
    return Survivor(
        status.replica_id,
        node_id,
        _name(node_id, nodes),
        status.tablet_incarnation,
        opid_from_pb(status.last_logged),
        opid_from_pb(status.last_committed),
        status.term,
        status.last_timestamp,
        status.bytes_on_disk,
        status.rows_estimate,
        status.role == common_pb2.LEADER,
    )


def _may_lose(
    survivors: Sequence[Survivor],
    peers: Sequence[Peer],
    voters: Sequence[Member],
    nodes: Mapping[str, master_pb2.NodeViewPB],
    now_us: int,
) -> str:
    if not survivors:
        return ""
    best = survivors[0]
    heard = []
    for peer, voter in zip(peers, voters):
        node = nodes.get(peer.node_id)
        if voter.lost and node is not None:
            at = utc(now_us - node.heartbeat_age_ms * 1_000)
            heard.append(f"{voter.node} {'at' if node.ever_heard else 'before'} {at}")
    when = f"; last heard: {', '.join(heard)}" if heard else ""
    lost = "writes that only the lost voters had acknowledged"
    if not best.newest:
        return f"{lost}; replica {best.replica_id} does not say when its newest write was{when}"
    newest = utc(physical_us(best.newest))
    return f"{lost}, after {newest}, the newest write of replica {best.replica_id}{when}"


def _refusal(
    tablet: master_pb2.TabletViewPB,
    view: master_pb2.GetClusterViewResponse,
    config: Configuration,
    voters: Sequence[Member],
    survivors: Sequence[Survivor],
    nodes: Mapping[str, master_pb2.NodeViewPB],
    mine: Mapping[str, Sequence[common_pb2.ReplicaStatusPB]],
) -> str:
    if id_from_pb(tablet.tablet_id) == CATALOG_TABLET_ID:
        return "it is the catalog: stop a master, and recover the catalog on its volume with `stele local cmeta rewrite`"
    if tablet.state != "RUNNING":
        return f"it is {tablet.state}; only a RUNNING tablet can be recovered"
    if not view.settled:
        return "the leading master is new and has not heard from all nodes yet; try again in a second"
    pending = [
        config_from_pb(s.pending_config)
        for told in mine.values()
        for s in told
        if s.HasField("pending_config")
    ]
    for each in (config, *pending):
        answering = [p for p in each.voters if not _member(p, config.incarnation, nodes, mine).lost]
        if each.voters and len(answering) >= each.majority:
            return (
                f"{len(answering)} of {len(each.voters)} voters answer, which is a majority: nothing is lost"
            )
    if not survivors:
        return "no replica with rows answers. Bring one of the lost nodes back; without any of them the rows are gone"
    return ""


def _name(node_id: str, nodes: Mapping[str, master_pb2.NodeViewPB]) -> str:
    node = nodes.get(node_id)
    return node.name if node is not None and node.name else node_id[:8]


def _opid(pb: common_pb2.OpIdPB) -> str:
    return f"{pb.term}.{pb.index}"


async def recover(
    masters: Masters, found: Recovery, *, owner: str = "", reason: str = ""
) -> master_pb2.RecoveryPB:
    """Let the most advanced survivor continue alone. Returns the record of the recovery.

    Raises:
        Rejected: UNSAFE_CHANGE: a majority is heard. CAS_FAILED: it was recovered meanwhile. Also if
            `found.refused` is not "".
        Retryable: no master leads, or it has not heard of all nodes yet.
    """
    if found.refused:
        raise Rejected(f"tablet {found.tablet_id[:8]}: {found.refused}", code=Code.UNSAFE_CHANGE)
    best = found.survivors[0]
    request = master_pb2.RecoverTabletRequest(
        tablet_id=id_to_pb(found.tablet_id),
        survivor_node=id_to_pb(best.node_id),
        survivor_replica=best.replica_id,
        last_logged=opid_to_pb(best.last_logged),
        term=found.term,
        tablet_incarnation=found.incarnation,
        owner=owner,
        reason=reason,
        told=f"may be lost: {found.may_lose}",
    )
    answer = await masters.call("RecoverTablet", request, timeout_s=_TIMEOUT_S)
    done: master_pb2.RecoveryPB = answer.recovery
    return done
