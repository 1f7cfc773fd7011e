"""The kubelets: they run the pods of machines that are on, as processes. Owns a `Pod` for each, and the
addresses of pods.

Invariants: after `power_off` has returned, the machine runs no process. A pod's object is removed only after
its processes are gone.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from stele_local import dns, podspec, processes
from stele_local.container import RETRY_SECONDS, Backoff, Container, Program, Start, base_environment
from stele_local.controllers import Recorder, is_ready
from stele_local.kinds import POD
from stele_local.machines import Machine, Machines, set_condition
from stele_local.objects import find, now
from stele_local.podspec import NotYet, Sources
from stele_local.registry import DeleteOptions, Registry
from stele_local.status import bad_request, no_kubelet, not_offered

Json = dict[str, Any]
log = structlog.get_logger("stele_local.kubelet")


class Addresses:
    """Gives each pod name a loopback address that never changes. `given`: the addresses that pods already
    have, by name.
    """

    def __init__(self, network: str, given: Mapping[str, str]) -> None:
        self._given = {name: address for name, address in given.items() if address.startswith(f"{network}.")}
        self._free = (f"{network}.{n // 250 + 1}.{n % 250 + 1}" for n in range(250 * 250))

    def give(self, name: str) -> str:
        if name not in self._given:
            taken = set(self._given.values())
            self._given[name] = next(address for address in self._free if address not in taken)
        return self._given[name]


class Pod:
    """Runs one pod on one machine."""

    def __init__(self, kubelet: Kubelet, machine: Machine, pod: Json) -> None:
        self._kubelet, self.machine, self._pod = kubelet, machine, pod
        metadata = pod["metadata"]
        name = f"{metadata['namespace']}/{metadata['name']}"
        self.uid = metadata["uid"]
        self._address = kubelet.addresses.give(name)
        self._home = machine.folder / "pods" / self.uid
        self.logs = kubelet.logs / metadata["namespace"] / f"{metadata['name']}-{self.uid[:8]}"
        self.containers: dict[str, Container] = {}
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name=f"pod {name}")

    def see(self, pod: Json) -> None:
        """Take over the newest version of the pod's object."""
        self._pod = pod
        self._changed.set()

    def kill(self) -> None:
        """End everything at once, because the machine was switched off or the object is gone."""
        for container in self.containers.values():
            container.kill()
        self.task.cancel()

    async def _run(self) -> None:
        self._start_containers_status()
        running: list[asyncio.Task[None]] = []
        try:
            if await self._ready_to_start():
                self._make_containers()
                running = [asyncio.create_task(c.run()) for c in self.containers.values()]
            while running and not self._deleted():
                self._changed.clear()
                waiter = asyncio.create_task(self._changed.wait())
                await asyncio.wait(
                    {waiter, *(t for t in running if not t.done())}, return_when=asyncio.FIRST_COMPLETED
                )
                waiter.cancel()
                if all(task.done() for task in running):
                    break
            if self._deleted():
                self._stop()
            if running:
                await asyncio.gather(*running)
            while not self._deleted():
                self._changed.clear()
                await self._changed.wait()
            self._finish()
        finally:
            for task in running:
                task.cancel()
            for container in self.containers.values():
                container.kill()
            await asyncio.gather(*running, return_exceptions=True)

    def _deleted(self) -> bool:
        return "deletionTimestamp" in self._pod["metadata"]

    def _stop(self) -> None:
        seconds = float(self._pod["metadata"].get("deletionGracePeriodSeconds") or 0)
        for container in self.containers.values():
            self._tell("Normal", "Killing", f"Stopping container {container.spec['name']}")
            container.stop(seconds)

    def _finish(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)
        metadata = self._pod["metadata"]
        registry = self._kubelet.sources.registry
        newest = registry.find(POD, metadata["namespace"], metadata["name"])
        if newest is not None and newest["metadata"]["uid"] == self.uid:
            registry.delete(
                POD, metadata["namespace"], metadata["name"], DeleteOptions(uid=self.uid, grace_seconds=0)
            )

    # -- starting

    async def _ready_to_start(self) -> bool:
        """Wait for the pod's volumes and config maps. False if the pod was deleted meanwhile."""
        while not self._deleted():
            try:
                for spec in self._pod["spec"]["containers"]:
                    self._program(spec)
                return True
            except NotYet as why:
                self._waiting(why)
            self._changed.clear()
            try:
                async with asyncio.timeout(RETRY_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return False

    def _waiting(self, why: NotYet) -> None:
        before = [
            find(s, "state", "waiting", "message")
            for s in find(self._pod, "status", "containerStatuses", default=[])
        ]
        self._publish_states([self._idle(spec, why.state) for spec in self._pod["spec"]["containers"]])
        if why.message not in before and "is not bound" not in why.message:
            self._tell("Warning", "FailedMount" if why.reason == "FailedMount" else "Failed", why.message)

    def _idle(self, spec: Json, state: Json) -> Json:
        return {
            "name": spec["name"], "image": spec.get("image", ""), "imageID": "", "ready": False, "started": False,
            "restartCount": self._restarts(spec["name"]), "state": state, "lastState": {},
        }  # fmt: skip

    def _restarts(self, name: str) -> int:
        for status in find(self._pod, "status", "containerStatuses", default=[]):
            if status["name"] == name:
                return int(status["restartCount"])
        return 0

    def _start_containers_status(self) -> None:
        """Set the pod's phase and addresses before its containers start. Containers that ran before the
        machine was off no longer run.
        """

        def begin(new: Json) -> None:
            status = new["status"]
            status["phase"] = "Pending" if status.get("phase") == "Pending" else "Running"
            status.setdefault("startTime", now())
            status |= {
                "hostIP": self.machine.address,
                "podIP": self._address,
                "podIPs": [{"ip": self._address}],
            }
            status["hostIPs"] = [{"ip": self.machine.address}]

        changed = self._kubelet.sources.registry.change(POD, self._pod, begin, "status")
        self._pod = changed or self._pod

    def _make_containers(self) -> None:
        spec = self._pod["spec"]
        before = {s["name"]: s for s in find(self._pod, "status", "containerStatuses", default=[])}
        for container in spec["containers"]:
            ran = (
                find(before.get(container["name"], {}), "state", "waiting") is None
                and container["name"] in before
            )
            self.containers[container["name"]] = Container(
                spec=container,
                prepare=partial(self._program, container),
                address=self._address,
                logs=self.logs,
                restart_policy=spec["restartPolicy"],
                grace_seconds=spec["terminationGracePeriodSeconds"],
                backoff=self._kubelet.backoff,
                start=self._kubelet.start,
                restarts=self._restarts(container["name"]) + ran,
                tell=self._tell,
                on_change=self._publish,
            )

    def _program(self, container: Json) -> Program:
        """The program to run for a container.

        Raises:
            NotYet: a volume or a config map is missing, or the container has no command.
        """
        sources = self._kubelet.sources
        mounted = podspec.mounts(sources, self._pod, container, self._home)
        declared = podspec.environment(sources, self._pod, container)
        words = [
            podspec.expand(w, declared)
            for w in [*(container.get("command") or ()), *(container.get("args") or ())]
        ]
        if not words:
            raise NotYet("CreateContainerError", "stele_local pulls no images: a container needs a command")
        folder = self._home / "containers" / container["name"]
        folder.mkdir(parents=True, exist_ok=True)
        namespace = self._pod["metadata"]["namespace"]
        ours = self._kubelet.process_environment(namespace) | {
            processes.MACHINE_VARIABLE: self.machine.name,
            "HOSTNAME": self._pod["metadata"]["name"],
            "HOME": str(folder),
        }
        environment = base_environment(ours)
        environment |= {key: podspec.rewrite(value, mounted) for key, value in declared.items()}
        if "PYTHONPATH" in declared:
            environment["PYTHONPATH"] = os.pathsep.join([ours["PYTHONPATH"], environment["PYTHONPATH"]])
        return Program([podspec.rewrite(word, mounted) for word in words], environment, folder)

    # -- telling

    def _tell(self, type_: str, reason: str, message: str) -> None:
        self._kubelet.recorder.tell(self._pod, POD, type_, reason, message)

    def _publish(self) -> None:
        self._publish_states([container.status() for container in self.containers.values()])

    def _publish_states(self, states: list[Json]) -> None:
        if not self.machine.on:
            return
        specs = self._pod["spec"]["containers"]
        ready = len(states) == len(specs) and all(state["ready"] for state in states)
        phase = self._phase(states)

        def alter(new: Json) -> None:
            status = new["status"]
            status["phase"], status["containerStatuses"] = phase, states
            over = phase in ("Succeeded", "Failed")
            reason = (
                ("PodCompleted" if phase == "Succeeded" else "PodFailed") if over else "ContainersNotReady"
            )
            names = " ".join(state["name"] for state in states if not state["ready"])
            told = (reason, "" if over else f"containers with unready status: [{names}]")
            set_condition(new, "Initialized", "True")
            for word in ("ContainersReady", "Ready"):
                set_condition(new, word, "True" if ready else "False", *(("", "") if ready else told))

        changed = self._kubelet.sources.registry.change(POD, self._pod, alter, "status")
        self._pod = changed or self._pod

    def _phase(self, states: list[Json]) -> str:
        codes = [container.exit_code for container in self.containers.values()]
        if codes and all(code is not None for code in codes) and not self._deleted():
            return "Failed" if any(codes) else "Succeeded"
        begun = any("waiting" not in state["state"] or state["restartCount"] for state in states)
        return "Running" if begun else "Pending"


class Kubelet:
    """The kubelets of all machines in one object."""

    def __init__(
        self,
        registry: Registry,
        machines: Machines,
        folder: Path,
        network: str,
        hosts: dns.HostsFile,
        backoff: Backoff,
        start: Start,
    ) -> None:
        self.sources, self._machines, self._folder = Sources(registry, machines), machines, folder
        self.addresses = Addresses(network, _addresses_of_pods(registry))
        self._hosts, self.backoff, self.start = hosts, backoff, start
        self.logs = folder / "logs"
        self.recorder = Recorder(registry, "kubelet")
        self._pods: dict[str, Pod] = {}
        self._ending: set[Pod] = set()
        self._power = {machine.name: asyncio.Lock() for machine in machines}

    def process_environment(self, namespace: str) -> dict[str, str]:
        """Environment variables that mark a process as part of this cluster, and with which it resolves
        cluster names.
        """
        return {
            "PYTHONPATH": str(dns.SHIM),
            processes.FOLDER_VARIABLE: str(self._folder),
            **self._hosts.environment(namespace),
        }

    def step(self) -> None:
        wanted: dict[str, Json] = {}
        for pod in self.sources.registry.store.objects(POD.key):
            machine = self._machines.get(pod["spec"].get("nodeName", ""))
            if machine is not None and machine.on:
                wanted[pod["metadata"]["uid"]] = pod
        for uid in [uid for uid in self._pods if uid not in wanted]:
            self._end(self._pods.pop(uid))
        for uid, pod in wanted.items():
            machine = self._machines[pod["spec"]["nodeName"]]
            if uid in self._pods:
                self._pods[uid].see(pod)
            elif find(pod, "status", "phase") not in ("Succeeded", "Failed"):
                self._pods[uid] = Pod(self, machine, pod)

    async def power_off(self, machine: Machine) -> None:
        """Kill all of the machine's processes with SIGKILL. Returns once they are gone. The machine's pods
        keep their last status.
        """
        async with self._power[machine.name]:
            machine.on = False
            for uid in [uid for uid, pod in self._pods.items() if pod.machine is machine]:
                self._end(self._pods.pop(uid))
            await self._gone(machine)

    async def power_on(self, machine: Machine) -> None:
        """Switch the machine on, once the last process from before `power_off` is gone. The next pass starts
        its pods again.
        """
        async with self._power[machine.name]:
            if not machine.on:
                await self._gone(machine)  # an earlier power_off may have been cancelled
                machine.on = True

    async def _gone(self, machine: Machine) -> None:
        while ending := [pod.task for pod in self._ending if pod.machine is machine]:
            await asyncio.wait(ending)
        await asyncio.to_thread(processes.sweep, self._folder, machine.name)

    def _end(self, pod: Pod) -> None:
        pod.kill()
        self._ending.add(pod)
        pod.task.add_done_callback(lambda _: self._ending.discard(pod))

    async def stop(self) -> None:
        for pod in self._pods.values():
            self._end(pod)
        await asyncio.gather(*(pod.task for pod in self._ending), return_exceptions=True)

    async def read_log(self, pod: Json, query: Mapping[str, str]) -> str:
        """The log of one container.

        Raises:
            ApiError: there is no such container or log, or its machine is off.
        """
        names = [container["name"] for container in pod["spec"]["containers"]]
        name = query.get("container") or names[0]
        if name not in names:
            raise bad_request(f"container {name} is not valid for pod {pod['metadata']['name']}")
        if query.get("follow") in ("true", "1"):
            raise not_offered("following logs")
        machine = self._machines.get(pod["spec"].get("nodeName", ""))
        if machine is not None and not machine.on:
            where = f"/containerLogs/{pod['metadata']['namespace']}/{pod['metadata']['name']}/{name}"
            raise no_kubelet(machine.name, machine.address, where)
        running = self._pods.get(pod["metadata"]["uid"])
        if running is None or name not in running.containers:
            raise bad_request(
                f'container "{name}" in pod "{pod["metadata"]["name"]}" is waiting to start: ContainerCreating'
            )
        path = running.containers[name].log_path(query.get("previous") in ("true", "1"))
        text = path.read_text(errors="replace") if path.exists() else ""
        if tail := query.get("tailLines"):
            text = "".join(text.splitlines(keepends=True)[-int(tail) :])
        return text


def _addresses_of_pods(registry: Registry) -> dict[str, str]:
    """The addresses of existing pods, by name. An earlier process gave them."""
    return {
        f"{pod['metadata']['namespace']}/{pod['metadata']['name']}": find(pod, "status", "podIP", default="")
        for pod in registry.store.objects(POD.key)
    }


def mark_stopped(registry: Registry) -> set[str]:
    """After a restart of the whole cluster: mark all existing pods as not ready until their processes run
    again.

    Returns the uids of the pods that were ready before.
    """
    were_ready = {pod["metadata"]["uid"] for pod in registry.store.objects(POD.key) if is_ready(pod)}

    def stopped(new: Json) -> None:
        for word in ("ContainersReady", "Ready"):
            set_condition(new, word, "False", "ContainersNotReady", "the cluster was started again")
        for status in find(new, "status", "containerStatuses", default=[]):
            status["ready"] = status["started"] = False

    for pod in registry.store.objects(POD.key):
        if pod["spec"].get("nodeName") and find(pod, "status", "phase") not in ("Succeeded", "Failed"):
            registry.change(POD, pod, stopped, "status")
    return were_ready
