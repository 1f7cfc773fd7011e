"""A key space of the blocking client. Each method runs its asynchronous twin and waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stele.client.kv import AsyncKeySpace

if TYPE_CHECKING:
    from stele.client.blocking import Client


class KeySpace:
    """A key space. Keys and values are bytes; str is taken as UTF-8.

    Example:
        >>> space = client.create_keyspace("settings")
        >>> space.replace("colour", "blue")
        >>> space.read("colour")
        b'blue'
    """

    def __init__(self, client: Client, keyspace: AsyncKeySpace) -> None:
        self._client = client
        self._keyspace = keyspace

    def replace(self, key: bytes | str, value: bytes | str) -> None:
        """Set a key, whatever was there. str is taken as UTF-8. Raises Retryable if no leader answered in time.

        Example:
            >>> space.replace("colour", "blue")
            >>> space.replace("colour", b"red")
        """
        self._client.run(self._keyspace.replace(key, value))

    def insert(self, key: bytes | str, value: bytes | str) -> None:
        """Set a key that must not be there. Raises Rejected ALREADY_PRESENT, and as `replace`.

        Example:
            >>> space.insert("owner", "me")
            >>> space.read("owner")
            b'me'
        """
        self._client.run(self._keyspace.insert(key, value))

    def read(self, key: bytes | str) -> bytes | None:
        """The value of a key as of now (linearizable), None if it is not there. Raises as `replace`.

        Example:
            >>> space.read("nothing") is None
            True
        """
        return self._client.run(self._keyspace.read(key))

    def delete(self, key: bytes | str) -> None:
        """Remove a key, present or not. Raises as `replace`.

        Example:
            >>> space.delete("nothing")
        """
        self._client.run(self._keyspace.delete(key))

    def list(self, prefix: bytes | str = b"") -> list[tuple[bytes, bytes]]:
        """Keys that begin with `prefix` and their values, in order. Raises as `replace`.

        Example:
            >>> space.replace("colour", "blue")
            >>> space.list("c")
            [(b'colour', b'blue')]
        """
        return self._client.run(self._keyspace.list(prefix))

    def elect(self, name: str, candidate: str) -> str:
        """Stand for `name`: become its holder if nobody is. Returns who holds it now. Raises as `replace`.

        Example:
            >>> space.elect("primary", "worker-1"), space.elect("primary", "worker-2")
            ('worker-1', 'worker-1')
        """
        return self._client.run(self._keyspace.elect(name, candidate))

    def changed(self, key: bytes | str, known: bytes | None) -> bytes | None:
        """Wait until the value of a key is another than `known`; returns it. Looks twice a second.

        Example:
            >>> space.replace("colour", "blue")
            >>> space.changed("colour", known=None)
            b'blue'
        """
        return self._client.run(self._keyspace.changed(key, known))
