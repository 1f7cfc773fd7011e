"""node.json: changed from several threads, never less than what was said to be durable, damage never believed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from stele.model.ids import ClusterId, NodeId, new_id
from stele.tserver.node_record import NodeRecord, is_formatted
from stele.tserver.options import EXIT_DISK, EXIT_USAGE
from stele.tserver.volume import (
    Fate,
    Volume,
    format_volume,
    lock_directory,
    open_volume,
)


def test_changes_from_several_threads_all_stay(tmp_path: Path) -> None:
    directory, cluster, node = tmp_path / "data", ClusterId(new_id()), NodeId(new_id())
    for round_ in range(10):
        here = directory / str(round_)
        here.parent.mkdir(exist_ok=True)
        first = ((node, "a:1"),)
        volume = format_volume(here, lock_directory(here), cluster, node, "master", first_masters=first)
        with ThreadPoolExecutor(4) as threads:
            changes = [
                threads.submit(volume.update, partial(replace, masters=(f"m{i}:1",))) for i in range(4)
            ]
            changes.append(threads.submit(volume.update, partial(replace, formed=True)))
            for change in changes:
                change.result()
        volume.close()
        again = open_volume(here, lock_directory(here), cluster, node, "master")
        assert again.record.formed and again.record.masters
        again.close()


def _formatted(directory: Path) -> tuple[ClusterId, NodeId, NodeRecord]:
    cluster, node = ClusterId(new_id()), NodeId(new_id())
    volume = format_volume(directory, lock_directory(directory), cluster, node, "node")
    volume.close()
    return cluster, node, volume.record


def test_no_flipped_bit_of_the_record_is_believed(tmp_path: Path) -> None:
    """A higher `catalog` or `driver_epoch` would have the node refuse all orders, a lower `incarnation` be refused itself."""
    directory = tmp_path / "data"
    cluster, node, record = _formatted(directory)
    path, copy = directory / "node.json", directory / "node.json.copy"
    good = path.read_bytes()
    copy.unlink()
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


@pytest.mark.parametrize("name", ["node.json", "node.json.copy"])
def test_one_damaged_record_is_written_anew_from_the_other(tmp_path: Path, name: str) -> None:
    """One flipped bit ended the node, and the operator gave its volume up."""
    directory = tmp_path / "data"
    cluster, node, record = _formatted(directory)
    path, copy = directory / "node.json", directory / "node.json.copy"
    for number, at in enumerate([*range(0, len(path.read_bytes()), 9), -1], 1):
        good = (directory / name).read_bytes()
        if at < 0:
            (directory / name).unlink()
        else:
            (directory / name).write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        assert is_formatted(directory)
        volume = open_volume(directory, lock_directory(directory), cluster, node, "node")
        assert volume.record == replace(record, incarnation=record.incarnation + number)
        volume.close()
        assert path.read_bytes() == copy.read_bytes()


def test_a_damaged_record_whose_copy_is_damaged_too_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    cluster, node, _ = _formatted(directory)
    for name in ("node.json", "node.json.copy"):
        (directory / name).write_bytes((directory / name).read_bytes()[:-20])
    with pytest.raises(Fate, match=r"node\.json:") as refused:
        open_volume(directory, -1, cluster, node, "node")
    assert refused.value.exit_code == EXIT_DISK


def test_the_volume_of_another_is_refused_and_its_copy_is_not_touched(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    cluster, _, _ = _formatted(directory)
    copy = (directory / "node.json.copy").read_bytes()
    with pytest.raises(Fate, match="belongs to node"):
        open_volume(directory, -1, cluster, NodeId(new_id()), "node")
    assert (directory / "node.json.copy").read_bytes() == copy


def test_a_record_of_a_later_program_is_refused_by_name(tmp_path: Path) -> None:
    directory, cluster, node = tmp_path / "data", ClusterId(new_id()), NodeId(new_id())
    volume = format_volume(directory, lock_directory(directory), cluster, node, "node")
    volume.update(lambda record: replace(record, version=2))
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


def _opened(directory: Path, cluster: ClusterId, node: NodeId, *masters: str, fork_id: str = "") -> Volume:
    fd = lock_directory(directory)
    volume = open_volume(directory, fd, cluster, node, "node", fork_id=fork_id, masters=masters)
    volume.close()
    return volume


def test_a_volume_under_another_fork_id_forgets_where_the_masters_were(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    cluster, node, _ = _formatted(directory)
    volume = open_volume(directory, lock_directory(directory), cluster, node, "node", masters=("a:1",))
    volume.update(lambda record: replace(record, masters=("10.0.0.1:1",), given=("a:1",)))
    volume.close()
    assert not _opened(directory, cluster, node, "a:1").adopted
    fork = new_id()
    adopted = _opened(directory, cluster, node, "a:1", fork_id=fork)
    assert adopted.adopted and adopted.record.adopted
    assert (adopted.record.fork_id, adopted.record.masters) == (fork, ())
    for again in (fork, ""):  # it stays in the record, also where nobody says it any more
        volume = _opened(directory, cluster, node, "a:1", fork_id=again)
        assert volume.record.fork_id == fork and volume.adopted
    second = _opened(directory, cluster, node, "a:1", fork_id=new_id())
    assert second.record.fork_id not in ("", fork)


@pytest.mark.parametrize(
    ("given", "now", "adopted"),
    [
        (("a:1", "b:1"), ("a:1", "b:1"), False),
        (("a:1", "b:1"), ("b:1", "c:1"), False),  # one was replaced
        (("a:1", "b:1"), (), False),  # nothing is said of other masters
        (("a:1", "b:1"), ("c:1",), True),  # a copy, started by hand with masters of its own
        ((), ("c:1",), False),  # written by a release that did not note it
    ],
)
def test_a_start_with_none_of_the_masters_of_before_asks_only_those_given(
    tmp_path: Path, given: tuple[str, ...], now: tuple[str, ...], adopted: bool
) -> None:
    directory = tmp_path / "data"
    cluster, node, _ = _formatted(directory)
    volume = open_volume(directory, lock_directory(directory), cluster, node, "node")
    volume.update(lambda record: replace(record, masters=("10.0.0.1:1",), given=given))
    volume.close()
    volume = _opened(directory, cluster, node, *now)
    assert volume.adopted is adopted and volume.record.given == (given or now)
    # Nothing is forgotten before masters answer: a mistyped --masters is mended by the right one.
    assert volume.record.masters == ("10.0.0.1:1",) and not volume.record.adopted
    assert not _opened(directory, cluster, node, *given).adopted


def test_a_record_of_a_release_without_fork_ids_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    cluster, node, record = _formatted(directory)
    for name in ("node.json", "node.json.copy"):
        fields = json.loads((directory / name).read_text())
        for new in ("fork_id", "given", "adopted", "crc32c"):
            del fields[new]
        (directory / name).write_text(json.dumps(fields))
    opened = _opened(directory, cluster, node, "a:1")
    assert not opened.adopted and opened.record.given == ("a:1",)
    assert replace(opened.record, incarnation=record.incarnation, given=()) == record
    assert _opened(directory, cluster, node, "b:1").adopted, (
        "noted at the first start, though no master answered"
    )


def test_a_new_volume_notes_the_masters_that_were_given(tmp_path: Path) -> None:
    """A copy of one that had stopped before a master answered dialled the original's peers."""
    directory, cluster, node = tmp_path / "data", ClusterId(new_id()), NodeId(new_id())
    format_volume(directory, lock_directory(directory), cluster, node, "node", masters=("a:1",)).close()
    assert _opened(directory, cluster, node, "b:1").adopted
