"""The driver's requests to the catalog: claim, intents, node states. Called by service.py on the leader.

The caller has confirmed the leadership (Master.confirmed_lead), because some answers commit no batch, and
only a batch would confirm it.

Invariants:
- An order with an epoch takes effect only if that epoch is in force at the batch's place in the log.
- Intents always have an epoch. Node states have one unless an administrator orders them (epoch 0).
  RegisterNode has none, since it gives the node no work.
- An intent ends only in the batch that records the committed configuration which decides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stele.master.leadership import MASTER_HOLDER, Leadership
from stele.master.port import drop, insert, put, swap, unchanged
from stele.master.records import (
    ADMINISTRATOR,
    DRIVER,
    ClaimRecord,
    IntentRecord,
    NodeRecord,
    PolicyRecord,
)
from stele.master.replica_ids import free_id
from stele.model import bounds
from stele.model.config import Configuration
from stele.model.copies import with_made
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import CATALOG_TABLET_ID, NodeId, ReplicaId, TabletId
from stele.model.incarnation import is_newer
from stele.model.kvop import KeyOperation
from stele.rpc.convert import config_from_pb, id_from_pb, opid_from_pb
from stele.rpc.proto import master_pb2

CLAIM_LOCK = "driver claim"
UNFORMED_LOCK = "nodes that never started"
"""The lock for registering nodes. It is held while nodes that never started are counted and one is added. So
a burst of requests keeps to NODES_UNFORMED_MAX.
"""


async def claim_driver(lead: Leadership, request: master_pb2.ClaimDriverRequest) -> ClaimRecord:
    """Take the claim (epoch 0), renew it, or release it.

    The present holder may take it again at once: that is the same driver after a restart. The new, higher
    epoch fences its earlier run. Another driver must wait until the claim was not renewed for its lifetime.
    If an earlier leader granted the claim, the lifetime that the caller gives is used. Wall clocks do not
    decide: an earlier leader's may have been hours ahead.

    Raises:
        Retryable: NOT_READY while another holder's claim runs, or while the policy holds drivers back. Also
            NOT_READY for a master where the policy forbids masters to drive: it may have read an older
            policy.
        Rejected: STALE_EPOCH if the epoch to renew is not the one in force.
    """
    if not request.holder:
        raise Rejected("driver claim: the request names no holder")
    async with lead.locks.hold(tables=(CLAIM_LOCK,)):
        claim, now_ms = lead.catalog.claim, lead.now_ms()
        policy = lead.catalog.policy
        if policy is not None and policy.held and not (request.release or request.override_held):
            raise Retryable(f"no driver may work now: {policy.held}", code=Code.NOT_READY)
        if forbids_masters(policy) and request.holder.startswith(MASTER_HOLDER) and not request.release:
            raise Retryable("no master may drive now: the policy forbids it", code=Code.NOT_READY)
        expires_us = lead.wall_us() + request.ttl_ms * 1000  # only for display
        if request.epoch:
            if request.epoch != claim.epoch:
                raise _stale(request.epoch, claim)
            renewed = replace(claim, expires_us=0 if request.release else expires_us)
        else:
            ttl_ms = request.ttl_ms if lead.claim_ttl_ms is None else lead.claim_ttl_ms
            runs = claim.expires_us != 0 and now_ms - lead.claim_seen_ms < ttl_ms
            if claim.holder != request.holder and runs:
                # The message leaves out the remaining time, so that a caller that repeats the request gets
                # the same text.
                raise Retryable(
                    f"{claim.holder} holds the driver claim (epoch {claim.epoch}), and it has not expired; stop that driver first, or wait",
                    code=Code.NOT_READY,
                )
            renewed = replace(claim, holder=request.holder, epoch=claim.epoch + 1, expires_us=expires_us)
        lead.claim_seen_ms, lead.claim_ttl_ms = now_ms, request.ttl_ms
        await lead.commit([put(renewed)])
        return renewed


def forbids_masters(policy: PolicyRecord | None) -> bool:
    """Whether masters never drive, however long no driver is heard."""
    return policy is not None and not policy.drive_after_ms


def ended_claim(claim: ClaimRecord) -> ClaimRecord:
    """The claim after its holder has lost it. Nobody holds it, and its new epoch makes earlier orders stale."""
    return replace(claim, holder="", epoch=claim.epoch + 1, expires_us=0)


def check_epoch(lead: Leadership, epoch: int) -> None:
    """Raise STALE_EPOCH unless this is the epoch in force."""
    if epoch != lead.catalog.claim.epoch or not epoch:
        raise _stale(epoch, lead.catalog.claim)


async def commit_order(lead: Leadership, epoch: int, batch: Sequence[KeyOperation]) -> None:
    """Commit an order about a node under its locks.

    A driver's order needs its epoch in force (`_commit`). An administrator's order (epoch 0) does not.
    """
    if epoch:
        await _commit(lead, epoch, batch)
    else:
        await lead.commit(batch)


async def _commit(lead: Leadership, epoch: int, batch: Sequence[KeyOperation]) -> None:
    """Commit a driver's order under its locks.

    A newer claim may be proposed but not applied yet. Then the batch has no effect. If it was only a renewal
    by the same driver, the batch is proposed again.

    Raises:
        Rejected: STALE_EPOCH. Other errors as `Leadership.commit`.
    """
    while True:
        check_epoch(lead, epoch)
        claim = lead.catalog.claim
        try:
            return await lead.commit([unchanged(claim), *batch])
        except SteleError as exc:
            if exc.code is not Code.CAS_FAILED or lead.catalog.claim == claim:
                raise


def _stale(epoch: int, claim: ClaimRecord) -> Rejected:
    return Rejected(
        f"driver epoch {epoch} is stale; epoch {claim.epoch} ({claim.holder or 'nobody'}) is in force: claim "
        f"again",
        code=Code.STALE_EPOCH,
    )


async def begin_intent(lead: Leadership, request: master_pb2.BeginIntentRequest) -> IntentRecord:
    """Record an intent and assign its replica_id. If a replica_id is given, take over the existing intent.

    Raises:
        Rejected: STALE_EPOCH. NOT_FOUND. CHANGE_IN_PROGRESS, the tablet has an intent. INVALID_ARGUMENT, the
            target cannot hold the replica.
        Retryable: CAS_FAILED, the target's row changed meanwhile. NOT_READY, the target is not `formed` yet.
    """
    asked = request.intent
    tablet_id = TabletId(id_from_pb(asked.tablet_id))
    async with lead.locks.hold(tablets=(tablet_id,)):
        check_epoch(lead, request.epoch)
        tablet = lead.catalog.tablet(tablet_id)
        present = lead.catalog.intents.get(tablet_id)
        newest = newest_config(lead, tablet_id)
        config_index = newest.opid_index
        if present is not None:
            if asked.replica_id != present.replica_id:
                raise Rejected(
                    f"tablet {tablet_id[:8]} has an intent already (replica {present.replica_id}, epoch "
                    f"{present.epoch})",
                    code=Code.CHANGE_IN_PROGRESS,
                )
            taken = replace(
                present,
                epoch=request.epoch,
                expires_us=asked.expires_us,
                config_index=max(present.config_index, config_index),
            )
            await _commit(lead, request.epoch, [swap(present, taken)])
            return taken
        if asked.replica_id:
            raise Rejected(
                f"tablet {tablet_id[:8]} has no intent for replica {asked.replica_id}", code=Code.NOT_FOUND
            )
        if tablet.state != "RUNNING":
            raise Rejected(f"tablet {tablet_id[:8]} is {tablet.state}; an intent needs a RUNNING tablet")
        target = _target(lead, asked, tablet_id)
        replica_id = free_id(tablet, newest, lead.liveness.all_reports_of(tablet_id))
        intent = IntentRecord(
            tablet_id,
            ReplicaId(replica_id),
            target.node_id,
            asked.kind or "add",
            request.epoch,
            config_index,
            asked.expires_us,
            id_from_pb(asked.source_node),
            asked.replaces_replica,
            asked.HasField("witness_start"),
            opid_from_pb(asked.witness_start),
            asked.reason,
            asked.cause,
        )
        counted = replace(tablet, next_replica_id=replica_id + 1)
        await _commit(lead, request.epoch, [swap(tablet, counted), insert(intent), unchanged(target)])
        return intent


def _target(lead: Leadership, asked: master_pb2.IntentPB, tablet_id: TabletId) -> NodeRecord:
    node_id = id_from_pb(asked.target_node)
    target = lead.catalog.nodes.get(node_id)
    role = "master" if tablet_id == CATALOG_TABLET_ID else "node"
    if target is None or target.role != role:
        raise Rejected(
            f"intent on tablet {tablet_id[:8]}: the catalog has no {role} with the id {node_id[:8]}"
        )
    if target.state != "ACTIVE":
        raise Rejected(
            f"intent on tablet {tablet_id[:8]}: target {node_id[:8]} is {target.state}, expected ACTIVE"
        )
    if not target.takes_replicas:
        raise Rejected(
            f"intent on tablet {tablet_id[:8]}: target {node_id[:8]} is parked; expected one in service"
        )
    if not target.formed:
        raise Retryable(
            f"intent on tablet {tablet_id[:8]}: target {node_id[:8]} has not registered its volume yet; try again",
            code=Code.NOT_READY,
        )
    if newest_config(lead, tablet_id).peer_on(node_id) is not None:
        raise Rejected(
            f"intent on tablet {tablet_id[:8]}: target {node_id[:8]} holds a replica of it already"
        )
    return target


def newest_config(lead: Leadership, tablet_id: TabletId) -> Configuration:
    """The tablet's committed configuration. For the catalog tablet it comes from its log, for others from the
    row.
    """
    if tablet_id == CATALOG_TABLET_ID:
        return lead.log.committed_config
    return lead.catalog.tablet(tablet_id).config


async def end_intent(lead: Leadership, request: master_pb2.EndIntentRequest) -> None:
    """End an intent and record the committed configuration that decides it. Does nothing if the intent has
    ended.

    Raises:
        Rejected: STALE_EPOCH. CAS_FAILED, no committed configuration names the replica, and none was written
            since the intent was begun or taken over.
    """
    tablet_id = TabletId(id_from_pb(request.tablet_id))
    async with lead.locks.hold(tablets=(tablet_id,)):
        check_epoch(lead, request.epoch)
        intent = lead.catalog.intents.get(tablet_id)
        if intent is None or intent.replica_id != request.replica_id:
            return
        tablet = lead.catalog.tablet(tablet_id)
        told, known = config_from_pb(request.committed_config), newest_config(lead, tablet_id)
        config, term = (told, request.term) if is_newer(told.version, known.version) else (known, tablet.term)
        decided = (
            config.names(intent.replica_id, intent.target_node)
            or config.opid_index > intent.config_index
            or tablet.state in ("DELETED", "REPLACED")
        )
        if not decided:
            raise Rejected(
                f"intent on tablet {tablet_id[:8]}: configuration {config.opid_index} lacks replica "
                f"{intent.replica_id} and "
                f"is not above {intent.config_index}; write a newer configuration first, so that late orders are refused",
                code=Code.CAS_FAILED,
            )
        recorded = replace(tablet, config=config, term=max(term, tablet.term))
        if tablet_id != CATALOG_TABLET_ID and config.names(intent.replica_id, intent.target_node):
            copies = with_made(tablet.copies, intent.replica_id, intent.cause, config)
            recorded = replace(recorded, copies=copies)
        batch = [drop(intent)]
        if recorded != tablet:
            batch.append(swap(tablet, recorded))
        await _commit(lead, request.epoch, batch)
    lead.look_at(tablet_id)


async def register_node(lead: Leadership, request: master_pb2.RegisterNodeRequest) -> bool:
    """Register a node's UUID. Returns whether the node was ever seen with a formatted volume.

    Raises:
        Rejected: an unknown role, or another role than before. Too many registered nodes that never started.
    """
    node_id = NodeId(id_from_pb(request.node_id))
    role = request.role or "node"
    if not node_id or role not in ("node", "master"):
        raise Rejected(f"register node {node_id[:8] or '(none)'}: role {role!r}; expected node or master")
    async with lead.locks.hold(tables=(f"node/{node_id}", UNFORMED_LOCK)):
        present = lead.catalog.nodes.get(node_id)
        if present is not None:
            if present.role != role:
                raise Rejected(
                    f"node {node_id[:8]} is a {present.role}, not a {role}; give the new {role} an unused id"
                )
            if request.name and present.name != request.name:
                await lead.commit([swap(present, replace(present, name=request.name))])
            return present.formed
        unformed = sum(not n.formed and n.state != "RETIRED" for n in lead.catalog.nodes.values())
        if unformed >= bounds.NODES_UNFORMED_MAX:
            raise Rejected(
                f"register node {node_id[:8]}: {unformed} registered nodes have never started; retire those that "
                f"never will"
            )
        await lead.commit([insert(NodeRecord(node_id, role, "ACTIVE", name=request.name))])
        return False


_MOVES = {
    ("ACTIVE", "DRAINING"),
    ("DRAINING", "ACTIVE"),
    ("DRAINING", "RETIRED"),
}


async def set_node_state(lead: Leadership, request: master_pb2.SetNodeStateRequest) -> None:
    """Move a node between ACTIVE, DRAINING and RETIRED. Ordering the state that it has changes nothing, with
    one exception. A node that is DRAINING only because it was silent stays DRAINING after an order to drain
    it.

    This call records what a driver sees; `wanted.want_node` records what somebody wants.

    Raises:
        Rejected: STALE_EPOCH (epoch 0: an administrator). NOT_FOUND. UNSAFE_CHANGE, something still names the
            node. INVALID_ARGUMENT, a driver would undo what an administrator asked for.
        Retryable: NOT_READY, a driver retires a node that has returned meanwhile.
    """
    node_id = id_from_pb(request.node_id)
    try:
        state = master_pb2.NodeStatePB.Name(request.state)
    except ValueError:
        state = str(request.state)
    async with lead.locks.hold(tables=(f"node/{node_id}",)):
        if request.epoch:
            check_epoch(lead, request.epoch)
        node = lead.catalog.nodes.get(node_id)
        if node is None:
            raise Rejected(
                f"there is no node with the id {node_id[:8]}; `stele node list` shows all",
                code=Code.NOT_FOUND,
            )
        given_up = state == "DRAINING" and request.given_up
        if node.state == state and (given_up or not node.returns):
            return
        if node.state != state and (node.state, state) not in _MOVES:
            raise Rejected(f"node {node_id[:8]} is {node.state} and cannot become {state}")
        if request.epoch:
            _check_wanted(lead, node, state, given_up)
        if state == "RETIRED":
            check_unnamed(lead, node_id)
        owner = DRIVER if request.epoch else ADMINISTRATOR
        asks = state == "RETIRED" or (state == "DRAINING" and not given_up)
        changed = replace(node, state=state, reason=request.reason, given_up=given_up)
        changed = replace(changed, wanted="RETIRED" if asks else "", owner=owner if asks else "", left_ms=0)
        await commit_order(lead, request.epoch, [swap(node, changed)])


def _check_wanted(lead: Leadership, node: NodeRecord, state: str, given_up: bool) -> None:
    """Refuse a driver's order if an administrator's order, or the node's return, has overtaken it."""
    if state == "ACTIVE" and not node.returns and node.asked_by != DRIVER:
        raise Rejected(
            f"somebody asked to drain node {node.node_id[:8]} ({node.reason}); a driver may not undo that"
        )
    if state == "DRAINING" and not given_up and node.asked_by == ADMINISTRATOR:
        raise Rejected(
            f"an administrator wants node {node.node_id[:8]} {node.asked} ({node.reason}); a driver may not "
            f"change that"
        )
    if state == "RETIRED" and node.asked == "DRAINED" and lead.is_alive(node):
        raise Rejected(
            f"node {node.node_id[:8]} is to be drained, not retired ({node.reason}); a driver may retire it once "
            f"it is lost"
        )
    if state == "RETIRED" and node.returns and lead.is_alive(node):
        raise Retryable(
            f"node {node.node_id[:8]} was given up as silent but sends heartbeats again; fetch the cluster view "
            f"again",
            code=Code.NOT_READY,
        )


