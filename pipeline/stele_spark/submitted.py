"""Runs a command of `stele backup` as a program whose work is spread over Spark's executors. Called by apps/.

The command, its options, its output and its exit status are those of stele.cli; only the workers that run its
jobs differ. Spark starts once there is a job to run, so errors that can be found before that are reported at
once.
"""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

import click

from stele.cli.app import run
from stele.cli.errors import EXIT_CODES, exit_codes_help
from stele.cli.options import set_workers
from stele.extras import extra
from stele_spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_WITHOUT = frozenset(("parallel",))
"""Options of the commands that are left out, because Spark's settings replace them."""
_LOCAL = "local[*,4]"
"""Where tasks run unless Spark was told otherwise: in this process, on all cores. A task that fails is tried
up to four times.
"""


def main(program: str, command: click.Command, called: str) -> None:
    """Run `program`: the command `command`, with workers of Spark. `called`: the name of the command in its
    help. Always raises SystemExit.
    """
    with extra("spark", program=program):
        import pyspark  # noqa: F401 - else the first job would fail
    run(command=with_spark(program, command, called), program=program)


def with_spark(program: str, command: click.Command, called: str) -> click.Command:
    """The command as a program of its own, with workers of Spark."""
    option = click.Option(
        ["--conf"],
        multiple=True,
        metavar="KEY=VALUE",
        help=f"A setting of Spark, such as spark.master=local[4,3]; several may be given [default: spark.master={_LOCAL}, "
        "or what spark-submit was told].",
    )
    params = [param for param in command.params if param.name not in _WITHOUT]
    body = inspect.cleandoc(str(command.help)).replace(called, program)
    return click.Command(
        program,
        params=[*params, option],
        help=f"{body}\n\nTasks of Spark do the work, one for each tablet.\n\n{exit_codes_help(EXIT_CODES)}",
        callback=_Callback(program, command),
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )


class _Callback:
    """Calls the command with workers of Spark. Stops Spark at the end, if it was started."""

    def __init__(self, program: str, command: click.Command) -> None:
        self._program = program
        self._command = command
        self._conf: dict[str, str] = {}
        self._spark: SparkSession | None = None

    def __call__(self, conf: tuple[str, ...], **arguments: Any) -> Any:
        from stele_spark.workers import SparkWorkers

        for text in conf:
            key, separator, value = text.partition("=")
            if not separator or not key.strip():
                raise click.UsageError(f"--conf {text}: expected KEY=VALUE")
            self._conf[key.strip()] = value
        set_workers(lambda masters: SparkWorkers(self._start, masters))
        left_out = {param.name: param.default for param in self._command.params if param.name in _WITHOUT}
        assert self._command.callback is not None
        try:
            return self._command.callback(**arguments, **left_out)
        finally:
            if self._spark is not None:
                self._spark.stop()

    def _start(self) -> SparkSession:
        if self._spark is None:
            if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit has started Java, and has the settings
                from pyspark.sql import SparkSession

                builder = SparkSession.builder.appName(self._program)
                for key, value in self._conf.items():
                    builder = builder.config(key, value)
                self._spark = builder.getOrCreate()
            else:
                settings: dict[str, Any] = {"spark.master": _LOCAL, **self._conf}
                self._spark = session(self._program, **settings)
            self._spark.sparkContext.setLogLevel("OFF")  # errors are told in one line, by this program
        return self._spark
