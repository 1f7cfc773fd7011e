"""Foretells what a new spec would do: runs the plan and the driver's planner on a simulated cluster, to the
end. Called by preview and reconcile; pure.

Invariant: every event is an action of `make_plan` or a step of the driver's `plan`. No rule is repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from stele.driver.forecast import copying_s
from stele.driver.planner import plan as plan_steps
from stele.driver.policy import Policy
from stele.driver.rehearsal import new_replicas, settled, unhurried
from stele.driver.situation import Situation, judge_all, majority
from stele.driver.steps import (
    WAITS,
    Blocked,
    DrainNode,
    EndWish,
    MoveLeader,
    ParkNode,
    RemovePeer,
    RetireNode,
    ReturnNode,
    Step,
)
from stele.driver.view import MOVE, MOVE_BY_HAND, ClusterView
from stele.model.amounts import plural
from stele_operator.plan.actions import (
    Action,
    AlterTable,
    CreateClaim,
    CreatePod,
    CreateTable,
    DeletePod,
    FinalizeVersion,
    GrowClaim,
    PatchObject,
    RollPod,
    SetDriverPolicy,
    SetMasterCount,
    SetReplicationFactor,
)
from stele_operator.plan.budgets import tablet_name
from stele_operator.plan.cluster_plan import Plan, asked_again, make_plan
from stele_operator.plan.findings import RESTING, SLEEP, Finding, Kind
from stele_operator.plan.foretold import Event, Foretold, NewMember, NewReplica, Restart, Said, Unmet, named
from stele_operator.plan.holder import ROLL
from stele_operator.plan.observation import Catalog, Observation
from stele_operator.plan.ranges import tablets_of
from stele_operator.plan.stage import Stage
from stele_operator.plan.status import restart_pending

_ROUNDS_MAX = 1_000
_WORK_MAX = 3_000_000
"""How many tablets a rehearsal looks at, over all its rounds, before it gives up."""
_VERSION_WAITS = "VersionWaits"
"""The reason of a finding that counts as a note: a rehearsal does not know which versions a new image reads."""
_UNMET = (Kind.STALLED, Kind.DEGRADED, Kind.NOT_READY, Kind.RECONCILING)


def never() -> bool:
    """The default of `stop`: the caller waits until the rehearsal ends."""
    return False


def foretell(
    before: Observation, after: Observation, catalog: Catalog, stop: Callable[[], bool] = never
) -> Foretold:
    """Foretell what happens from now on if the specs of `after` replace those of `before`.

    `before` and `after`: the same observation, with two valid versions of the specs. `catalog`: the catalog
    of both. Changes of tablets that are under way count as done. `stop`: asked before each round; it returns
    True if nobody waits for the answer any more.
    """
    catalog = replace(catalog, view=settled(catalog.view))
    run = _Rehearsal(after, catalog).run(stop)
    usual = _Rehearsal(before, catalog).run(stop)
    without = Foretold("", events=tuple(usual.events)).order()
    return Foretold(
        cluster=f"TabletCluster {after.cluster.namespace}/{after.cluster.name}",
        events=tuple(run.events),
        unmet=tuple(replace(u, already=any(map(u.is_as, usual.unmet))) for u in run.unmet),
        notes=tuple(n for n in run.notes if n not in usual.notes),
        sleeps=run.sleeps and not usual.sleeps,
        weaker=tuple(_weaker(catalog.view, run.stage.view, run.policy)),
        copying_s=_copying_s(run),
        restarting_s=_restarting_s(before, run.events),
        anyway=tuple(without),
        complete=run.complete,
    )


class _Rehearsal:
    """One run on the simulated cluster. Afterwards it has the events in order, and what is not reached.
    `heals` and `moves`: the bytes of the copies. Both kinds are kept apart, because moves may use only half
    of the slots.
    """

    def __init__(self, o: Observation, catalog: Catalog) -> None:
        self.stage = Stage(o, catalog)
        self.policy = Policy()
        self.events: list[Event] = []
        self.unmet: list[Unmet] = []
        self.notes: list[str] = []
        self.sleeps = False
        self.heals: list[int] = []
        self.moves: list[int] = []
        self.complete = False
        self._names: dict[str, str] = {}
        self._new_tables: set[str] = set()
        self._rolled: set[str] = set()
        self._judged: tuple[ClusterView, list[Situation]] | None = None

    def run(self, stop: Callable[[], bool]) -> _Rehearsal:
        """Plan and carry out, round by round, until nothing is left to do, nothing changes, or `stop` says
        so.
        """
        rounds = max(50, min(_ROUNDS_MAX, _WORK_MAX // max(1, len(self.stage.view.tablets))))
        blocked: list[Blocked] = []
        planned: tuple[ClusterView, Policy] | None = None
        last: list[str] = []
        for _ in range(rounds):
            if stop():
                break
            o = self.stage.observe()
            plan = make_plan(o)
            self._names = {m.node_id: m.name for m in plan.members}
            actions = [a for a in plan.actions if not asked_again(o, a)]
            for action in actions:
                self._tell_action(o, action)
            self.stage.actions(actions)
            steps: list[Step] = []
            # As in a pass, the driver sees what was there before the actions, for which the policy was made.
            view = o.catalog.view if o.catalog is not None else self.stage.view
            if plan.policy is None:
                blocked = []
            elif planned is None or not _same(planned, view, plan.policy):
                planned, self.policy = (view, plan.policy), plan.policy
                found = plan_steps(view, unhurried(plan.policy))
                blocked = [s for s in found if isinstance(s, Blocked)]
                steps = [s for s in found if not isinstance(s, WAITS)]
                self._tell_steps(view, steps)
                self.stage.steps(steps)
            # Steps by all that they name: two masters leave for the same reason, one after the other.
            done = [*(f"{type(x).__name__} {x.reason}" for x in actions), *map(repr, steps)]
            if not done or done == last:
                self.complete = not done
                self.unmet = [*self._unmet(plan), *_blocked(blocked)]
                self.notes = [f.message for f in plan.findings if f.kind is Kind.REMARK or _is_note(f)]
                self.notes += _by_hand(o, plan)
                self.sleeps = any(f.reason in SLEEP for f in plan.findings)
                break
            last = done
        self._place()
        return self

    # -- events

    def _tell_action(self, o: Observation, action: Action) -> None:
        match action:
            case RollPod():
                self._rolled.add(action.name)
                self.events.append(self._restart(o, action.name))
            case CreateClaim():
                self.events.append(NewMember(action.name, "", ""))
            case CreatePod():
                if action.name not in self._rolled and not self._is_new(action.name):
                    self._say("start", action.name, "its pod is made")
            case DeletePod():
                if o.cluster.spec is not None and o.cluster.spec.hibernate:
                    self._say("stop", action.name, "its pod is deleted, and its claim is kept")
            case GrowClaim():
                self._say("grow", action.name, f"its volume grows to {action.size}")
            case PatchObject(kind="PersistentVolumeClaim", patch={"metadata": {"ownerReferences": owners}}):
                goes = "goes with the TabletCluster" if owners else "outlives the TabletCluster"
                self._say("owner", action.name, f"its volume {goes} from now on (deletionPolicy)")
            case CreateTable(spec=spec):
                self._new_tables.add(action.group)
                text = f"table {action.name} is created: {plural(tablets_of(spec), 'tablet')} with {plural(spec.replicationFactor, 'replica')} each"
                self._say("table", "", text)
            case SetReplicationFactor() | AlterTable():
                self._say("table", "", action.reason)
            case SetMasterCount():
                self._say(
                    "masters", "", f"the number of masters becomes {action.masters}; it was {action.before}"
                )
            case SetDriverPolicy(only_holders=False):
                masters = "while no operator is heard, the masters"
                drive = "heal by the new policy" if action.policy.drive_after_ms else "heal nothing"
                self._say("policy", "", f"{masters} {drive}")
            case FinalizeVersion():
                self._say("version", "", f"{action.reason}: it is finalized, and cannot be taken back")
            case _:
                pass

    def _tell_steps(self, view: ClusterView, steps: Sequence[Step]) -> None:
        removed: dict[str, int] = {}
        leaders: dict[str, int] = {}
        for step in steps:
            match step:
                case DrainNode():
                    self._say("drain", self._name(step.node_id), f"leaves: {step.reason}")
                case ParkNode():
                    self._say("park", self._name(step.node_id), f"is parked: {step.reason}")
                case RetireNode():
                    text = "holds nothing and is retired: its pod goes, its claim is kept for healing.keepFor"
                    self._say("retire", self._name(step.node_id), text)
                case EndWish() | ReturnNode():
                    self._say("return", self._name(step.node_id), "is in service again")
                case RemovePeer():
                    removed[step.node_id] = removed.get(step.node_id, 0) + 1
                case MoveLeader():
                    tablet = view.tablet(step.tablet_id)
                    source = tablet.leader_node if tablet is not None else ""
                    leaders[source] = leaders.get(source, 0) + 1
                case _:
                    pass
        for made in new_replicas(view, steps):
            (self.moves if made.kind in (MOVE, MOVE_BY_HAND) else self.heals).append(made.size_bytes)
            source = self._name(made.from_node) if made.from_node else ""
            self.events.append(
                NewReplica(
                    made.tablet_id,
                    made.table_name,
                    source,
                    self._name(made.target_node),
                    made.size_bytes,
                    made.reason,
                )
            )
        for node_id, number in sorted(removed.items()):
            self._say("remove", self._name(node_id), f"{plural(number, 'replica')} removed")
        for node_id, number in sorted(leaders.items()):
            self._say("leaders", self._name(node_id), f"{plural(number, 'leader')} given away")

    def _say(self, kind: str, pod: str, text: str) -> None:
        self.events.append(Said(kind, pod, text))

    def _name(self, node_id: str) -> str:
        return self._names.get(node_id) or f"node {node_id[:8]}"

    def _is_new(self, name: str) -> bool:
        return any(isinstance(e, NewMember) and e.pod == name for e in self.events)

    def _restart(self, o: Observation, name: str) -> Restart:
        pod = o.pod(name)
        node_id = pod.node_id if pod is not None else ""
        ready = {p.name for p in o.pods if p.ready}
        away = {c.node_id for c in o.claims if c.name in self._rolled - ready - {name}}
        no_spare, stopped = 0, []
        view = self.stage.view
        if self._judged is None or self._judged[0].tablets is not view.tablets:
            self._judged = (view, judge_all(view, self.policy))
        for s in self._judged[1]:
            if any(m.peer.node_id == node_id and m.live for m in s.voters):
                left = sum(m.peer.node_id not in {node_id, *away} for m in s.live_voters)
                needed = majority(len(s.voters))
                no_spare += left == needed
                if left < needed:
                    stopped.append(tablet_name(s.tablet))
        leaders = sum(t.leader_node == node_id for t in view.tablets if t.node_role == "node")
        machine = pod.machine if pod is not None else ""
        return Restart(name, machine, leaders, no_spare, tuple(stopped), len(away))

    # -- the end

    def _place(self) -> None:
        """Add to the events the zones and machines that new members got."""
        zones = {c.name: c.zone for c in self.stage.observe().claims}
        for number, event in enumerate(self.events):
            if isinstance(event, NewMember):
                pod = self.stage.pod(event.pod)
                self.events[number] = NewMember(
                    event.pod, zones.get(event.pod, ""), pod.machine if pod is not None else ""
                )

    def _unmet(self, plan: Plan) -> list[Unmet]:
        return [
            Unmet(f.reason, f.message, f.group, f.member)
            for f in plan.findings
            if f.kind in _UNMET
            and f.reason not in (*RESTING, *SLEEP, _VERSION_WAITS)
            and not self._is_made(f)
        ]

    def _is_made(self, finding: Finding) -> bool:
        """Whether the finding is about a table that is created in the rehearsal. Tablets of such tables are
        not simulated.
        """
        return finding.group in self._new_tables and finding.kind is Kind.NOT_READY


def _by_hand(o: Observation, plan: Plan) -> list[str]:
    """A note about pods with an older spec that are not rolled, so a person must delete them."""
    waits = plan.policy is None or any(f.reason in ROLL for f in plan.findings)
    stale = () if waits else restart_pending(o)
    return [f"these pods keep an older spec until somebody deletes them: {named(stale)}"] if stale else []


def _is_note(finding: Finding) -> bool:
    """Whether the finding only says that the cluster rests as somebody asked, or that new images must read a
    version.
    """
    known = finding.reason in (*RESTING, _VERSION_WAITS)
    return finding.kind is Kind.RECONCILING and not finding.group and known


def _same(planned: tuple[ClusterView, Policy], view: ClusterView, policy: Policy) -> bool:
    """Whether the driver has already planned this view under this policy."""
    seen, by = planned
    return seen.tablets is view.tablets and seen.nodes == view.nodes and by == policy


def _blocked(steps: Sequence[Blocked]) -> list[Unmet]:
    """Tablets whose planned change is blocked, counted by the code of the reason."""
    by_code: dict[str, list[Blocked]] = {}
    for step in steps:
        by_code.setdefault(step.code, []).append(step)
    return [
        Unmet(code, f"{plural(len(found), 'tablet')}: {found[0].reason}")
        for code, found in sorted(by_code.items())
    ]


def _weaker(before: ClusterView, after: ClusterView, policy: Policy) -> list[str]:
    """A text for each table with tablets that can lose a voter now, but not at the end."""
    spare = {s.tablet.tablet_id: s.spare for s in judge_all(before, policy)}
    count: dict[str, int] = {}
    for s in judge_all(after, policy):
        if s.spare <= 0 < spare.get(s.tablet.tablet_id, 0):
            name = s.tablet.table_name or "the catalog"
            count[name] = count.get(name, 0) + 1
    return [
        f"{plural(number, 'tablet')} of {name} cannot lose a replica any more"
        for name, number in sorted(count.items())
    ]


def _copying_s(run: _Rehearsal) -> float | None:
    parts = [
        copying_s(run.heals, run.policy, run.policy.max_copies) if run.heals else 0.0,
        copying_s(run.moves, run.policy, run.policy.max_moves) if run.moves else 0.0,
    ]
    known = [p for p in parts if p is not None]
    return sum(known) if len(known) == len(parts) and (run.heals or run.moves) else None


def _restarting_s(o: Observation, events: Sequence[Event]) -> float | None:
    """About how many seconds all restarts take, from the time that running pods took to become ready; None if
    unknown.
    """
    took = [
        p.unready_since_s - p.created_s for p in o.pods if p.ready and not p.restarts and p.unready_since_s
    ]
    restarts = sum(1 / (1 + e.beside) for e in events if isinstance(e, Restart))
    return restarts * median(took) if restarts and took and median(took) > 0 else None
