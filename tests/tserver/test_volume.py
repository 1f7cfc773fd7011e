"""node.json: changed from several threads, and never less than what was said to be durable."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stele.model.ids import ClusterId, NodeId, new_id
from stele.tserver.volume import format_volume, lock_directory, open_volume


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
