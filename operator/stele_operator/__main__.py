"""The command line `stele-operator`. Reads settings, reports a fault in one line, starts app.

Exit codes: 0 stopped, 2 a wrong setting, 75 the lease was lost.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys

import click

from stele import __version__
from stele.extras import extra
from stele.model.errors import SteleError
from stele.rpc.logging import setup

with extra("operator", program="stele-operator"):
    from stele_operator.app import Options
    from stele_operator.app import run as run_app
    from stele_operator.kube import BadKubeconfig, KubeError

EXIT_USAGE = 2


def _identity() -> str:
    # Two containers cannot have the same pod name at once, so a restarted one need not wait for the lease.
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


@click.group(context_settings={"auto_envvar_prefix": "STELE_OPERATOR", "help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="stele-operator")
def main() -> None:
    """The controller of TabletClusters and TabletGroups."""


@main.command()
@click.option(
    "--kubeconfig",
    default="",
    help="The kubeconfig file. Default: the pod's own account, KUBECONFIG, or ~/.kube/config.",
)
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    help="Namespace to serve; may be given several times. Default: all.",
)
@click.option(
    "--image",
    default=f"stele/node:{__version__}",
    show_default=True,
    help="Image of masters and nodes if a TabletCluster names none.",
)
@click.option(
    "--metrics-host",
    default="0.0.0.0",
    show_default=True,
    help="Address for /metrics, /livez and /readyz; empty: all addresses, IPv6 included.",
)
@click.option(
    "--metrics-port",
    default=8080,
    show_default=True,
    help="Port for /metrics, /livez and /readyz; 0: any free port.",
)
@click.option(
    "--lease-namespace", default="", help="Namespace of the Lease. Default: the operator's own namespace."
)
@click.option(
    "--identity",
    default="",
    help="Name of this process in the Lease. Default: POD_NAME, or host and process id. A restart with the same name need not wait.",
)
@click.option(
    "--log-level",
    default="info",
    type=click.Choice(["debug", "info", "warning", "error"]),
    show_default=True,
    help="What to log.",
)
def run(
    kubeconfig: str,
    namespaces: tuple[str, ...],
    image: str,
    metrics_host: str,
    metrics_port: int,
    lease_namespace: str,
    identity: str,
    log_level: str,
) -> None:
    """Run the operator until SIGTERM."""
    setup(level=log_level)
    options = Options(
        image=image,
        identity=identity or _identity(),
        kubeconfig=kubeconfig,
        namespaces=namespaces,
        lease_namespace=lease_namespace,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
    )
    try:
        asyncio.run(run_app(options))
    except (BadKubeconfig, KubeError, SteleError) as exc:
        message = exc.args[0] if exc.args else str(exc)
        print(f"stele-operator: {message}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
