"""The operator killed at each step of a heal, two operators at once, no API server for a minute, neither of them while a
machine is lost: the same end."""

from __future__ import annotations

import os
import shlex
import time
from typing import Any

import pytest

from examples.demo.outside import ROOT, TAG, helm, run
from tests.e2e.bench import NAMESPACE, Bench
from tests.e2e.test_9_leaders import groups, spread_soon

STEPS = {
    *("Beginning", "Demoting", "AddingWitness", "Copying", "Promoting", "Removing", "Ending"),
    *("HealBegan", "HealEnded", "Retiring", "PodDeleted", "ClaimReleased", "ClaimCreated"),
}
SECOND = "stele-e2e-second"


def lose(bench: Bench) -> str:
    """A machine with a node and a master, switched off for good."""
    machine = bench.machine_with_both()
    bench.power("off", machine)
    bench.power("wipe", machine)
    return machine


def kill_pod(bench: Bench, operator: Any) -> None:
    """Another starts under another name, and waits for the Lease."""
    other = bench.new_leader()
    bench.core.delete_namespaced_pod(operator.metadata.name, NAMESPACE, grace_period_seconds=0)
    bench.until("the operator's pod deleted by force, the next one leads", other)


def kill_process(bench: Bench, operator: Any) -> None:
    """The container starts again under the same name."""

    before = operator.status.container_statuses[0].restart_count

    def again() -> bool:
        (pod,) = bench.operators()
        status = pod.status.container_statuses[0]
        return bool(status.restart_count > before and status.ready)

    bench.signal(operator.spec.node_name, "stele-operator run", "SIGKILL")
    bench.until("the operator killed with -9, ready again", again)


def test_killed_at_each_step_of_a_heal(bench: Bench) -> None:
    bench.have(fresh=True)
    loaded = bench.program("load")
    started = time.time()
    lose(bench)
    killed: list[str] = []

    def killed_and_healed() -> bool:
        """After each step that has not been seen before: kill -9, and every other time the whole pod by force."""
        steps = {heal["step"] for heal in bench.healing()}
        for reason in sorted(STEPS - set(killed)):
            if reason in steps or bench.told(reason, started):
                killed.append(reason)
                (operator,) = bench.operators()
                kill_pod(bench, operator) if len(killed) % 2 == 0 else kill_process(bench, operator)
                bench.note(f"          that was after {reason}")
                return False  # whoever comes next may have told of an earlier one meanwhile
        return bool(bench.told("ClaimReleased", started)) and len(bench.released()) == 2

    bench.until("healed, retired, claims let go", killed_and_healed, 900)
    bench.note(f"          killed {len(killed)} times, after {', '.join(killed)}")
    assert len(killed) >= 6
    bench.power.restore()
    bench.until("whole", bench.whole, 300)
    bench.sound()
    bench.compare(loaded)


def test_two_operators_at_once(bench: Bench) -> None:
    """A second release, in another namespace and so with another Lease, looks after the same namespace."""
    bench.have(fresh=True)
    loaded = bench.program("load")
    settings = (f"image.tag={TAG}", f"nodeImage.tag={TAG}", "rbac.machines=true", "crds.install=false")
    helm(
        *("install", "second", str(ROOT / "charts" / "stele"), "--namespace", SECOND, "--create-namespace"),
        *("--wait", "--timeout", "5m", "--set", f"namespaces={{{NAMESPACE}}}"),
        *(word for setting in settings for word in ("--set", setting)),
    )
    try:
        lose(bench)
        bench.until("healed by two at once", lambda: len(bench.released()) == 2, 600)
        bench.power.restore()
        bench.until("whole", bench.whole, 300)
        bench.sound()
        bench.compare(loaded)
        assert len(bench.pods("master")) == 3 and len(bench.pods("node")) == 5
    finally:
        helm("uninstall", "second", "--namespace", SECOND, "--wait")
        bench.core.delete_namespace(SECOND)


def api_command() -> list[str]:
    command = shlex.split(os.environ.get("STELE_API", ""))
    if not command:
        pytest.skip("STELE_API is not set: the command that stops and starts the API server")
    return command


def test_writes_go_on_without_an_api_server(bench: Bench) -> None:
    """STELE_API is called with stop and start."""
    command = api_command()
    bench.have(fresh=True)
    stream = bench.stream()
    run([*command, "stop"])
    try:
        time.sleep(60)
    finally:
        run([*command, "start"])
    bench.until("the API server answers", lambda: bench.members())
    streamed = bench.written(stream)
    assert streamed["longest_wait_ms"] < 20_000
    bench.until("whole", bench.whole, 240)
    bench.compare(streamed)


def healed_without(bench: Bench, machine: str) -> bool:
    """Whether each tablet of the table has three voters, none of them on this machine. A master is made by an operator
    alone, so the catalog waits for one."""
    lost = next(
        m["nodeUUID"] for m in bench.members().values() if (m["machine"], m["role"]) == (machine, "node")
    )
    pod = next(p.metadata.name for p in bench.pods("node") if p.spec.node_name != machine)
    found = groups(bench, pod)
    return bool(found) and all(len(g.places) == 3 and lost not in g.places for g in found)


def test_the_masters_heal_without_operator_and_api_server(bench: Bench) -> None:
    """Both are away, and a machine is lost for good: every tablet has its voters again before the operator returns."""
    command = api_command()
    bench.have(fresh=True)
    bench.patch("TabletCluster", {"healing": {"mastersDriveAfter": "15s"}})
    loaded = bench.program("load")
    (operator,) = bench.operators()
    machine = bench.machine_with_both()
    stream = bench.stream()
    bench.scale_operator(0)
    try:
        bench.until("no operator runs", lambda: not bench.operators())
        run([*command, "stop"])
        try:
            bench.power("off", machine)
            bench.power("wipe", machine)
            time.sleep(120)  # nobody can be asked meanwhile
        finally:
            run([*command, "start"])
        bench.until("the API server answers", lambda: bench.members())
        assert not bench.operators()
        bench.until(
            "the table's tablets have all voters elsewhere", lambda: healed_without(bench, machine), 240
        )
        spread_soon(bench)
    finally:
        bench.scale_operator(1)
    assert operator.metadata.name not in {p.metadata.name for p in bench.operators()}
    bench.until("two claims are let go by the operator", lambda: len(bench.released()) == 2, 600)
    bench.power.restore()
    bench.until("whole", bench.whole, 300)
    streamed = bench.written(stream)
    spread_soon(bench)
    bench.sound()
    bench.compare(loaded, streamed)
