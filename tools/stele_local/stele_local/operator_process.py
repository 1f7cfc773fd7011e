"""Runs Stele's operator beside the cluster. If it ends, it is started again with back-off, as by a
Deployment.

Owns: that process. Invariant: the operator runs on no machine, so `off` never ends it; it ends with the
cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from stele_local.container import Backoff, Container, Program, base_environment, start_process

Json = dict[str, Any]
log = structlog.get_logger("stele_local.operator")
_GRACE_SECONDS = 5.0
_NAME = "operator"


class OperatorProcess:
    """The process `stele-operator run`, for all namespaces. `environment` returns the variables that mark a
    process as part of the cluster.
    """

    def __init__(
        self, kubeconfig: Path, folder: Path, environment: Callable[[], dict[str, str]], backoff: Backoff
    ) -> None:
        self._environment, self._home = environment, folder
        # The lease knows it by one name, so that a restarted one need not wait for the lease to end.
        self._command = [
            *("stele-operator", "run", "--kubeconfig", str(kubeconfig)),
            *("--metrics-host", "127.0.0.1", "--metrics-port", "0", "--identity", "stele-local"),
        ]
        self._container = Container(
            spec={"name": _NAME, "terminationMessagePolicy": "File"},
            prepare=self._program,
            address="127.0.0.1",
            logs=folder,
            restart_policy="Always",
            grace_seconds=_GRACE_SECONDS,
            backoff=backoff,
            start=start_process,
            restarts=0,
            tell=self._tell,
            on_change=lambda: None,
        )
        self._task = asyncio.create_task(self._container.run(), name=_NAME)

    def status(self) -> Json:
        """The operator's state in the words of a container's, its restarts, and the path of its log."""
        status = self._container.status()
        return {
            "state": next(iter(status["state"])),
            "restarts": status["restartCount"],
            "log": str(self._container.log_path()),
        }

    async def stop(self) -> None:
        """Send SIGTERM, so that the operator releases its lease; after some seconds send SIGKILL. Returns
        when it is gone.
        """
        self._container.stop(_GRACE_SECONDS)
        await asyncio.wait({self._task})

    def _program(self) -> Program:
        self._home.mkdir(parents=True, exist_ok=True)
        return Program(self._command, base_environment(self._environment()), self._home)

    def _tell(self, type_: str, reason: str, message: str) -> None:
        log.info(reason, message=message)
