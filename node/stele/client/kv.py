"""A key space: small values by key, replicated like any tablet. Used through `AsyncClient.keyspace(name)`.

Invariant: an operation is done whole or not at all, and only once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stele.client import arguments, reprs
from stele.client.lease import AsyncLease, KeyLease
from stele.client.lease import ttl_s as lease_ttl_s
from stele.client.nearby import Nearby
from stele.client.tablet import TabletClient
from stele.client.watch import VERSION_NEEDED, AsyncWatch
from stele.model.column import shown
from stele.model.errors import Closed, Code, Rejected, SteleError, let_go
from stele.model.kvop import LEASE_MAX, encode_write
from stele.rpc.proto import tserver_pb2

_CHANGED_INTERVAL_S = 0.5
_REVISION_MAX = (1 << 63) - 1

Pairs = list[tuple[bytes, bytes]]
_Value = bytes | str | None
ValuesByKey = Mapping[str, _Value] | Mapping[bytes, _Value] | Mapping[bytes | str, _Value]


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as it was read. `revision`: the revision of the write that set its value. `lease`: the id of the
    lease with which the key ends; 0: none.

    Example:
        >>> revision = space.replace("colour", "blue")
        >>> space.snapshot("colour").keys == (stele.KeyValue(b"colour", b"blue", revision),)
        True
    """

    key: bytes
    value: bytes
    revision: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class KeySnapshot:
    """Keys in order, as they were at `revision`. A watch after that revision misses nothing.

    Example:
        >>> space.write({"colour": "blue", "owner": "me"}) <= space.snapshot().revision
        True
        >>> [each.key for each in space.snapshot(prefix="c").keys]
        [b'colour']
    """

    revision: int
    keys: tuple[KeyValue, ...]
    age_s: float = 0.0
    """The snapshot has all changes that were acknowledged this many seconds before the call; 0: all until the call."""


