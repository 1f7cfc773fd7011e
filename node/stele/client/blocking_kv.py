"""A key space of the blocking client. Each method runs the asynchronous method of the same name and waits."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from stele.client import reprs
from stele.client.kv import AsyncKeySpace, KeySnapshot, ValuesByKey
from stele.client.lease import AsyncLease, KeyLease
from stele.client.watch import AsyncWatch, KeyWrite

if TYPE_CHECKING:
    from stele.client.blocking import Client


class KeySpace:
    """A key space. Keys and values are bytes; a str is encoded as UTF-8.

    Example:
        >>> space = client.create_keyspace("settings")
        >>> revision = space.replace("colour", "blue")
        >>> space.read("colour")
        b'blue'
    """

    def __init__(self, client: Client, keyspace: AsyncKeySpace) -> None:
        self._client = client
        self._keyspace = keyspace

    def __repr__(self) -> str:
        return reprs.blocking(self._keyspace)

    def replace(self, key: bytes | str, value: bytes | str, *, lease: Lease | int | None = None) -> int:
        """Set a key, whether or not it exists. A str is encoded as UTF-8. Returns the revision; so do all
        changes. Raises Retryable if no leader answered in time.

        A revision of 0 is rare. It means that the write is done, but its revision is no longer known.
        `lease`: the key is removed when this lease ends; without one it stays.

        Example:
            >>> first = space.replace("colour", "blue")
            >>> first < space.replace("colour", b"red")
            True
        """
        return self._client.run(self._keyspace.replace(key, value, lease=_own(lease)))

    def insert(self, key: bytes | str, value: bytes | str, *, lease: Lease | int | None = None) -> int:
        """Set a key that must not exist. Returns the revision. `lease`: see `replace`. Raises Rejected ALREADY_PRESENT, and
        LEASE_LOST; also what `replace` raises.

        Example:
            >>> revision = space.insert("owner", "me")
            >>> space.read("owner")
            b'me'
        """
        return self._client.run(self._keyspace.insert(key, value, lease=_own(lease)))

    def read(self, key: bytes | str) -> bytes | None:
        """The present value of a key (linearizable); None if it does not exist. Raises what `replace` raises.

        Example:
            >>> space.read("nothing") is None
            True
        """
        return self._client.run(self._keyspace.read(key))

    def delete(self, key: bytes | str) -> int:
        """Remove a key, whether or not it exists. Returns the revision. Raises what `replace` raises.

        Example:
            >>> revision = space.delete("nothing")
        """
        return self._client.run(self._keyspace.delete(key))

    def list(self, prefix: bytes | str = b"") -> list[tuple[bytes, bytes]]:
        """Keys that begin with `prefix`, with their values, in order. Raises what `replace` raises.

        Example:
            >>> revision = space.replace("colour", "blue")
            >>> space.list("c")
            [(b'colour', b'blue')]
        """
        return self._client.run(self._keyspace.list(prefix))

    def write(
        self,
        values: ValuesByKey,
        *,
        when: ValuesByKey | None = None,
        lease: Lease | int | None = None,
    ) -> int:
        """Set several keys at once, if others have the expected values; else change nothing. Returns the revision.

        `values`: the new value of each key; None removes it. `when`: the value that each of these keys must have; None:
        it must not exist. At most 1,000 keys and 8 MiB. `lease`: the keys that are set end with it. Raises Rejected
        CAS_FAILED, if a key of `when` has another value, and LEASE_LOST; also what `replace` raises.

        Example:
            >>> revision = space.write({"colour": "blue", "owner": "me"}, when={"owner": None})
            >>> space.write({"colour": "red"}, when={"colour": "green"})
            Traceback (most recent call last):
            stele.model.errors.Rejected: CAS_FAILED: key 'colour' is not what was expected; read it again
            >>> space.list()
            [(b'colour', b'blue'), (b'owner', b'me')]
        """
        return self._client.run(self._keyspace.write(values, when=when, lease=_own(lease)))

    def snapshot(
        self,
        key: bytes | str | None = None,
        *,
        prefix: bytes | str | None = None,
        max_staleness: float | None = None,
    ) -> KeySnapshot:
        """One key, or those that begin with `prefix`, or all; with the revision at which they are read
        (linearizable). Raises what `replace` raises.

        `max_staleness`: they may be up to this many seconds old. Then the nearest replica answers, followers
        first. The answer has all changes of this client, and later reads are never older.

        Example:
            >>> revision = space.replace("colour", "blue")
            >>> space.snapshot("colour").keys[0].value, space.snapshot().revision == revision
            (b'blue', True)
            >>> space.snapshot("colour", max_staleness=5.0).age_s <= 5
            True
        """
        read = self._keyspace.snapshot(key, prefix=prefix, max_staleness=max_staleness)
        return self._client.run(read)

    def watch(
        self,
        key: bytes | str | None = None,
        *,
        prefix: bytes | str | None = None,
        after: int | None = None,
    ) -> Watch:
        """Watch one key, or those that begin with `prefix`, or all. It gives the changes after revision `after`; None:
        those from now on.

        Each change comes once, in order of the revisions. Changes of one write come together. The watch goes
        on at a new leader. Raises Rejected COMPACTED, if nodes no longer keep changes from so long ago; also
        later, if the caller takes them too slowly. Then read all keys with `snapshot`, and watch after its
        revision.

        Example:
            >>> revision = space.replace("colour", "blue")
            >>> with space.watch("colour", after=0) as watch:
            ...     next(watch).changes[0].value
            b'blue'
        """
        return Watch(self._client, self._client.run(self._keyspace.watch(key, prefix=prefix, after=after)))

    def lease(self, ttl_s: float = 10.0) -> Lease:
        """Take a lease, and keep it alive. Keys that are set with it are removed once nobody has kept it alive for `ttl_s`.
        Raises what `replace` raises.

        Example:
            >>> with space.lease(10) as lease:
            ...     revision = space.replace("worker-1", "here", lease=lease)
            >>> space.read("worker-1") is None
            True
        """
        return Lease(self._client, self._client.run(self._keyspace.lease(ttl_s)))

    def keep_lease(self, lease: int) -> Lease:
        """From now on, keep a lease alive that was taken elsewhere. `lease`: its id. Raises Rejected LEASE_LOST if it is gone.

        Example:
            >>> taken = space.lease(10)
            >>> taken.close()
            >>> space.keep_lease(taken.id).alive
            True
        """
        return Lease(self._client, self._client.run(self._keyspace.keep_lease(lease)))

    def revoke_lease(self, lease: Lease | int) -> int:
        """End a lease and remove its keys. A lease that is gone is no error. Returns the revision. Raises
        what `replace` raises.

        Example:
            >>> lease = space.lease(1)
            >>> revision = space.revoke_lease(lease.id)
            >>> lease.lost()
            True
        """
        return self._client.run(self._keyspace.revoke_lease(lease.id if isinstance(lease, Lease) else lease))

    def leases(self) -> tuple[KeyLease, ...]:
        """All leases, with their keys, in order of their ids. If there are many, they are read with several requests, so not all
        at one moment. Raises what `replace` raises.

        Example:
            >>> with space.lease(10) as lease:
            ...     [each.ttl_s for each in space.leases()]
            [10.0]
        """
        return self._client.run(self._keyspace.leases())

    def elect(self, name: str, candidate: str, *, lease: Lease | int | None = None) -> str:
        """Become the holder of `name` if nobody is. Returns the present holder. Raises what `replace` raises.

        With a lease, the name is free again once the lease has ended: hold the name only while `lease.alive`. Without a
        lease, it is held until its key is deleted.

        Example:
            >>> lease = space.lease(10)
            >>> space.elect("primary", "worker-1", lease=lease), space.elect("primary", "worker-2")
            ('worker-1', 'worker-1')
            >>> lease.revoke()
            >>> space.elect("primary", "worker-2")
            'worker-2'
        """
        return self._client.run(self._keyspace.elect(name, candidate, lease=_own(lease)))

    def changed(self, key: bytes | str, known: bytes | str | None) -> bytes | None:
        """Wait until the value of a key differs from `known`, and return it.

        Example:
            >>> revision = space.replace("colour", "blue")
            >>> space.changed("colour", known=None)
            b'blue'
        """
        return self._client.run(self._keyspace.changed(key, known))


class Watch:
    """Changes of keys as they are committed: `for write in space.watch(prefix="app/")`.

    Iterating gives a `KeyWrite` for each write. It waits for the next one, and goes on by itself at a new leader. Use it in
    `with`, or call `close`.

    Example:
        >>> with space.watch() as watch:
        ...     revision = space.delete("colour"), space.replace("colour", "blue")
        ...     for write in watch:  # deleting a missing key is no change
        ...         print(write.changes[0].key, write.changes[0].value)
        ...         break
        b'colour' b'blue'
    """

    def __init__(self, client: Client, watch: AsyncWatch) -> None:
        self._client = client
        self._watch = watch

    def __repr__(self) -> str:
        return reprs.blocking(self._watch)

    @property
    def revision(self) -> int:
        """All changes up to this revision were given. Another watch may begin after it.

        Example:
            >>> with space.watch() as watch:
            ...     watch.revision == space.snapshot().revision
            True
        """
        return self._watch.revision

    @property
    def stalled_by(self) -> str:
        """Why no change can come at the moment; empty while a leader pushes. The watch goes on by itself.

        Example:
            >>> with space.watch() as watch:
            ...     watch.stalled_by
            ''
        """
        return self._watch.stalled_by

    def __iter__(self) -> Iterator[KeyWrite]:
        return self

    def __next__(self) -> KeyWrite:
        try:
            return self._client.run(self._watch.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """End the watch. Whoever waits for a change, in another thread, gets none.

        Example:
            >>> watch = space.watch("colour")
            >>> watch.close()
        """
        self._client.end(self._watch.close())

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Lease:
    """A lease of a key space, kept alive in the background until `revoke` or `close`, or until the client is closed.

    `with` revokes it at its end. `id`: the id by which other programs name it.

    Example:
        >>> with space.lease(10) as lease:
        ...     if space.elect("primary", "worker-1", lease=lease) == "worker-1" and lease.alive:
        ...         print("worker-1 works")
        worker-1 works
    """

    def __init__(self, client: Client, lease: AsyncLease) -> None:
        self._client = client
        self.asynchronous = lease
        self.id = lease.id

    def __repr__(self) -> str:
        return reprs.blocking(self.asynchronous)

    @property
    def ttl_s(self) -> float:
        """How many seconds the lease lives without a sign of its holder.

        Example:
            >>> with space.lease(10) as lease:
            ...     lease.ttl_s
            10.0
        """
        return self.asynchronous.ttl_s

    @property
    def alive(self) -> bool:
        """Whether the lease is alive: nobody else can have what it holds. Check this right before each step that needs it.

        Example:
            >>> with space.lease(10) as lease:
            ...     lease.alive
            True
        """
        return self.asynchronous.alive

    @property
    def left_s(self) -> float:
        """How many more seconds the lease is alive at least; 0 if it is lost.

        Example:
            >>> with space.lease(10) as lease:
            ...     0 < lease.left_s <= 9
            True
        """
        return self.asynchronous.left_s

    @property
    def lost_by(self) -> str:
        """Why the lease is lost; "" while it is alive.

        Example:
            >>> lease = space.lease(10)
            >>> lease.revoke()
            >>> lease.lost_by
            'it was ended here'
        """
        return self.asynchronous.lost_by

    def keep(self) -> None:
        """Send a sign of life now, and wait until it is confirmed. The lease also sends signs in the
        background. Raises Rejected LEASE_LOST; also what `replace` raises.

        Example:
            >>> with space.lease(10) as lease:
            ...     lease.keep()
        """
        self._client.run(self.asynchronous.keep())

    def lost(self, timeout_s: float | None = None) -> bool:
        """Wait until the lease is lost: nobody confirmed it in time, or it was revoked or closed. Others may
        soon have what it holds. Returns False if it was not lost within `timeout_s`.

        Example:
            >>> with space.lease(10) as lease:
            ...     lease.lost(timeout_s=0)
            False
        """
        return self._client.run(self.asynchronous.lost(timeout_s))

    def revoke(self) -> None:
        """End the lease: remove its keys. It counts as lost from now on, even if no leader answers. Raises
        what `replace` raises.

        Example:
            >>> lease = space.lease(10)
            >>> lease.revoke()
            >>> lease.alive, space.leases()
            (False, ())
        """
        self._client.run(self.asynchronous.revoke())

    def close(self) -> None:
        """Send no more signs of life. The lease counts as lost from now on. Its keys are removed once its
        time has passed.

        Example:
            >>> lease = space.lease(10)
            >>> lease.close()
            >>> lease.alive, len(space.leases())
            (False, 1)
        """
        self._client.end(self.asynchronous.close())

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.run(self.asynchronous.__aexit__(kind, exc, trace))


def _own(lease: Lease | int | None) -> AsyncLease | int | None:
    return lease.asynchronous if isinstance(lease, Lease) else lease
