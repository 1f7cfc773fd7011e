"""Leases in the key spaces that this node leads: when each one expires, and the entries that end expired
ones.

Called by tablet_service.py. `stele.tablet.leases` defines what a lease is; it is replicated and knows no
clock.

Invariants:
- A lease ends by an entry of the leader alone. The leader proposes the entry after the lease's time has
  passed since it last confirmed a sign of the holder. It measures by its monotonic clock.
- A new leader gives every lease its whole time again. It cannot know what the earlier leader confirmed last.
- A sign of a holder is confirmed like a linearizable read: nobody else led when it came. So a later leader
  began later, and gives the lease its whole time from then on. While an entry that ends a lease is under way,
  no sign of its holder is confirmed.
- An entry ends few keys, or one lease. Replicas apply it in one step, and watchers get it in one message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any

import structlog

from stele import metrics
from stele.consensus.ports import Host
from stele.consensus.replica import Replica
from stele.model import writeop
from stele.model.errors import Code, Rejected, Retryable, SteleError, let_go
from stele.model.ids import StreamKey
from stele.model.kvop import TTL_MAX_MS, TTL_MIN_MS, encode_operations, revoke
from stele.model.writeop import NO_CLIENT, BodyKind, WriteHeader
from stele.rpc.proto import tserver_pb2 as pb
from stele.tablet.keyspace import KeySpace
from stele.tserver.reads import key_space_of
from stele.tserver.replicas import Replicas
from stele.tserver.wheel import Wheel

log = structlog.get_logger("stele.tserver.leases")

LOOK_S = 0.1
"""Pause between two checks for expired leases. So a lease may end this much too late."""
_SEARCH_S = 1.0
"""Pause between two searches for key spaces with leases that this node has come to lead."""
ENDED_AT_ONCE = 200
"""The most leases and keys that one entry ends. A single lease ends by one entry, however many keys it has.

