"""The plan, driven to its end in a small world: whole, cut off after any prefix, and through every fate."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from stele.driver.view import ReplicaState, ReplicaView
from stele_operator.plan import make_plan
from stele_operator.plan.actions import CreateClaim, CreatePod, RegisterNode
from stele_operator.plan.fates import Fate, State, members
from stele_operator.plan.findings import Kind
from stele_operator.plan.status import cluster_status
from tests.operator.world import World


def names(world: World, kind: str) -> list[str]:
    """Names of all objects of a kind."""
    return [o["metadata"]["name"] for o in world.of(kind)]


def made() -> World:
    """A cluster that has formed, with a table of four tablets."""
    world = World({"nodes": {"replicas": 5}})
    world.group("events", partitioning={"hash": [{"columns": ["id"], "buckets": 4}]})
    world.run()
    return world


def check(world: World) -> None:
    """What holds at every moment."""
    used = Counter(name for kind, name in world.names_used if kind == "PersistentVolumeClaim")
    assert all(n == 1 for n in used.values()), f"a serial was used twice: {used}"
    claims = {o["metadata"]["name"]: o for o in world.of("PersistentVolumeClaim")}
    ids = [o["metadata"]["annotations"]["stele.dev/node-id"] for o in claims.values()]
    assert len(set(ids)) == len(ids)
    for pod in world.of("Pod"):
        claim = claims[pod["metadata"]["name"]]
        for key in ("stele.dev/node-id",):
            assert pod["metadata"]["annotations"][key] == claim["metadata"]["annotations"][key]


def test_a_new_cluster_forms_and_makes_its_table() -> None:
    world = made()
    assert names(world, "Pod") == [
        *(f"flights-master-{i}" for i in range(3)),
        *(f"flights-node-{i}" for i in range(5)),
    ]
    assert names(world, "PersistentVolumeClaim") == names(world, "Pod")
    assert names(world, "Service") == ["flights-masters", "flights-peers"]
    assert len(world.confirmed) == 3
    assert [t.name for t in world.tables] == ["events"]
    assert len(world.tablets) == 4
    assert not make_plan(world.observe()).actions
    check(world)


def test_what_is_starting_is_told_in_one_sentence() -> None:
    world = World({"nodes": {"replicas": 5}})
    told = {f.message for _ in range(8) for f in world.step().findings if f.reason.endswith("Starting")}
    assert "flights-master-0 is starting" in told, told


def test_first_masters_get_the_flag_others_join_and_formed_ones_start_plain() -> None:
    world = made()
    pods = {p["metadata"]["name"]: p["spec"]["containers"][0]["args"] for p in world.of("Pod")}
    assert "--first-masters" in pods["flights-master-0"]
    assert "--first-masters" not in pods["flights-node-0"]
    del world.objects["Pod", "flights-master-0"]
    world.run()
    again = world.objects["Pod", "flights-master-0"]["spec"]["containers"][0]["args"]
    assert "--first-masters" not in again
    assert "--join" not in again


def test_a_first_master_is_on_record_without_a_name_and_gets_one() -> None:
    world = made()
    observed = world.observe()
    assert observed.catalog is not None
    master = next(n.node_id for n in observed.catalog.view.nodes if n.role == "master")
    catalog = replace(observed.catalog, unnamed_nodes=frozenset({master}))
    (action,) = make_plan(replace(observed, catalog=catalog)).actions
    assert isinstance(action, RegisterNode) and action.node_id == master
    assert action.name.startswith("flights-master-")


@pytest.mark.parametrize("seed", range(12))
def test_cut_off_after_any_prefix_the_next_pass_goes_on(seed: int) -> None:
    world = World({"nodes": {"replicas": 4}})
    world.group("events", partitioning={"hash": [{"columns": ["id"], "buckets": 4}]})
    for n in range(40):
        world.step(prefix=(seed + n * 7) % 4)
        check(world)
    world.run()
    check(world)
    active = [m for m in members(world.observe()) if m.active]
    assert Counter(m.role for m in active) == {"master": 3, "node": 4}
    assert all(m.state is State.READY for m in active)
    assert len(world.tables) == 1


def test_nothing_is_touched_twice_by_an_operator_that_saw_old_news() -> None:
    world = World({"nodes": {"replicas": 3}})
    stale = make_plan(world.observe())
    world.run()
    before = dict(world.objects)
    for action in stale.actions:
        with pytest.raises(Exception, match="exists"):
            world.apply(action)
    assert world.objects == before


def test_a_pod_that_is_gone_comes_back_on_its_volume() -> None:
    world = made()
    uid = world.objects["PersistentVolumeClaim", "flights-node-2"]["metadata"]["uid"]
    del world.objects["Pod", "flights-node-2"]
    plan = world.step()
    assert [a.reason for a in plan.actions] == ["flights-node-2: back on its volume"]
    world.run()
    assert world.objects["PersistentVolumeClaim", "flights-node-2"]["metadata"]["uid"] == uid


def test_pods_may_do_nothing_but_their_work() -> None:
    for pod in made().of("Pod"):
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsUser"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert spec["automountServiceAccountToken"] is False


def node_of(world: World, machine: str, role: str = "node") -> str:
    """The member of a role on a machine."""
    return next(
        p["metadata"]["name"]
        for p in world.of("Pod")
        if p["spec"].get("nodeName") == machine and p["metadata"]["labels"]["stele.dev/role"] == role
    )


def test_a_machine_lost_for_good_loses_node_and_master_and_both_are_replaced() -> None:
    world = made()
    node, master = node_of(world, "n1"), node_of(world, "n1", "master")
    world.kill("n1")
    world.settle()
    plan = None
    for _ in range(601):
        plan = world.step()
        check(world)
    assert plan is not None
    by_name = {m.name: m for m in plan.members}
    assert by_name[node].state is State.LOST or by_name[node].state is State.RETIRED
    world.run()
    assert ("Pod", node) not in world.objects
    assert ("Pod", master) not in world.objects
    released = world.objects["PersistentVolumeClaim", node]["metadata"]["annotations"]
    assert re.fullmatch(r"\d+", released["stele.dev/released-at"])
    retired = next(m for m in make_plan(world.observe()).members if m.name == node)
    assert (retired.state, retired.fate) == (State.RETIRED, Fate.NONE)
    assert "flights-master-3" in names(world, "Pod")
    assert "--join" in world.objects["Pod", "flights-master-3"]["spec"]["containers"][0]["args"]
    assert "flights-node-5" in names(world, "Pod")  # waits for a machine: there are four
    findings = {f.reason for f in make_plan(world.observe()).findings}
    assert "NodePending" in findings
    world.now_s += 24 * 3600 + 1
    world.settle()
    world.run()
    assert ("PersistentVolumeClaim", node) not in world.objects


def test_a_replacement_goes_to_the_zone_of_the_one_that_was_lost() -> None:
    spec = {"zones": ["z1", "z2", "z3"], "nodes": {"replicas": 3}, "healing": {"machineLostAfter": "40s"}}
    world = World(spec, machines=9)
    world.run()

    def zones(role: str) -> dict[str, str]:
        claims = (o["metadata"] for o in world.of("PersistentVolumeClaim"))
        return {c["name"]: c["annotations"]["stele.dev/zone"] for c in claims if role in c["name"]}

    assert zones("node") == {f"flights-node-{n}": f"z{n + 1}" for n in range(3)}
    machine = world.objects["Pod", "flights-node-1"]["spec"]["nodeName"]
    assert world.objects["Pod", "flights-master-1"]["spec"]["nodeName"] == machine
    world.kill(machine)
    for _ in range(60):
        world.step()
    assert (zones("node")["flights-node-3"], zones("master")["flights-master-3"]) == ("z2", "z2")


def test_while_no_master_leads_no_more_pods_may_be_evicted_than_before() -> None:
    """A drain takes the leader master first: what is then not known of the tablets must not let a node go."""
    world = made()

    def least() -> int:
        return int(world.objects["PodDisruptionBudget", "flights-nodes"]["spec"]["minAvailable"])

    assert least() == 4
    tablet = world.tablets[0]
    peer = tablet.config.peers[1]
    failed = ReplicaView(peer.node_id, peer.replica_id, ReplicaState.FAILED)
    world.tablets[0] = replace(tablet, replicas=(failed,))
    world.step()
    assert least() == 5
    confirmed, world.confirmed = world.confirmed, set()
    world.step()
    assert least() == 5
    world.tablets[0], world.confirmed = tablet, confirmed
    world.step()
    assert least() == 4


def test_nothing_is_given_up_before_its_time() -> None:
    world = made()
    world.kill("n1")
    for _ in range(590):
        plan = world.step()
        assert plan.policy is not None
        assert not plan.policy.lost
        assert not plan.actions or all("n1" not in str(a) or "Budget" in a.reason for a in plan.actions)
    assert plan.policy.dead_after_ms == 30_000


def test_with_too_many_lost_healing_stops_and_says_so() -> None:
    world = made()
    for machine in ("n4", "n5"):
        world.kill(machine)
    for _ in range(700):
        plan = world.step()
    assert plan.policy is not None
    assert not plan.policy.lost
    (stalled,) = [f for f in plan.findings if f.reason == "TooManyLost"]
    assert "flights-node-" in stalled.message
    assert "maxLostNodes=1" in stalled.message


def test_too_many_lost_are_too_many_also_where_witnesses_wait_longest() -> None:
    world = made()
    world.cluster["spec"]["healing"] = {"witnessAfter": "10m", "machineLostAfter": "1m"}
    for machine in ("n4", "n5"):
        world.kill(machine)
    for _ in range(70):
        plan = world.step()
        assert plan.policy is not None
        assert not plan.policy.lost
    assert "TooManyLost" in {f.reason for f in plan.findings}


FATES = [
    # what happens to flights-node-1 on n2 → fate
    ("pod deleted", Fate.RESTARTING),
    ("process silent", Fate.MACHINE_SILENT),
    ("machine off", Fate.MACHINE_LOST),
    ("machine deleted", Fate.MACHINE_DELETED),
    ("claim gone", Fate.VOLUME_LOST),
    ("claim lost", Fate.VOLUME_LOST),
    ("volume empty", Fate.VOLUME_EMPTY),
    ("volume foreign", Fate.VOLUME_EMPTY),
    ("disk corrupt", Fate.VOLUME_LOST),
    ("volume old", Fate.VOLUME_LOST),
]


@pytest.mark.parametrize(("what", "fate"), FATES)
def test_each_fate_has_its_name(what: str, fate: Fate) -> None:
    world = made()
    name = node_of(world, "n2")
    pod = world.objects["Pod", name]
    exits = {"volume empty": 3, "volume foreign": 4, "disk corrupt": 5, "volume old": 6}
    match what:
        case "pod deleted":
            del world.objects["Pod", name]
        case "process silent":
            pass
        case "machine off":
            world.kill("n2")
        case "machine deleted":
            world.machines = [m for m in world.machines if m.name != "n2"]
        case "claim gone":
            del world.objects["PersistentVolumeClaim", name]
        case "claim lost":
            world.objects["PersistentVolumeClaim", name]["status"] = {"phase": "Lost"}
        case _:
            ended = {"terminated": {"exitCode": exits[what], "message": "told why"}}
            pod["status"]["containerStatuses"] = [
                {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended}
            ]
    world.now_s += 31
    node_id = pod["metadata"]["annotations"]["stele.dev/node-id"]
    for other in world.heard_s:
        if other != node_id:
            world.heard_s[other] = world.now_s
    member = next(m for m in members(world.observe()) if m.node_id == node_id)
    assert (member.state, member.fate) == (State.LOST, fate)
    assert member.given_up == (fate in (Fate.MACHINE_DELETED, Fate.VOLUME_LOST, Fate.VOLUME_EMPTY))


def test_the_machine_that_a_volume_was_made_on_may_be_long_gone() -> None:
    """A volume that any machine can mount: its pod ran on n2, and is being started again."""
    world = made()
    name = node_of(world, "n2")
    node_id = world.objects["Pod", name]["metadata"]["annotations"]["stele.dev/node-id"]
    claim = world.objects["PersistentVolumeClaim", name]["metadata"]["annotations"]
    claim["volume.kubernetes.io/selected-node"] = "n9"
    del world.objects["Pod", name]
    world.heard_s[node_id] -= 6
    member = next(m for m in members(world.observe()) if m.node_id == node_id)
    assert (member.fate, member.given_up) == (Fate.RESTARTING, False)


def test_without_the_right_to_read_machines_the_longest_time_out_counts() -> None:
    world = made()
    world.machines_known = False
    name = node_of(world, "n2")
    node_id = world.objects["Pod", name]["metadata"]["annotations"]["stele.dev/node-id"]
    for age_s, given_up in ((301, False), (601, True)):
        for other in world.heard_s:
            world.heard_s[other] = world.now_s - (age_s if other == node_id else 0)
        member = next(m for m in members(world.observe()) if m.node_id == node_id)
        assert (member.fate, member.given_up) == (Fate.MACHINE_SILENT, given_up)


def test_a_lost_volume_means_a_new_node_under_a_new_serial() -> None:
    world = made()
    name = node_of(world, "n2")
    del world.objects["PersistentVolumeClaim", name]
    del world.objects["Pod", name]
    for _ in range(8):
        world.step()
    world.run()
    assert ("Pod", name) not in world.objects
    assert "flights-node-5" in names(world, "Pod")
    check(world)


def test_identity_lost_is_read_back_from_the_claims_as_formed() -> None:
    world = made()
    before = dict(world.objects["ConfigMap", "flights-identity"]["data"])
    del world.objects["ConfigMap", "flights-identity"]
    world.run()
    after = world.objects["ConfigMap", "flights-identity"]["data"]
    assert after == before


def test_identity_lost_after_a_master_was_replaced_is_read_back_as_formed() -> None:
    """The new master joined and has no format id on its claim; the lost one's claim is kept for a while."""
    world = made()
    before = dict(world.objects["ConfigMap", "flights-identity"]["data"])
    world.kill("n1")
    for _ in range(700):
        world.step()
    assert "flights-master-3" in names(world, "Pod") and "flights-master-0" not in names(world, "Pod")
    assert "flights-master-0" in names(world, "PersistentVolumeClaim")
    serials = dict(world.objects["ConfigMap", "flights-identity"]["data"])
    del world.objects["ConfigMap", "flights-identity"]
    world.run()
    after = world.objects["ConfigMap", "flights-identity"]["data"]
    assert after["formed"] == before["formed"] and after["firstMasters"] == before["firstMasters"]
    assert after["nextMaster"] == serials["nextMaster"]
    assert world.observe().catalog is not None