class AsyncKeySpace:
    """An open key space. Keys and values are bytes; a str is encoded as UTF-8.

    Example:
        >>> async def read(client):
        ...     space = await client.create_keyspace("limits")
        ...     await space.insert("rows", "10")
        ...     return await space.read("rows")
        >>> client.run(read(client.asynchronous))
        b'10'
    """

    def __init__(
        self, name: str, tablet: TabletClient, timeout_s: float, cluster_id: str, nearby: Nearby
    ) -> None:
        self.name = name
        self._nearby = nearby
        self._cluster_id = cluster_id
        self._tablet = tablet
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return reprs.shown_as(self, self.name, self._cluster_id)

    async def replace(
        self, key: bytes | str, value: bytes | str, *, lease: AsyncLease | int | None = None
    ) -> int:
        """Set a key, whether or not it exists. Returns the revision; so do all changes.

        `lease`: the key is removed when this lease ends; without one it stays.

        A revision of 0 is rare. It means that the write is done, but its revision is no longer known.
        """
        return (await self._ask(tserver_pb2.KV_REPLACE, key, value, lease)).revision

    async def insert(
        self, key: bytes | str, value: bytes | str, *, lease: AsyncLease | int | None = None
    ) -> int:
        """Set a key that must not exist. Returns the revision. `lease`: see `replace`.

        Raises:
            Rejected: LEASE_LOST. ALREADY_PRESENT; also while another insert of the key is not committed yet.
        """
        return (await self._ask(tserver_pb2.KV_INSERT, key, value, lease)).revision

    async def read(self, key: bytes | str) -> bytes | None:
        """The present value of a key (linearizable); None if it does not exist."""
        pairs = (await self._ask(tserver_pb2.KV_READ, key)).pairs
        return pairs[0].value if pairs else None

    async def delete(self, key: bytes | str) -> int:
        """Remove a key, whether or not it exists. Returns the revision."""
        return (await self._ask(tserver_pb2.KV_DELETE, key)).revision

    async def list(self, prefix: bytes | str = b"") -> Pairs:
        """Keys that begin with `prefix`, with their values, in order."""
        answer = await self._ask(tserver_pb2.KV_LIST, prefix)
        return [(pair.key, pair.value) for pair in answer.pairs]

    async def snapshot(
        self,
        key: bytes | str | None = None,
        *,
        prefix: bytes | str | None = None,
        max_staleness: float | None = None,
    ) -> KeySnapshot:
        """One key, or those that begin with `prefix`, or all; with the revision at which they are read (linearizable).

        `max_staleness`: they may be up to this many seconds old. Then the nearest replica answers, followers
        first. The answer has all changes of this client, and later reads are never older.
        """
        raw, is_prefix = _one_or_prefix(key, prefix)
        self._ensure_version("a revision")
        op = tserver_pb2.KV_LIST if is_prefix else tserver_pb2.KV_READ
        if max_staleness is None:
            answer = await self._ask(op, raw)
        else:
            old_us = int(arguments.seconds(max_staleness, "max_staleness", zero=True) * 1e6)
            request = tserver_pb2.KvRequest(op=op, key=arguments.raw(raw, "key"))
            self._tablet.ensure_open()
            answer = await self._nearby.kv(request, old_us, self._timeout_s)
        found = tuple(KeyValue(pair.key, pair.value, pair.revision, pair.lease) for pair in answer.pairs)
        return KeySnapshot(answer.revision, found, answer.age_us / 1e6)

    async def watch(
        self,
        key: bytes | str | None = None,
        *,
        prefix: bytes | str | None = None,
        after: int | None = None,
    ) -> AsyncWatch:
        """Watch one key, or those that begin with `prefix`, or all. It gives the changes after revision `after`; None: those
        from now on.

        Each change comes once, in order of the revisions. Changes of one write come together. The watch goes
        on at a new leader.

        Raises:
            Rejected: COMPACTED: nodes no longer keep changes from so long ago; also later, if the caller takes them too
                slowly. Read all keys with `snapshot`, and watch after its revision. UNSUPPORTED_VERSION.
        """
        raw, is_prefix = _one_or_prefix(key, prefix)
        since = None if after is None else arguments.whole_number(after, "after", least=0, most=_REVISION_MAX)
        self._ensure_version("a watch")
        watch = AsyncWatch(
            self.name,
            self._tablet,
            raw,
            prefix=is_prefix,
            after=since,
            timeout_s=self._timeout_s,
            cluster_id=self._cluster_id,
        )
        try:
            await watch.begin()
        except BaseException:
            await watch.close()
            raise
        return watch

    def _ensure_version(self, what: str) -> None:
        """Raise UNSUPPORTED_VERSION until the upgrade is finalized: earlier programs do not know `what`."""
        present = self._tablet.cluster_version
        if present < VERSION_NEEDED:
            raise Rejected(
                f"key space {self.name}: {what}: this needs cluster version {VERSION_NEEDED}, but the cluster has {present}; "
                "`stele cluster finalize` allows it",
                code=Code.UNSUPPORTED_VERSION,
            )

    async def write(
        self,
        values: ValuesByKey,
        *,
        when: ValuesByKey | None = None,
        lease: AsyncLease | int | None = None,
    ) -> int:
        """Set several keys at once, if others have the expected values; else change nothing. Returns the revision.

        `values`: the new value of each key; None removes it. `when`: the value that each of these keys must have;
        None: it must not exist. At most 1,000 keys and 8 MiB. `lease`: the keys that are set end with it.

        Raises:
            Rejected: CAS_FAILED: a key of `when` has another value. LEASE_LOST. TOO_LARGE. INVALID_ARGUMENT.
        """
        wanted, expected = _raw(values, "values"), _raw({} if when is None else when, "when")
        operations = encode_write(wanted, expected, self._lease_id(lease))
        request = tserver_pb2.KvRequest(op=tserver_pb2.KV_WRITE, operations=operations)
        return (await self._send(request, expected)).revision

    async def lease(self, ttl_s: float = 10.0) -> AsyncLease:
        """Take a lease, and keep it alive. Keys that are set with it are removed once nobody has kept it alive for `ttl_s`.

        Raises:
            Rejected: UNSUPPORTED_VERSION. TOO_LARGE: there are too many.
        """
        seconds = lease_ttl_s(ttl_s)
        self._ensure_version("a lease")
        made = self._lease(secrets.randbelow(LEASE_MAX) + 1, seconds)
        await made.grant()
        return made

    async def keep_lease(self, lease: int) -> AsyncLease:
        """From now on, keep a lease alive that was taken elsewhere. `lease`: its id. Raises Rejected LEASE_LOST if it is gone."""
        self._ensure_version("a lease")
        made = self._lease(self._lease_id(lease), 0.0)
        await made.keep()
        made.adopt()
        return made

    def _lease(self, lease: int, ttl_s: float) -> AsyncLease:
        return AsyncLease(self.name, self._tablet, lease, ttl_s, self._timeout_s, self._cluster_id)

    async def revoke_lease(self, lease: AsyncLease | int) -> int:
        """End a lease and remove its keys. A lease that is gone is no error. Returns the revision."""
        return (await self._ask(tserver_pb2.KV_LEASE_REVOKE, b"", b"", lease)).revision

    async def leases(self) -> tuple[KeyLease, ...]:
        """All leases, with their keys, in order of their ids. If there are many, they are read with several requests, so not all
        at one moment."""
        self._ensure_version("a lease")
        found = list[KeyLease]()
        while True:
            request = tserver_pb2.KvRequest(
                op=tserver_pb2.KV_LEASES, after_lease=found[-1].id if found else 0
            )
            answer = await self._send(request, ())
            found += (
                KeyLease(each.lease, each.ttl_ms / 1000, each.left_ms / 1000, tuple(each.keys))
                for each in answer.leases
            )
            if not answer.more:
                return tuple(found)

    def _lease_id(self, lease: AsyncLease | int | None) -> int:
        """The id of a lease; 0 for none."""
        if lease is None:
            return 0
        self._ensure_version("a lease")
        if isinstance(lease, AsyncLease):
            return lease.id
        if isinstance(lease, str):
            raise arguments.refusal("lease", lease, "a number; int(id, 16) of an id that `stele kv` prints")
        return arguments.whole_number(lease, "lease", least=1, most=LEASE_MAX)

    async def elect(self, name: str, candidate: str, *, lease: AsyncLease | int | None = None) -> str:
        """Become the holder of `name` if nobody is. Returns the present holder.

        With a lease, the name is free again once the lease has ended: hold the name only while `lease.alive`. Without a
        lease, it is held until its key is deleted. Raises Rejected LEASE_LOST.
        """
        while True:
            try:
                await self.insert(name, candidate, lease=lease)
                return candidate
            except Rejected as exc:
                if exc.code is not Code.ALREADY_PRESENT:
                    raise
            if lease is None:
                holder = await self.read(name)
            else:
                found = (await self.snapshot(name)).keys
                holder = found[0].value if found else None
                if found and holder == candidate.encode() and found[0].lease != self._lease_id(lease):
                    if await self._renewed(name, candidate, lease):
                        return candidate
                    continue
            if holder is not None:  # otherwise it became free in between: try again
                return holder.decode("utf-8", "replace")

    async def _renewed(self, name: str, candidate: str, lease: AsyncLease | int) -> bool:
        """Move a name that the same candidate took with another lease to this lease. False: the name was lost
        meanwhile."""
        try:
            await self.write({name: candidate}, when={name: candidate}, lease=lease)
        except Rejected as exc:
            if exc.code is not Code.CAS_FAILED:
                raise
            return False
        return True

    async def changed(self, key: bytes | str, known: bytes | str | None) -> bytes | None:
        """Wait until the value of a key differs from `known`, and return it.

        Raises:
            Rejected: NOT_FOUND: the key space was deleted. CLOSED: the client was closed.
        """
        before = None if known is None else arguments.raw(known, "known")
        while True:
            try:
                if self._tablet.cluster_version < VERSION_NEEDED:  # nobody pushes: look again and again
                    value = await self.read(key)
                    if value != before:
                        return value
                else:
                    return await self._pushed(key, before)
            except Rejected as exc:
                if exc.code is not Code.COMPACTED:
                    raise
            except SteleError as exc:
                let_go(exc)
            await asyncio.sleep(_CHANGED_INTERVAL_S)

    async def _pushed(self, key: bytes | str, before: bytes | None) -> bytes | None:
        """The first value of a key that differs from `before`."""
        state = await self.snapshot(key)
        value = state.keys[0].value if state.keys else None
        if value != before:
            return value
        async with await self.watch(key, after=state.revision) as watch:
            async for write in watch:
                value = write.changes[-1].value
                if value != before:
                    return value
        raise Closed()

    async def _ask(
        self,
        op: tserver_pb2.KvOpPB.ValueType,
        key: bytes | str,
        value: bytes | str = b"",
        lease: AsyncLease | int | None = None,
    ) -> tserver_pb2.KvResponse:
        request = tserver_pb2.KvRequest(
            op=op,
            key=arguments.raw(key, "key"),
            value=arguments.raw(value, "value"),
            lease=self._lease_id(lease),
        )
        return await self._send(request, [request.key])

    async def _send(self, request: tserver_pb2.KvRequest, keys: Iterable[bytes]) -> tserver_pb2.KvResponse:
        """Ask the leader. `keys`: the keys that an error may name."""
        self._tablet.ensure_open()
        try:
            return await self._tablet.kv(request, timeout_s=self._timeout_s)
        except Rejected as exc:
            # Nodes show the key as bytes. Their words are replicated state, so they cannot change; show it as
            # text here.
            words = str(exc.args[0])
            for key in keys:
                if f"key {key!r} " in words:
                    words = words.replace(repr(key), _shown_key(key))
                    break
            exc.args = (words, *exc.args[1:])
            raise


