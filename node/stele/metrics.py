"""Every metric of a node and a master, declared once, each with one sentence that explains it.

Imported by all code that counts; imports nothing of ours. Invariant: names begin with `stele_` and end in
their unit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

REGISTRY = CollectorRegistry()
"""The registry of all metrics that /metrics shows."""

ProcessCollector(registry=REGISTRY)


class Tally:
    """A counter for events that happen thousands of times a second on the event loop.

    It counts in plain integers, which are collected when /metrics is read. Add with `cell(*labels)[0] += 1`, from
    one thread only. That takes a fiftieth of the time of a Counter, which locks.
    """

    def __init__(self, name: str, text: str, labels: list[str]) -> None:
        self._name, self._text, self._labels = name.removesuffix("_total"), text, labels
        self._cells: dict[tuple[str, ...], list[int]] = {}
        REGISTRY.register(self)

    def cell(self, *labels: str) -> list[int]:
        """Return the count for these labels, in a list of one item. The caller adds to the item."""
        return self._cells.setdefault(labels, [0])

    def collect(self) -> Iterator[CounterMetricFamily]:
        """See prometheus_client.registry.Collector."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, cell in list(self._cells.items()):
            family.add_metric(labels, cell[0])
        yield family


BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds of all histograms' buckets, in seconds: from what memory answers to the deadline of a write."""
_LES = (*map(floatToGoString, BOUNDS_S), "+Inf")


class Durations:
    """How many durations fell into each bucket, and their sum in seconds. One thread may add at a time."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * len(_LES)
        """By the first bound that it did not pass."""
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one that took this long."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds


class Timing:
    """A histogram for what happens thousands of times a second: as `Tally`, plain numbers and no lock.

    `cell(*labels).add(seconds)` costs a sixth of a Histogram's locked `observe`.
    """

    def __init__(self, name: str, text: str, labels: list[str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._cells: dict[tuple[str, ...], Durations] = {}
        REGISTRY.register(self)

    def cell(self, *labels: str) -> Durations:
        """Return the durations for these labels. The caller adds to them."""
        found = self._cells.get(labels)
        return found if found is not None else self._cells.setdefault(labels, Durations())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """See prometheus_client.registry.Collector."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, cell in list(self._cells.items()):
            buckets = list(zip(_LES, accumulate(list(cell.counts))))
            family.add_metric(labels, buckets, cell.total_s)
        yield family


