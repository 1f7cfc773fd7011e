"""Names of things. Imported by every package; imports nothing of ours.

Invariant: an identifier is an opaque value that is never used again. Code only compares identifiers for
equality.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from typing import NamedTuple, NewType

from stele.model.record import record

NodeId = NewType("NodeId", str)
"""32 lower-case hex digits. Stored on the node's volume."""
ClusterId = NewType("ClusterId", str)
"""32 lower-case hex digits."""
TableId = NewType("TableId", str)
"""32 lower-case hex digits."""
TabletId = NewType("TabletId", str)
"""32 lower-case hex digits; the catalog's is CATALOG_TABLET_ID."""
ReplicaId = NewType("ReplicaId", int)
"""Counted per tablet from 1 by the catalog, never used again."""
Term = NewType("Term", int)
LogIndex = NewType("LogIndex", int)
ColumnId = NewType("ColumnId", int)
"""Permanent. Counted per table from 0."""
SchemaVersion = NewType("SchemaVersion", int)
HybridTime = NewType("HybridTime", int)
"""(microseconds since 1970) << 12 | logical counter; unsigned 64 bits."""
Incarnation = NewType("Incarnation", int)

CATALOG_TABLET_ID = TabletId("0" * 32)

_HEX32 = re.compile(r"[0-9a-f]{32}\Z")


def new_id() -> str:
    """A fresh random identifier: 32 lower-case hex digits."""
    return uuid.uuid4().hex


def is_id(text: str) -> bool:
    """Whether `text` has the form of an identifier (32 lower-case hex digits)."""
    return _HEX32.match(text) is not None


def start_digest(start: int) -> int:
    """Return a digest of the secret random number that names one start of a node. The node sends the digest to
    everybody. It is never 0."""
    digest = hashlib.blake2b(start.to_bytes(8, "little"), digest_size=8, person=b"stele start").digest()
    return int.from_bytes(digest, "little") or 1


@record(order=True)
class OpId:
    """Position of a log entry. Ordered by term, then index (Raft §5.4.1)."""

    term: int
    index: int

    def __str__(self) -> str:
        return f"{self.term}.{self.index}"


OPID_NONE = OpId(0, 0)
"""Before the first entry of a log."""


class StreamKey(NamedTuple):
    """Names one replica's sequence of records within the shared log of its node.

    It is a tuple because Python hashes tuples four times as fast as objects. Each block needs some dozens of look-ups."""

    tablet_id: TabletId
    replica_id: ReplicaId

    def __str__(self) -> str:
        return f"{self.tablet_id[:8]}/{self.replica_id}"