Each key takes a replica some 30 µs, and nothing else goes on meanwhile.
"""
TOLD_AT_ONCE = 1_000
"""The most leases and keys in one answer. A single lease is listed in one answer, however many keys it has.
"""


class _Term:
    """The leases of one key space while this node leads it in one term.

    `ends_ms`: when each lease expires, by the node's clock. `ending`: the leases whose end is proposed.
    `look_ms`: when the first lease may expire. `at_work`: whether a task is ending expired leases.
    """

    __slots__ = ("_changes", "at_work", "ending", "ends_ms", "look_ms", "replica", "space", "term")

    def __init__(self, replica: Replica, space: KeySpace) -> None:
        self.replica = replica
        self.space = space
        self.term = replica.term
        self.ends_ms: dict[int, int] = {}
        self.ending: set[int] = set()
        self.look_ms = 0
        self.at_work = False
        self._changes = -1

    def stands(self) -> bool:
        """Whether this node still leads in this term."""
        replica = self.replica
        return replica.is_leader and replica.term == self.term and replica.machine is self.space

    def follow(self, now_ms: int) -> None:
        """Begin the time of leases that are new here, or were granted again. Forget those that are gone."""
        leases, ends_ms = self.space.leases, self.ends_ms
        known = self._changes
        if known == leases.changes:
            return
        self._changes, self.look_ms = leases.changes, 0
        for lease in reversed(leases.granted):
            if leases.granted[lease] <= known:
                break  # so are all before it
            ends_ms[lease] = now_ms + leases.ttl_ms[lease]
        if len(ends_ms) > len(leases):
            for lease in [lease for lease in ends_ms if lease not in leases]:
                del ends_ms[lease]

    def over(self, now_ms: int) -> list[int]:
        """The leases that have expired. Looks at all leases only if one may have expired."""
        if now_ms <= self.look_ms:
            return []
        self.look_ms = min((ends for ends in self.ends_ms.values() if ends >= now_ms), default=0)
        return [lease for lease, ends in self.ends_ms.items() if now_ms > ends]

    def next_of(self, over: deque[int], now_ms: int) -> list[int]:
        """Take from `over` the leases that the next entry ends. Leave out those whose holders were heard
        meanwhile.
        """
        some, size, leases = list[int](), 0, self.space.leases
        while over:
            lease = over[0]
            if now_ms > self.ends_ms.get(lease, now_ms):
                size += 1 + len(leases.keys_of(lease))
                if some and size > ENDED_AT_ONCE:
                    break
                some.append(lease)
            over.popleft()
        return some


class LeaseKeeper:
    """Keeps the time of all leases in the key spaces that this node leads."""

    def __init__(self, replicas: Replicas, host: Host) -> None:
        self._host = host
        self._wheel = Wheel(replicas)
        self._terms: dict[StreamKey, _Term] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._searched_s = 0.0

    def __len__(self) -> int:
        return sum(len(term.space.leases) for term in self._terms.values())

    def start(self) -> None:
        """Begin to check for expired leases."""
        self._in_background(self._run())

    async def close(self) -> None:
        """End no more leases, because the node stops."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- for clients

    async def answer(self, replica: Replica, request: pb.KvRequest) -> pb.KvResponse:
        """Keep a lease alive for its holder, or list leases. Raises what `keep` raises."""
        if request.op == pb.KV_LEASE_KEEP:
            ttl_ms = await self.keep(replica, request.lease, request.deadline_ms)
            return pb.KvResponse(leases=[pb.KvLeasePB(lease=request.lease, ttl_ms=ttl_ms, left_ms=ttl_ms)])
        await replica.reads.linearizable_read(request.deadline_ms)
        replica.check_leader()
        return self._told(self._term_of(replica, key_space_of(replica)), request)

    def _told(self, term: _Term, request: pb.KvRequest) -> pb.KvResponse:
        """The answer that lists one lease, or the next page of all leases. It gives the keys of each, and its
        time left in ms.
        """
        leases, now_ms = term.space.leases, self._host.now_ms()
        if request.lease:
            asked = [request.lease] if request.lease in leases else []
        else:
            asked = sorted(lease for lease in leases.ttl_ms if lease > request.after_lease)
        answer, size = pb.KvResponse(revision=term.space.revision), 0
        for lease in asked:
            size += 1 + len(leases.keys_of(lease))
            if answer.leases and size > TOLD_AT_ONCE:
                answer.more = True
                break
            answer.leases.add(
                lease=lease,
                ttl_ms=leases.ttl_ms[lease],
                left_ms=0 if lease in term.ending else max(0, term.ends_ms[lease] - now_ms),
                keys=sorted(leases.keys_of(lease)),
            )
        return answer

    def granted(self, replica: Replica) -> None:
        """Note that a lease was granted in a key space that is led here."""
        if isinstance(replica.machine, KeySpace) and replica.is_leader:
            self._term_of(replica, replica.machine)

    async def keep(self, replica: Replica, lease: int, deadline_ms: int) -> int:
        """Confirm a sign of a lease's holder: its time begins anew. Returns that time in ms.

        Raises:
            Rejected: LEASE_LOST, the lease is gone.
            Retryable: NOT_READY, the end of the lease is under way. NOT_LEADER and other codes of
                `Reads.linearizable_read`.
        """
        await replica.reads.linearizable_read(deadline_ms)
        replica.check_leader()
        space = key_space_of(replica)
        ttl_ms = space.leases.ttl_ms.get(lease)
        if ttl_ms is None:
            raise lost(lease)
        term = self._term_of(replica, space)
        if lease in term.ending:
            raise Retryable(f"lease {lease:016x} is about to end; ask again", code=Code.NOT_READY)
        term.ends_ms[lease] = self._host.now_ms() + ttl_ms
        return ttl_ms

    def _term_of(self, replica: Replica, space: KeySpace) -> _Term:
        key = replica.superblock.key
        term = self._terms.get(key)
        if term is None or not term.stands():
            term = self._terms[key] = _Term(replica, space)
        term.follow(self._host.now_ms())
        return term

    # --- in the background

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S if self._terms else _SEARCH_S)
            try:
                self._look()
            except Exception:
                log.exception("a check for expired leases failed; the next one tries again")

    def _look(self) -> None:
        """Begin to end the leases that have expired."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._searched_s >= 0.9 * _SEARCH_S:
            self._searched_s = now_s
            self._search()
        now_ms = self._host.now_ms()
        for key, term in list(self._terms.items()):
            if not term.stands() or not len(term.space.leases):
                del self._terms[key]
                continue
            term.follow(now_ms)
            if not term.at_work and (over := term.over(now_ms)):
                term.at_work = True
                self._in_background(self._end_all(term, over))

    def _search(self) -> None:
        for replica in self._wheel.turn():
            space = replica.machine
            if isinstance(space, KeySpace) and len(space.leases) and replica.is_leader:
                self._term_of(replica, space)

    async def _end_all(self, term: _Term, over: list[int]) -> None:
        """End expired leases, by one entry after the other."""
        left = deque(over)
        try:
            while term.stands() and (some := term.next_of(left, self._host.now_ms())):
                if not await self._end(term, some):
                    return
        finally:
            term.at_work = False
            term.look_ms = 0

    async def _end(self, term: _Term, leases: list[int]) -> bool:
        """End these leases by one entry. Returns whether they are known to have ended.

        They are in `ending` until the outcome is known.
        """
        term.ending.update(leases)
        body = encode_operations([revoke(lease) for lease in leases])
        header = WriteHeader(NO_CLIENT, 0, 0, 0, writeop.digest(body), kind=BodyKind.KEYSPACE)
        tablet = term.replica.tablet_id
        try:
            await term.replica.writes.propose(writeop.encode(header, body), small=True)
            metrics.leases_expired.inc(len(leases))
            log.info("leases have expired", tablet=tablet, leases=[f"{lease:016x}" for lease in leases])
            return True
        except SteleError as exc:
            let_go(exc)
            log.info("expired leases were not ended; it is tried again", tablet=tablet, error=str(exc))
            return False
        finally:
            term.ending.difference_update(leases)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def lost(lease: int) -> Rejected:
    """The error for a lease that is gone."""
    return Rejected(f"lease {lease:016x} has expired, or was revoked; take another", code=Code.LEASE_LOST)


def check_ttl(ttl_ms: int) -> int:
    """Return the time that a client wants for a lease.

    Raises:
        Rejected: the time is too short or too long.
    """
    if not TTL_MIN_MS <= ttl_ms <= TTL_MAX_MS:
        raise Rejected(f"a lease of {ttl_ms} ms; expected {TTL_MIN_MS} to {TTL_MAX_MS} ms")
    return ttl_ms
