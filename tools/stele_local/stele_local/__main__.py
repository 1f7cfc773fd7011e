"""The command `stele-local`: starts, controls and stops a one-machine Kubernetes. The module `cluster` does
the work.

Only `run` imports that module, because the import takes a second of processor time. No other command should
wait for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from stele import __version__
from stele.extras import extra
from stele_local import processes
from stele_local.copies import original_of
from stele_local.folder import FolderTaken, as_called, kept, owner_of, wipe

with extra("local", program="stele-local", install="./tools/stele_local"):
    for _needed in ("aiohttp", "celpy"):
        if importlib.util.find_spec(_needed) is None:
            raise ModuleNotFoundError(name=_needed)

Json = dict[str, Any]
START_SECONDS = 120.0  # a command that ends is seen at once; this only bounds one that hangs
STOP_SECONDS = 15.0
_EXAMPLES = """\b
Examples:
  eval "$(stele-local up)"              start a cluster, or find the running one; point kubectl at it
  kubectl apply -f crds
  stele-local operator                  run Stele's operator beside it
  stele-local exec python first.py      run a program that can resolve the cluster's names
  stele-local off n4                    power failure of a machine; then: on n4, or wipe n4
  stele-local down                      stop all; `up` brings the cluster back with its data
  stele-local down --wipe               stop all and remove the data
"""


class _Folder(click.Path):
    """The path of a folder. Refuses an empty text, such as that of an unset shell variable: it would mean the
    current folder.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value).strip():
            self.fail("it is empty; give the path of a folder, or leave --folder out", param, ctx)
        return super().convert(value, param, ctx)


class _Program(click.Group):
    """The group of commands. It turns errors of disks and paths into one line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for_eval = any(isinstance(self.commands.get(word), _ForEval) for word in args)
        with _failing_eval(ctx) if for_eval else contextlib.nullcontext():
            return super().parse_args(ctx, args)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError:
            raise
        except click.NoSuchOption as error:
            if error.option_name != "--folder" or error.ctx is None:
                raise
            raise click.UsageError(
                f"--folder stands before the command: `stele-local --folder FOLDER {error.ctx.info_name}`",
                error.ctx,
            ) from error
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(f"{where}{error.strerror}: give another --folder") from error


class _ForEval(click.Command):
    """A command whose output a shell evaluates. If the command fails, `eval` fails too, so that no kubectl
    reaches another cluster.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _failing_eval(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, context: click.Context) -> Any:
        with _failing_eval(context):
            return super().invoke(context)


@contextlib.contextmanager
def _failing_eval(context: click.Context) -> Iterator[None]:
    """Print text after an error that makes the shell's `eval` fail."""
    try:
        yield
    except (click.ClickException, OSError):
        if not sys.stdout.isatty():
            click.echo(f"{_export(context.obj)}; false" if context.obj is not None else "false")
        raise


def _export(folder: Path) -> str:
    return f"export KUBECONFIG={shlex.quote(str(folder / 'kubeconfig'))}"


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
            f"the cluster in {folder} does not answer ({error}); `{as_called(folder)} down` ends it and "
            f"keeps its data"
        ) from error


@click.group(
    cls=_Program,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=_EXAMPLES,
)
@click.version_option(__version__, prog_name="stele-local")
@click.option(
    "--folder",
    type=_Folder(path_type=Path),
    envvar="STELE_LOCAL_DIR",
    default=Path.home() / ".cache" / "stele-local",
    help="The folder of the cluster (environment: STELE_LOCAL_DIR).",
)
@click.pass_context
def main(context: click.Context, folder: Path) -> None:
    """A one-machine Kubernetes for Stele's demo and quick tests."""
    context.obj = folder.expanduser().resolve()


def _settings(function: Any) -> Any:
    function = click.option(
        "--machines", type=click.IntRange(1, 50), help="Number of machines; default: as before, else 5."
    )(function)
    function = click.option(
        "--zones", type=click.IntRange(1, 10), help="Number of zones for them; default: as before, else 3."
    )(function)
    return click.option(
        "--node-grace",
        default=4.0,
        show_default=True,
        help="Seconds without a report until a machine is NotReady.",
    )(function)


