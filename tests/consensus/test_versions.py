"""What a later program wrote: refused by name, and by the whole node. It is no damage, which would be replaced and erased."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import google_crc32c
import pytest

from stele.consensus.files import frame_record, parse_record
from stele.consensus.replica import Replica, ReplicaState
from stele.consensus.superblock import SUPERBLOCK, DataState, read_superblock
from stele.model import config
from stele.model.config import MemberType
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import NodeId, OpId, new_id
from stele.raft.messages import UpdateRequest
from stele.tablet import checked, manifest
from stele.tablet.files import FILES
from stele.tablet.machine import Outcome
from stele.wal import format as wal_format
from stele.wal import metadata
from tests.consensus.cluster import WAIT_S, TestNode, pairs, rows, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.copies import DirectSource, add, order


def later_manifest(path: Path) -> None:
    path.write_bytes(checked.seal(b"STLMANIF", 2, path.read_bytes()[checked.HEADER_BYTES :]))


def later_superblock(path: Path) -> None:
    data = path.read_bytes()
    _, body = parse_record(data, data[:4], 1, "superblock")
    path.write_bytes(frame_record(data[:4], 9, body))


def resealed(magic: bytes, old: bytes, new: bytes) -> Callable[[Path], None]:
    """Another word in a file that is whole and of this version."""

    def rewrite(path: Path) -> None:
        body = bytes(checked.open_sealed(path.read_bytes(), magic, 1, path.name))
        assert old in body
        path.write_bytes(checked.seal(magic, 1, body.replace(old, new)))

    return rewrite


def later_outcome(path: Path) -> None:
    """A code that this program does not know, in the very file that the manifest lists."""
    resealed(b"STLONCE1", b'null,0,""', b'null,999,"x"')(path)
    listed, data = manifest.read(path.parent), path.read_bytes()
    crc = google_crc32c.value(data)
    manifest.write(FILES, path.parent, replace(listed, once_size=len(data), once_crc=crc))


def reframed(old: bytes, new: bytes) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        data = path.read_bytes()
        version, body = parse_record(data, data[:4], 1, "superblock")
        assert old in body
        path.write_bytes(frame_record(data[:4], version, body.replace(old, new)))

    return rewrite


LATER_FILES = [
    pytest.param("store/MANIFEST", later_manifest, id="manifest"),
    pytest.param(
        "store/MANIFEST", resealed(b"STLMANIF", b'"string"', b'"uuid"'), id="column type in the manifest"
    ),
    pytest.param(SUPERBLOCK, later_superblock, id="superblock"),
    pytest.param(SUPERBLOCK, reframed(b'"table"', b'"queue"'), id="kind in the superblock"),
    pytest.param(SUPERBLOCK, reframed(b'"data_state":1', b'"data_state":9'), id="state in the superblock"),
    pytest.param("store/once-*", later_outcome, id="code of an outcome"),
]


@pytest.mark.parametrize(("relative", "rewrite"), LATER_FILES)
async def test_a_node_with_files_of_a_later_program_does_not_start(
    group_of: MakeGroup, relative: str, rewrite: Callable[[Path], None]
) -> None:
    """The replica became FAILED: after a rollback of the program its rows were erased, and copied from another."""
    group, _ = await group_of(3)
    await group.write(rows(range(10), client=b"sixteen letters!", sequence=1))
    leader = await group.leader()
    victim = next(r for r in group.replicas() if r is not leader)
    await group.caught_up(victim)
    await victim.storage.flush()
    node = group.node_of(victim)
    await node.stop()
    (path,) = victim.directory.glob(relative)
    rewrite(path)
    before = path.read_bytes()
    with pytest.raises(Rejected, match="upgrade") as refused:
        await node.restart()
    assert refused.value.code is Code.UNSUPPORTED_VERSION
    assert path.read_bytes() == before


def later_payload() -> bytes:
    return b"\x02" + rows([1])[1:]


def later_flag() -> bytes:
    return rows([1])[:2] + b"\x04" + rows([1])[3:]


PAYLOADS = [
    pytest.param("table", later_payload, id="version"),
    pytest.param("table", later_flag, id="flag"),
    pytest.param("keyspace", lambda: b"\x02" + pairs(b"a", b"1")[1:], id="version, key space"),
]


def files_of(replica: Replica) -> dict[str, bytes]:
    here = replica.directory
    return {str(p.relative_to(here)): p.read_bytes() for p in sorted(here.rglob("*")) if p.is_file()}


class Later:
    """The machine of a later program: what this one does not know it does."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def begin(self, entry: Entry) -> Outcome:
        try:
            return self._machine.apply(entry)  # type: ignore[no-any-return]
        except Rejected:
            if self._machine.applied.index < entry.index:
                self._machine._progress.advance(entry)
            return Outcome(entry.timestamp)