def test_identity_lost_after_every_first_master_was_replaced_is_read_back_as_formed() -> None:
    """Nobody is left who was there when the cluster formed, nor a claim of theirs."""
    world = made()
    for number in range(3):
        del world.objects["PersistentVolumeClaim", f"flights-master-{number}"]
        del world.objects["Pod", f"flights-master-{number}"]
        for _ in range(8):
            world.step()
        world.run()
    masters = [n for n in names(world, "PersistentVolumeClaim") if "master" in n]
    assert masters == ["flights-master-3", "flights-master-4", "flights-master-5"]
    before = dict(world.objects["ConfigMap", "flights-identity"]["data"])
    del world.objects["ConfigMap", "flights-identity"]
    world.kill(world.objects["Pod", "flights-master-3"]["spec"]["nodeName"])  # it cannot say what it knows
    world.step()
    after = world.objects["ConfigMap", "flights-identity"]["data"]
    assert after["formed"] and after["nextMaster"] == before["nextMaster"]
    assert world.observe().catalog is not None
    check(world)


def test_identity_lost_before_forming_is_not_taken_for_formed() -> None:
    world = World({"nodes": {"replicas": 3}})
    for _ in range(2):
        world.step()
    assert names(world, "PersistentVolumeClaim")
    del world.objects["ConfigMap", "flights-identity"]
    world.run()
    assert len(world.confirmed) == 3
    check(world)


