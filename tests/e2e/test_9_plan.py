"""`stele-operator plan -f` in the operator's pod, as docs tell it, and the annotation: what they foretell of real pods happens."""

from __future__ import annotations

import base64
from typing import Any

import yaml

from tests.e2e.bench import CLUSTER, NAMESPACE, Bench, Json
from tests.e2e.test_9_nodes import nodes, serve
from tests.e2e.test_9_roll import uids

FINE, NOT_ALL, WRONG = 0, 1, 2


def foretold(bench: Bench, manifest: Json, *options: str) -> tuple[int, str]:
    """Exit code and output of the command, with the manifest on its standard input."""
    text = base64.b64encode(yaml.safe_dump(manifest).encode()).decode()
    asked = " ".join(["stele-operator plan -f -", *options])
    (operator,) = bench.operators()
    for _ in range(5):
        said = bench.execute(
            operator.metadata.name, "sh", "-c", f'echo {text} | base64 -d | {asked} 2>&1; echo "code=$?"'
        )
        out, _, code = said.rpartition("code=")
        if int(code) != 75:  # the masters may be busy
            break
    bench.note("".join(f"          {line}\n" for line in out.splitlines()).rstrip())
    return int(code), out


def manifest(bench: Bench, kind: str = "TabletCluster", **nodes: Any) -> Json:
    """The resource as `kubectl get -o yaml` has it, with other fields of nodes."""
    raw: Json = bench.custom.get_namespaced_custom_object(*bench.where(kind), CLUSTER)
    if nodes:
        raw["spec"]["nodes"] = {**raw["spec"]["nodes"], **nodes}
    return raw


def test_what_is_foretold_of_real_pods_happens(bench: Bench) -> None:
    bench.have(patient=True)
    bench.patch(
        "TabletCluster", {"healing": {"silentAfter": "15m", "machineLostAfter": "15m", "witnessAfter": "2m"}}
    )
    before = uids(bench)

    def rests() -> bool:
        """Leaders of a new cluster are spread first."""
        code, out = foretold(bench, manifest(bench))
        assert code == FINE
        return "nothing: the cluster is as this spec asks" in out

    bench.until("nothing is foretold", rests)
    code, out = foretold(bench, manifest(bench, storage={"size": "1Gi"}))
    assert code == FINE and "NOTE: nodes.storage.size is 1Gi" in out and "cannot be made smaller" in out
    code, out = foretold(bench, manifest(bench, storage={"size": "2Gi", "className": "fast"}))
    assert code == NOT_ALL and "REFUSED" in out and "storage.className cannot change" in out
    code, out = foretold(bench, manifest(bench, replicaz=4))
    assert code == WRONG and "replicaz" in out
    code, out = foretold(bench, manifest(bench, podAnnotations={"note": "planned"}))
    assert code == FINE and all(name in out for name in before if "-node-" in name)
    assert not any(name in out for name in before if "-master-" in name)
    group = manifest(bench, "TabletGroup")
    group["spec"]["replicationFactor"] = 5
    code, out = foretold(bench, group)
    assert code == FINE and "replicas copied" in out
    assert uids(bench) == before and bench.whole(), "nothing was changed"

    code, out = foretold(bench, manifest(bench, replicas=4))
    assert code == FINE
    leaves = {name for name in nodes(bench) if f"{name}: leaves" in out}
    assert len(leaves) == 1
    note = {"metadata": {"annotations": {"stele.dev/plan": '{"nodes": {"replicas": 4}}'}}}
    bench.custom.patch_namespaced_custom_object(*bench.where("TabletCluster"), CLUSTER, note)

    def answered() -> bool:
        return "plan" in bench.kube.status("TabletCluster", CLUSTER)

    bench.until("the annotation is answered", answered)
    answer = bench.kube.status("TabletCluster", CLUSTER)["plan"]
    assert answer["fine"] and f"{min(leaves)}: leaves" in answer["text"], answer
    gone: Json = {"metadata": {"annotations": {"stele.dev/plan": None}}}
    bench.custom.patch_namespaced_custom_object(*bench.where("TabletCluster"), CLUSTER, gone)
    bench.until("the answer goes with the question", lambda: not answered())
    bench.patch("TabletCluster", {"nodes": {"replicas": 4}})
    bench.until("four nodes serve", lambda: serve(bench, 4), 600)
    bench.until("the one that was named goes", lambda: before.keys() - uids(bench).keys() == leaves)
    bench.sound()


def test_a_cluster_that_is_not_there(bench: Bench) -> None:
    body = {"apiVersion": "stele.dev/v1alpha1", "kind": "TabletCluster", "spec": {}}
    code, out = foretold(bench, {**body, "metadata": {"name": "flihgts", "namespace": NAMESPACE}})
    assert code == WRONG and "there is no TabletCluster flihgts" in out
