"""The command line `stele-operator`. Reads settings, reports a fault in one line, starts app.

Exit codes of `run`: 0 stopped; 2 a setting is wrong; 75 the lease was lost. Exit codes of `plan`: 0 all is
reached; 1 not all is reached; 2 a file or setting is wrong; 75 try again later.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
from typing import TextIO

import click

from stele import __version__
from stele.extras import extra
from stele.first_process import end_when_told
from stele.model.errors import Retryable, SteleError
from stele.model.texts import printable
from stele.rpc.logging import setup

end_when_told()  # the imports below take seconds
with extra("operator", program="stele-operator"):
    from stele_operator.app import Options
    from stele_operator.app import run as run_app
    from stele_operator.kube import BadKubeconfig, Kube, KubeError, configuration
    from stele_operator.plan.foretold import Foretold
    from stele_operator.preview import DEFAULT_IMAGE, FILE_MAX, BadManifest, Wanted, preview, read_manifests

EXIT_NO = 1
EXIT_USAGE = 2
EXIT_TRY_AGAIN = 75


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
    default=DEFAULT_IMAGE,
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


@main.command()
@click.option(
    "-f",
    "--file",
    "file",
    required=True,
    type=click.File("r", encoding="utf-8"),
    help="Manifests of a TabletCluster, of its TabletGroups, or of both; - reads standard input.",
)
@click.option(
    "--namespace", default="", help="Namespace of the cluster. Default: that of the manifests, else default."
)
@click.option(
    "--kubeconfig",
    default="",
    help="The kubeconfig file. Default: the pod's own account, KUBECONFIG, or ~/.kube/config.",
)
@click.option(
    "--masters",
    default="",
    metavar="HOST:PORT,...",
    help="Addresses of masters, where those of their pods cannot be reached.",
)
@click.option(
    "--image",
    default="",
    help="The operator's own --image. Default: the image of the pods that run; if the spec names one now, the default of `run`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(file: TextIO, namespace: str, kubeconfig: str, masters: str, image: str, as_json: bool) -> None:
    """Show what changed manifests would do to a running cluster, before anything happens.

    Nothing is changed. The planners of operator and driver run on a simulated copy of the cluster, and give
    the answer. It says what would be refused, and which pods are made again. It says which nodes come and go,
    which replicas are copied, and what is at risk meanwhile. A field that the file leaves out gets its
    default. Exit code 1 means that something would be refused or not reached, or that a tablet could not be
    used meanwhile.

    Example: stele-operator plan -f new.yaml
    """
    try:
        wanted = read_manifests(file.read(FILE_MAX + 1), file.name, namespace)
        addresses = [part.strip() for part in masters.split(",") if part.strip()]
        told = asyncio.run(_preview(wanted, kubeconfig, image, addresses))
    except BadManifest as exc:
        for fault in exc.faults:
            click.echo(f"stele-operator: {printable(f'{file.name}: {fault}')}", err=True)
        sys.exit(EXIT_USAGE)
    except UnicodeDecodeError:
        click.echo(f"stele-operator: {printable(file.name)}: it is not text in UTF-8", err=True)
        sys.exit(EXIT_USAGE)
    except (BadKubeconfig, KubeError, SteleError) as exc:
        click.echo(f"stele-operator: {printable(str(exc.args[0] if exc.args else exc))}", err=True)
        again = isinstance(exc, Retryable) or (isinstance(exc, KubeError) and not exc.status)
        sys.exit(EXIT_TRY_AGAIN if again else EXIT_USAGE)
    if as_json:
        click.echo(json.dumps(told.as_json(), indent=2))
    else:
        for line in told.lines():
            click.echo(printable(line))
    sys.exit(0 if told.fine else EXIT_NO)


async def _preview(wanted: Wanted, kubeconfig: str, image: str, masters: list[str]) -> Foretold:
    kube = Kube(await configuration(kubeconfig))
    try:
        return await preview(kube, wanted, image, masters)
    finally:
        await kube.close()


if __name__ == "__main__":
    main()
