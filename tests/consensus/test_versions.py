"""What a later program wrote: refused by name, and by the whole node. It is no damage, which would be replaced and erased."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stele.consensus.files import frame_record, parse_record
from stele.consensus.superblock import SUPERBLOCK
from stele.model import config
from stele.model.errors import Code, Rejected
from stele.model.ids import NodeId, new_id
from stele.tablet import checked
from stele.wal import format as wal_format
from stele.wal import metadata
from tests.consensus.cluster import rows
from tests.consensus.conftest import MakeGroup


def later_manifest(path: Path) -> None:
    path.write_bytes(checked.seal(b"STLMANIF", 2, path.read_bytes()[checked.HEADER_BYTES :]))


def later_superblock(path: Path) -> None:
    data = path.read_bytes()
    _, body = parse_record(data, data[:4], 1, "superblock")
    path.write_bytes(frame_record(data[:4], 9, body))


@pytest.mark.parametrize(
    ("relative", "rewrite"), [("store/MANIFEST", later_manifest), (SUPERBLOCK, later_superblock)]
)
async def test_a_node_with_files_of_a_later_program_does_not_start(
    group_of: MakeGroup, relative: str, rewrite: Callable[[Path], None]
) -> None:
    """The replica became FAILED: after a rollback of the program its rows were erased, and copied from another."""
    group, _ = await group_of(3)
    await group.write(rows(range(10)))
    leader = await group.leader()
    victim = next(r for r in group.replicas() if r is not leader)
    await group.caught_up(victim)
    await victim.flush()
    node = group.node_of(victim)
    await node.stop()
    rewrite(victim.directory / relative)
    before = (victim.directory / relative).read_bytes()
    with pytest.raises(Rejected, match="upgrade it") as refused:
        await node.restart()
    assert refused.value.code is Code.UNSUPPORTED_VERSION
    assert (victim.directory / relative).read_bytes() == before


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
    (config, "_CODEC_VERSION", configuration, config.decode_configuration),
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
            later.setattr(module, version, 2)
            data = encode()
    else:
        data = encode()
    with pytest.raises(Rejected, match="upgrade") as refused:
        decode(data)
    assert refused.value.code is Code.UNSUPPORTED_VERSION
