"""Runs the jobs of a backup on Spark's executors: each job is a task. Called by backup.py and submitted.py,
in the driver.

The driver alone claims the folder, holds history, and writes plan and manifest (stele.backup). A task runs
one job with the client of its Python worker. Invariants: the result of a job is that of an attempt that ended
well. An error that another attempt cannot mend is returned as a value, so Spark neither repeats the task nor
logs a traceback.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark import TaskContext
from pyspark.accumulators import Accumulator, AccumulatorParam

from stele.backup.workers import Bench, Did, Job, Tell
from stele.client import Client
from stele.model.errors import Code, Corrupt, InvariantViolation, Rejected, Retryable, SteleError
from stele.model.ids import new_id
from stele.rpc.threads import in_thread
from stele_spark.options import one_sentence

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

R = TypeVar("R")
_LOOK_S = 0.2
"""Seconds between two looks of the driver at what tasks have done."""
_TIMEOUT_S = 60.0
_ATTEMPTS = "spark.task.maxFailures"
_ATTEMPTS_DEFAULT = 4


class SparkWorkers:
    """Runs jobs as tasks of Spark. `masters`: addresses of the cluster's masters; "" if no job asks a
    cluster. `spark`: a session, or a function that makes one once there is a job to run.

    Spark decides how many jobs run at once, and how often one is tried: executors, cores,
    `spark.task.maxFailures`. With `spark.speculation` two attempts may run at once.

    Example:
        >>> workers = SparkWorkers(spark, masters)
        >>> stele.backup.create(client, folder, "flights", workers=workers)
    """

    repeats = True

    def __init__(self, spark: SparkSession | Callable[[], SparkSession], masters: str = "") -> None:
        self._spark = spark
        self._masters = masters

    async def run(self, jobs: Sequence[Job[R]], parallel: int, tell: Tell) -> list[R]:
        """Run the jobs, like `Workers.run`. `parallel` is ignored, because Spark decides how many jobs run at
        once.
        """
        if not jobs:
            return []
        context = await in_thread(self._context)
        stage = _Stage(context, self._masters, list(enumerate(jobs)), tell)
        running = asyncio.ensure_future(in_thread(stage.run))
        try:
            while not running.done():
                await asyncio.wait([running], timeout=_LOOK_S)
                stage.look()
        except BaseException:
            await in_thread(stage.cancel)
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # that it was cancelled
            raise
        return stage.results(running)

    def _context(self) -> Any:
        spark: Any = self._spark() if callable(self._spark) else self._spark
        return spark.sparkContext


class _Stage:
    """One run of jobs as tasks of Spark."""

    def __init__(self, context: Any, masters: str, jobs: list[tuple[int, Job[Any]]], tell: Tell) -> None:
        self._context = context
        self._jobs = jobs
        self._tell = tell
        self._tag = f"stele-{new_id()}"
        self._ended: Accumulator[dict[int, _Ended]] = context.accumulator({}, _Union())
        self._told = set[int]()
        self._task = _Task(masters, _attempts_max(context), self._ended)

    def run(self) -> list[tuple[int, Any]]:
        """Run the tasks and wait for Spark. Called in a thread of its own."""
        self._context.addJobTag(self._tag)
        try:
            tasks = self._context.parallelize(self._jobs, len(self._jobs)).mapPartitions(self._task)
            found: list[tuple[int, Any]] = tasks.collect()
            return found
        finally:
            self._context.removeJobTag(self._tag)

    def look(self) -> None:
        """Tell `tell` of the tasks that have ended. If one ended with an error, cancel the others."""
        for number, ended in list(self._ended.value.items()):
            if number in self._told:
                continue
            self._told.add(number)
            if ended.error is None:
                self._tell(number, Did(ended.rows, ended.bytes, ended=True))
            else:
                threading.Thread(target=self.cancel, name="stele-cancel", daemon=True).start()

    def cancel(self) -> None:
        """Cancel all tasks."""
        self._context.cancelJobsWithTag(self._tag)

    def results(self, running: asyncio.Future[list[tuple[int, Any]]]) -> list[Any]:
        """The results of all jobs, in their order.

        Raises:
            SteleError: the first error of a job. Retryable, if Spark gave up.
        """
        errors = [ended.error for _, ended in sorted(self._ended.value.items()) if ended.error is not None]
        if errors:
            running.exception()  # that the others were cancelled
            raise errors[0].raised()
        try:
            found = dict(running.result())
        except SteleError:
            raise
        except Exception as exc:
            raise Retryable(
                f"Spark gave up after its attempts at a task: {_cause(exc)}; run the same command again",
                code=Code.UNAVAILABLE,
            ) from exc
        self.look()
        return [found[number] for number, _ in self._jobs]


def _attempts_max(context: Any) -> int:
    """How often Spark tries a task. A local master tries once, unless it says otherwise, as in local[2,3]."""
    master = str(context.master)
    if not master.startswith("local") or master.startswith("local-cluster"):
        return int(context.getConf().get(_ATTEMPTS, str(_ATTEMPTS_DEFAULT)))
    _, comma, failures = master.rstrip("]").partition(",")
    return int(failures) if comma else 1


def _cause(exc: Exception) -> str:
    """Spark's reason for an error, in one line."""
    lines = [
        line.strip() for line in str(getattr(exc, "java_exception", None) or exc).splitlines() if line.strip()
    ]
    return lines[0][:500] if lines else type(exc).__name__


