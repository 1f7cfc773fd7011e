"""Drives the cluster while no driver is heard, and keeps the policy for it. Run by master.py on the leader.

A driver is heard when it takes or renews the claim, or asks for a view under its name. After
`drive_after_ms` of silence this master takes the claim and heals with the driver's own planner and executor.
When a driver is heard again, this master releases the claim after the round under way.

Invariant: it gives orders only under the driver's claim, so it and another driver never work at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

import structlog

from stele import metrics
from stele.driver.budget import taken_over
from stele.driver.executor import Executor
from stele.driver.keeping import ViewKeeper
from stele.driver.policy import Policy, StandingPolicy
from stele.driver.view import ClusterView, Holder
from stele.driver.wire import standing_from_pb
from stele.master.cluster_view import Scene, masters_of, policy_to_pb
from stele.master.driving import CLAIM_LOCK, check_epoch, ended_claim, forbids_masters
from stele.master.leadership import MASTER_HOLDER, Leadership
from stele.master.port import put, swap
from stele.master.records import PolicyRecord
from stele.master.view_changes import ViewChanges
from stele.model.errors import Rejected, SteleError
from stele.rpc.channels import ChannelPool
from stele.rpc.proto import master_pb2

log = structlog.get_logger("stele.master")

_LOOK_S = 5.0
"""The pause between two looks while the cluster needs nothing, or the policy forbids driving."""
_PAUSE_S = 0.5
_POLICY_LOCK = "driver policy"


async def set_policy(lead: Leadership, asked: master_pb2.DriverPolicyPB, epoch: int) -> None:
    """Replace the policy. If it forbids the holder of the claim to drive, the same batch ends the claim. Then
    that holder's orders are stale.

    `epoch`: of the caller's claim, 0 if it has none.

    Raises:
        Rejected: INVALID_ARGUMENT, a value is out of range. STALE_EPOCH, the caller has lost its claim, so
            its knowledge of the budget may be old.
    """
    policy = standing_from_pb(asked)
    if faults := policy.faults:
        raise Rejected(f"driver policy: {'; '.join(faults)}")
    values = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}
    values["holding"] = _rows_of(policy.holding)
    async with lead.locks.hold(tables=(CLAIM_LOCK, _POLICY_LOCK)):
        if epoch:
            check_epoch(lead, epoch)
        present = lead.catalog.policy
        record = dataclasses.replace(present, **values) if present is not None else PolicyRecord(**values)
        if record != present:
            claim = lead.catalog.claim
            forbidden = record.held or (forbids_masters(record) and claim.holder.startswith(MASTER_HOLDER))
            await lead.commit([put(record), *([put(ended_claim(claim))] if forbidden else [])])


async def keep_budget(
    lead: Leadership, holding: Sequence[Holder], waiting: Sequence[str], may: Callable[[], bool]
) -> None:
    """Write down who holds the budget and who waits, if that changed. Does nothing without a policy in the
    catalog.

    `may` is called under the lock. If it returns false, nothing is written, since a driver is back and writes
    it.
    """
    async with lead.locks.hold(tables=(_POLICY_LOCK,)):
        present = lead.catalog.policy
        if present is not None and may():
            record = dataclasses.replace(present, holding=_rows_of(holding), waiting=tuple(waiting))
            if record != present:
                await lead.commit([swap(present, record)])


def _rows_of(holding: Sequence[Holder]) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
    return tuple((h.name, tuple((a.node_id, a.incarnation) for a in h.away)) for h in holding)


class StandIn:
    """Drives during one leadership. `scene`: as `Master.scene`. `changes`: those of the view, in this
    leadership.
    """

    def __init__(
        self,
        lead: Leadership,
        pool: ChannelPool,
        scene: Callable[[], Scene],
        changes: ViewChanges,
        node_id: str,
    ) -> None:
        self._lead = lead
        self._pool = pool
        self._scene = scene
        self._changes = changes
        self._holder = f"{MASTER_HOLDER}{node_id}"
        self._begin()
        self._drives = False
        self._told = ""

    def _begin(self) -> None:
        """Forget the cluster. With 10,000 tablets a view and its judgements take 50 MB. So they are not kept
        while another drives.
        """
        self._keeper = ViewKeeper()
        self._executor = Executor(self._pool, (), holder=self._holder, keeper=self._keeper)
        self._knows = False

    async def run(self) -> None:
        """Run until cancelled. The claim is not released at the end: it expires, or the next leader ignores
        it.
        """
        try:
            while True:
                wait_s = self._silence_left_s()
                if wait_s is not None:
                    await self._rest()
                    await asyncio.sleep(min(wait_s, _LOOK_S))
                    continue
                try:
                    pause_s = await self._round()
                    self._told = ""
                except SteleError as exc:
                    pause_s = _LOOK_S
                    if str(exc) != self._told:
                        self._told = str(exc)
                        log.warning("this master cannot drive now; it keeps trying", error=self._told)
                await asyncio.sleep(pause_s)
        finally:
            await self._executor.checks.close()
            metrics.master_drives.set(0)

    def _policy(self) -> StandingPolicy:
        return standing_from_pb(policy_to_pb(self._lead.catalog.policy, self._lead.options))

    def _silence_left_s(self) -> float | None:
        """The time in seconds until this master may drive. None: it may drive now."""
        after_ms = self._policy().drive_after_ms
        if not after_ms:
            return _LOOK_S
        left_ms = after_ms - (self._lead.now_ms() - self._lead.driver_heard_ms)
        return left_ms / 1000 if left_ms > 0 else None

    async def _rest(self) -> None:
        """Leave the work to the driver that was heard."""
        if self._drives:
            self._drives = False
            metrics.master_drives.set(0)
            log.info("a driver is at work again; this master stops driving")
        await self._executor.close()
        if self._knows:
            self._begin()

    async def _keep_budget(self, view: ClusterView, policy: Policy) -> None:
        """Keep the budget's holders in the catalog up to date while their driver is away. The next driver
        finds them there."""
        if not view.settled:
            return
        names: dict[str, str] = {n.node_id: n.name for n in self._lead.catalog.nodes.values() if n.name}
        holding, waiting = taken_over(view, policy, self._policy().waiting, names)
        await keep_budget(self._lead, holding, waiting, lambda: self._silence_left_s() is None)

    async def _page(self, since: master_pb2.ViewPlacePB) -> master_pb2.GetClusterViewResponse:
        return await self._changes.page(since, "")

    async def _round(self) -> float:
        """Drive for one round if the cluster needs it. Returns the seconds to wait before the next round."""
        scene, policy = self._scene(), self._policy().policy()
        self._knows = True
        # A claim writes to the catalog every few seconds. So none is taken while the cluster needs nothing.
        view = (await self._keeper.renew(self._page)).view
        await self._keep_budget(view, policy)
        self._executor.masters.learn(m.address for m in masters_of(scene))
        if not await asyncio.to_thread(self._executor.has_work, view, policy):
            await self._executor.compare_copies(view)
            if not self._executor.checks.busy:
                await self._executor.release()
            return _LOOK_S
        if self._silence_left_s() is not None:
            return 0.0  # meanwhile a driver was heard, or the policy came to forbid it
        if not self._drives:
            self._drives = True
            metrics.master_drives.set(1)
            silent_s = (self._lead.now_ms() - self._lead.driver_heard_ms) // 1000
            log.warning("no driver was heard; this master drives until one returns", silent_s=silent_s)
        await self._executor.run_once(policy)
        return _PAUSE_S
