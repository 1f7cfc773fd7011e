"""Clusters of tests that run at once do not meet."""

from __future__ import annotations

import gc
import random
import socket
import subprocess
import sys
from pathlib import Path

from tests.harness import Cluster
from tests.harness.loopback import Loopback, name_of
from tests.tserver.local import LocalCluster

_HOLD = """
import random
from tests.harness.loopback import Loopback
held = Loopback(random.Random(5))
print(held.prefix, flush=True)
input()
"""


def test_a_network_is_used_once_at_a_time() -> None:
    first, second = Loopback(random.Random(3)), Loopback(random.Random(3))
    assert first.prefix != second.prefix
    wanted = first.prefix
    del first
    gc.collect()
    assert Loopback(random.Random(3)).prefix == wanted


def test_another_process_is_seen_to_use_one() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        taken = other.stdout.readline().strip()
        assert taken and Loopback(random.Random(5)).prefix != taken
        other.communicate("\n")
    assert Loopback(random.Random(5)).prefix == taken


async def test_a_process_that_a_cluster_left_behind_keeps_its_network(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, masters=1, nodes=0)
    tmp_path.mkdir(exist_ok=True)
    cluster.launch(cluster.masters[0])
    try:
        cluster.loopback.free()
        assert taken(cluster.network)
    finally:
        cluster.kill_all()
    assert not taken(cluster.network)


def test_clusters_within_a_process_have_networks_of_their_own(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    assert taken(cluster.network)


def taken(prefix: str) -> bool:
    """Whether somebody claims this network."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        try:
            other.bind(name_of(prefix))
        except OSError:
            return True
    return False
