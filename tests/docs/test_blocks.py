"""What tests/docs asks of a block beyond running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import Block, run


def block(code: str) -> Block:
    return Block(Path("a.md"), 7, code)


def test_an_error_that_a_block_shows_has_to_come() -> None:
    shows = "try:\n    {}\nexcept ValueError as error:\n    assert 'x' in str(error)\n"
    run([block(shows.format("int('x')"))], {})
    with pytest.raises(AssertionError, match="no error came from the try in line 7"):
        run([block(shows.format("int('1')"))], {})


def test_an_error_that_a_block_only_provides_for_need_not() -> None:
    assert run([block("try:\n    n = int('1')\nexcept ValueError:\n    n = 0\n")], {})["n"] == 1
