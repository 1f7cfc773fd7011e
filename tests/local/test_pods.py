"""Pods are processes: started, probed, restarted, stopped in time, and named."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from stele_local import processes
from stele_local.cluster import LocalCluster
from stele_local.kinds import CONFIG_MAP, EVENT, POD, SERVICE
from stele_local.registry import DeleteOptions
from tests.local.conftest import condition, container_status, pod, until


def _delete(cluster: LocalCluster, name: str, grace_seconds: int | None = None) -> None:
    cluster.registry.delete(POD, "default", name, DeleteOptions(grace_seconds=grace_seconds))


async def test_a_pod_gets_ready_and_keeps_its_address(cluster: LocalCluster) -> None:
    cluster.registry.create(POD, "default", pod("a"))
    await until(lambda: condition(cluster, "a") == "True", "a is ready")
    address = cluster.registry.get(POD, "default", "a")["status"]["podIP"]
    _delete(cluster, "a")
    await until(lambda: not cluster.registry.find(POD, "default", "a"), "a is gone")
    assert processes.left_over(cluster.folder) == []
    cluster.registry.create(POD, "default", pod("b"))
    cluster.registry.create(POD, "default", pod("a"))
    await until(lambda: condition(cluster, "a") == condition(cluster, "b") == "True", "both are ready")
    assert cluster.registry.get(POD, "default", "a")["status"]["podIP"] == address
    assert cluster.registry.get(POD, "default", "b")["status"]["podIP"] != address


async def test_sigterm_first_then_the_log_tells(cluster: LocalCluster) -> None:
    stored = cluster.registry.create(POD, "default", pod("a")).obj
    await until(lambda: condition(cluster, "a") == "True", "a is ready")
    _delete(cluster, "a")
    await until(lambda: not cluster.registry.find(POD, "default", "a"), "a is gone")
    log = cluster.folder / "logs" / "default" / f"a-{stored['metadata']['uid'][:8]}" / "main-0.log"
    assert log.read_text() == "serving\nasked to stop\n"


async def test_a_deaf_process_is_killed_after_the_grace(cluster: LocalCluster) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    cluster.registry.create(
        POD, "default", pod("a", "python", "-c", deaf, container={"readinessProbe": None})
    )
    logs = cluster.folder / "logs" / "default"
    await until(lambda: any(log.read_text() for log in logs.glob("a-*/main-0.log")), "a ignores SIGTERM")
    _delete(cluster, "a", grace_seconds=5)
    await until(lambda: container_status(cluster, "a").get("state", {}).get("running"), "a does not care")
    await until(lambda: not cluster.registry.find(POD, "default", "a"), "a is gone")
    assert processes.left_over(cluster.folder) == []


async def test_readiness_and_liveness(cluster: LocalCluster) -> None:
    live = {"httpGet": {"path": "/livez", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    started = {
        "httpGet": {"path": "/startupz", "port": "http"},
        "periodSeconds": 0.1,
        "failureThreshold": 100,
    }
    ports = [{"name": "http", "containerPort": 7080}]
    body = pod("a", container={"livenessProbe": live, "startupProbe": started, "ports": ports})
    body["spec"]["containers"][0]["readinessProbe"]["failureThreshold"] = 1
    stored = cluster.registry.create(POD, "default", body).obj
    await until(lambda: condition(cluster, "a") == "True", "a is ready")
    machine = cluster.registry.get(POD, "default", "a")["spec"]["nodeName"]
    data = cluster.folder / "machines" / machine / "pods" / stored["metadata"]["uid"] / "volumes" / "data"
    (data / "readyz").touch()
    await until(lambda: condition(cluster, "a") == "False", "a is not ready")
    assert container_status(cluster, "a")["restartCount"] == 0
    (data / "livez").touch()
    await until(lambda: container_status(cluster, "a")["restartCount"] >= 1, "a was restarted")
    (data / "livez").unlink(missing_ok=True)
    (data / "readyz").unlink()
    await until(lambda: condition(cluster, "a") == "True", "a is ready again")
    told = [event["reason"] for event in cluster.registry.list(EVENT, "default")]
    assert {"Scheduled", "Started", "Unhealthy", "Killing"} <= set(told)


async def test_exit_codes_messages_and_back_off(cluster: LocalCluster) -> None:
    fail = "import os; open(os.environ['STELE_TERMINATION_LOG'], 'w').write('volume is empty'); raise SystemExit(3)"
    quiet = {"readinessProbe": None}
    cluster.registry.create(POD, "default", pod("always", "python", "-c", fail, container=quiet))
    cluster.registry.create(
        POD, "default", pod("never", "python", "-c", fail, container=quiet, restartPolicy="Never")
    )
    cluster.registry.create(
        POD, "default", pod("done", "python", "-c", "pass", container=quiet, restartPolicy="OnFailure")
    )
    await until(
        lambda: container_status(cluster, "always").get("restartCount", 0) >= 2, "always is restarted"
    )
    last = container_status(cluster, "always")["lastState"]["terminated"]
    assert (last["exitCode"], last["reason"], last["message"]) == (3, "Error", "volume is empty")
    await until(
        lambda: cluster.registry.get(POD, "default", "never")["status"]["phase"] == "Failed", "never failed"
    )
    await until(
        lambda: cluster.registry.get(POD, "default", "done")["status"]["phase"] == "Succeeded", "done is done"
    )
    assert container_status(cluster, "never")["state"]["terminated"]["exitCode"] == 3


async def test_environment_arguments_and_files(cluster: LocalCluster) -> None:
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), open(sys.argv[1].split('=')[1]).read()]), flush=True)"
    cluster.registry.create(
        CONFIG_MAP, "default", {"metadata": {"name": "settings"}, "data": {"id": "6f1c", "file": "text"}}
    )
    body = pod("a", "python", "-c", show, container={"readinessProbe": None}, restartPolicy="Never")
    main = body["spec"]["containers"][0]
    main["args"] = ["--config=/etc/stele/file", "--name=$(NAME)", "--dir=/data/x", "$$(NAME)", "/database"]
    main["volumeMounts"].append({"name": "config", "mountPath": "/etc/stele"})
    body["spec"]["volumes"].append({"name": "config", "configMap": {"name": "settings"}})
    body["metadata"]["annotations"] = {"stele.dev/zone": "z9"}
    main["env"] += [
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "ZONE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['stele.dev/zone']"}}},
        {"name": "MACHINE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "ID", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "id"}}},
        {"name": "DIR", "value": "/data/$(ID)"},
    ]
    stored = cluster.registry.create(POD, "default", body).obj
    await until(lambda: cluster.registry.get(POD, "default", "a")["status"]["phase"] == "Succeeded", "a ran")
    machine = cluster.registry.get(POD, "default", "a")["spec"]["nodeName"]
    home = cluster.folder / "machines" / machine / "pods" / stored["metadata"]["uid"] / "volumes"
    log = cluster.folder / "logs" / "default" / f"a-{stored['metadata']['uid'][:8]}" / "main-0.log"
    arguments, environment, text = json.loads(log.read_text())
    expected = [f"--config={home}/config/file", "--name=a", f"--dir={home}/data/x", "$(NAME)", "/database"]
    assert arguments == expected and text == "text"
    shown = {key: environment[key] for key in ("NAME", "ZONE", "MACHINE", "ID", "DIR")}
    assert shown == {"NAME": "a", "ZONE": "z9", "MACHINE": machine, "ID": "6f1c", "DIR": f"{home}/data/6f1c"}


async def test_names_are_resolved(cluster: LocalCluster) -> None:
    service = {"clusterIP": "None", "selector": {"app": "x"}, "ports": [{"port": 7080}]}
    for name, early in (("peers", True), ("masters", False)):
        spec = {**service, "publishNotReadyAddresses": early}
        cluster.registry.create(SERVICE, "default", {"metadata": {"name": name}, "spec": spec})
    never = {"httpGet": {"path": "/", "port": 1}, "periodSeconds": 1}
    cluster.registry.create(POD, "default", pod("a", hostname="a", subdomain="peers"))
    cluster.registry.create(
        POD, "default", pod("b", hostname="b", subdomain="peers", container={"readinessProbe": never})
    )
    await until(
        lambda: (
            condition(cluster, "a") == "True"
            and container_status(cluster, "b").get("state", {}).get("running")
        ),
        "both run",
    )
    a, b = (cluster.registry.get(POD, "default", name)["status"]["podIP"] for name in "ab")
    look = """
