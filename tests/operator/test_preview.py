"""`plan -f` reads manifests strictly, and tells all that is wrong with a file at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from stele.cli.app import cli
from stele_operator.__main__ import main
from stele_operator.plan.observation import Observation
from stele_operator.preview import BadManifest, answer, changed, read_manifests
from tests.operator.test_foretold import reported
from tests.operator.worlds import made

CLUSTER = """
apiVersion: stele.dev/v1alpha1
kind: TabletCluster
metadata: {name: flights, namespace: data}
spec: {nodes: {replicas: 5}}
"""
GROUP = """
apiVersion: stele.dev/v1alpha1
kind: TabletGroup
metadata: {name: more}
spec:
  clusterRef: {name: flights}
  replicationFactor: 3
  columns: [{name: id, type: int64}]
  primaryKey: [id]
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no manifest; expected a TabletCluster or a TabletGroup"]),
        ("{", ["it is not YAML"]),
        ("- 1", ["it is not an object"]),
        ("kind: Pod", ["it is a Pod; expected TabletCluster or TabletGroup"]),
        (CLUSTER.replace("v1alpha1", "v9"), ["apiVersion stele.dev/v9; expected stele.dev/v1alpha1"]),
        (CLUSTER.replace("name: flights, ", ""), ["no metadata.name"]),
        (CLUSTER + "more: 1", ["TabletCluster flights: more is unknown"]),
        (
            CLUSTER.replace("replicas: 5", "replicaz: 5, retire: 3"),
            ["spec.nodes.replicaz", "spec.nodes.retire"],
        ),
        (
            CLUSTER.replace("replicas: 5", "replicaz: 5"),
            ["spec.nodes.replicaz: there is no such field; did you mean 'replicas'?"],
        ),
        (CLUSTER.replace("nodes:", "nodez:"), ["spec.nodez: there is no such field; did you mean 'nodes'?"]),
        (CLUSTER.replace("spec:", "sepc:"), ["sepc is unknown; did you mean 'spec'?"]),
        (
            CLUSTER.replace("namespace:", "namespce:"),
            ["metadata.namespce is unknown; did you mean 'namespace'?"],
        ),
        (CLUSTER.replace("replicas: 5", "replicas: 5, replicas: 4"), ["line 5: 'replicas' appears twice"]),
        (
            CLUSTER.replace("replicas: 5", "replicas: true"),
            ["spec.nodes.replicas: Input should be a valid integer"],
        ),
        (
            CLUSTER.replace("replicas: 5", "replicas: '5'"),
            ["spec.nodes.replicas: Input should be a valid integer"],
        ),
        (
            CLUSTER.replace("replicas: 5", "replicas: 5.0"),
            ["spec.nodes.replicas: Input should be a valid integer"],
        ),
        (
            CLUSTER.replace("replicas: 5", "replicas: [5]"),
            ["spec.nodes.replicas: Input should be a valid integer"],
        ),
        (
            GROUP.replace("type: int64", "typ: int64"),
            ["spec.columns.0.typ: there is no such field; did you mean 'type'?"],
        ),
        (CLUSTER.replace("{nodes: {replicas: 5}}", "[]"), ["TabletCluster flights: spec"]),
        (f"{CLUSTER}---{CLUSTER}", ["TabletCluster flights stands in the file twice; remove one"]),
        (
            f"{CLUSTER}---{CLUSTER.replace('name: flights', 'name: other')}",
            ["more than one TabletCluster: flights, other"],
        ),
        (
            f"{CLUSTER}---{GROUP.replace('name: flights', 'name: other')}",
            ["TabletGroup more is of TabletCluster other, not of flights"],
        ),
        (
            f"{CLUSTER}---{GROUP.replace('more}', 'more, namespace: b}')}",
            ["only one namespace is allowed, but these are named: b, data"],
        ),
        ("x: " * 500_000, ["longer than 1 MiB"]),
        ("[" * 5_000, ["it is not YAML"]),
    ],
)
def test_a_bad_file_is_refused_with_all_its_faults(text: str, words: list[str]) -> None:
    with pytest.raises(BadManifest) as caught:
        read_manifests(text, "new.yaml")
    for word in words:
        assert any(word in fault for fault in caught.value.faults), caught.value.faults