def test_a_cluster_made_again_over_kept_volumes_takes_them_over() -> None:
    world = made()
    before = world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"]
    for name in names(world, "Pod"):
        del world.objects["Pod", name]
    world.cluster["metadata"]["uid"] = "ffffffff-0000-0000-0000-000000000000"
    world.run()
    assert world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"] == before
    assert len(names(world, "Pod")) == 8


def test_a_cluster_made_again_without_volumes_is_a_new_one_with_new_serials() -> None:
    world = made()
    before = world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"]
    for kind in ("Pod", "PersistentVolumeClaim", "TabletGroup"):
        for name in names(world, kind):
            del world.objects[kind, name]
    world.confirmed, world.nodes, world.tables, world.tablets = set(), {}, [], []
    world.cluster["metadata"]["uid"] = "ffffffff-0000-0000-0000-000000000000"
    world.run()
    assert world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"] != before
    assert names(world, "Pod")[0] == "flights-master-3"
    check(world)


def test_a_cluster_made_again_while_its_volumes_go_is_a_new_one() -> None:
    """Under deletionPolicy Delete the volumes belong to the one that was deleted: they go, only later."""
    world = made()
    world.cluster["spec"]["deletionPolicy"] = "Delete"
    world.run()
    before = world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"]
    going = names(world, "PersistentVolumeClaim")
    for name in names(world, "Pod"):
        del world.objects["Pod", name]
    del world.objects["TabletGroup", "events"]
    world.confirmed, world.nodes, world.tables, world.tablets = set(), {}, [], []
    world.cluster["metadata"]["uid"] = "ffffffff-0000-0000-0000-000000000000"
    world.cluster["spec"]["deletionPolicy"] = "Retain"
    for _ in range(6):
        world.step()
    assert world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"] != before
    for name in going:
        assert ("Pod", name) not in world.objects
        owner = world.objects["PersistentVolumeClaim", name]["metadata"]["ownerReferences"][0]["uid"]
        assert owner != world.cluster["metadata"]["uid"]
        del world.objects["PersistentVolumeClaim", name]
    world.run()
    assert names(world, "Pod")[0] == "flights-master-3" and len(names(world, "Pod")) == 8
    check(world)