@dataclass(frozen=True, slots=True)
class _Error:
    """An error on its way to the driver. A subclass such as RowErrors arrives as its base: Retryable,
    Rejected, Corrupt or InvariantViolation.
    """

    kind: type[SteleError]
    message: str
    code: Code

    @staticmethod
    def of(exc: SteleError) -> _Error:
        kinds = (Retryable, Rejected, Corrupt, InvariantViolation)
        kind = next((kind for kind in kinds if isinstance(exc, kind)), SteleError)
        return _Error(kind, str(exc.args[0]), exc.code)

    def raised(self) -> SteleError:
        return self.kind(self.message, code=self.code)


@dataclass(frozen=True, slots=True)
class _Ended:
    rows: int = 0
    bytes: int = 0
    error: _Error | None = None


class _Union(AccumulatorParam[Any]):
    """A Spark accumulator of task results by job number. Each task counts once."""

    def zero(self, value: dict[int, _Ended]) -> dict[int, _Ended]:
        return {}

    def addInPlace(self, value1: dict[int, _Ended], value2: dict[int, _Ended]) -> dict[int, _Ended]:
        return {**value1, **value2}


class _Task:
    """The function that an executor runs."""

    def __init__(self, masters: str, attempts_max: int, ended: Accumulator[dict[int, _Ended]]) -> None:
        self._masters = masters
        self._attempts_max = attempts_max
        self._ended = ended

    def __call__(self, jobs: Iterable[tuple[int, Job[Any]]]) -> Iterator[tuple[int, Any]]:
        with one_sentence():
            for number, job in jobs:
                yield number, self._run(number, job)

    def _run(self, number: int, job: Job[Any]) -> Any:
        done = _Sum()
        try:
            result = _run(self._masters, job, done.add)
        except SteleError as exc:
            context = TaskContext.get()
            attempt = 0 if context is None else context.attemptNumber()
            if isinstance(exc, Retryable) and attempt + 1 < self._attempts_max:
                raise  # another executor may reach what this one cannot
            self._ended.add({number: _Ended(error=_Error.of(exc))})
            return None
        self._ended.add({number: _Ended(done.rows, done.bytes)})
        return result


class _Sum:
    """The rows and bytes that one attempt has done so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.rows = self.bytes = 0

    def add(self, did: Did) -> None:
        with self._lock:
            self.rows += did.rows
            self.bytes += did.bytes


_own: dict[tuple[int, str], tuple[Client, Bench]] = {}
"""The client of this Python worker, by process id and masters. A worker runs one task at a time."""


def _run(masters: str, job: Job[Any], tell: Callable[[Did], None]) -> Any:
    if not masters:
        return asyncio.run(job.run(Bench(None), tell))
    key = (os.getpid(), masters)
    if key not in _own:
        client = Client(masters, timeout_s=_TIMEOUT_S)
        _own[key] = client, Bench(client.asynchronous)
    client, bench = _own[key]
    return client.run(job.run(bench, tell))
