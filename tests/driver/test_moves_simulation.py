"""Random worlds with moves, changes of the factor, balance and losses: nothing unsafe happens, moves always
end, none is undone. `make sim` has more.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.driver import moves_world


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_random_worlds(first: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(first, first + 40):
        total += moves_world.run(seed)
    print(dict(total))
    assert total["worlds"] == 40 and total["moves"] and total["by_hand"]


def test_no_small_move_is_made_that_larger_ones_make_wrong() -> None:
    """A node gave away three replicas because it had the most, then two for the sake of their tables, and got one of the
    three back."""
    moves_world.run(1546)


def test_a_placement_by_hand_goes_before_moves_for_balance() -> None:
    """The only turn went to balance between two moves of a tablet placed by hand; the second one made it wrong."""
    moves_world.run(5005)


def test_a_heal_goes_before_moves_for_balance_also_while_its_tablet_moves() -> None:
    """A placement by hand ended, and voters of its tablet were still missing. Balance took the moment between them."""
    moves_world.run(6417)


def test_a_witness_that_fewer_replicas_make_needless_can_leave() -> None:
    """The factor went from 3 to 1 while it joined. Its vote was needed to remove it, since a dead voter still had one."""
    moves_world.run(8218)