def test_given_up_and_applied_anew_while_its_claims_still_go_it_is_a_new_one() -> None:
    """What MastersLost advises, done in one go: the identity is gone, and the claims' deletion takes its time."""
    world = made()
    before = world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"]
    del world.objects["ConfigMap", "flights-identity"]
    del world.objects["TabletGroup", "events"]
    for name in names(world, "Pod"):
        del world.objects["Pod", name]
    world.confirmed, world.nodes = set(), {}
    world.tables, world.tablets = [], []
    world.cluster["metadata"]["uid"] = "ffffffff-0000-0000-0000-000000000000"
    going = world.of("PersistentVolumeClaim")
    for claim in going:
        claim["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for _ in range(3):
        world.step()
    for claim in going:
        del world.objects["PersistentVolumeClaim", claim["metadata"]["name"]]
    world.run()
    assert world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"] != before
    assert names(world, "Pod")[0] == "flights-master-3" and len(names(world, "Pod")) == 8
    check(world)


def test_its_own_volumes_are_kept_whatever_the_identity_says_of_its_owner() -> None:
    """An identity put back from a copy that is older than this TabletCluster."""
    world = made()
    world.cluster["spec"]["deletionPolicy"] = "Delete"
    world.run()
    identity = world.objects["ConfigMap", "flights-identity"]
    before, identity["data"]["ownerUID"] = (
        identity["data"]["clusterUUID"],
        "00000099-0000-0000-0000-000000000000",
    )
    pods = names(world, "Pod")
    world.run()
    assert world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"] == before
    assert names(world, "Pod") == pods


def test_nodes_whose_claims_are_refused_do_not_fill_the_catalog() -> None:
    """A quota, or an admission rule: it may last for days, and a pass comes every second."""
    world = World({"nodes": {"replicas": 3}})
    world.run()
    world.cluster["spec"]["nodes"]["replicas"] = 5
    known = len(world.nodes)
    for _ in range(10):
        for action in make_plan(world.observe()).actions:
            if not isinstance(action, CreateClaim):
                world.apply(action)
        world.now_s += 1
    assert len(world.nodes) == known
    world.run()
    assert len([n for n in names(world, "Pod") if "node" in n]) == 5
    assert len(world.nodes) == known + 2
    check(world)


def test_a_node_is_registered_before_its_pod_starts() -> None:
    world = World({"nodes": {"replicas": 3}})
    world.run()
    world.cluster["spec"]["nodes"]["replicas"] = 4
    order = []
    for _ in range(6):
        plan = world.step()
        order += [a for a in plan.actions if isinstance(a, RegisterNode | CreatePod)]
    assert [type(a) for a in order] == [RegisterNode, CreatePod]


def test_more_nodes_are_asked_for_and_come() -> None:
    world = World({"nodes": {"replicas": 3}})
    world.run()
    world.cluster["spec"]["nodes"]["replicas"] = 5
    world.run()
    assert len([n for n in names(world, "Pod") if "node" in n]) == 5
    check(world)


def test_storage_grows_and_owners_follow_the_deletion_policy() -> None:
    world = made()
    world.cluster["spec"] |= {
        "deletionPolicy": "Delete",
        "nodes": {"replicas": 5, "storage": {"size": "20Gi"}},
    }
    world.run()
    claim = world.objects["PersistentVolumeClaim", "flights-node-0"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "20Gi"
    assert claim["metadata"]["ownerReferences"][0]["kind"] == "TabletCluster"
    world.cluster["spec"]["deletionPolicy"] = "Retain"
    world.run()
    assert "ownerReferences" not in world.objects["PersistentVolumeClaim", "flights-node-0"]["metadata"]


def test_the_status_tells_which_deletion_policy_is_in_force() -> None:
    """Volumes go with the TabletCluster until the last claim was let go, whatever the spec says meanwhile."""
    world = made()

    def told() -> str:
        observed = world.observe()
        return str(
            cluster_status(observed, make_plan(observed), (), "2026-01-01T00:00:00Z")["deletionPolicy"]
        )

    assert told() == "Retain"
    world.cluster["spec"]["deletionPolicy"] = "Delete"
    world.run()
    assert told() == "Delete"
    world.cluster["spec"]["deletionPolicy"] = "Retain"
    world.step(prefix=3)
    assert told() == "Delete"
    world.run()
    assert told() == "Retain"


def test_a_released_claim_says_nothing_of_the_deletion_policy() -> None:
    """It keeps its owner until it goes, perhaps a day later: who waits for Retain need not wait for that."""
    world = made()
    observed = world.observe()
    first, *others = observed.claims
    for released_s, told in ((None, "Delete"), (world.now_s, "Retain")):
        claims = (replace(first, owned=True, released_s=released_s), *others)
        seen = replace(observed, claims=claims)
        status = cluster_status(seen, make_plan(seen), (), "2026-01-01T00:00:00Z")
        assert status["deletionPolicy"] == told


def test_masters_whose_volumes_are_gone_for_good_are_a_case_for_a_human() -> None:
    world = made()
    masters = sorted(n for n in names(world, "PersistentVolumeClaim") if "master" in n)

    def stalled() -> dict[str, str]:
        return {f.reason: f.message for f in make_plan(world.observe()).findings if f.kind is Kind.STALLED}

    assert "MastersLost" not in stalled()
    for name in masters[:2]:
        del world.objects["PersistentVolumeClaim", name]
        del world.objects["Pod", name]
    world.confirmed = set(sorted(world.confirmed)[:1])
    assert not world.leads()
    assert "1 of 3" in stalled()["MastersLost"]
    assert "kubectl delete pvc -l stele.dev/cluster=flights" in stalled()["MastersLost"]


def test_a_volume_chosen_on_a_machine_that_went_down_is_chosen_again() -> None:
    world = World({"nodes": {"replicas": 3}})
    for _ in range(3):
        world.step()
    world.kill("n1")
    claim = world.objects["PersistentVolumeClaim", "flights-master-0"]
    claim["metadata"]["annotations"]["volume.kubernetes.io/selected-node"] = "n1"
    claim["status"] = {"phase": "Pending"}
    world.objects["Pod", "flights-master-0"]["spec"].pop("nodeName", None)
    world.formats.clear()
    world.now_s += 61
    plan = make_plan(world.observe())
    deleted = [a for a in plan.actions if "which is down" in a.reason]
    assert len(deleted) == 2


def test_paused_touches_nothing() -> None:
    world = made()
    world.cluster["spec"]["paused"] = True
    del world.objects["Pod", "flights-node-0"]
    plan = make_plan(world.observe())
    assert not plan.actions
    assert plan.policy is None
    assert [f.reason for f in plan.findings] == ["Paused"]
