"""A key space of the blocking client. Each method runs the asynchronous method of the same name and waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stele.client import reprs
from stele.client.kv import AsyncKeySpace, ValuesByKey

if TYPE_CHECKING:
    from stele.client.blocking import Client


class KeySpace:
    """A key space. Keys and values are bytes; a str is encoded as UTF-8.

    Example:
        >>> space = client.create_keyspace("settings")
        >>> space.replace("colour", "blue")
        >>> space.read("colour")
        b'blue'
    """

    def __init__(self, client: Client, keyspace: AsyncKeySpace) -> None:
        self._client = client
        self._keyspace = keyspace

    def __repr__(self) -> str:
        return reprs.blocking(self._keyspace)

    def replace(self, key: bytes | str, value: bytes | str) -> None:
        """Set a key, whether or not it exists. A str is encoded as UTF-8. Raises Retryable if no leader
        answered in time.

        Example:
            >>> space.replace("colour", "blue")
            >>> space.replace("colour", b"red")
        """
        self._client.run(self._keyspace.replace(key, value))

    def insert(self, key: bytes | str, value: bytes | str) -> None:
        """Set a key that must not exist. Raises Rejected ALREADY_PRESENT; also what `replace` raises.

        Example:
            >>> space.insert("owner", "me")
            >>> space.read("owner")
            b'me'
        """
        self._client.run(self._keyspace.insert(key, value))

    def read(self, key: bytes | str) -> bytes | None:
        """The present value of a key (linearizable); None if it does not exist. Raises what `replace` raises.

        Example:
            >>> space.read("nothing") is None
            True
        """
        return self._client.run(self._keyspace.read(key))

    def delete(self, key: bytes | str) -> None:
        """Remove a key, whether or not it exists. Raises what `replace` raises.

        Example:
            >>> space.delete("nothing")
        """
        self._client.run(self._keyspace.delete(key))

    def list(self, prefix: bytes | str = b"") -> list[tuple[bytes, bytes]]:
        """Keys that begin with `prefix`, with their values, in order. Raises what `replace` raises.

        Example:
            >>> space.replace("colour", "blue")
            >>> space.list("c")
            [(b'colour', b'blue')]
        """
        return self._client.run(self._keyspace.list(prefix))

    def write(
        self,
        values: ValuesByKey,
        *,
        when: ValuesByKey | None = None,
    ) -> None:
        """Set several keys at once, if others have the expected values; else change nothing.

        `values`: the new value of each key; None removes it. `when`: the value that each of these keys must have; None:
        it must not exist. At most 1,000 keys and 8 MiB. Raises Rejected CAS_FAILED, if a key of `when` has another value;
        also what `replace` raises.

        Example:
            >>> space.write({"colour": "blue", "owner": "me"}, when={"owner": None})
            >>> space.write({"colour": "red"}, when={"colour": "green"})
            Traceback (most recent call last):
            stele.model.errors.Rejected: CAS_FAILED: key 'colour' is not what was expected; read it again
            >>> space.list()
            [(b'colour', b'blue'), (b'owner', b'me')]
        """
        self._client.run(self._keyspace.write(values, when=when))

    def elect(self, name: str, candidate: str) -> str:
        """Become the holder of `name` if nobody is. Returns the present holder. Raises what `replace` raises.

        Example:
            >>> space.elect("primary", "worker-1"), space.elect("primary", "worker-2")
            ('worker-1', 'worker-1')
        """
        return self._client.run(self._keyspace.elect(name, candidate))

    def changed(self, key: bytes | str, known: bytes | str | None) -> bytes | None:
        """Wait until the value of a key differs from `known`, and return it. Looks twice a second.

        Example:
            >>> space.replace("colour", "blue")
            >>> space.changed("colour", known=None)
            b'blue'
        """
        return self._client.run(self._keyspace.changed(key, known))
