"""node.json: changed from several threads, never less than what was said to be durable, damage never believed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stele.model.ids import ClusterId, NodeId, new_id
from stele.tserver.options import EXIT_DISK, EXIT_USAGE
from stele.tserver.volume import Fate, format_volume, lock_directory, open_volume


def test_changes_from_several_threads_all_stay(tmp_path: Path) -> None:
    directory, cluster, node = tmp_path / "data", ClusterId(new_id()), NodeId(new_id())
    for round_ in range(10):
        here = directory / str(round_)
        here.parent.mkdir(exist_ok=True)
        first = ((node, "a:1"),)
        volume = format_volume(here, lock_directory(here), cluster, node, "master", first_masters=first)
        with ThreadPoolExecutor(4) as threads:
            changes = [threads.submit(volume.update, masters=(f"m{i}:1",)) for i in range(4)]
            changes.append(threads.submit(volume.update, formed=True))
            for change in changes:
                change.result()
        volume.close()
        again = open_volume(here, lock_directory(here), cluster, node, "master")
        assert again.record.formed and again.record.masters
        again.close()


def test_no_flipped_bit_of_the_record_is_believed(tmp_path: Path) -> None:
    """A higher `catalog` or `driver_epoch` would have the node refuse all orders, a lower `incarnation` be refused itself."""
    directory, cluster, node = tmp_path / "data", ClusterId(new_id()), NodeId(new_id())
    volume = format_volume(directory, lock_directory(directory), cluster, node, "node")
    record = volume.record
    volume.close()
    path = directory / "node.json"
    good = path.read_bytes()
    refused = 0
    for at in range(len(good)):
        for bit in (1, 4, 16):
            path.write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
            try:
                assert open_volume(directory, -1, cluster, node, "node").record == record  # some white space
            except Fate as fate:
                assert fate.exit_code == EXIT_DISK
                refused += 1
    assert refused > len(good)


def test_a_record_of_a_later_program_is_refused_by_name(tmp_path: Path) -> None:
    directory, cluster, node = tmp_path / "data", ClusterId(new_id()), NodeId(new_id())
    volume = format_volume(directory, lock_directory(directory), cluster, node, "node")
    volume.update(version=2)
    volume.close()
    with pytest.raises(Fate, match=r"node\.json: version 2 is unknown.*upgrade") as refused:
        open_volume(directory, lock_directory(directory), cluster, node, "node")
    assert refused.value.exit_code == EXIT_USAGE


def test_a_record_from_before_there_was_a_checksum_is_read(tmp_path: Path) -> None:
    directory, cluster, node = tmp_path / "data", ClusterId(new_id()), NodeId(new_id())
    format_volume(directory, lock_directory(directory), cluster, node, "node").close()
    path = directory / "node.json"
    fields = json.loads(path.read_text())
    del fields["crc32c"]
    path.write_text(json.dumps(fields))
    open_volume(directory, lock_directory(directory), cluster, node, "node").close()
