"""A cluster outlasts its process: `down` and `up` bring back objects, volumes and addresses; the operator is started again."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stele_local import folder, keeper, processes
from stele_local.cluster import LocalCluster, OtherSettings
from stele_local.copies import as_new
from stele_local.kinds import CRD, POD, PV, PVC
from tests.local.conftest import SETTINGS, claim, condition, container_status, pod, until

WIDGETS: dict[str, Any] = {
    "metadata": {"name": "widgets.stele.test"},
    "spec": {
        "group": "stele.test",
        "scope": "Namespaced",
        "names": {"plural": "widgets", "kind": "Widget"},
        "versions": [
            {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object"}}}
        ],
    },
}


async def test_a_cluster_comes_back_as_it_was(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path, SETTINGS) as cluster:
        cluster.registry.create(CRD, "", WIDGETS)
        kind = cluster.registry.kind("stele.test", "v1", "widgets")
        assert kind is not None
        cluster.registry.create(kind, "default", {"metadata": {"name": "w"}})
        cluster.registry.create(PVC, "default", claim("data-a"))
        cluster.registry.create(POD, "default", pod("a", claim="data-a"))
        await until(lambda: condition(cluster, "a") == "True", "a is ready")
        before, version = cluster.registry.get(POD, "default", "a"), cluster.store.version
        access = cluster.url, cluster.token
    assert processes.left_over(tmp_path) == []
    async with LocalCluster(tmp_path) as cluster:
        assert condition(cluster, "a") == "False", "it does not run yet"
        assert (cluster.url, cluster.token) == access and len(list(cluster.machines)) == SETTINGS.machines
        kind = cluster.registry.kind("stele.test", "v1", "widgets")
        assert kind is not None and cluster.registry.find(kind, "default", "w")
        assert cluster.store.oldest(POD.key) > version, "no watch resumes across the restart"
        await until(lambda: condition(cluster, "a") == "True", "a is ready again")
        after = cluster.registry.get(POD, "default", "a")
        for path in (("metadata", "uid"), ("spec", "nodeName"), ("status", "podIP")):
            assert after[path[0]][path[1]] == before[path[0]][path[1]]
        assert container_status(cluster, "a")["restartCount"] == 1
        starts = next((tmp_path / "machines").glob("*/volumes/*/starts"))
        assert starts.read_text() == "xx", "it found its data"
    with pytest.raises(OtherSettings, match="has 3 machines in 3 zones, not 4 in 3"):
        async with LocalCluster(tmp_path, replace(SETTINGS, machines=4)):
            pass


async def test_a_copied_folder_becomes_a_cluster_of_its_own(tmp_path: Path) -> None:
    """Started under the original's uids, its operator would take the claims for the original's, and its nodes would dial those."""
    first, second, moved = tmp_path / "first", tmp_path / "second", tmp_path / "moved"
    async with LocalCluster(first, SETTINGS) as cluster:
        made = cluster.registry.create(PVC, "default", claim("data-a")).obj
        cluster.registry.create(POD, "default", pod("a", claim="data-a"))
        await until(lambda: condition(cluster, "a") == "True", "a is ready")
        network = cluster.url.rpartition(".0.1:")[0]
        bound = cluster.registry.get(PVC, "default", "data-a")["spec"]["volumeName"]
    shutil.copytree(first, second)
    async with LocalCluster(second, SETTINGS) as copy:
        assert not copy.url.startswith(f"{network}."), "the original's addresses are left to it"
        async with LocalCluster(first, SETTINGS) as original:
            assert original.url.startswith(f"{network}.") and original.token != copy.token
            assert (
                original.registry.get(PVC, "default", "data-a")["metadata"]["uid"] == made["metadata"]["uid"]
            )
            mine = copy.registry.get(PVC, "default", "data-a")
            assert mine["metadata"]["uid"] != made["metadata"]["uid"] and mine["spec"]["volumeName"] == bound
            (volume,) = copy.store.objects(PV.key)
            assert volume["spec"]["claimRef"]["uid"] == mine["metadata"]["uid"]
            assert copy.store.objects(POD.key) == [], "pods are the original's processes"
            copy.registry.create(POD, "default", pod("a", claim="data-a"))
            await until(lambda: condition(copy, "a") == "True", "the copy has the data")
            await until(lambda: condition(original, "a") == "True", "the original goes on")
        starts = [next(place.glob("machines/*/volumes/*/starts")).read_text() for place in (first, second)]
        assert starts == ["xx", "xx"], "each has a volume of its own"
    first.rename(moved)
    async with LocalCluster(moved, SETTINGS) as cluster:
        kept = cluster.registry.get(PVC, "default", "data-a")
        assert kept["metadata"]["uid"] == made["metadata"]["uid"], (
            "a folder that was moved is the same cluster"
        )
    async with LocalCluster(second, SETTINGS) as copy:
        assert copy.registry.get(PVC, "default", "data-a")["metadata"]["uid"] == mine["metadata"]["uid"]


async def test_what_a_copied_object_owns_follows_it(tmp_path: Path) -> None:
    owner = {"metadata": {"name": "o", "uid": "u1"}}
    owned = {"metadata": {"name": "w", "uid": "u2", "ownerReferences": [{"uid": "u1"}, {"uid": "gone"}]}}
    (_, new_owner), (_, new_owned) = as_new([(("", "configmaps"), owner), (("", "services"), owned)])
    references = [reference["uid"] for reference in new_owned["metadata"]["ownerReferences"]]
    assert references == [new_owner["metadata"]["uid"], "gone"] and new_owner["metadata"]["uid"] != "u1"
    assert owned["metadata"]["ownerReferences"][0]["uid"] == "u1", "what was read is not changed"


async def test_a_state_that_cannot_be_read_is_not_begun_anew(tmp_path: Path) -> None:
    (tmp_path / folder.STATE).write_text("{")
    with pytest.raises(keeper.StateUnreadable, match="down --wipe"):
        async with LocalCluster(tmp_path, SETTINGS):
            pass
    assert (tmp_path / folder.STATE).read_text() == "{"
    (tmp_path / "mine").write_text("")
    folder.wipe(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


async def test_the_operator_is_started_again_when_it_ends(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path, SETTINGS) as cluster:
        assert "operator" not in cluster.status()
        cluster.start_operator()
        cluster.start_operator()
        await until(lambda: cluster.status()["operator"]["state"] == "running", "it runs")
        (pid,) = processes.left_over(tmp_path)
        await cluster.off("n1")
        assert processes.left_over(tmp_path) == [pid], "it lies on no machine"
        os.kill(pid, signal.SIGKILL)
        await until(lambda: cluster.status()["operator"]["restarts"] == 1, "it was started again")
        await until(lambda: processes.left_over(tmp_path) not in ([], [pid]), "as another process")
    assert processes.left_over(tmp_path) == []
    async with LocalCluster(tmp_path, SETTINGS) as cluster:
        await until(lambda: cluster.status()["operator"]["state"] == "running", "it runs after `up` too")
        await cluster.stop_operator()
        assert "operator" not in cluster.status() and processes.left_over(tmp_path) == []
