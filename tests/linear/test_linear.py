"""A bounded share of `make linear`: fixed seeds, a few seconds of faults each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.linear import network
from tests.linear.__main__ import run


@pytest.mark.linear
def test_what_clients_are_told_while_processes_die_and_pause_is_linearizable(tmp_path: Path) -> None:
    # kill -9 of one and of all, a volume lost and healed meanwhile, pauses, leaders that hand over
    print(run(tmp_path, seed=22, seconds=5.0, cutting=False))


@pytest.mark.linear
@pytest.mark.skipif(bool(why := network.unavailable()), reason=why)
def test_and_while_the_network_is_cut(tmp_path: Path) -> None:
    # from all and from one, from clients, one way and both
    print(run(tmp_path, seed=99, seconds=5.0, cutting=True))
