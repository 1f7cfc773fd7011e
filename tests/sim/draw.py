"""Draws the plan that one seed gives. Even the chances of faults are drawn.

Invariant: a plan depends only on its seed.
"""

from __future__ import annotations

import random
from dataclasses import replace

from stele.raft.options import RaftOptions
from stele.wal import LogOptions
from tests.sim.early import with_early
from tests.sim.plan import Plan, Weather

_MIXED = (
    Weather.MIXED,
    Weather.RECOVERY,
    Weather.TABLE,
    Weather.CATALOG,
    Weather.FULL_DISKS,
    Weather.DEPOSED,
    Weather.FOLLOWERS,
    Weather.LEASES,
    Weather.EARLY,
)
"""Those whose plans begin as a mixed one."""
_WEATHERS = (Weather.MIXED,) * 6 + (Weather.STORM,) * 3 + (Weather.DUEL, Weather.CHURN, Weather.FIGURE_8)

_BY_TURNS = (Weather.CLOCKS, Weather.FULL_DISKS, Weather.FOLLOWERS, Weather.LEASES)
"""Those that `draw_plan` gives on request alone."""


def weather_of(seed: int) -> Weather | None:
    """The weather that runs of many seeds ask for with this one. None: what the seed draws."""
    return _BY_TURNS[seed // 5 % 4] if seed % 5 == 0 else None


def draw_plan(seed: int, weather: Weather | None = None) -> Plan:
    """The world of this seed. The caller may choose its weather."""
    plan = _with_weather(seed, weather)
    plan = plan if plan.directed or plan.clock_off_ms else _with_habits(plan)
    plan = _with_losses(_with_disks(_with_timestamps(_with_returns(_with_clocks(plan)))))
    plan = _with_older(_with_table(_with_recovery(plan, weather), weather))
    plan = _with_leases(_with_followers(_with_deposed(plan, weather), weather), weather)
    plan = with_early(_with_catalog(plan, weather), weather)
    if weather is Weather.FULL_DISKS:
        plan = replace(plan, full_disks_per_s=1.0, disk_errors_per_s=0.0, rots_per_s=0.0)
    return plan


def _with_weather(seed: int, weather: Weather | None) -> Plan:
    rng = random.Random(f"plan/{seed}")
    drawn = rng.choice(_WEATHERS)
    weather = weather or drawn
    plan = _mixed(seed, rng)
    if weather in _MIXED:
        return plan
    if weather is Weather.CLOCKS:
        return replace(
            plan,
            voters=3,
            fault_ms=4000,
            clock_off_ms=2000.0,
            snapshots_per_s=10.0,
            transfers_per_s=rng.uniform(1.0, 3.0),
            changes_per_s=0.0,
            partitions_per_s=0.0,
        )
    low = plan.options.election_min_ms
    plan = replace(
        plan,
        options=replace(plan.options, election_max_ms=rng.choice((low + 10, 2 * low))),
        delay_max_ms=plan.delay_min_ms + low * rng.uniform(0.02, 0.4),
        crashes_per_s=rng.uniform(0.5, 8.0),
        crash_after_vote=rng.uniform(0.0, 0.5),
        crash_after_election=rng.uniform(0.0, 0.7),
        down_ms_max=low * rng.uniform(0.1, 1.5),
        alarms_per_s=rng.uniform(0.0, 5.0),
    )
    if weather is Weather.DUEL:
        low = rng.randint(75, 125)
        return replace(
            plan,
            voters=3,
            fault_ms=rng.randint(3000, 5000),
            options=replace(plan.options, heartbeat_ms=25, election_min_ms=low, election_max_ms=low + 5),
            delay_max_ms=plan.delay_min_ms + low * rng.uniform(0.1, 0.4),
            vote_down_ms_max=5.0,
            crashes_per_s=rng.uniform(2.0, 6.0),
            crash_leader=1.0,
            crash_after_vote=rng.uniform(0.5, 1.0),
            crash_after_election=0.0,
            down_ms_max=rng.uniform(5.0, low),
            alarms_per_s=rng.uniform(0.0, 3.0),
            sync_ms=0.2,
            loss=0.0,
            partitions_per_s=0.0,
            slow_disks_per_s=0.0,
            changes_per_s=0.0,
            hinted=False,
        )
    if weather is Weather.FIGURE_8:
        low = rng.randint(75, 125)
        return replace(
            plan,
            voters=rng.choice((3, 3, 5)),
            options=replace(
                plan.options,
                heartbeat_ms=25,
                election_min_ms=low,
                election_max_ms=rng.choice((low + 10, 2 * low)),
                batch_bytes_max=1,
                probe_bytes_max=1,
            ),
            delay_max_ms=plan.delay_min_ms + low * rng.uniform(0.01, 0.05),
            reaches=(0, 0, 1, 2, 2, 3),
            crashes_per_s=0.0,
            crash_after_vote=0.0,
            crash_after_election=0.0,
            down_ms_max=low * rng.uniform(2.0, 6.0),
            alarms_per_s=0.0,
            partitions_per_s=0.0,
            stalls_per_s=0.0,
            slow_disks_per_s=0.0,
            loss=0.0,
            slow_message=0.0,
            changes_per_s=0.0,
            sync_ms=rng.choice((0.2, 2.0, 15.0)),
        )
    if weather is Weather.CHURN:
        return replace(
            plan,
            voters=rng.choice((2, 3, 3, 4)),
            crash_after_vote=0.0,
            crash_after_election=rng.uniform(0.0, 0.3),
            crashes_per_s=rng.uniform(0.0, 1.0),
            changes_per_s=rng.choice((0.5, 0.5, 10.0)) * rng.uniform(0.5, 1.5),
            partitions_per_s=rng.uniform(0.0, 1.0),
            rushes_per_s=rng.uniform(0.7, 2.0),
        )
    return plan


def _mixed(seed: int, rng: random.Random) -> Plan:
    def sometimes(chance: float, low: float, high: float) -> float:
        return rng.uniform(low, high) if rng.random() < chance else 0.0

    heartbeat = rng.choice((25, 75, 75, 100))
    low = heartbeat * rng.randint(3, 5)
    delay_min = rng.uniform(0.1, 2.0)
    return Plan(
        seed=seed,
        voters=rng.choice((1, 2, 3, 3, 3, 3, 4, 5, 5)),
        options=RaftOptions(
            heartbeat_ms=heartbeat,
            election_min_ms=low,
            election_max_ms=low * 2,
            inflight_bytes_max=rng.choice((200, 1000, 1 << 20)),
            batch_bytes_max=rng.choice((1, 100, 400, 1 << 16)),
            probe_bytes_max=rng.choice((1, 100, 1 << 12)),
            tail_bytes_max=rng.choice((700, 7000, 1 << 20)),
            uncommitted_bytes_max=rng.choice((7000, 1 << 20)),
        ),
        fault_ms=rng.randint(4000, 9000),
        loss=sometimes(0.6, 0.0, 0.25),
        duplicate=sometimes(0.5, 0.0, 0.15),
        delay_min_ms=delay_min,
        delay_max_ms=delay_min + rng.choice((0.5, 5.0, 40.0)),
        slow_message=sometimes(0.4, 0.0, 0.1),
        partitions_per_s=sometimes(0.7, 0.1, 1.0),
        crashes_per_s=sometimes(0.8, 0.1, 1.5),
        crash_leader=rng.uniform(0.0, 0.8),
        crash_after_vote=0.0,
        crash_after_election=0.0,
        crash_in_change=random.Random(f"in change/{seed}").choice((0.0, 0.0, 0.1, 0.4)),
        down_ms_max=2500.0,
        alarms_per_s=0.0,
        stalls_per_s=sometimes(0.4, 0.1, 1.0),
        slow_disks_per_s=sometimes(0.5, 0.1, 1.0),
        sync_ms=rng.choice((0.2, 2.0, 15.0)),
        writes_per_s=rng.uniform(5.0, 60.0),
        reads_per_s=rng.uniform(0.0, 30.0),
        changes_per_s=sometimes(0.75, 0.3, 4.0),
        transfers_per_s=sometimes(0.5, 0.1, 1.5),
        flushes_per_s=sometimes(0.6, 0.2, 3.0),
        failures=rng.random() < 0.2,
        clock_skew=sometimes(0.5, 0.0, 0.1),
        hinted=rng.random() < 0.7,
        rest_after_ms=None,
        rest_crashes_per_s=0.0,
        lull_ms=0.0,
        keeps_log=False,
    )


def _with_clocks(plan: Plan) -> Plan:
    """Nodes whose clocks are found wrong for a while, or for good. They lead only if nobody else can. Drawn
    from a source of its own."""
    rng = random.Random(f"clocks/{plan.seed}")
    if rng.random() < 0.75:
        return plan
    return replace(plan, unfit_per_s=rng.uniform(0.1, 2.0), stays_unfit=rng.random() < 0.5)


def _with_timestamps(plan: Plan) -> Plan:
    """Writes and snapshots with timestamps, by clocks that differ and jump. Drawn from a source of its
    own."""
    rng = random.Random(f"timestamps/{plan.seed}")
    if rng.random() < 0.8 or plan.directed or plan.stays_unfit or plan.clock_off_ms:
        return plan
    return replace(plan, clock_off_ms=rng.choice((20.0, 400.0, 2000.0)))


def _with_disks(plan: Plan) -> Plan:
    """Faults of disks, and how logs use them. Drawn from a source of its own."""
    rng = random.Random(f"disks/{plan.seed}")
    log = LogOptions(
        segment_bytes=rng.choice((8 << 10, 16 << 10, 64 << 10)),
        group_bytes_max=rng.choice((300, 2000, 1 << 20)),
        cache_bytes_max=rng.choice((0, 2000, 1 << 20)),
        anchor_bytes_max=1 << 30 if plan.keeps_log else 20 << 10,
        low_space_bytes=rng.choice((0, 30_000)),
        low_space_files=0,
        prepare=False,
    )
    plan = replace(
        plan,
        log=log,
        tick_ms=plan.options.heartbeat_ms / 5,
        snapshots_per_s=plan.snapshots_per_s or rng.choice((0.0, 5.0)),
    )
    plan = replace(plan, kill=rng.choice((0.0, 0.2)))
    if plan.directed or rng.random() < 0.5:
        return plan
    return replace(
        plan,
        disk_errors_per_s=rng.choice((0.0, 0.0, 0.5)),
        full_disks_per_s=rng.choice((0.0, 0.0, 0.3)),
        cuts_per_s=rng.choice((0.0, 0.0, 0.7)),
        rots_per_s=rng.choice((0.0, 0.0, 0.4)),
    )


def _with_losses(plan: Plan) -> Plan:
    """A minority that never comes back, and a planner that heals meanwhile. Drawn from a source of its
    own."""
    rng = random.Random(f"losses/{plan.seed}")
    plan = replace(plan, heals=rng.choice((0.0, 0.0, 0.2, 1.0)))
    if rng.random() < 0.7:
        return plan
    return replace(plan, leaves=rng.choice(("dead", "deaf", "mute", "cut off")))


def _with_recovery(plan: Plan, weather: Weather | None) -> Plan:
    """A lost majority, and a survivor that goes on alone. Only what makes this hard is left of other faults: crashes,
    cuts, loss and delay of messages. Drawn from a source of its own."""
    rng = random.Random(f"lost for good/{plan.seed}")
    fits = plan.voters >= 3 and plan.rest_after_ms is None and not plan.directed and not plan.clock_off_ms
    if weather is not Weather.RECOVERY and (weather is not None or not fits or rng.random() >= 0.2):
        return plan
    fault_ms = max(plan.fault_ms, 8_000)
    return replace(
        plan,
        voters=plan.voters if plan.voters in (3, 5) else 3,
        fault_ms=fault_ms,
        recovers_ms=rng.uniform(0.2, 0.4) * fault_ms,
        rest_after_ms=None,
        keeps_log=True,
        changes_per_s=0.0,
        rushes_per_s=0.0,
        crash_in_change=0.0,
        heals=0.0,
        leaves="",
        failures=False,
        failed_ms_max=0.0,
        unfit_per_s=0.0,
        stays_unfit=False,
        snapshots_per_s=0.0,
        disk_errors_per_s=0.0,
        full_disks_per_s=0.0,
        cuts_per_s=0.0,
        rots_per_s=0.0,
    )


def _with_table(plan: Plan, weather: Weather | None) -> Plan:
    """A table in the place of a key space: it is flushed and merged, and keeps its history for a while. Drawn from a
    source of its own."""
    rng = random.Random(f"table/{plan.seed}")
    wanted = rng.random() < 0.3 if weather is None else weather is Weather.TABLE
    if not wanted:
        return plan
    return replace(
        plan,
        table=True,
        flushes_per_s=plan.flushes_per_s or rng.choice((0.5, 3.0)),
        merges_per_s=rng.choice((0.0, 0.5, 3.0)),
        history_ms=rng.choice((50.0, 1_000.0, 900_000.0)),
        snapshots_per_s=4 * plan.snapshots_per_s,  # some of them lie deep within the history
    )


def _with_deposed(plan: Plan, weather: Weather | None) -> Plan:
    """Leaders that another replica deposes while nothing of it reaches them. Clients read there meanwhile. The network is
    quick but for answers to questions about leaders, some of which come late. Drawn from a source of its own."""
    rng = random.Random(f"deposed/{plan.seed}")
    fits = not plan.recovers_ms and plan.rest_after_ms is None and not plan.directed and not plan.clock_off_ms
    if weather is not Weather.DEPOSED and (weather is not None or not fits or rng.random() >= 0.15):
        return plan
    heartbeat = rng.choice((75, 100, 150))
    low = heartbeat * rng.randint(3, 4)
    delay_min = rng.uniform(0.1, 0.5)
    return replace(
        plan,
        voters=rng.choice((3, 3, 3, 5)),
        options=replace(plan.options, heartbeat_ms=heartbeat, election_min_ms=low, election_max_ms=low * 2),
        tick_ms=heartbeat / 5,
        fault_ms=rng.randint(3000, 5000),
        rest_after_ms=None,
        rest_crashes_per_s=0.0,
        recovers_ms=0.0,
        clock_off_ms=0.0,
        clock_error_ms=10,
        failures=False,
        failed_ms_max=0.0,
        unfit_per_s=0.0,
        stays_unfit=False,
        disk_errors_per_s=0.0,
        full_disks_per_s=0.0,
        cuts_per_s=0.0,
        rots_per_s=0.0,
        delay_min_ms=delay_min,
        delay_max_ms=delay_min + rng.choice((0.5, 1.5)),
        sync_ms=0.2,
        loss=0.1 * plan.loss,
        slow_message=0.1 * plan.slow_message,
        crashes_per_s=0.0,
        alarms_per_s=0.0,
        stalls_per_s=0.3 * plan.stalls_per_s,
        slow_disks_per_s=0.0,
        partitions_per_s=rng.choice((0.0, 0.2)),
        changes_per_s=rng.choice((0.0, 0.0, 0.5)),
        timeout_ms=2.0 * heartbeat,
        outstanding_max=12,
        transfers_per_s=0.0,
        writes_per_s=rng.uniform(20.0, 60.0),
        reads_per_s=rng.uniform(40.0, 120.0),
        usurpers_per_s=rng.uniform(2.0, 5.0),
        returns=rng.choice((0.0, 0.5)),
        late_answers=rng.choice((0.0, 0.5, 0.9)),
        late_ms=rng.choice((heartbeat, heartbeat, 3 * low)),
        reads_back=rng.uniform(0.5, 1.0),
        older=rng.choice(("", "", "", "odd")),
    )


def _with_followers(plan: Plan, weather: Weather | None) -> Plan:
    """Clients that read at followers, while leaders are deposed unawares, nodes stand still, and entries are slow. Drawn from a
    source of its own."""
    if weather is not Weather.FOLLOWERS:
        return plan
    rng = random.Random(f"followers/{plan.seed}")
    return replace(
        _with_deposed(plan, Weather.DEPOSED),
        older="",
        table=rng.random() < 0.5,
        snapshots_per_s=rng.choice((0.0, 5.0)),
        old_reads_per_s=rng.uniform(40.0, 120.0),
        stalls_per_s=rng.choice((0.0, 1.0)),
        partitions_per_s=rng.choice((0.2, 1.0)),
        slow_disks_per_s=rng.choice((0.0, 1.0)),
        clock_skew=rng.choice((0.0, 0.05)),
    )


def _with_leases(plan: Plan, weather: Weather | None) -> Plan:
    """Leaders with leases, by clocks that run as wrong as the bound allows. Leaders are deposed unawares at the worst moments,
    hand over, stand still, and their voters start again. Drawn from a source of its own."""
    if weather is not Weather.LEASES:
        return plan
    rng = random.Random(f"leases/{plan.seed}")
    plan = _with_deposed(plan, Weather.DEPOSED)
    heartbeat, low = plan.options.heartbeat_ms, plan.options.election_min_ms
    lease_ms = rng.choice((2 * heartbeat, 3 * heartbeat, low, 2 * low))
    rests = rng.random() < 0.15
    clock_off_ms = rng.choice((0.0, 0.0, 0.0, 400.0))
    return replace(
        plan,
        options=replace(plan.options, lease_ms=lease_ms, promised_ms=lease_ms),
        older="",
        returns=0.0,
        clock_skew=rng.choice((0.0, 0.1)),
        clock_off_ms=clock_off_ms,
        clock_error_ms=0 if clock_off_ms else 10,
        stalls_per_s=rng.choice((0.0, 1.0)),
        crashes_per_s=rng.choice((0.0, 0.0, 0.5)),
        down_ms_max=rng.choice((0.2, 3.0)) * low,
        partitions_per_s=rng.choice((0.0, 0.2, 1.0)),
        changes_per_s=rng.choice((0.0, 0.0, 1.0)),
        transfers_per_s=rng.choice((0.0, 0.3)),
        slow_disks_per_s=rng.choice((0.0, 0.5)),
        alarms_per_s=rng.choice((0.0, 0.5)),
        usurpers_per_s=rng.uniform(1.0, 2.0),
        rest_after_ms=200 if rests else None,
        lull_ms=1_500.0 if rests else 0.0,
        keeps_log=plan.keeps_log or rests,
    )


def _with_catalog(plan: Plan, weather: Weather | None) -> Plan:
    """Masters on a key space. Drawn from a source of its own."""
    rng = random.Random(f"catalog/{plan.seed}")
    fits = not plan.table and not plan.recovers_ms and plan.rest_after_ms is None and not plan.directed
    if weather is not Weather.CATALOG and (weather is not None or not fits or rng.random() >= 0.15):
        return plan
    if weather is Weather.CATALOG and rng.random() < 0.5:
        plan = _with_deposed(plan, Weather.DEPOSED)
    return replace(
        plan,
        catalog=True,
        fault_ms=min(plan.fault_ms, 9_000),
        recovers_ms=0.0,
        rest_after_ms=None,
        rest_crashes_per_s=0.0,
        writes_per_s=min(plan.writes_per_s, 10.0),
        reads_per_s=min(plan.reads_per_s, 10.0),
        transfers_per_s=plan.transfers_per_s or rng.choice((0.0, 1.0)),
    )


def _with_older(plan: Plan) -> Plan:
    """Nodes of the release before. Drawn from a source of its own."""
    return replace(plan, older=random.Random(f"older/{plan.seed}").choice(("", "", "", "odd", "all")))


def _with_returns(plan: Plan) -> Plan:
    """Replicas that become FAILED without damage: after a restart they are well. Drawn from a source of its
    own."""
    rng = random.Random(f"returns/{plan.seed}")
    if rng.random() < 0.8:
        return plan
    return replace(plan, failures=True, failed_ms_max=rng.choice((200.0, 3000.0)))


def _with_habits(plan: Plan) -> Plan:
    """What nodes do in addition to the core: they let idle groups rest, in fairer weather, and keep a log
    that their stores hold.

    Drawn from a source of its own, so that the worlds of all other seeds stay the same.
    """
    rng = random.Random(f"habits/{plan.seed}")
    if rng.random() < 0.7:
        return replace(plan, keeps_log=rng.random() < 0.3)
    return replace(
        plan,
        rest_after_ms=rng.choice((0, 200, 500)),
        rest_crashes_per_s=rng.choice((0.0, 0.5)),
        lull_ms=rng.choice((1500.0, 6000.0)),
        keeps_log=True,
        fault_ms=20_000,
        loss=rng.choice((0.0, 0.1 * plan.loss)),
        slow_message=0.1 * plan.slow_message,
        partitions_per_s=rng.choice((0.0, 0.1)),
        crashes_per_s=rng.choice((0.0, 0.1)),
        crash_leader=1.0,
        crash_after_election=0.0,
        down_ms_max=rng.choice((500.0, 10_000.0)),
        alarms_per_s=0.0,
        writes_per_s=max(5.0, 0.3 * plan.writes_per_s),
        stalls_per_s=0.3 * plan.stalls_per_s,
        slow_disks_per_s=0.3 * plan.slow_disks_per_s,
        changes_per_s=rng.choice((0.0, 0.1)),
        transfers_per_s=0.2 * plan.transfers_per_s,
        flushes_per_s=0.2 * plan.flushes_per_s,
    )
