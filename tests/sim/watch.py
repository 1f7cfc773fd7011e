"""Watches production's code while a world runs: every step of every core, every entry that is applied.

Installed for the length of a run. Changes nothing. Invariant: findings are reported to the world, since
production's code would catch an exception.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from stele.consensus import quiet
from stele.consensus.early import EarlyAnswers
from stele.consensus.read_round import ReadRound
from stele.consensus.reads import Reads
from stele.model.entry import Entry
from stele.model.errors import ensure
from stele.model.ids import ReplicaId
from stele.raft import RaftCore
from stele.raft import effects as fx
from stele.raft.events import Event
from stele.raft.invariants import StepMarks, check, check_change_step, check_role_step, check_step, step_marks
from stele.tablet.keyspace import KeySpace
from stele.tablet.machine import Outcome, StateMachine
from stele.tablet.store import StoreOptions, TabletStore
from stele.wal import pool, recovery
from tests.sim.loop import running_node
from tests.sim.masters import same_ids
from tests.sim.node import SimNode

if TYPE_CHECKING:
    from tests.sim.world import World

CHECKSUM_EVERY = 16
Apply = Callable[..., Any]


@contextlib.contextmanager
def watching(world: World) -> Iterator[None]:
    """Within this context, cores and stores of simulated nodes are watched, and groups rest as the plan
    says. The ids of segments come from the seed: rot changes only bytes that are not 0, so it must find the
    same ones in each run."""
    plan = world.plan
    ids = random.Random(f"segments/{plan.seed}")
    with contextlib.ExitStack() as stack:
        step_many = RaftCore.step_many

        def watched_step_many(core: RaftCore, events: Iterable[Event], steady_ms: int = 0) -> list[fx.Effect]:
            node = running_node()
            if node is None:
                return step_many(core, events, steady_ms)
            before = step_marks(core)
            effects = step_many(core, events, steady_ms)
            node.world.judge(_stepped, node, core, before, effects)
            return effects

        def watched(apply: Apply) -> Apply:
            def applied(store: Any, entry: Entry, *found: Any) -> Any:
                outcome = apply(store, entry, *found)
                node = running_node()
                if node is not None and isinstance(outcome, Outcome):
                    due = entry.index % CHECKSUM_EVERY == 0
                    checksum = world.content.checksum(store) if due else None
                    world.judge(node.history.applied, node.replica_id, entry, outcome, checksum)
                return outcome

            return applied

        init = TabletStore.__init__

        def init_in_world(store: TabletStore, directory: Path, options: StoreOptions, *parts: Any) -> None:
            """A node's threads have its clocks, too."""
            clocks = world.node_of(directory).clocks
            options = replace(
                options,
                history_us=int(1_000 * plan.history_ms),
                wall_us=clocks.wall_us,
                steady_us=lambda: int(1_000 * clocks.monotonic_ms()),
            )
            init(store, directory, options, *parts)

        confirmed, leased_index = Reads.confirmed, Reads._leased_index

        def watched_leased_index(reads: Reads) -> int | None:
            index = leased_index(reads)
            world.met["reads under a lease"] += index is not None
            return index

        def watched_confirmed(reads: Reads, begun: ReadRound, followers: Collection[ReplicaId]) -> bool:
            answered = confirmed(reads, begun, followers)
            node = running_node()
            if answered and node is not None:
                world.judge(_answered, node, begun)
            return answered

        held = EarlyAnswers.held

        def watched_held(
            answers: EarlyAnswers, index: int, applied_index: int, machine: StateMachine
        ) -> None:
            before = dict(answers._waiting)
            held(answers, index, applied_index, machine)
            node = running_node()
            for at, pending in before.items():
                if at not in answers._waiting and node is not None and node.core is not None:
                    assert pending.opid is not None
                    voters = tuple(voter.replica_id for voter in node.core.config.voters)
                    world.early[pending.timestamp] = pending.opid, voters

        stack.enter_context(mock.patch.object(EarlyAnswers, "held", watched_held))
        if world.masters is not None:
            stack.enter_context(same_ids(world))
        stack.enter_context(mock.patch.object(RaftCore, "step_many", watched_step_many))
        stack.enter_context(mock.patch.object(Reads, "confirmed", watched_confirmed))
        stack.enter_context(mock.patch.object(Reads, "_leased_index", watched_leased_index))
        for owner, name in ((KeySpace, "begin"), (TabletStore, "begin"), (TabletStore, "apply")):
            stack.enter_context(mock.patch.object(owner, name, watched(getattr(owner, name))))
        stack.enter_context(mock.patch.object(TabletStore, "__init__", init_in_world))
        for module in (pool, recovery):
            stack.enter_context(mock.patch.object(module, "new_segment_id", lambda: ids.getrandbits(63) + 1))
        if plan.rest_after_ms is not None:
            stack.enter_context(mock.patch.object(quiet, "QUIET_AFTER_MS", plan.rest_after_ms))
        yield