def _raw(given: ValuesByKey, what: str) -> dict[bytes, bytes | None]:
    """Keys and values as bytes.

    Raises:
        Rejected: it is no mapping; a key or value of a wrong kind; a key given twice, as bytes and as text.
    """
    if not isinstance(given, Mapping):
        raise arguments.refusal(what, given, "a dict of keys and values")
    found: dict[bytes, bytes | None] = {}
    for key, value in given.items():
        raw = arguments.raw(key, "key")
        if raw in found:
            raise Rejected(
                f"{what}: key {_shown_key(raw)} is given twice, as bytes and as text; give it once"
            )
        found[raw] = None if value is None else arguments.raw(value, "value")
    return found


def _one_or_prefix(key: bytes | str | None, prefix: bytes | str | None) -> tuple[bytes, bool]:
    """Return (the key or prefix, whether it is a prefix). If neither is given, all keys are meant."""
    if key is None:
        return (b"" if prefix is None else arguments.raw(prefix, "prefix")), True
    if prefix is not None:
        raise Rejected("key and prefix are both given; expected one of them, or none for all keys")
    return arguments.raw(key, "key"), False


def _shown_key(key: bytes) -> str:
    """A key as people wrote it: as text if possible."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return shown(key)
    return shown(text if text.isprintable() else key)