import socket, sys
for name in sys.argv[1:]:
    try: print(name, *sorted(row[4][0] for row in socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)))
    except socket.gaierror: print(name, "-")
"""
    names = [
        "a.peers",
        "b.peers.default.svc.cluster.local",
        "peers.default.svc",
        "masters",
        "none.default.svc",
        "127.0.0.1",
    ]
    hosts = cluster.folder / "hosts.json"
    await until(
        lambda: "masters.default.svc.cluster.local" in hosts.read_text() and b in hosts.read_text(),
        "names are known",
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        look,
        *names,
        env={**os.environ, **cluster.environment()},
        stdout=asyncio.subprocess.PIPE,
    )
    answers = dict(line.split(" ", 1) for line in (await process.communicate())[0].decode().splitlines())
    assert answers == {
        "a.peers": a, "b.peers.default.svc.cluster.local": b, "peers.default.svc": " ".join(sorted([a, b])),
        "masters": a, "none.default.svc": "-", "127.0.0.1": "127.0.0.1",
    }  # fmt: skip


async def test_a_container_that_cannot_be_started_again_yet_waits_and_can_be_deleted(
    cluster: LocalCluster,
) -> None:
    settings = {"metadata": {"name": "settings"}, "data": {"id": "6f1c"}}
    cluster.registry.create(CONFIG_MAP, "default", settings)
    reference = {"configMapKeyRef": {"name": "settings", "key": "id"}}
    container = {"readinessProbe": None, "env": [{"name": "ID", "valueFrom": reference}]}
    wait = "import signal; signal.pause()"
    for name in ("a", "b"):
        cluster.registry.create(POD, "default", pod(name, "python", "-c", wait, container=container))
        await until(
            lambda name=name: "running" in container_status(cluster, name).get("state", {}), f"{name} runs"
        )
    cluster.registry.delete(CONFIG_MAP, "default", "settings", DeleteOptions())

    def waits(name: str) -> bool:
        waiting = container_status(cluster, name)["state"].get("waiting", {})
        return waiting.get("reason") == "CreateContainerConfigError" and "settings" in waiting["message"]

    for name in ("a", "b"):
        pid = int(container_status(cluster, name)["containerID"].removeprefix("process://"))
        os.kill(pid, signal.SIGKILL)
        await until(lambda name=name: waits(name), f"{name} waits for its settings")
    _delete(cluster, "a")
    await until(lambda: not cluster.registry.find(POD, "default", "a"), "a is gone")
    cluster.registry.create(CONFIG_MAP, "default", settings)
    await until(lambda: "running" in container_status(cluster, "b")["state"], "b runs again")
    assert container_status(cluster, "b")["restartCount"] == 1