def test_cluster_and_groups_stand_in_one_file_or_alone() -> None:
    both = read_manifests(f"{CLUSTER}---{GROUP}", "-")
    assert (both.namespace, both.cluster, set(both.groups)) == ("data", "flights", {"more"}) and both.spec
    alone = read_manifests(GROUP, "-", "elsewhere")
    assert (alone.namespace, alone.cluster, alone.spec) == ("elsewhere", "flights", None)
    listed = "kind: List\nitems:\n" + "".join(
        f"- {d.strip()}\n".replace("\n", "\n  ") + "\n" for d in (CLUSTER, GROUP)
    )
    assert set(read_manifests(listed, "-").raws) == set(both.raws)


def running() -> Observation:
    """A cluster of five nodes with a table."""
    return reported(made().observe())


def test_a_new_group_is_a_new_table_and_an_old_one_keeps_what_the_file_leaves_out() -> None:
    o = running()
    assert o.catalog is not None
    told = answer(o, read_manifests(GROUP, "-", "data"), o.catalog)
    assert told.fine and told.order() == ["table more is created: 1 tablet with 3 replicas each"]
    after = changed(o, read_manifests(GROUP, "-", "data"))
    assert after.cluster == o.cluster and len(after.groups) == 2


def test_what_is_fixed_and_what_breaks_a_rule_is_refused() -> None:
    o = running()
    assert o.catalog is not None
    bad = CLUSTER.replace("5}", "5, retire: [a], park: [a], storage: {className: fast}}")
    bad_group = GROUP.replace("primaryKey: [id]", "primaryKey: [other]")
    told = answer(o, read_manifests(f"{bad}---{bad_group}", "-"), o.catalog)
    assert not told.fine and not told.events
    for words in (
        "both name a",
        "storage.className cannot change",
        "TabletGroup more: primaryKey names a column",
    ):
        assert any(words in fault for fault in told.refused), told.refused
    assert told.lines()[1] == "REFUSED:"
    unformed = replace(o, cluster=replace(o.cluster, spec=None, faults=("x",)))
    assert answer(unformed, read_manifests(CLUSTER, "-"), o.catalog).complete


def test_the_command_tells_every_fault_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    path.write_text(CLUSTER.replace("replicas: 5", "replicaz: 5, retire: 3"))
    done = CliRunner().invoke(main, ["plan", "-f", str(path)])
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 2 and "spec.nodes.retire" in done.stderr
    done = CliRunner().invoke(main, ["plan", "-f", str(tmp_path / "none.yaml")])
    assert done.exit_code == 2 and "No such file" in done.stderr
    path.write_bytes(b"\xff\xfe")
    done = CliRunner().invoke(main, ["plan", "-f", str(path)])
    assert done.exit_code == 2 and "UTF-8" in done.stderr
    path.write_text(CLUSTER)
    done = CliRunner().invoke(main, ["plan", "-f", str(path), "--kubeconfig", str(tmp_path / "no")])
    assert done.exit_code == 2 and "no such file" in done.stderr


def test_stele_plan_asks_the_operators_program(tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    path.write_text("kind: Pod")
    done = CliRunner().invoke(cli, ["plan", "-f", str(path)])
    assert done.exit_code == 2 and "expected TabletCluster or TabletGroup" in done.stderr
    for arguments in ([], ["-f", str(path), "--lose", "node/x"]):
        done = CliRunner().invoke(cli, ["plan", *arguments])
        assert done.exit_code == 2 and "either --lose KIND/NAME or -f FILE" in done.stderr
