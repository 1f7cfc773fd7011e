"""A key space: small values by key, replicated like any tablet. Used through `AsyncClient.keyspace(name)`.

Invariant: an operation is done whole or not at all, and only once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from stele.client import arguments, reprs
from stele.client.tablet import TabletClient
from stele.model.column import shown
from stele.model.errors import Code, Rejected, SteleError
from stele.model.kvop import encode_write
from stele.rpc.proto import tserver_pb2

_ELECT_INTERVAL_S = 0.5

Pairs = list[tuple[bytes, bytes]]
_Value = bytes | str | None
ValuesByKey = Mapping[str, _Value] | Mapping[bytes, _Value] | Mapping[bytes | str, _Value]


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

    def __init__(self, name: str, tablet: TabletClient, timeout_s: float, cluster_id: str) -> None:
        self.name = name
        self._cluster_id = cluster_id
        self._tablet = tablet
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return reprs.shown_as(self, self.name, self._cluster_id)

    async def replace(self, key: bytes | str, value: bytes | str) -> None:
        """Set a key, whether or not it exists."""
        await self._ask(tserver_pb2.KV_REPLACE, key, value)

    async def insert(self, key: bytes | str, value: bytes | str) -> None:
        """Set a key that must not exist.

        Raises:
            Rejected: ALREADY_PRESENT; also while another insert of the key is not committed yet.
        """
        await self._ask(tserver_pb2.KV_INSERT, key, value)

    async def read(self, key: bytes | str) -> bytes | None:
        """The present value of a key (linearizable); None if it does not exist."""
        pairs = await self._ask(tserver_pb2.KV_READ, key)
        return pairs[0][1] if pairs else None

    async def delete(self, key: bytes | str) -> None:
        """Remove a key, whether or not it exists."""
        await self._ask(tserver_pb2.KV_DELETE, key)

    async def list(self, prefix: bytes | str = b"") -> Pairs:
        """Keys that begin with `prefix`, with their values, in order."""
        return await self._ask(tserver_pb2.KV_LIST, prefix)

    async def write(
        self,
        values: ValuesByKey,
        *,
        when: ValuesByKey | None = None,
    ) -> None:
        """Set several keys at once, if others have the expected values; else change nothing.

        `values`: the new value of each key; None removes it. `when`: the value that each of these keys must have;
        None: it must not exist. At most 1,000 keys and 8 MiB.

        Raises:
            Rejected: CAS_FAILED: a key of `when` has another value. TOO_LARGE. INVALID_ARGUMENT.
        """
        wanted, expected = _raw(values, "values"), _raw({} if when is None else when, "when")
        request = tserver_pb2.KvRequest(op=tserver_pb2.KV_WRITE, operations=encode_write(wanted, expected))
        await self._send(request, expected)

    async def elect(self, name: str, candidate: str) -> str:
        """Become the holder of `name` if nobody is. Returns the present holder."""
        while True:
            try:
                await self.insert(name, candidate)
                return candidate
            except Rejected as exc:
                if exc.code is not Code.ALREADY_PRESENT:
                    raise
            holder = await self.read(name)
            if holder is not None:  # otherwise it became free in between: try again
                return holder.decode("utf-8", "replace")

    async def changed(self, key: bytes | str, known: bytes | str | None) -> bytes | None:
        """Wait until the value of a key differs from `known`, and return it.

        Raises:
            Rejected: NOT_FOUND: the key space was deleted. CLOSED: the client was closed.
        """
        before = None if known is None else arguments.raw(known, "known")
        while True:
            try:
                value = await self.read(key)
            except Rejected:
                raise
            except SteleError:
                value = before
            if value != before:
                return value
            await asyncio.sleep(_ELECT_INTERVAL_S)

    async def _ask(
        self, op: tserver_pb2.KvOpPB.ValueType, key: bytes | str, value: bytes | str = b""
    ) -> Pairs:
        request = tserver_pb2.KvRequest(
            op=op, key=arguments.raw(key, "key"), value=arguments.raw(value, "value")
        )
        return await self._send(request, [request.key])

    async def _send(self, request: tserver_pb2.KvRequest, keys: Iterable[bytes]) -> Pairs:
        """Ask the leader. `keys`: those that an error may name."""
        self._tablet.ensure_open()
        try:
            answer = await self._tablet.kv(request, timeout_s=self._timeout_s)
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
        return [(pair.key, pair.value) for pair in answer.pairs]


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
            raise Rejected(f"{what}: key {_shown_key(raw)} is given twice, as bytes and as text")
        found[raw] = None if value is None else arguments.raw(value, "value")
    return found


def _shown_key(key: bytes) -> str:
    """A key as people wrote it: as text if possible."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return shown(key)
    return shown(text if text.isprintable() else key)
