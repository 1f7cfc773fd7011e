"""The plan of a world: the size of the group, and which faults it has. draw.py draws them from seeds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from stele.consensus.ports import ReplicaOptions
from stele.raft.options import RaftOptions
from stele.wal import LogOptions


@dataclass(frozen=True, slots=True)
class Plan:
    """Times in simulated milliseconds, chances per message or per second as the names say."""

    seed: int
    voters: int
    options: RaftOptions
    fault_ms: int
    loss: float
    duplicate: float
    delay_min_ms: float
    delay_max_ms: float
    slow_message: float
    partitions_per_s: float
    crashes_per_s: float
    crash_leader: float
    crash_after_vote: float
    crash_after_election: float
    crash_in_change: float
    down_ms_max: float
    alarms_per_s: float
    stalls_per_s: float
    slow_disks_per_s: float
    sync_ms: float
    writes_per_s: float
    reads_per_s: float
    changes_per_s: float
    transfers_per_s: float
    flushes_per_s: float
    failures: bool
    clock_skew: float
    hinted: bool
    rest_after_ms: int | None
    rest_crashes_per_s: float
    lull_ms: float
    keeps_log: bool
    unfit_per_s: float = 0.0
    stays_unfit: bool = False
    failed_ms_max: float = 0.0  # 0: a replica that FAILED never recovers
    reaches: tuple[
        int, ...
    ] = ()  # how many messages with entries arrive from a leader before it dies; (): it does not die
    rushes_per_s: float = 0.0
    clock_off_ms: float = 0.0  # how far wall clocks may be set wrong; 0: writes have no timestamps
    vote_down_ms_max: float = 20.0  # how long a replica stays away that just voted
    tick_ms: float = 25.0
    turn_ms: float = 0.3  # the longest pause before a turn of a node's loop
    snapshots_per_s: float = 0.0
    kill: float = 0.0  # the share of crashes that keep the page cache
    disk_errors_per_s: float = 0.0
    full_disks_per_s: float = 0.0
    cuts_per_s: float = 0.0  # power losses within a file operation
    rots_per_s: float = 0.0
    heals: float = 0.0  # the share of the planner's passes that run while there are faults
    recovers_ms: float = 0.0  # when a majority is lost, of which one survivor recovers; 0: never
    leaves: str = ""  # how a minority stays to the end: "dead", "deaf", "mute", "cut off"; "": all come back
    table: bool = False  # whether the tablet is one of a table, not a key space
    catalog: bool = False  # whether the key space is a catalog, and its nodes are masters
    merges_per_s: float = 0.0
    history_ms: float = 900_000.0  # how long a table keeps replaced rows
    usurpers_per_s: float = 0.0  # how often a leader is deposed unawares
    returns: float = 0.0  # the share of these leaders whose process had just started again
    late_answers: float = 0.0  # the share of answers to questions about leaders that come late
    late_ms: float = 0.0  # how late at most
    clock_error_ms: int = (
        0  # how far clocks may be apart; 0: as by default. A new leader waits half as long at most
    )
    timeout_ms: float = 700.0  # how long a client waits for an answer before it tries again
    outstanding_max: int = 4  # how many writes a client has under way
    reads_back: float = 0.0  # the share of acknowledged writes that another client reads at once
    old_reads_per_s: float = 0.0  # how often a client reads at any replica what may be old
    early: float = 0.0  # the share of writes whose clients are content once every voter has them in memory
    older: str = ""  # which nodes run a release that knows no questions about leaders: "odd", "all"; "": none
    log: LogOptions = field(default_factory=LogOptions)

    @property
    def replica(self) -> ReplicaOptions:
        """Options of every replica. One entry is applied per turn, so that everything meets half-applied
        logs."""
        options = ReplicaOptions(raft=self.options, apply_slice_ms=0.0)
        return replace(options, clock_error_max_ms=self.clock_error_ms) if self.clock_error_ms else options

    @property
    def directed(self) -> bool:
        """Whether the world is made for one kind of fault. Other habits would make it rare."""
        return bool(self.reaches or self.rushes_per_s or self.vote_down_ms_max < 20.0)


class Weather(Enum):
    """The kinds of faults that a world has."""

    MIXED = "mixed"  # a little of everything, or of some faults
    STORM = "storm"  # leaders die right after their election, voters right after their vote
    DUEL = "duel"  # several candidates at once; voters that lose memory and come back at once
    CHURN = "churn"  # one membership change after the other, across partitions
    FIGURE_8 = "figure 8"  # leader after leader dies before its first entries are everywhere
    CLOCKS = "clocks"  # wall clocks differ by seconds, and leadership moves; every 20th seed of a run
    FULL_DISKS = "full disks"  # disks have no space left, again and again; every 20th seed of a run
    TABLE = "table"  # the rows of a table; also some of the others, where nobody asks for a weather
    CATALOG = "catalog"  # masters on a key space; also some of the others that have one
    DEPOSED = "deposed"  # leaders that are deposed and do not know it yet; also in some of the mixed
    FOLLOWERS = (
        "followers"  # as deposed, and clients read at followers what may be old; every 20th seed of a run
    )
    LEASES = "leases"  # leaders answer reads under leases, and are deposed; every 20th seed of a run
    EARLY = (
        "early"  # clients that are content with memory, and power that is lost; also in some of the others
    )
    RECOVERY = "recovery"  # a majority is lost, and one survivor goes on alone; also in some of the mixed
