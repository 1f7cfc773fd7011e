"""docs/kubernetes.md: a new image is given to all pods by hand as it says, and it names each field of the pods."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from stele_local.kinds import POD
from stele_operator.plan.observation import ROLES
from tests.docs.blocks import ROOT, blocks
from tests.operator.cluster import Json, bench
from tests.operator.worlds import made

DOCUMENT = "docs/kubernetes.md"
NEW = "stele/node:NEW"


FIELDS = (
    "nodeSelector",
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "podLabels",
    "podAnnotations",
)


def test_each_field_of_the_pods_is_in_the_document() -> None:
    text = (ROOT / DOCUMENT).read_text()
    for name in ("imagePullSecrets", "serviceAccountName", *(f"{r}s.{f}" for r in ROLES for f in FIELDS)):
        assert f"`{name}`" in text, name


def test_pods_have_nothing_of_what_is_not_given() -> None:
    pods = made().of("Pod")
    assert pods
    for pod in pods:
        spec = pod["spec"]
        ours = {"tolerations", "affinity"}  # whose content is below, and in the operator's own tests
        assert not {"imagePullSecrets", "serviceAccountName", *FIELDS} - ours & set(spec)
        keys = {t["key"] for t in spec["tolerations"]}
        assert keys == {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}


def is_ready(pod: Json) -> bool:
    """By its condition."""
    found = (pod.get("status") or {}).get("conditions") or ()
    return any((c["type"], c["status"]) == ("Ready", "True") for c in found)


@pytest.mark.chaos
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on the path")
async def test_all_pods_get_a_new_image_one_after_the_other(tmp_path: Path) -> None:
    (block,) = (b for b in blocks(DOCUMENT, language="sh") if NEW in b.code)
    script = block.code.replace("-n data", "-n default")
    async with bench(tmp_path, machines=4) as there:
        await there.start()
        await there.apply(
            "cluster", nodes={"replicas": 3, "storage": {"size": "1Gi"}}, updateStrategy="OnDelete"
        )
        await there.apply(
            "flights",
            columns=[{"name": "id", "type": "int64"}],
            primaryKey=["id"],
            partitioning={"hash": [{"columns": ["id"], "buckets": 3}]},
        )

        async def ready() -> bool:
            return (await there.condition("TabletGroup", "flights", "Ready"))[0] == "True"

        await there.until("the table is Ready", ready)
        before = {p["metadata"]["name"]: p for p in await there.kube.list("Pod", "default")}
        assert len(before) == 6
        back: set[str] = set()

        def one_away_at_most() -> bool:
            pods = {p["metadata"]["name"]: p for p in there.local.store.objects(POD.key)}
            anew = {n for n, p in pods.items() if p["metadata"]["uid"] != before[n]["metadata"]["uid"]}
            back.update(name for name in anew if is_ready(pods[name]))
            going = {n for n, p in pods.items() if n not in anew and "deletionTimestamp" in p["metadata"]}
            return len((before.keys() - pods.keys() | anew | going) - back) <= 1

        with there.keep("one pod is away at most", one_away_at_most):
            process = await asyncio.create_subprocess_exec(
                *("sh", "-c", script),
                env={**os.environ, "KUBECONFIG": str(there.local.kubeconfig)},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            try:
                out, _ = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
        assert process.returncode == 0, out.decode()
        for name, pod in before.items():
            now = await there.kube.get("Pod", "default", name)
            assert now is not None and now["metadata"]["uid"] != pod["metadata"]["uid"], out.decode()
            assert now["spec"]["containers"][0]["image"] == NEW

        async def none_left() -> bool:
            return (await there.condition("TabletCluster", "flights", "Reconciling"))[1] == "AsAskedFor"

        await there.until("no pod is left behind", none_left)
