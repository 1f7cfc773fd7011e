"""Pods of a one-machine Kubernetes in a test's own process: their `stele` is forked from the template, others are started.

A forked process has no marks of its cluster in what the kernel shows of its environment. Its container ends it, and so does
the end of the template.
"""

from __future__ import annotations

from stele_local.container import Process, Program, start_process
from tests.harness.template import template


def start_forked(program: Program, output: int) -> Process:
    """For `stele_local.cluster.Settings.start`."""
    name, *arguments = program.command
    if name != "stele":
        return start_process(program, output)
    return template().start(arguments, program.environment, output, folder=program.folder)