@main.command()
@_settings
@click.pass_obj
def run(folder: Path, machines: int | None, zones: int | None, node_grace: float) -> None:
    """Run the cluster in the foreground, until Ctrl-C."""
    with extra("local", program="stele-local", install="./tools/stele_local"):
        import asyncio

        from stele_local.cluster import LocalCluster, OtherSettings, Settings
        from stele_local.keeper import StateUnreadable

    async def until_stopped() -> None:
        settings = Settings(machines=machines, zones=zones, node_grace_seconds=node_grace)
        async with LocalCluster(folder, settings) as cluster:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, cluster.stopped.set)
            click.echo(_export(folder))
            await cluster.stopped.wait()

    try:
        asyncio.run(until_stopped())
    except (FolderTaken, OtherSettings, StateUnreadable) as error:
        raise click.ClickException(str(error)) from error


@main.command(cls=_ForEval)
@_settings
@click.option(
    "--wait",
    "patience_s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Seconds to wait until the pods that were ready before are ready again.",
)
@click.pass_obj
def up(folder: Path, machines: int | None, zones: int | None, node_grace: float, patience_s: float) -> None:
    """Start the cluster in the background, as it was before. Print the line that points kubectl at it.

    If the cluster runs already, only the line is printed again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "stele_local", "--folder", str(folder), "run"]
    command += ["--node-grace", str(node_grace)]
    for word, value in (("--machines", machines), ("--zones", zones)):
        command += [word, str(value)] if value is not None else []
    runs = owner_of(folder) is not None
    original = None if runs else original_of(folder)
    process: subprocess.Popen[bytes] | None = None
    try:
        process = None if runs else _background(command, folder)
        _await_access(folder, process)
        returning = [] if runs else _await_pods(folder, patience_s)
    except BaseException as error:
        if process is not None:
            _abandon(process)
        if isinstance(error, KeyboardInterrupt):
            goes_on = f"; the cluster in {folder} continues to run: `{as_called(folder)} down` stops it"
            raise click.ClickException(f"interrupted{goes_on if runs else '; nothing was started'}") from None
        raise
    if runs:
        click.echo(f"the cluster in {folder} is running already", err=True)
    if original is not None:
        click.echo(
            f"{folder} is a copy of {original}: its cluster starts as one of its own, with the same tables. If the original "
            f"ran while it was copied, a volume may be refused: then copy it again after `{as_called(original)} down`",
            err=True,
        )
    if returning:
        click.echo(
            f"after {patience_s:g} s not ready again: {', '.join(returning)}; `kubectl describe pod {returning[0]}` says why",
            err=True,
        )
    click.echo(_export(folder))


def _await_pods(folder: Path, patience_s: float) -> list[str]:
    """Wait until the pods that ran before are ready again, so that programs can use the cluster at once.
    Returns the names of pods that are still not ready after `patience_s` seconds.
    """
    until = time.monotonic() + patience_s
    while (returning := _control(folder, "status")["returning"]) and time.monotonic() < until:
        time.sleep(0.1)
    return list(returning)


def _background(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with open(folder / "stele-local.log", "ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def _await_access(folder: Path, process: subprocess.Popen[bytes] | None) -> None:
    """Wait until the folder's cluster has published its address. The cluster is run by `process`, or by
    another process that was faster.
    """
    until = time.monotonic() + START_SECONDS
    while not _answers_for(folder):
        ended = process is not None and process.poll() is not None and owner_of(folder) is None
        if ended or time.monotonic() > until:
            log = folder / "stele-local.log"
            told = log.read_text(errors="replace").strip().splitlines()[-1:] if ended else []
            why = told[0].removeprefix("Error: ") if told else f"no answer within {START_SECONDS:g} s"
            raise click.ClickException(f"the cluster did not start: {why} (its log: {log})")
        time.sleep(0.05)


def _answers_for(folder: Path) -> bool:
    """Whether the access file was written by the process that owns the folder now."""
    try:
        pid = json.loads((folder / "cluster.json").read_text())["pid"]
    except FileNotFoundError:
        return False
    return bool(pid == owner_of(folder))


def _abandon(process: subprocess.Popen[bytes]) -> None:
    """End the cluster that this command began to start."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@main.command()
