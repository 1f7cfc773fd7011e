"""Faults that are planted in production's code, to prove that the simulator finds them. Used by test_sim.py
and `--planted`.

Each replaces one attribute of one class or module while a run lasts; its comment says which rule it breaks.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stele.consensus import bootstrap, incarnations, recovering
from stele.consensus.following import Following
from stele.consensus.reads import Reads
from stele.consensus.runtime import CoreRuntime
from stele.consensus.timestamps import Timestamps
from stele.master import driving, service
from stele.master.following import Following as CatalogFollowing
from stele.master.leadership import Leadership
from stele.master.locks import Locks
from stele.master.master import Master
from stele.model.schema import Schema
from stele.raft import RaftCore, lease
from stele.raft import effects as fx
from stele.raft.leader import Leader
from stele.raft.lease import Lease, Promise
from stele.raft.peers import Peers
from stele.raft.roles import Parts
from stele.tablet import applying, sorted_runs
from stele.tablet.applying import Applying
from stele.tablet.exactly_once import ExactlyOnce
from stele.tablet.locate import StoreRows
from stele.tablet.memtable import MemTable
from stele.tserver.confirming import Confirming
from stele.tserver.following import LeaderQuestions
from stele.tserver.quiet import QuietGroups
from stele.wal.clear import Suspects
from stele.wal.segment import ActiveSegment
from stele.wal.stream import StreamLog
from tests.sim import confirming_bugs, core_bugs, early_bugs, following_bugs, lease_bugs, master_bugs
from tests.sim.bug import Bug
from tests.sim.clock import Clocks
from tests.sim.plan import Weather
from tests.wal.simfs import PowerOff

_initial_state, _carry_out = bootstrap.initial_state, CoreRuntime._carry_out
_sync, _write = ActiveSegment.sync, ActiveSegment.write
_next_ceiling, _frozen, _kept = Timestamps.next_ceiling, ExactlyOnce.frozen, sorted_runs._kept
_NEVER = (1 << 63) - 1
"""A hybrid time that never comes."""


def _without(**fields: Any) -> Callable[..., Any]:
    def start(*arguments: Any, **options: Any) -> Any:
        return replace(_initial_state(*arguments, **options), **fields)

    return start


def _sends_at_once(runtime: CoreRuntime, effects: list[fx.Effect]) -> None:
    _carry_out(runtime, [fx.Send(e.to, e.message) if type(e) is fx.Send else e for e in effects])


def _syncs_nothing(active: ActiveSegment) -> None:
    active.was_synced()


def _ignores_errors(active: ActiveSegment) -> None:
    try:
        _sync(active)
    except PowerOff:
        raise
    except OSError:
        active.was_synced()


def _goes_on_when_full(active: ActiveSegment) -> int:
    length = active.offset - active._written
    try:
        return _write(active)
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
        active._staged, active._written = [], active.offset
        return length


async def _at_once(reads: Reads, within_ms: int = 0) -> None:
    return None


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


def _takes_for_committed(times: Timestamps, at_least: int = 0) -> int | None:
    ceiling = _next_ceiling(times, at_least)
    times._committed = max(times._committed, ceiling or 0)
    return ceiling


def _in_memory(schema: Schema, memory: Sequence[MemTable], files: object, *, brief: bool) -> StoreRows:
    return StoreRows(schema, memory, (), brief=brief)


def _core(label: str, weather: Weather, told: str = "", first: int = 1, **part: Any) -> Bug:
    parts = Parts(**part)
    return Bug(label, RaftCore, "parts", parts, told, first, weather, strict=bool(told))


_STARTS = (
    # A start does not read the vote from the disk (Raft figure 2: votedFor is persistent).
    Bug(
        "a vote forgotten at a start", bootstrap, "initial_state", _without(voted_for=None), "starts at term"
    ),
    # A start does not read the term from the disk (Raft figure 2: currentTerm is persistent).
    Bug(
        "a term forgotten at a start",
        bootstrap,
        "initial_state",
        _without(term=0, voted_for=None),
        "starts at term",
    ),
)

_DISKS = (
    # The runtime sends a message before the Persist that it must wait for (duty 2 of stele.raft.effects).
    Bug("a message before its Persist", CoreRuntime, "_carry_out", _sends_at_once, "on disk"),
    # The log reports a batch as synced that is only in the page cache.
    Bug("a sync that does nothing", ActiveSegment, "sync", _syncs_nothing, "begins with term|damaged|lost"),
    # The log continues after a failed sync (the log's README: a failed sync is final).
    Bug(
        "a failed sync that is ignored",
        ActiveSegment,
        "sync",
        _ignores_errors,
        "begins with term|damaged",
        first=51,
    ),
    # The log continues after a write for which the disk had no space.
    Bug(
        "a full disk that is ignored",
        ActiveSegment,
        "write",
        _goes_on_when_full,
        "begins with term|damaged|lost",
        weather=Weather.FULL_DISKS,
    ),
    # Damage is cut like a torn tail ("Damage that is skipped in silence" must never happen).
    Bug("damage that is not reported", Suspects, "judge", lambda self, damages: {}, "begins with term", 6),
)

_CLIENTS = (
    # A read is served at once, without an answer from a majority (Raft §8).
    Bug("a read without a majority", Reads, "linearizable_read", _at_once, "not linearizable"),
    # A retry is carried out again (ExactlyOnce).
    Bug("a retry carried out twice", ExactlyOnce, "earlier", _nothing, "again|linearizable", 2),
)

_TIMES = (
    # The next leader begins above no ceiling of the log (docs: timestamps).
    Bug("a ceiling forgotten", Timestamps, "in_log", _nothing, "timestamp|snapshot", 2, Weather.CLOCKS),
    # Timestamps follow the clock alone, whatever ceiling is committed.
    Bug(
        "a timestamp above the ceiling",
        Timestamps,
        "assign",
        lambda times: times._clock.now(),
        "timestamp|snapshot",
    ),
    # A ceiling counts as committed when it is proposed.
    Bug(
        "a ceiling not committed",
        Timestamps,
        "next_ceiling",
        _takes_for_committed,
        "timestamp|snapshot",
        first=9,
        weather=Weather.CLOCKS,
    ),
    # A leader assigns timestamps below a snapshot that was served.
    Bug(
        "a snapshot forgotten", Timestamps, "reserve", _nothing, "snapshot|timestamp", weather=Weather.CLOCKS
    ),
)

_RULES = (
    _core(
        "a vote not persisted",
        Weather.DUEL,
        first=475,
        outbox=core_bugs.ForgetsVotes,
        follower=core_bugs.StandsAgainstOthers,
    ),
    _core("entries of old terms committed", Weather.FIGURE_8, first=102, leader=core_bugs.CommitsOldTerms),
    _core("the leader's unsynced copy counted", Weather.FIGURE_8, leader=core_bugs.CountsMemory),
    _core("memory acknowledged", Weather.FIGURE_8, first=17, outbox=core_bugs.AcknowledgesMemory),
    _core("votes for shorter logs", Weather.MIXED, first=8, log=core_bugs.VotesForShorterLogs),
    _core(
        "a log trusted without comparison", Weather.FIGURE_8, first=1, follower=core_bugs.TrustsItsWholeLog
    ),
    _core(
        "a core that reads without a majority", Weather.MIXED, first=5, leader=core_bugs.ReadsWithoutAsking
    ),
    _core("a log cut by a late request", Weather.STORM, follower=core_bugs.CutsWhatFollows),
    _core("changes at any time", Weather.CHURN, first=2, changes=core_bugs.ChangesAtAnyTime),
)
"""Judged only by their consequences: a rule of the paper is broken, and a write is lost or a term has two
leaders."""

_STEPS = (
    _core("a vote not persisted, judged when sent", Weather.DUEL, "on disk", outbox=core_bugs.ForgetsVotes),
    _core(
        "memory acknowledged, judged when sent", Weather.DUEL, "on disk", outbox=core_bugs.AcknowledgesMemory
    ),
    _core(
        "a term in memory, judged when sent", Weather.DUEL, "on disk", outbox=core_bugs.SpeaksBeforeItsDisk
    ),
    _core(
        "changes at any time, judged when made",
        Weather.CHURN,
        "members change",
        changes=core_bugs.ChangesAtAnyTime,
    ),
    _core(
        "promotions before a commit",
        Weather.CHURN,
        "members change before anything",
        first=50,
        changes=core_bugs.PromotesAtOnce,
    ),
)
"""Judged by the broken rule itself, even if nothing else follows."""

_RESTS = (
    # A replica keeps resting although its leader's node is silent.
    Bug(
        "rest under a silent leader",
        QuietGroups,
        "lives",
        lambda groups, node_id: True,
        "at rest without",
        first=334,
    ),
)

_RECOVERIES = (
    # Messages cross from one incarnation to another (stele.consensus.incarnations).
    Bug(
        "messages of a history that was given up",
        incarnations,
        "same_incarnation",
        lambda *arguments: True,
        weather=Weather.RECOVERY,
    ),
    # A recovery makes the survivor the only voter, but does not raise its incarnation.
    Bug(
        "a recovery without a new incarnation",
        recovering,
        "with_incarnation",
        lambda block, order: block,
        weather=Weather.RECOVERY,
    ),
)

_TABLES = (
    # Whether a row is present is asked of memory alone, not of the files.
    Bug(
        "a lookup that skips the files",
        applying,
        "StoreRows",
        _in_memory,
        "linearizable|shows",
        weather=Weather.TABLE,
    ),
    # A flush or a merge drops a delete although an older file still has the row.
    Bug(
        "a delete dropped too soon",
        sorted_runs,
        "_kept",
        lambda versions, mark, bottom: _kept(versions, mark, True),
        "shows|linearizable|differ",
        weather=Weather.TABLE,
    ),
    # A flush or a merge drops versions that a snapshot above the history mark shows.
    Bug(
        "history dropped above its mark",
        sorted_runs,
        "_kept",
        lambda versions, mark, bottom: _kept(versions, _NEVER, bottom),
        "shows",
        weather=Weather.TABLE,
    ),
    # A flush writes no exactly-once state: after a restart a retry is new.
    Bug(
        "clients forgotten by a flush",
        ExactlyOnce,
        "frozen",
        lambda once: _frozen(ExactlyOnce()),
        "again|differ",
        first=5,
        weather=Weather.TABLE,
    ),
)


def _confirmed(
    label: str,
    owner: Any,
    name: str,
    instead: Any,
    told: str = "not linearizable",
    first: int = 4,
    also: tuple[tuple[Any, str, Any], ...] = (),
) -> Bug:
    return Bug(label, owner, name, instead, told, first, Weather.DEPOSED, older="", also=also)


_CONFIRMATIONS = (
    _confirmed("a leader confirmed by whoever is asked", Confirming, "_follows", confirming_bugs.anybody),
    _confirmed("a leader confirmed in another term", RaftCore, "vouches", confirming_bugs.follows_anybody),
    _confirmed(
        "an answer to an earlier question",
        Confirming,
        "_take_answer",
        confirming_bugs.takes_any_answer,
        first=2,
    ),
    _confirmed(
        "answers after the leader stepped down",
        RaftCore,
        "confirmed_by",
        confirming_bugs.counts_without_leading,
        "reads are answered",
        first=1,
        also=((Reads, "refuse_all", confirming_bugs.keeps_rounds),),
    ),
)
"""A node confirms, or a leader counts, what it should not: a deposed leader that does not know it yet answers a read."""


def _master(label: str, owner: Any, name: str, instead: Any, told: str, first: int = 1) -> Bug:
    return Bug(label, owner, name, instead, told, first, Weather.CATALOG, older="")


_MASTERS = (
    _master(
        "a master answers unconfirmed",
        Master,
        "confirmed_lead",
        master_bugs.answers_unconfirmed,
        "not linearizable",
        first=81,
    ),
    _master(
        "locks that hold nobody", Locks, "hold", master_bugs.holds_nobody, "two tables|linearizable", first=7
    ),
    _master(
        "locks that end with a caller",
        Leadership,
        "do",
        master_bugs.ends_with_its_caller,
        "two tables|linearizable",
        first=12,
    ),
    _master(
        "an order after another's claim",
        driving,
        "_commit",
        master_bugs.commits_whoever_holds,
        "in force",
        first=13,
    ),
    _master(
        "rows applied while memory reads",
        CatalogFollowing,
        "_applied",
        master_bugs.sees_nothing_while_it_reads,
        "differs",
        first=4,
    ),
    _master(
        "replica ids given again", driving, "free_id", master_bugs.above_what_is_in_force, "given", first=3
    ),
    _master(
        "a done change told as not done",
        service,
        "_done_already",
        master_bugs.says_not_leader,
        "not linearizable",
        first=32,
    ),
)
"""A master breaks a rule of the catalog."""


def _followed(label: str, owner: Any, name: str, instead: Any, first: int = 1) -> Bug:
    return Bug(label, owner, name, instead, "not linearizable|shows", first, Weather.FOLLOWERS, older="")


_FOLLOWERS = (
    _followed("safe time past a hole", Following, "_applied", following_bugs.past_a_hole),
    _followed(
        "an answer to an earlier follower", LeaderQuestions, "_take_answers", following_bugs.any_answer, 30
    ),
)
"""A follower serves rows that are older than its reader allows."""


def _leased(
    label: str, owner: Any, name: str, instead: Any, first: int, told: str = "not linearizable"
) -> Bug:
    strict = told != "not linearizable"
    return Bug(label, owner, name, instead, told, first, Weather.LEASES, strict=strict, older="")


_LEASES = (
    _leased("a lease after a hand-over", Lease, "give_up", lease_bugs.keeps_it, 4),
    _leased("a promise forgotten by a restart", Promise, "wait_out", lease_bugs.forgets, 19),
    _leased("a lease counted from the answer", Leader, "_note_promise", lease_bugs.from_the_answer, 6),
    _leased("a vote within a promise", Promise, "binds", lease_bugs.binds_nobody, 6),
    _leased("a clock that is too slow", Clocks, "__init__", lease_bugs.too_slow, 15),
    _leased(
        "a lease without the clocks' error",
        lease,
        "counted_us",
        lease_bugs.trusts_its_clock,
        37,
        "holds a lease",
    ),
)
"""A leader answers reads under a lease that is over, or was never there. What clients were told shows it, but for the last, which
takes a moment that no client hits soon: there an election while a lease holds is the failure."""


def _early(label: str, owner: Any, name: str, instead: Any, told: str, first: int) -> Bug:
    return Bug(label, owner, name, instead, told, first, Weather.EARLY, older="")


_EARLY = (
    _early(
        "memory of a majority", Peers, "held_by_all", early_bugs.held_by_a_majority, "in memory, is lost", 140
    ),
    _early(
        "a read that sees commits alone",
        Leader,
        "read_index",
        property(early_bugs.only_what_is_committed),
        "not linearizable",
        9,
    ),
    _early("memory called synced", Applying, "foreseen", early_bugs.called_synced, "acknowledged write", 27),
    _early(
        "an early answer to any block",
        Applying,
        "foreseen",
        early_bugs.whatever_it_does,
        "not linearizable",
        6,
    ),
    _early(
        "written while it is queued",
        StreamLog,
        "when_written",
        early_bugs.before_it_is_written,
        "written up to|in memory, is lost",
        1,
    ),
)
"""A client hears of a write before its commit, and of more than is so."""

BUGS = (
    *_STARTS,
    *_DISKS,
    *_CLIENTS,
    *_TIMES,
    *_RULES,
    *_STEPS,
    *_RESTS,
    *_RECOVERIES,
    *_TABLES,
    *_CONFIRMATIONS,
    *_FOLLOWERS,
    *_LEASES,
    *_EARLY,
    *_MASTERS,
)
