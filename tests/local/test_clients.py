"""The clients that matter: kopf, kubernetes.aio, kubectl."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from typing import Any

import aiohttp
import kopf
import kubernetes.aio.client
import kubernetes.aio.config
import kubernetes.aio.watch
import pytest

from stele_local.cluster import LocalCluster
from stele_local.http import PROTOBUF
from stele_local.kinds import CRD, POD
from tests.kube_contract import crd
from tests.local.conftest import pod, until

Json = dict[str, Any]


async def test_kopf_sees_every_event(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    cluster.registry.create(CRD, "", crd.CRD)
    kind = cluster.registry.kind(crd.GROUP, "v1", "shelves")
    assert kind is not None
    registry, seen = kopf.OperatorRegistry(), []

    @kopf.on.login(registry=registry)  # type: ignore[arg-type]
    def login(**kwargs: Any) -> Any:
        return kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(crd.GROUP, "v1", "shelves", registry=registry)
    def shelf(type: str | None, name: str | None, spec: kopf.Spec, **_: Any) -> None:
        seen.append((type, name, spec.get("mode")))

    @kopf.on.event("pods", registry=registry)
    def pods(type: str | None, name: str | None, **_: Any) -> None:
        seen.append((type, name, None))

    cluster.registry.create(kind, "default", crd.shelf("before", {"n": {}}))
    stop = threading.Event()
    # In a thread of its own: at its end kopf stops every task of its loop, and ours would be among them.
    operator = asyncio.create_task(
        asyncio.to_thread(
            lambda: asyncio.run(
                kopf.operator(registry=registry, namespaces=["default"], standalone=True, stop_flag=stop)
            )
        )
    )
    await until(lambda: (None, "before", "A") in seen, "kopf lists")
    cluster.registry.create(kind, "default", crd.shelf("after", {"n": {}}))
    cluster.registry.patch(kind, "default", "after", {"spec": {"mode": "B"}})
    cluster.registry.create(POD, "default", pod("p"))
    await until(
        lambda: ("ADDED", "after", "A") in seen and ("MODIFIED", "after", "B") in seen, "kopf watches"
    )
    await until(lambda: ("ADDED", "p", None) in seen, "kopf watches pods")
    cluster.store.forget_history()
    assert "kopf.zalando.org/last-handled-configuration" not in json.dumps(cluster.registry.list(kind))
    stop.set()
    await operator


def POD_KIND(cluster: LocalCluster) -> Any:
    kind = cluster.registry.kind("", "v1", "pods")
    assert kind is not None
    return kind


async def test_kubernetes_aio(cluster: LocalCluster) -> None:
    await kubernetes.aio.config.load_kube_config(config_file=str(cluster.kubeconfig))
    async with kubernetes.aio.client.ApiClient() as client:
        core = kubernetes.aio.client.CoreV1Api(client)
        custom = kubernetes.aio.client.CustomObjectsApi(client)
        extensions = kubernetes.aio.client.ApiextensionsV1Api(client)
        await extensions.create_custom_resource_definition(crd.CRD)
        where = (crd.GROUP, "v1", "default", "shelves")
        made: Json = await custom.create_namespaced_custom_object(*where, crd.shelf("a", {"n": {}}))
        assert made["spec"] == {"mode": "A", "n": {"replicas": 3}}
        patch = {"status": {"phase": "Up"}}
        merge = {"_content_type": "application/merge-patch+json"}
        await custom.patch_namespaced_custom_object_status(*where, "a", patch, **merge)
        with pytest.raises(kubernetes.aio.client.ApiException) as refused:
            await custom.patch_namespaced_custom_object(
                *where, "a", {"spec": {"n": {"replicas": 2}}}, **merge
            )
        assert refused.value.status == 422
        map_body = {"metadata": {"name": "identity"}, "data": {"uuid": "6f1c"}}
        stored = await core.create_namespaced_config_map("default", map_body)
        stored.data["formed"] = "yes"
        stored = await core.replace_namespaced_config_map("identity", "default", stored)
        stored.metadata.resource_version = "1"
        with pytest.raises(kubernetes.aio.client.ApiException) as stale:
            await core.replace_namespaced_config_map("identity", "default", stored)
        assert stale.value.status == 409
        seen = []
        async with kubernetes.aio.watch.Watch() as watch:
            async for event in watch.stream(core.list_namespaced_config_map, "default", timeout_seconds=1):
                seen.append((event["type"], event["object"].metadata.name))
        assert seen == [("ADDED", "identity")]
        uid = kubernetes.aio.client.V1Preconditions(uid=stored.metadata.uid)
        await core.delete_namespaced_config_map(
            "identity", "default", body=kubernetes.aio.client.V1DeleteOptions(preconditions=uid)
        )
        assert (await core.list_namespaced_config_map("default")).items == []


async def test_what_kubectl_drain_sends_is_refused_in_words(cluster: LocalCluster) -> None:
    async with aiohttp.ClientSession() as session:
        pods = f"{cluster.url}/{cluster.token}/api/v1/namespaces/default/pods"
        headers = {"Content-Type": PROTOBUF}
        for request in (
            session.delete(f"{pods}/p", data=b"k8s\0", headers=headers),
            session.post(pods, headers=headers),
        ):
            async with request as answer:
                assert answer.status == 501
                assert "does not offer bodies in protobuf" in (await answer.json())["message"]


async def test_kubectl(cluster: LocalCluster) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl at hand")

    async def run(*words: str, stdin: str = "", code: int = 0) -> str:
        process = await asyncio.create_subprocess_exec(
            kubectl, *words, env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "HOME": str(cluster.folder)},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output = (await process.communicate(stdin.encode()))[0].decode()
        assert process.returncode == code, output
        return output

    assert "created" in await run("apply", "-f", "-", stdin=json.dumps(crd.CRD))
    assert "shelf.contract.stele.dev/a created" in await run(
        "apply", "-f", "-", stdin=json.dumps(crd.shelf("a", {"n": {}}))
    )
    assert "unchanged" in await run("apply", "-f", "-", stdin=json.dumps(crd.shelf("a", {"n": {}})))
    assert "configured" in await run(
        "apply", "-f", "-", stdin=json.dumps(crd.shelf("a", {"n": {"replicas": 5}}))
    )
    wrong = await run("apply", "-f", "-", stdin=json.dumps(crd.shelf("a", {"n": {"replicas": 2}})), code=1)
    assert 'spec.n.replicas: Unsupported value: 2: supported values: "1", "3", "5", "20"' in wrong
    unknown = await run(
        "apply", "-f", "-", stdin=json.dumps(crd.shelf("a", {"n": {}, "colour": "red"})), code=1
    )
    assert 'unknown field "spec.colour"' in unknown
    assert (await run("get", "sh")).split()[:6] == ["NAME", "REPS", "READY", "AGE", "a", "5"]
    assert "Replicas:  5" in await run("describe", "sh", "a")
    assert "scaled" in await run("scale", "sh/a", "--replicas=3")
    assert "condition met" in await run(
        "wait", "sh/a", "--for=jsonpath={.spec.n.replicas}=3", "--timeout=60s"
    )
    assert "deleted" in await run("delete", "sh", "a")
    cluster.registry.create(POD, "default", pod("p"))
    await run("wait", "pod/p", "--for=condition=Ready", "--timeout=60s")
    assert "1/1" in await run("get", "pods", "-o", "wide")
    assert "Successfully assigned default/p" in await run("describe", "pod", "p")
    assert await run("logs", "p") == "serving\n"
    assert "Ready" in await run("get", "nodes")