def upgrade(replica: Replica) -> None:
    assert replica.started is not None
    applier: Any = replica.started.applier
    applier._machine = Later(replica.machine)


async def gave_up(node: TestNode) -> None:
    await wait_until(lambda: bool(node.given_up))
    error = node.given_up[0]
    assert isinstance(error, Rejected) and error.code is Code.UNSUPPORTED_VERSION
    assert "upgrade" in str(error)


async def takes_no_part(replica: Replica) -> None:
    """Nor does it flush: its store is neither with nor without what it could not apply."""
    assert replica.state is ReplicaState.STOPPED and not replica.error
    with pytest.raises(SteleError):
        replica.writes.submit(rows([2]))
    with pytest.raises(Retryable, match="no rows to flush"):
        await replica.storage.flush()


@pytest.mark.parametrize(("kind", "payload"), PAYLOADS)
async def test_a_write_of_a_later_program_ends_the_node(
    group_of: MakeGroup, kind: str, payload: Callable[[], bytes]
) -> None:
    """The replica became FAILED, and was replaced: its rows were erased."""
    group, _ = await group_of(3, kind=kind)
    more = (rows([0]), rows([1])) if kind == "table" else (pairs(b"a", b"1"), pairs(b"b", b"2"))
    await group.write(more[0])
    leader = await group.leader()
    victim = next(r for r in group.replicas() if r is not leader)
    await group.caught_up(victim)
    await victim.storage.flush()
    before = files_of(victim)
    for replica in group.replicas():
        if replica is not victim:
            upgrade(replica)
    await group.write(payload())
    node = group.node_of(victim)
    await gave_up(node)
    await takes_no_part(victim)
    assert files_of(victim) == before
    await group.write(more[1])
    again = await node.restart()
    await gave_up(again)  # as long as it is not upgraded
    assert files_of(again.replicas.get(group.tablet_id)) == before


async def test_a_value_of_a_later_program_that_a_listener_refuses_ends_the_node(group_of: MakeGroup) -> None:
    """As the catalog's listeners do with rows of a version that they do not know."""

    def listener(key: bytes, old: bytes | None, new: bytes | None, opid: OpId) -> None:
        if new == b"later":
            raise Rejected("a row of version 2", code=Code.UNSUPPORTED_VERSION)

    group, _ = await group_of(3, kind="keyspace")
    await group.write(pairs(b"a", b"known"))
    leader = await group.leader()
    victim = next(r for r in group.replicas() if r is not leader)
    machine: Any = victim.machine
    machine.add_commit_listener(listener)
    await group.write(pairs(b"a", b"later"))
    await gave_up(group.node_of(victim))
    await takes_no_part(victim)


async def test_a_store_that_meets_a_write_of_a_later_program_ends_its_node(group_of: MakeGroup) -> None:
    """A witness has it in its log. When its rows came they could not be brought up to it, and were copied anew, for ever."""
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(10)))
    leader = await group.leader()
    for replica in group.replicas():
        upgrade(replica)
    source = DirectSource(nodes[0])
    source.hold = Event()
    started = leader.committed_opid
    what = order(group, nodes[0], 4, witness=True, witness_start=started)
    copy = await nodes[3].manager.start_copy(what, source)
    assert copy is not None and await copy.wait_prepared(WAIT_S)
    await add(group, nodes[3], 4, member_type=MemberType.WITNESS, witness_start=started)
    witness = nodes[3].replicas.get(group.tablet_id)
    await group.write(later_payload())
    await wait_until(lambda: witness.committed_opid >= leader.committed_opid)
    source.hold.set()
    await gave_up(nodes[3])
    assert witness.state is ReplicaState.STOPPED and not witness.error
    assert read_superblock(witness.directory).data_state is DataState.READY