def _stepped(node: SimNode, core: RaftCore, before: StepMarks, effects: list[fx.Effect]) -> None:
    world = node.world
    for effect in effects:
        match effect:
            case fx.Committed(entries):
                if world.recovery.outdated(node):
                    world.met["entries committed in a history that was given up"] += len(entries)
                node.history.handed_out(node.replica_id, core.term, entries)
            case fx.RoleChanged():
                _role_changed(node, core, effect)
            case fx.ProposalLost(opid):
                node.history.lost(node.replica_id, opid)
            case fx.PeerSound(replica_id, sound, cause):
                how = "is sound" if sound else "has FAILED"
                world.trace("{} finds that {} {}: {}", node.replica_id, replica_id, how, cause)
                ensure(
                    sound == (replica_id in node.told_failed), "it was reported already that the peer is so"
                )
                if sound:
                    del node.told_failed[replica_id]
                else:
                    node.told_failed[replica_id] = True
            case fx.PeerForgot(replica_id, cause):
                ensure(
                    False, f"{node.replica_id} says that {replica_id}, which is sound, lost entries: {cause}"
                )
            case fx.MessageIgnored(sender, cause):
                ensure(False, f"{node.replica_id} ignores a message of {sender}, which is sound: {cause}")
            case fx.ConfigChanged(config, committed, cause):
                world.trace(
                    "{} has configuration {} ({}): {}", node.replica_id, config.opid_index, committed, cause
                )
            case fx.PeerNeedsCopy(replica_id, cause):
                world.met["a peer needs a copy"] += 1
                world.trace("{} finds that {} needs a copy: {}", node.replica_id, replica_id, cause)
    role = before.role
    for effect in effects:
        if isinstance(effect, fx.RoleChanged):
            check_role_step(role, effect.role)
            role = effect.role
    after = step_marks(core)
    check_step(before, after)
    if world.strict:
        check_change_step(before, after)
    check(core)


def _answered(node: SimNode, begun: ReadRound) -> None:
    """Reads that other nodes confirmed are answered by a replica that leads, in the term of the question."""
    core = node.core
    node.world.met["reads confirmed beside their cores"] += 1
    ensure(
        core is not None and core.role is fx.Role.LEADER and core.term == begun.term,
        f"reads are answered by {node.replica_id}, which does not lead in term {begun.term}",
    )


def _check_leases(elected: SimNode, term: int) -> None:
    """No leader of an earlier term holds a lease when a new one is elected."""
    for node in elected.world.all_nodes():
        core = node.core
        if node is elected or core is None or not node.leads or node.history is not elected.history:
            continue
        ensure(
            core.term >= term or not core.leased(node.host.steady_us()),
            f"{elected.replica_id} leads term {term} while {node.replica_id} holds a lease in term {core.term}",
        )


def _role_changed(node: SimNode, core: RaftCore, effect: fx.RoleChanged) -> None:
    node.told_failed.clear()
    world = node.world
    world.trace("{} is {} of term {}: {}", node.replica_id, effect.role.value, effect.term, effect.cause)
    if effect.role is fx.Role.LEADER:
        if world.strict:
            _check_leases(node, effect.term)
        node.history.elected(core, effect.term)
        world.faults.elected(node)