@click.option("--wipe", "wiped", is_flag=True, help="Remove the cluster too: its objects, volumes and logs.")
@click.pass_obj
def down(folder: Path, wiped: bool) -> None:
    """Stop the cluster and all its processes, even after the cluster itself was killed. `up` brings it back,
    with its data.
    """
    path = folder / "cluster.json"
    was_there = path.exists()
    if (owner := owner_of(folder)) is not None:
        was_there = True
        _end(folder, owner)
    path.unlink(missing_ok=True)
    left = processes.sweep(folder)
    over = f", {left} leftover processes were killed" if left else ""
    told = f"down{over}" if was_there or left else f"no cluster runs in {folder}"
    used = kept(folder)
    if wiped:
        try:
            wipe(folder)
        except FolderTaken as error:
            raise click.ClickException(str(error)) from error
    if used is None:
        click.echo(told)
    elif wiped:
        click.echo(f"{told}; its data were removed: {used / 1e6:,.0f} MB")
    else:
        command = as_called(folder)
        click.echo(
            f"{told}; its data stay ({used / 1e6:,.0f} MB): `{command} up` brings it back, `{command} down "
            f"--wipe` removes them"
        )


def _end(folder: Path, pid: int) -> None:
    """End the cluster of the folder and its process, even if the process hangs or has not published its
    address yet.
    """
    with contextlib.suppress(click.ClickException):
        _control(folder, "down")
        _gone(folder, pid)
    if pid and owner_of(folder) == pid:
        os.kill(pid, signal.SIGKILL)
        _gone(folder, pid)


def _gone(folder: Path, pid: int) -> None:
    """Wait for the process to end, but not for ever."""
    until = time.monotonic() + STOP_SECONDS
    while (owner_of(folder) == pid or Path(f"/proc/{pid}").exists()) and time.monotonic() < until:
        time.sleep(0.05)


@main.command()
@click.pass_obj
def status(folder: Path) -> None:
    """Show machines, their nodes and pods, and the operator."""
    told = _control(folder, "status")
    for row in told["machines"]:
        power, ready = "on" if row["on"] else "off", "Ready" if row["node_ready"] else "NotReady"
        click.echo(f"{row['name']:4} {row['zone']:4} {power:4} {ready:9} {' '.join(row['pods'])}")
    _show_operator(told)


def _show_operator(told: Json) -> None:
    if operator := told.get("operator"):
        click.echo(f"operator {operator['state']}, restarts: {operator['restarts']}, log: {operator['log']}")
    else:
        click.echo("no operator: `stele-local operator` runs one")


@main.command()
@click.option("--stop", is_flag=True, help="Stop the operator instead.")
@click.pass_obj
def operator(folder: Path, stop: bool) -> None:
    """Run Stele's operator beside the cluster. If it ends, it is started again, as by a Deployment."""
    _show_operator(_control(folder, "operator", *(["stop"] if stop else [])))


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


@main.command(cls=_ForEval)
@click.pass_obj
def env(folder: Path) -> None:
    """Print the line that points kubectl at the cluster."""
    _access(folder)
    click.echo(_export(folder))


@main.command("exec", context_settings={"allow_interspersed_args": False})
@click.option("--namespace", default="default", show_default=True, help="Namespace for short names.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@click.pass_obj
def exec_(folder: Path, namespace: str, command: tuple[str, ...]) -> None:
    """Run COMMAND with the cluster's DNS names and KUBECONFIG. Only Python programs see the names.

    Everything after COMMAND belongs to it, including options: `stele-local exec stele table --help`.
    """
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
