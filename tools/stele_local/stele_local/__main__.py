"""The command `stele-local`: starts, controls and stops a one-machine Kubernetes. `cluster` does the work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click

from stele.extras import extra

with extra("local", program="stele-local", install="./tools/stele_local"):
    from stele_local import processes
    from stele_local.cluster import FolderTaken, LocalCluster, Settings, as_called, owner_of

Json = dict[str, Any]
START_SECONDS = 20.0
STOP_SECONDS = 15.0


def _access(folder: Path) -> Json:
    try:
        access: Json = json.loads((folder / "cluster.json").read_text())
        return access
    except FileNotFoundError:
        raise click.ClickException(
            f"no cluster runs in {folder}; start one with `{as_called(folder)} up`"
        ) from None


def _control(folder: Path, *words: str) -> Json:
    access = _access(folder)
    request = urllib.request.Request(
        f"{access['url']}/stele-local/{'/'.join(words)}",
        method="POST",
        headers={"Authorization": f"Bearer {access['token']}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=STOP_SECONDS) as answer:
            told: Json = json.load(answer)
            return told
    except urllib.error.HTTPError as error:
        raise click.ClickException(json.load(error)["message"]) from error
    except OSError as error:
        raise click.ClickException(
            f"the cluster in {folder} does not answer ({error}); end it with `{as_called(folder)} down`"
        ) from error


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    envvar="STELE_LOCAL_DIR",
    default=Path.home() / ".cache" / "stele-local",
    help="The folder of the cluster (environment: STELE_LOCAL_DIR).",
)
@click.pass_context
def main(context: click.Context, folder: Path) -> None:
    """A one-machine Kubernetes for Stele's demo and quick tests."""
    context.obj = folder.expanduser().resolve()


def _settings(function: Any) -> Any:
    function = click.option("--machines", default=5, show_default=True, type=click.IntRange(1, 50))(function)
    function = click.option("--zones", default=3, show_default=True, type=click.IntRange(1, 10))(function)
    return click.option(
        "--node-grace",
        default=4.0,
        show_default=True,
        help="Seconds without a report until a machine is NotReady.",
    )(function)


@main.command()
@_settings
@click.pass_obj
def run(folder: Path, machines: int, zones: int, node_grace: float) -> None:
    """Run the cluster here, until Ctrl-C."""
    settings = Settings(machines=machines, zones=zones, node_grace_seconds=node_grace)
    try:
        asyncio.run(_run(folder, settings))
    except FolderTaken as error:
        raise click.ClickException(str(error)) from error


async def _run(folder: Path, settings: Settings) -> None:
    async with LocalCluster(folder, settings) as cluster:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, cluster.stopped.set)
        click.echo(f"export KUBECONFIG={cluster.kubeconfig}")
        await cluster.stopped.wait()


@main.command()
@_settings
@click.pass_obj
def up(folder: Path, machines: int, zones: int, node_grace: float) -> None:
    """Start the cluster in the background; print the line that points kubectl at it."""
    folder.mkdir(parents=True, exist_ok=True)
    if owner_of(folder) is not None:
        raise click.ClickException(
            f"a cluster runs in {folder} already; run `{as_called(folder)} down` first, or give another --folder"
        )
    (folder / "cluster.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "stele_local", "--folder", str(folder), "run"]
    command += ["--machines", str(machines), "--zones", str(zones), "--node-grace", str(node_grace)]
    with open(folder / "stele-local.log", "ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    until = time.monotonic() + START_SECONDS
    while not (folder / "cluster.json").exists():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            raise click.ClickException(f"the cluster did not start; see {folder / 'stele-local.log'}")
        time.sleep(0.05)
    click.echo(f"export KUBECONFIG={folder / 'kubeconfig'}")


@main.command()
@click.pass_obj
def down(folder: Path) -> None:
    """Stop the cluster and all its processes, also after it was killed."""
    path = folder / "cluster.json"
    was_there = path.exists()
    if (owner := owner_of(folder)) is not None:
        was_there = True
        _end(folder, owner)
    path.unlink(missing_ok=True)
    left = processes.sweep(folder)
    over = f", {left} leftover processes were killed" if left else ""
    click.echo(f"down{over}" if was_there or left else f"no cluster runs in {folder}")


def _end(folder: Path, pid: int) -> None:
    """Ends the cluster of the folder and its process, also if the process hangs or has not yet published
    its address."""
    with contextlib.suppress(click.ClickException):
        _control(folder, "down")
        _gone(folder, pid)
    if pid and owner_of(folder) == pid:
        os.kill(pid, signal.SIGKILL)
        _gone(folder, pid)


def _gone(folder: Path, pid: int) -> None:
    """Waits a while for the process to end."""
    until = time.monotonic() + STOP_SECONDS
    while (owner_of(folder) == pid or Path(f"/proc/{pid}").exists()) and time.monotonic() < until:
        time.sleep(0.05)


@main.command()
@click.pass_obj
def status(folder: Path) -> None:
    """Show machines, their nodes and pods."""
    for row in _control(folder, "status")["machines"]:
        power, ready = "on" if row["on"] else "off", "Ready" if row["node_ready"] else "NotReady"
        click.echo(f"{row['name']:4} {row['zone']:4} {power:4} {ready:9} {' '.join(row['pods'])}")


def _machine_command(verb: str, text: str, done: str) -> None:
    @main.command(verb, help=text)
    @click.argument("machine")
    @click.pass_obj
    def command(folder: Path, machine: str) -> None:
        _control(folder, verb, machine)
        click.echo(f"machine {machine} {done}")


_machine_command(
    "off", "Switch a machine off: all its processes are killed.", "is off: its processes were killed"
)
_machine_command(
    "on", "Switch a machine on again, with its old disks.", "is on: its remaining pods start again"
)
_machine_command("wipe", "Empty the disks of a machine that is off.", "has lost its disks")


@main.command()
@click.pass_obj
def env(folder: Path) -> None:
    """Print the line that points kubectl at the cluster."""
    _access(folder)
    click.echo(f"export KUBECONFIG={folder / 'kubeconfig'}")


@main.command("exec", context_settings={"ignore_unknown_options": True})
@click.option("--namespace", default="default", show_default=True, help="Namespace for short names.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@click.pass_obj
def exec_(folder: Path, namespace: str, command: tuple[str, ...]) -> None:
    """Run COMMAND with the cluster's DNS names and KUBECONFIG. Only Python programs see the names."""
    _access(folder)
    names = {"STELE_LOCAL_HOSTS": str(folder / "hosts.json"), "STELE_LOCAL_NAMESPACE": namespace}
    shim = Path(__file__).parent / "names"
    path = os.pathsep.join(part for part in (str(shim), os.environ.get("PYTHONPATH", "")) if part)
    variables = {**os.environ, **names, "PYTHONPATH": path, "KUBECONFIG": str(folder / "kubeconfig")}
    try:
        os.execvpe(command[0], list(command), variables)
    except OSError as error:
        raise click.ClickException(f"{command[0]}: {error.strerror}") from error


if __name__ == "__main__":
    main()
