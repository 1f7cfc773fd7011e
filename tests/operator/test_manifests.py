"""What Kubernetes is told of a cluster: whom it may move, when it restarts or serves, and what it must not guess."""

from __future__ import annotations

from typing import Any

from stele_operator.plan.status import restart_pending
from tests.operator.world import World
from tests.operator.worlds import made


def told(world: World) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(Role, pod's spec, its one container) of each pod."""
    found = []
    for raw in world.of("Pod"):
        (container,) = raw["spec"]["containers"]
        found.append((raw["metadata"]["labels"]["stele.dev/role"], raw["spec"], container))
    return found


def test_nobody_but_the_operator_moves_a_pod_off_its_volume() -> None:
    for _, spec, _ in told(made()):
        assert {
            (t["key"], t["effect"], t.get("tolerationSeconds", "for ever")) for t in spec["tolerations"]
        } == {
            (f"node.kubernetes.io/{taint}", "NoExecute", "for ever") for taint in ("not-ready", "unreachable")
        }


def test_liveness_asks_only_whether_the_process_lives() -> None:
    """A node that cannot serve yet, for its peers are not there, must not be restarted for it."""
    for _, _, container in told(made()):
        paths = [
            container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")
        ]
        assert paths == ["/startupz", "/livez", "/readyz"]


def test_two_of_a_role_are_never_on_one_machine() -> None:
    for role, spec, _ in told(made()):
        (apart,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert apart == {
            "labelSelector": {"matchLabels": {"stele.dev/cluster": "flights", "stele.dev/role": role}},
            "topologyKey": "kubernetes.io/hostname",
        }
        assert "nodeAffinity" not in spec["affinity"]


def test_a_pod_stays_in_the_zone_that_was_chosen_for_it() -> None:
    world = World({"zones": ["z1", "z2", "z3"], "nodes": {"replicas": 3}})
    world.run()
    for raw in world.of("Pod"):
        claim = world.objects["PersistentVolumeClaim", raw["metadata"]["name"]]["metadata"]
        (term,) = raw["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        assert term["matchExpressions"] == [
            {
                "key": "topology.kubernetes.io/zone",
                "operator": "In",
                "values": [claim["annotations"]["stele.dev/zone"]],
            }
        ]


def test_memory_that_was_asked_for_is_the_limit_unless_one_is_given() -> None:
    """Else a node may grow beyond what its machine has, and the kernel chooses whom to kill for it."""
    asked = {"requests": {"cpu": "1", "memory": "2Gi"}}
    given = {**asked, "limits": {"memory": "3Gi"}}
    world = World({"masters": {"resources": asked}, "nodes": {"replicas": 3, "resources": given}})
    world.run()
    for role, _, container in told(world):
        limit = {"memory": "2Gi" if role == "master" else "3Gi"}
        assert container["resources"] == {"requests": asked["requests"], "limits": limit}


def test_pods_that_are_not_ready_can_be_evicted_and_found_by_their_peers() -> None:
    world = made()
    budgets = world.of("PodDisruptionBudget")
    assert [b["spec"]["unhealthyPodEvictionPolicy"] for b in budgets] == ["AlwaysAllow"] * 2
    assert world.objects["Service", "flights-peers"]["spec"]["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in world.objects["Service", "flights-masters"]["spec"]


def test_nodes_find_masters_also_when_all_that_they_were_told_of_are_replaced() -> None:
    """Pods' command lines stay as they are; addresses that a node has learned since are old after a power failure."""
    world = made()
    named = [f"flights-master-{n}.flights-peers.data.svc:7051" for n in range(3)]
    ports = world.objects["Service", "flights-masters"]["spec"]["ports"]
    assert [p["port"] for p in ports] == [7051]
    for role, _, container in told(world):
        given = container["args"][container["args"].index("--masters") + 1].split(",")
        assert given == (named if role == "master" else [*named, "flights-masters.data.svc:7051"])


def test_pods_made_from_an_older_spec_wait_to_be_made_again() -> None:
    world = made()
    world.cluster["spec"]["updateStrategy"] = "OnDelete"
    assert not restart_pending(world.observe())
    world.cluster["spec"]["nodes"]["resources"] = {"requests": {"cpu": "2"}}
    assert restart_pending(world.observe()) == tuple(f"flights-node-{n}" for n in range(5))
    del world.objects["Pod", "flights-node-3"]
    world.run()
    assert "flights-node-3" not in restart_pending(world.observe())
    world.cluster["spec"]["image"] = "stele/node:another"
    assert len(restart_pending(world.observe())) == 8
