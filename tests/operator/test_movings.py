"""Moves as they are told: one event when they begin, one when they end, none for each tablet."""

from __future__ import annotations

from dataclasses import replace

from stele_operator.heals import News
from stele_operator.movings import Movings
from stele_operator.plan import make_plan
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, ModelNode, node_name
from tests.operator.test_heals import NAMES, Driver
from tests.operator.worlds import made


def test_a_new_node_that_fills_is_two_events() -> None:
    cluster = Cluster(3, 1, 8, 3)
    cluster.nodes[node_name(4)] = ModelNode(node_name(4), "m4", "z0")
    driver, movings, told = Driver(cluster, replace(POLICY, rebalance=True)), Movings(), list[News]()
    busy = True
    while busy:
        busy = driver.round()
        told += movings.note(driver.works, NAMES, driver.now_s)
        assert driver.rounds < 200
    assert [news.reason for news in told] == ["Moving", "Moved"]
    assert "balance" in told[0].message and "has 0 replicas" in told[0].message
    assert told[1].message.startswith("6 replicas moved in ")
    assert not driver.told, "a move is no heal"


def test_the_spec_switches_balance_off() -> None:
    world = made()
    policy = make_plan(world.observe()).policy
    assert policy is not None and policy.rebalance
    world.objects["TabletCluster", "flights"]["spec"]["balance"] = {"replicas": False}
    policy = make_plan(world.observe()).policy
    assert policy is not None and not policy.rebalance and policy.balance_leaders
