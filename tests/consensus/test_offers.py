"""What a copy's source says of its files is another process's word: nothing is made of it before it was held to bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stele.consensus.copy_bounds import refuse_beyond, refuse_offer
from stele.consensus.copy_source import CopyFile, SessionInfo
from stele.consensus.copy_target import TabletCopy
from stele.model.bounds import COPY_FILES_MAX, TERM_JUMP_MAX
from stele.model.config import Configuration
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import OpId, ReplicaId, TabletId
from tests.consensus.cluster import Group, TestNode, rows, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.copies import DirectSource, installed, order

HUGE = (1 << 64) - 1
Change = Callable[[SessionInfo], SessionInfo]


class Liar(DirectSource):
    """A source that says something else of its session."""

    def __init__(self, node: TestNode, change: Change) -> None:
        super().__init__(node)
        self.change = change

    async def begin(self, tablet_id: TabletId, replica_id: ReplicaId, at_least: OpId) -> SessionInfo:
        return self.change(await super().begin(tablet_id, replica_id, at_least))


def named(name: str) -> Change:
    """The first file has this name."""
    return lambda s: replace(s, files=(CopyFile(name, 3), *s.files[1:]))


def with_block(**fields: object) -> Change:
    return lambda s: replace(s, superblock=replace(s.superblock, **fields))  # type: ignore[arg-type]


OFFERS: list[tuple[str, Change]] = [
    *(
        (f"named {name[:40]!r}", named(name))
        for name in (
            "../evil",
            "rows-00000001.part",
            "superblock",
            "MANIFEST/x",
            "",
            ".",
            "rows-",
            "once-../../x",
            "x" * 300,
            "rows-0000\x0000",
            "MANIFEST\n",
        )
    ),
    ("different names", lambda s: replace(s, files=(*s.files, s.files[0]))),
    ("no files", lambda s: replace(s, files=())),
    (
        "number of files",
        lambda s: replace(s, files=tuple(CopyFile(f"rows-{n:08x}", 1) for n in range(COPY_FILES_MAX + 1))),
    ),
    ("checkpoint of index", lambda s: replace(s, checkpoint=OpId(s.checkpoint.term, HUGE))),
    ("checkpoint of term", lambda s: replace(s, checkpoint=OpId(2 + TERM_JUMP_MAX, s.checkpoint.index))),
    ("a term", lambda s: replace(s, term=HUGE)),
    ("a ceiling of", lambda s: replace(s, max_ceiling=HUGE)),
    ("tablet incarnation", with_block(tablet_incarnation=HUGE)),
    ("table name", with_block(table_name="n" * 100_000)),
    ("without voters", lambda s: replace(s, config=Configuration(-1, ()))),
    ("session id", lambda s: replace(s, session_id="s" * 1_000)),
]


async def copied(
    group_of: MakeGroup, change: Change, **more: object
) -> tuple[Group, Liar, TestNode, TabletCopy]:
    """A copy from a liar that has ended."""
    group, nodes = await group_of(1, spare=1)
    await group.write(rows(range(100)))
    source = Liar(nodes[0], change)
    copy = await nodes[1].manager.start_copy(order(group, nodes[0], 2, caller_term=1, **more), source)
    assert copy is not None
    await copy.wait()
    return group, source, nodes[1], copy


def files_below(directory: Path) -> list[str]:
    return [str(path) for path in directory.rglob("*") if path.is_file()]


@pytest.mark.parametrize(("words", "change"), OFFERS)
async def test_an_offer_that_no_sound_source_makes_is_refused(
    group_of: MakeGroup, words: str, change: Change
) -> None:
    _, source, target, copy = await copied(group_of, change)
    assert copy.failed and words in copy.progress.error
    assert source.sent == 0
    assert words == "session id" or not len(source.node.sessions)
    assert not files_below(target.directory / "tablets")


@pytest.mark.parametrize(("words", "change"), [o for o in OFFERS if o[0] in ("without voters", "a term")])
async def test_a_witness_that_fetches_nothing_yet_is_made_of_no_such_offer_either(
    group_of: MakeGroup, words: str, change: Change
) -> None:
    """Its stream has the configuration and the start that the source told."""
    _, _, target, copy = await copied(group_of, change, witness=True, log_only=True)
    assert copy.failed and words in copy.progress.error
    assert not files_below(target.directory / "tablets")


async def test_no_byte_is_written_outside_of_the_replica(group_of: MakeGroup, tmp_path: Path) -> None:
    """An absolute name took the place of the whole path: its bytes went there, as `.part`."""
    outside = tmp_path / "outside"
    outside.mkdir()
    group, source, _, copy = await copied(group_of, named(str(outside / "evil")))
    assert copy.failed and not list(outside.iterdir()) and source.sent == 0
    await group.write(rows([1]))


async def test_what_does_not_fit_is_refused_before_any_room_is_made(group_of: MakeGroup) -> None:
    """Room was made file by file until the disk of the node was full."""
    free = 1 << 60

    def many(session: SessionInfo) -> SessionInfo:
        """Small enough each, and more than any disk has together."""
        more = tuple(CopyFile(f"rows-{n:08x}", free >> 10) for n in range(1_000, 3_000))
        return replace(session, files=(*more, *session.files))

    _, source, target, copy = await copied(group_of, many)
    assert copy.failed and "DISK_FULL" in copy.progress.error and source.sent == 0
    assert not [path for path in files_below(target.directory / "tablets") if "incoming" in path]


async def test_files_that_hold_something_else_than_their_source_says_are_refused(group_of: MakeGroup) -> None:
    """A log that begins behind the rows would leave a gap, or a witness wait for ever for what nobody ever wrote."""
    _, _, _, copy = await copied(
        group_of, lambda s: replace(s, checkpoint=OpId(s.checkpoint.term, s.checkpoint.index + 1))
    )
    assert copy.failed and "the source announced" in copy.progress.error


async def test_a_sound_offer_is_taken(group_of: MakeGroup) -> None:
    group, nodes = await group_of(1, spare=1)
    await group.write(rows(range(100)))
    copy = await nodes[1].manager.start_copy(order(group, nodes[0], 2), DirectSource(nodes[0]))
    assert copy is not None
    await installed(copy)
    await wait_until(lambda: nodes[1].replicas.current(group.tablet_id) is not None)


async def test_a_checkpoint_older_than_was_asked_for_is_refused(group_of: MakeGroup) -> None:
    """A witness has voted for entries above it, and dropped what lies below its start."""
    group, nodes = await group_of(1)
    await group.write(rows(range(3)))
    session = await DirectSource(nodes[0]).begin(group.tablet_id, ReplicaId(2), OpId(0, 0))
    at = session.checkpoint
    refuse_offer(session, at_least=at, caller_term=at.term)
    with pytest.raises(Rejected, match="or later"):
        refuse_offer(session, at_least=OpId(at.term, at.index + 1), caller_term=at.term)
    await nodes[0].sessions.end(session.session_id)


def test_files_are_refused_that_the_disk_has_no_room_for() -> None:
    refuse_beyond(10, 10)
    with pytest.raises(Retryable, match="has room for 10") as refused:
        refuse_beyond(11, 10)
    assert refused.value.code is Code.DISK_FULL
