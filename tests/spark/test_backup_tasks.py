"""What a task of a backup does with the errors of its job. Needs no Java and no cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from pyspark.accumulators import Accumulator

from stele.backup.workers import Bench, Did
from stele.model.errors import Code, Corrupt, Rejected, Retryable, SteleError
from stele_spark.workers import _Task, _Union


@dataclass(frozen=True)
class Ends:
    """A job that did some rows, and then ends with an error, if it has one."""

    error: SteleError | None = None

    async def run(self, bench: Bench, tell: Callable[[Did], None]) -> str:
        tell(Did(rows=3))
        tell(Did(rows=4, bytes=50))
        if self.error is not None:
            raise self.error
        return "done"


def task(job: Ends, attempts_max: int) -> tuple[list[Any], dict[int, Any]]:
    """What a first attempt gives to Spark, and tells the driver."""
    ended: Accumulator[dict[int, Any]] = Accumulator(0, {}, _Union())
    return list(_Task("", attempts_max, ended)([(8, job)])), ended.value


def test_rows_are_told_once_with_the_result() -> None:
    given, told = task(Ends(), 4)
    assert given == [(8, "done")]
    assert (told[8].rows, told[8].bytes, told[8].error) == (7, 50, None)


@pytest.mark.parametrize("kind", [Rejected, Corrupt])
def test_what_no_other_attempt_can_mend_is_told_at_once(kind: type[SteleError]) -> None:
    given, told = task(Ends(kind("it is so", code=Code.NOT_FOUND)), 4)
    assert given == [(8, None)], "for Spark the task has ended well, and is not tried again"
    error = told[8].error.raised()
    assert (type(error), error.code, error.args[0]) == (kind, Code.NOT_FOUND, "it is so")


def test_what_may_pass_is_tried_again_and_told_after_the_last_attempt() -> None:
    with pytest.raises(Retryable, match="no way"):
        task(Ends(Retryable("no way there")), 2)
    given, told = task(Ends(Retryable("no way there")), 1)
    assert given == [(8, None)]
    assert isinstance(told[8].error.raised(), Retryable)