rpc_requests = Counter(
    "stele_rpc_requests_total",
    "Unary requests answered, by method and by the code of the answer (OK, NOT_LEADER, ...).",
    ["method", "code"],
    registry=REGISTRY,
)
rpc_request_seconds = Timing(
    "stele_rpc_request_seconds",
    "Time from the arrival of a unary request until its answer, by method and outcome (ok, retry, rejected, failed).",
    ["method", "outcome"],
)
client_requests = Tally(
    "stele_client_requests_total",
    "Requests on client streams answered, by kind (write, read, kv, watch) and by the code of the answer.",
    ["kind", "code"],
)
client_request_seconds = Timing(
    "stele_client_request_seconds",
    "Time from the arrival of a client's request until its answer, by kind (write, read, scan, ...) and outcome "
    "(ok, retry, rejected, failed).",
    ["kind", "outcome"],
)
commit_seconds = Timing(
    "stele_commit_seconds",
    "Time from the proposal of a write at its leader until it is committed.",
    [],
)
leased_reads = Tally(
    "stele_leased_reads_total",
    "Linearizable reads that a leader answered under its lease, so that no other node was asked.",
    [],
)
writes_in_memory = Tally(
    "stele_writes_in_memory_total",
    "Writes that were answered once every voter had them in memory, because their caller asked for no more.",
    [],
)
leases = Gauge(
    "stele_leases",
    "Leases in the key spaces that this node leads.",
    registry=REGISTRY,
)
leases_expired = Counter(
    "stele_leases_expired_total",
    "Leases that this node ended as a leader, because their holders were silent for the lease's time.",
    registry=REGISTRY,
)
watches = Gauge(
    "stele_watches",
    "Watches on key spaces that this node serves.",
    registry=REGISTRY,
)
watched_changes = Counter(
    "stele_watched_changes_total",
    "Changes of keys pushed to those who watch them; one that three watch counts three times.",
    registry=REGISTRY,
)
watches_ended = Counter(
    "stele_watches_ended_total",
    "Watches that this node ended, by code: NOT_LEADER if another leads, COMPACTED if the client reads too slowly.",
    ["code"],
    registry=REGISTRY,
)
budget_used_bytes = Gauge(
    "stele_budget_used_bytes",
    "Bytes of requests that came in and are not answered yet; past the node's budget requests are THROTTLED.",
    registry=REGISTRY,
)
budget_refused = Counter(
    "stele_budget_refused_total",
    "Requests answered THROTTLED because the budget had no room.",
    registry=REGISTRY,
)
peer_frames = Tally(
    "stele_peer_frames_total",
    "Frames between nodes, by channel (control, bulk) and direction (sent, received).",
    ["channel", "direction"],
)
peer_bytes = Tally(
    "stele_peer_bytes_total",
    "Bytes of frames between nodes, by channel and direction.",
    ["channel", "direction"],
)
peer_dropped = Counter(
    "stele_peer_dropped_total",
    "Messages to peers that were dropped (no connection, a full queue); the algorithm sends again.",
    ["channel"],
    registry=REGISTRY,
)
peer_refused = Counter(
    "stele_peer_refused_total",
    "Messages between nodes that were dropped because no sound replica sends them, by cause (term, entries, "
    "...).",
    ["cause"],
    registry=REGISTRY,
)
master_leads = Gauge(
    "stele_master_leads",
    "1 while this master leads and serves the catalog, else 0.",
    registry=REGISTRY,
)
master_drives = Gauge(
    "stele_master_drives",
    "1 while this master heals the cluster itself, because no driver is heard, else 0.",
    registry=REGISTRY,
)
master_heartbeats = Counter(
    "stele_master_heartbeats_total",
    "Heartbeats of nodes and masters that this master has heard.",
    registry=REGISTRY,
)
master_batches = Counter(
    "stele_master_batches_total",
    "Batches that this master proposed to the catalog, by the code of the outcome.",
    ["code"],
    registry=REGISTRY,
)
master_orders = Counter(
    "stele_master_orders_total",
    "Orders that this master sent to nodes, by order (CreateTablet, AlterTablet, DeleteTablet) and by the "
    "code of the answer.",
    ["order", "code"],
    registry=REGISTRY,
)
master_tablets = Gauge(
    "stele_master_tablets",
    "Tablets in the catalog by state, as the leader counts them; followers show their last count.",
    ["state"],
    registry=REGISTRY,
)
replicas = Gauge(
    "stele_replicas",
    "Replicas on this node, by state (BOOTSTRAPPING, CONFIGURING, RUNNING, STOPPED, FAILED).",
    ["state"],
    registry=REGISTRY,
)
replicas_leading = Gauge("stele_replicas_leading", "Replicas on this node that lead.", registry=REGISTRY)
leader_load = Gauge(
    "stele_leader_load",
    "Load of the leaders here per second, averaged over some 30 s. One unit is a request, a key read, 4 KiB of "
    "request data or 16 KiB of scan data.",
    registry=REGISTRY,
)
replicas_resting = Gauge(
    "stele_replicas_resting",
    "Replicas whose group is at rest: it sends no heartbeats, and its nodes hear each other instead.",
    registry=REGISTRY,
)
loop_stall_seconds = Counter(
    "stele_loop_stall_seconds_total",
    "Time by which the event loop's ticks were late, counting only delays over 200 ms.",
    registry=REGISTRY,
)
clock_ahead_seconds = Gauge(
    "stele_clock_ahead_seconds",
    "How far this node's wall clock is ahead of most clocks of its cluster; negative if behind, 0 if "
    "unknown.",
    registry=REGISTRY,
)
store_files = Gauge(
    "stele_store_files",
    "Column files of all tablets here; they become more if compaction lags.",
    registry=REGISTRY,
)
store_memory_bytes = Gauge(
    "stele_store_memory_bytes",
    "Bytes of rows here that wait for a flush; writes are THROTTLED past twice the node's share of memory "
    "for them.",
    registry=REGISTRY,
)
holds = Gauge("stele_holds", "Holds on the history of tablets, by the replicas here.", registry=REGISTRY)
held_bytes = Gauge(
    "stele_held_bytes",
    "Bytes of files here that have old rows only because of holds, as measured once a minute.",
    registry=REGISTRY,
)
keyspace_bytes = Gauge(
    "stele_keyspace_bytes",
    "Bytes of the largest key space here (also the catalog's), with 256 bytes for each key; past 64 MiB puts "
    "are refused (TOO_LARGE).",
    registry=REGISTRY,
)
flight_throttled = Counter(
    "stele_flight_throttled_total",
    "Scans and pieces of copies answered THROTTLED, by what was short: a free place (place), or memory for rows that "
    "scans hold (memory). Each try counts.",
    ["want"],
    registry=REGISTRY,
)
wal_sync_seconds = Timing(
    "stele_wal_sync_seconds",
    "Duration of the log's syncs; one sync may serve many writes, and no write is acknowledged before its own.",
    [],
)
wal_bytes = Gauge("stele_wal_bytes", "Bytes of the log's segments on disk.", registry=REGISTRY)
disk_free_bytes = Gauge("stele_disk_free_bytes", "Free bytes of the volume.", registry=REGISTRY)
flight_stalled = Counter(
    "stele_flight_stalled_total",
    "Scans and pieces of copies that were ended because their reader took nothing: for a minute, or for a "
    "second while others waited.",
    registry=REGISTRY,
)
copy_sessions = Gauge(
    "stele_copy_sessions", "Tablet copies that are being read from this node.", registry=REGISTRY
)
flush_seconds = Counter(
    "stele_flush_seconds_total", "Time that the stores of tablets spent in flushes.", registry=REGISTRY
)
