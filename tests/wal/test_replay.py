"""Records that do not follow on each other: their stream is FAILED, whatever the groups that hold them say of themselves."""

from __future__ import annotations

import pytest

from stele.model.config import encode_configuration
from stele.model.entry import EntryKind
from stele.model.ids import OPID_NONE, OpId
from stele.wal.cache import EntryCache
from stele.wal.format import Kind, Record
from stele.wal.metadata import Metadata, Position, Saved
from stele.wal.replay import Raw, Replay
from stele.wal.state import HardState
from tests.wal.support import CONFIG, NODE, key

RAW: Raw = (bytes.fromhex(key().tablet_id), int(key().replica_id))
BLOB = encode_configuration(CONFIG)


def entry(term: int, index: int) -> Record:
    return Record(Kind.ENTRY, EntryKind.WRITE, *RAW, term, index, 0, b"x")


def replayed(records: list[Record], *, metadata: Metadata | None = None, covered: bool = False) -> Replay:
    replay = Replay(metadata, EntryCache(1 << 20))
    for at, record in enumerate(records):
        replay.apply(record, 1, 4096 + at, covered)
    replay.at_position()
    return replay


def saved(last: OpId) -> Metadata:
    """Consensus metadata that says where the stream ends."""
    state = Saved(key(), HardState(1), OPID_NONE, BLOB, last, False, 0, 0)
    return Metadata(NODE, 1, 0, Position(2, 0), (state,))


@pytest.mark.parametrize("covered", [False, True])
def test_entries_that_are_missing_from_the_middle_fail_their_stream(covered: bool) -> None:
    """Also where the metadata vouches for what followed. Passed over they would be lost in silence."""
    metadata = saved(OpId(1, 3)) if covered else None
    create = Record(Kind.CREATE, 0, *RAW, 0, 0, 0, BLOB)
    whole = [create, entry(1, 1), entry(1, 2), entry(1, 3)]
    assert not replayed(whole, metadata=metadata, covered=covered).broken
    lacking = replayed([create, entry(1, 1), entry(1, 3)], metadata=metadata, covered=covered)
    assert list(lacking.broken) == [RAW]


def test_entries_of_a_stream_that_nobody_created_fail_it() -> None:
    assert list(replayed([entry(1, 1)]).broken) == [RAW]


def test_a_stream_that_ends_before_what_the_metadata_says_is_failed() -> None:
    """What was behind it was acknowledged, and is gone with the segment that held it."""
    create = Record(Kind.CREATE, 0, *RAW, 0, 0, 0, BLOB)
    assert not replayed([create, entry(1, 1)], metadata=saved(OpId(1, 1)), covered=True).broken
    assert list(replayed([create, entry(1, 1)], metadata=saved(OpId(1, 2)), covered=True).broken) == [RAW]