async def test_a_configuration_of_a_later_program_is_not_taken(group_of: MakeGroup) -> None:
    """The replica became FAILED, later its node ended, for bytes that anybody can send. It goes on without them."""
    group, nodes = await group_of(3)
    await group.write(rows([0]))
    leader = await group.leader()
    victim = next(r for r in group.replicas() if r is not leader)
    await group.caught_up(victim)
    nodes[0].network.cut.add(victim.host.node_id)
    core = victim.core
    assert core is not None
    last, term = core.log.last_opid, core.status().term + 1
    later = config.encode_configuration(victim.config).replace(b':1",1,0', b':1",9,0')
    assert later != config.encode_configuration(victim.config)
    entry = Entry(term, last.index + 1, EntryKind.CONFIG, 0, later)
    update = UpdateRequest(term, last, (entry,), last.index, 0, 0, 0)
    victim.on_message(leader.host.node_id, leader.replica_id, update)
    node = group.node_of(victim)
    ((from_node, cause, why),) = node.drops
    assert (from_node, cause) == (leader.host.node_id, "configuration") and "upgrade" in why
    nodes[0].network.cut.clear()
    await group.write(rows([1]))
    await group.caught_up(victim)
    assert victim.running and not node.given_up


async def test_a_log_with_a_configuration_of_a_later_program_ends_the_start(group_of: MakeGroup) -> None:
    """Its store is open by then. As FAILED the replica would be replaced, and its rows erased."""
    group, nodes = await group_of(1)
    await group.write(rows([0]))
    leader = await group.leader()
    assert leader.core is not None
    last = leader.core.log.last_opid
    later = config.encode_configuration(leader.config).replace(b':1",1,0', b':1",9,0')
    leader.storage.stream.append_entries((Entry(last.term, last.index + 1, EntryKind.CONFIG, 0, later),))
    with pytest.raises(Rejected, match="upgrade") as refused:
        await nodes[0].restart()
    assert refused.value.code is Code.UNSUPPORTED_VERSION


def sealed() -> bytes:
    return checked.seal(b"STLONCE1", 2, b"body")


def segment_header() -> bytes:
    return wal_format.encode_segment_header(wal_format.SegmentHeader(NODE, 1, 2, 3, False))


def log_metadata() -> bytes:
    return metadata.encode_metadata(metadata.Metadata(NODE, 1, 0, metadata.Position(1, 4096), ()))


def configuration() -> bytes:
    return config.encode_configuration(config.Configuration(-1, ()))


NODE = NodeId(new_id())
FORMATS: list[tuple[object, str, Callable[[], bytes], Callable[[bytes], object]]] = [
    (None, "", sealed, lambda data: checked.open_sealed(data, b"STLONCE1", 1, "once-3")),
    (
        wal_format,
        "FORMAT_VERSION",
        segment_header,
        lambda data: wal_format.decode_segment_header(data, "wal-1"),
    ),
    (metadata, "_VERSION", log_metadata, lambda data: metadata.decode_metadata(data, "metadata")),
    (config, "_FIRST", configuration, config.decode_configuration),
]


@pytest.mark.parametrize(("module", "version", "encode", "decode"), FORMATS)
def test_bytes_of_a_later_version_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
    module: object,
    version: str,
    encode: Callable[[], bytes],
    decode: Callable[[bytes], object],
) -> None:
    if module is not None:
        decode(encode())
        with monkeypatch.context() as later:
            later.setattr(module, version, 9)
            data = encode()
    else:
        data = encode()
    with pytest.raises(Rejected, match="upgrade") as refused:
        decode(data)
    assert refused.value.code is Code.UNSUPPORTED_VERSION