async def keep_leader(lead: Leadership, request: master_pb2.KeepLeaderRequest) -> None:
    """Record until when drivers do not move the leader of a tablet. With 0 ms they may move it again.

    Raises:
        Rejected: NOT_FOUND. INVALID_ARGUMENT, a time above KEEP_LEADER_MAX_MS.
    """
    tablet_id = TabletId(id_from_pb(request.tablet_id))
    if request.for_ms > bounds.KEEP_LEADER_MAX_MS:
        raise Rejected(
            f"tablet {tablet_id[:8]}: its leader may be kept for {bounds.KEEP_LEADER_MAX_MS // 1_000} s at most, "
            f"not for {request.for_ms // 1_000} s"
        )
    async with lead.locks.hold(tablets=(tablet_id,)):
        tablet = lead.catalog.tablet(tablet_id)
        until_us = lead.wall_us() + request.for_ms * 1_000 if request.for_ms else 0
        if tablet.leader_kept_until_us != until_us:
            await lead.commit([swap(tablet, replace(tablet, leader_kept_until_us=until_us))])


def check_unnamed(lead: Leadership, node_id: str) -> None:
    """Raise UNSAFE_CHANGE if a configuration or an intent names the node."""
    names = lead.catalog.references_to(node_id)
    if lead.log.committed_config.peer_on(node_id) is not None:
        names.append("the configuration of the catalog")
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise Rejected(
            f"node {node_id[:8]} cannot retire because {', '.join(names[:3])}{more} names it; move its replicas "
            f"away first",
            code=Code.UNSAFE_CHANGE,
        )
