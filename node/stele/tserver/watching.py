"""Watches on key spaces that this node leads: pushes committed changes to the watchers, in order, each change
once.

Called by tablet_service.py. Each change is encoded once, however many watch it. While a client does not read,
hardly more than one message is kept for it, out of the node's budget. Its watch stops at a revision. Later it
goes on from there, out of the newest changes (stele.tablet.recent). If those no longer reach back so far, the
watch ends with COMPACTED.

Invariants: only applied changes are pushed, so only committed ones. A watch ends once this node no longer
leads, or cannot confirm that it does. The watch then says so, and its client goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence

import structlog

from stele import metrics
from stele.consensus.replica import Replica
from stele.model.errors import Code, Rejected, Retryable, SteleError, let_go
from stele.model.ids import StreamKey
from stele.model.kvop import KEY_BYTES_MAX
from stele.rpc.channels import MESSAGE_BYTES_MAX
from stele.rpc.client_stream import WRITE_DEADLINE_MS, Sink
from stele.rpc.errors import error_to_pb
from stele.rpc.frames import pushed_change, pushed_changes
from stele.rpc.proto import tserver_pb2 as pb
from stele.tablet.keyspace import KeySpace
from stele.tablet.recent import Written
from stele.tserver.reads import check_tablet, key_space_of
from stele.tserver.replicas import Replicas

log = structlog.get_logger("stele.tserver.watching")

WATCHES_MAX = 16_384
"""The most watches of a node. Each takes about 1 KB."""
MARK_S = 2.0
"""Pause between two marks. A mark tells a quiet watcher the revision up to which nothing changed for it."""
WATCHES_OF_CLIENT_MAX = 1_000
"""The most watches of one client on one key space."""
LENGTHS_MAX = 64
"""The most different lengths of watched prefixes. Each key that changes is looked up once for each length."""
TURN_S = 0.002
"""How long one turn of the loop serves watches that are behind."""
_LOOK_S = 0.05
"""Pause between two checks: whether this node still leads, and whether clients that were full read again."""
_PUSHES_MAX = 100
"""A new write is pushed at once to this many watches. The others get it one after the other."""
_LOOKS_MAX = 10_000
"""The most lookups that one turn makes for new writes."""
_LOOKS_AT_ONCE = 256
"""The most changes examined for a watch that is behind, before another has its turn."""
_PUSH_BYTES = 1 << 20
"""A write is added to a message with others only if the message then has at most this many bytes."""
_WRITE_BYTES_MAX = MESSAGE_BYTES_MAX - 1_024
"""The most bytes of one write that are pushed, because clients take no larger message. A write by a client is
never that large.
"""


class Watch:
    """One watch of a client. `sent`: all changes up to this revision were pushed. It is used only while the
    watch is `behind`.
    """

    __slots__ = ("behind", "key", "number", "prefix", "sent", "sink")

    def __init__(self, sink: Sink, number: int, key: bytes, prefix: bool, sent: int) -> None:
        self.sink = sink
        self.number = number
        self.key = key
        self.prefix = prefix
        self.sent = sent
        self.behind = True

    def wants(self, key: bytes) -> bool:
        """Whether it watches this key."""
        return key.startswith(self.key) if self.prefix else key == self.key


class Feed:
    """The watches on one key space. `term`: the term in which this replica leads.

    If few watches want a new write, it goes at once to those that have everything before it. Otherwise they
    are `behind`, and get it one after the other. A turn of the loop serves the watches that are behind for
    TURN_S at most.
    """

    def __init__(self, replica: Replica, space: KeySpace) -> None:
        self.replica = replica
        self.space = space
        self.term = replica.term
        self.marked_s = asyncio.get_running_loop().time()
        self.marking: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._recent = space.recent
        self._recent.reader = self
        self._due = False
        self._sent = space.revision
        self._watches: dict[tuple[Sink, int], Watch] = {}
        self._of_sink: Counter[Sink] = Counter()
        self._by_key: dict[bytes, dict[Watch, None]] = {}
        self._by_prefix: dict[bytes, dict[Watch, None]] = {}
        self._lengths: Counter[int] = Counter()  # of the prefixes
        self._behind: dict[Watch, None] = {}
        self._turns: deque[Watch] = (
            deque()
        )  # whom to serve next: those behind who read, and those to be told a mark
        self._waits: set[Watch] = set()  # those in `_turns`

    def __len__(self) -> int:
        return len(self._watches)

    def __contains__(self, place: tuple[Sink, int]) -> bool:
        return place in self._watches

    # --- stele.tablet.recent.Reader

    @property
    def read_to(self) -> int:
        """See Reader."""
        return self._sent

    def written(self) -> None:
        """See Reader."""
        self._wake()

    # --- who watches

    def forget_ended(self) -> None:
        """Drop the watches whose streams have ended."""
        ended = {sink for sink in self._of_sink if sink.ended}
        for place in [place for place in self._watches if place[0] in ended] if ended else ():
            self.remove(place)

    def check_reaches(self, revision: int) -> None:
        """Refuse a watch from a revision that is no longer kept, or is not there yet.

        Raises:
            Rejected: COMPACTED, INVALID_ARGUMENT.
        """
        if revision < self._recent.start:
            raise self._compacted(revision, "begin")
        if revision > self.space.revision:
            raise Rejected(
                f"revision {revision} is newer than the key space, which is at {self.space.revision}; read again, and watch "
                "from that revision"
            )

    def check_room(self, watch: Watch) -> None:
        """Refuse a watch if with it the pushing of one write would take too long.

        Raises:
            Retryable: THROTTLED.
        """
        if self._of_sink[watch.sink] >= WATCHES_OF_CLIENT_MAX:
            raise Retryable(
                f"this client has {WATCHES_OF_CLIENT_MAX:,} watches of one key space; watch a prefix instead",
                code=Code.THROTTLED,
            )
        if watch.prefix and len(watch.key) not in self._lengths and len(self._lengths) >= LENGTHS_MAX:
            raise Retryable(
                f"the watched prefixes of this key space already have {LENGTHS_MAX} different lengths, the most allowed; watch single keys",
                code=Code.THROTTLED,
            )

    def _compacted(self, revision: int, what: str) -> Rejected:
        return Rejected(
            f"the watch after revision {revision} cannot {what}: changes up to revision {self._recent.start} are no longer "
            "kept; read all keys, and watch from that read's revision",
            code=Code.COMPACTED,
        )

    def add(self, watch: Watch) -> None:
        """Begin a watch at its revision."""
        self._watches[watch.sink, watch.number] = watch
        self._of_sink[watch.sink] += 1
        (self._by_prefix if watch.prefix else self._by_key).setdefault(watch.key, {})[watch] = None
        if watch.prefix:
            self._lengths[len(watch.key)] += 1
        self._fall_behind(watch, watch.sent)

    def remove(self, place: tuple[Sink, int]) -> None:
        """End a watch without telling its client."""
        watch = self._watches.pop(place, None)
        if watch is None:
            return
        self._of_sink[watch.sink] -= 1
        if not self._of_sink[watch.sink]:
            del self._of_sink[watch.sink]
        index = self._by_prefix if watch.prefix else self._by_key
        del index[watch.key][watch]
        if not index[watch.key]:
            del index[watch.key]
        if watch.prefix:
            self._lengths[len(watch.key)] -= 1
            if not self._lengths[len(watch.key)]:
                del self._lengths[len(watch.key)]
        self._behind.pop(watch, None)

    def end(self, error: SteleError) -> None:
        """End all watches with an error."""
        if self._recent.reader is self:  # else a later feed has it
            self._recent.reader = None
            self._recent.trim()
        for watch in list(self._watches.values()):
            self._tell_end(watch, error)

    def _tell_end(self, watch: Watch, error: SteleError) -> None:
        metrics.watches_ended.labels(error.code.name).inc()
        told = pb.KvPushPB(number=watch.number, error=error_to_pb(error))
        # Without room for it the client asks again after a silence.
        watch.sink.push(pb.ClientResponse(push=told).SerializeToString())
        self.remove((watch.sink, watch.number))

    # --- pushing

    def _wake(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._due = False
        try:
            self.flush()
            self._serve()
        except Exception as exc:
            log.exception("pushing changes failed", tablet=self.replica.tablet_id)
            self.end(Retryable(f"the watch failed: {exc!r}; watch again", code=Code.NOT_LEADER))

    def flush(self) -> None:
        """Push the changes applied since the last call to the watches that have everything before them."""
        before, looked = self._sent, 0
        found: dict[Watch, list[bytes]] = {}
        for written in self._recent.after(before):
            looked += len(written.changes) * (1 + len(self._lengths))
            if looked > _LOOKS_MAX or not self._find(written, found):
                self._all_fall_behind(before)
                found.clear()
                break
        self._sent = self.space.revision
        for watch, changes in found.items():
            if sum(map(len, changes)) > _PUSH_BYTES or not self._push(watch, changes, self._sent):
                self._fall_behind(watch, before)
        self._recent.trim()

    def _find(self, written: Written, found: dict[Watch, list[bytes]]) -> bool:
        """Note in `found` which watches want which of these changes. Returns False if they are too many for
        one turn.
        """
        for (key, _), encoded in zip(written.changes, encoded_changes(written)):
            for watch in self._wanting(key):
                if not watch.behind:
                    found.setdefault(watch, []).append(encoded)
                    if len(found) > _PUSHES_MAX:
                        return False
        return True

    def _wanting(self, key: bytes) -> Iterator[Watch]:
        yield from self._by_key.get(key, ())
        for length in self._lengths:
            if length <= len(key):
                yield from self._by_prefix.get(key[:length], ())

    def _all_fall_behind(self, sent: int) -> None:
        for watch in self._watches.values():
            if not watch.behind:
                self._fall_behind(watch, sent)

    def _fall_behind(self, watch: Watch, sent: int) -> None:
        """Note that the watch lacks the changes after `sent`. It gets them in later turns."""
        watch.behind, watch.sent = True, sent
        self._behind[watch] = None
        self._queue(watch)

    def _queue(self, watch: Watch) -> None:
        if watch not in self._waits:
            self._waits.add(watch)
            self._turns.append(watch)
            self._wake()

    def look(self) -> None:
        """Serve the watches that are behind and whose clients read again."""
        for watch in self._behind:
            if not watch.sink.full:
                self._queue(watch)

    def _serve(self) -> None:
        """Serve the watches whose turn it is, for TURN_S at most."""
        until_s = self._loop.time() + TURN_S
        while self._turns and self._loop.time() < until_s:
            watch = self._turns.popleft()
            self._waits.remove(watch)
            if (watch.sink, watch.number) not in self._watches or watch.sink.full:
                continue
            if not watch.behind:
                self._push(watch, (), self._sent)  # a mark
            elif self._catch_up(watch):
                self._queue(watch)
        if self._turns:
            self._wake()

    def _catch_up(self, watch: Watch) -> bool:
        """Push one message of the changes that the watch lacks. Returns whether it lacks more, and can take
        more now.
        """
        if watch.sent < self._recent.start:
            self._tell_end(watch, self._compacted(watch.sent, "go on, because its client reads too slowly"))
            return False
        changes, upto = self._lacking(watch)
        if sum(map(len, changes)) > _WRITE_BYTES_MAX:
            self._tell_end(
                watch, self._compacted(watch.sent, "go on, because the next write is too large to be sent")
            )
            return False
        last = upto >= self._sent
        if (changes or last) and not self._push(watch, changes, upto):
            return False  # `look` comes back to it
        watch.sent = upto
        if last:
            watch.behind = False
            del self._behind[watch]
        return not last

    def _lacking(self, watch: Watch) -> tuple[list[bytes], int]:
        """(changes that the watch lacks, the revision up to which they reach), as many as one message takes."""
        changes, size, upto, looked = list[bytes](), 0, watch.sent, 0
        for written in self._recent.after(watch.sent):
            if written.revision > self._sent:
                break
            wanted = [
                encoded
                for (key, _), encoded in zip(written.changes, encoded_changes(written))
                if watch.wants(key)
            ]
            size += sum(map(len, wanted))
            if (changes and size > _PUSH_BYTES) or looked >= _LOOKS_AT_ONCE:
                return changes, upto
            changes += wanted
            looked += len(written.changes)
            upto = written.revision
        return changes, max(self._sent, watch.sent)

    def _push(self, watch: Watch, changes: Sequence[bytes], upto: int) -> bool:
        """Push these changes to the watch, unless its client is full or the node has no memory for them. Returns whether
        they were pushed."""
        if watch.sink.full:
            return False
        head = pb.KvPushPB(number=watch.number, revision=upto).SerializeToString()
        if not watch.sink.push(pushed_changes(head, changes)):
            return False
        metrics.watched_changes.inc(len(changes))
        return True

    def mark(self) -> None:
        """Send each watch the revision up to which it has all changes. A turn of the loop sends some of them."""
        for watch in self._watches.values():
            self._queue(watch)


def encoded_changes(written: Written) -> Sequence[bytes]:
    """The changes of a write as messages, encoded once."""
    if written.encoded is None:
        revision = written.revision
        written.encoded = [
            pushed_change(
                pb.KvChangePB(key=key, value=value or b"", deleted=value is None, revision=revision)
            )
            for key, value in written.changes
        ]
    return written.encoded


class Watches:
    """All watches of a node."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._feeds: dict[StreamKey, Feed] = {}
        self._looking: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._feeds.values()))

    async def begin(self, request: pb.KvWatchRequest, sink: Sink) -> pb.KvWatchResponse:
        """Begin a watch, or stop one.

        Raises:
            Rejected: COMPACTED, INVALID_ARGUMENT, STALE_INCARNATION.
            Retryable: NOT_LEADER and other codes of `Reads.linearizable_read`. THROTTLED, there are too many
                watches.
        """
        if request.stop:
            for feed in self._feeds.values():
                feed.remove((sink, request.number))
            return pb.KvWatchResponse(number=request.number)
        if len(request.key) > KEY_BYTES_MAX:
            raise Rejected(
                f"watch of a key of {len(request.key)} bytes; keys have at most {KEY_BYTES_MAX}, so no key can match"
            )
        self._check_room()
        replica = self._replicas.of_request(request.tablet_id)
        check_tablet(replica, "keyspace", request.tablet_incarnation)
        await replica.reads.linearizable_read(request.deadline_ms or WRITE_DEADLINE_MS)
        replica.check_leader()
        feed = self._feed_of(replica)
        after = feed.space.revision if request.from_now else request.after
        feed.check_reaches(after)
        if (sink, request.number) in feed:
            raise Rejected(f"this stream already has a watch {request.number}; choose another number")
        self._check_room()  # others have begun meanwhile
        watch = Watch(sink, request.number, request.key, request.prefix, after)
        feed.check_room(watch)
        feed.add(watch)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        return pb.KvWatchResponse(
            number=request.number,
            revision=after,
            tablet_incarnation=replica.superblock.tablet_incarnation,
        )

    def _check_room(self) -> None:
        if len(self) >= WATCHES_MAX:
            raise Retryable(f"this node has {WATCHES_MAX:,} watches; end some", code=Code.THROTTLED)

    def _feed_of(self, replica: Replica) -> Feed:
        key, space = replica.superblock.key, key_space_of(replica)
        feed = self._feeds.get(key)
        if feed is not None and (feed.space is not space or feed.term != replica.term):
            self._end(
                key,
                feed,
                Retryable("this replica was led by another meanwhile; watch again", code=Code.NOT_LEADER),
            )
            feed = None
        if feed is None:
            feed = self._feeds[key] = Feed(replica, space)
        return feed

    async def _look(self) -> None:
        """Check all feeds every _LOOK_S, as long as there are some."""
        while self._feeds:
            await asyncio.sleep(_LOOK_S)
            for key, feed in list(self._feeds.items()):
                try:
                    self._look_at(key, feed)
                except SteleError as exc:
                    let_go(exc)
                    self._end(key, feed, exc)
                except Exception as exc:  # the other feeds go on
                    log.exception(
                        "a check of a key space's watches failed; they are ended", tablet=key.tablet_id
                    )
                    self._end(
                        key, feed, Retryable(f"the watch failed: {exc!r}; watch again", code=Code.NOT_LEADER)
                    )
        self._looking = None

    def _look_at(self, key: StreamKey, feed: Feed) -> None:
        feed.forget_ended()
        if not len(feed):
            self._end(key, feed, Retryable("nobody watches"))
            return
        self._replicas.for_client(feed.replica.tablet_id)  # refuses what was dropped
        feed.replica.check_leader()
        if feed.replica.term != feed.term or feed.replica.machine is not feed.space:
            raise Retryable("this replica was led by another meanwhile; watch again", code=Code.NOT_LEADER)
        feed.look()
        now_s = asyncio.get_running_loop().time()
        if feed.marking is None and now_s - feed.marked_s >= MARK_S:
            feed.marked_s = now_s
            feed.marking = asyncio.get_running_loop().create_task(self._mark(key, feed))

    async def _mark(self, key: StreamKey, feed: Feed) -> None:
        try:
            await feed.replica.reads.linearizable_read()
            feed.mark()
        except SteleError as exc:
            let_go(exc)
            self._end(key, feed, exc)
        finally:
            feed.marking = None

    def _end(self, key: StreamKey, feed: Feed, error: SteleError) -> None:
        feed.end(error)
        if self._feeds.get(key) is feed:
            del self._feeds[key]

    async def close(self) -> None:
        """End all watches, because the node stops."""
        for key, feed in list(self._feeds.items()):
            self._end(key, feed, Retryable("this node stops; ask another", code=Code.NOT_LEADER))
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking
