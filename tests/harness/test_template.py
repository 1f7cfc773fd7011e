"""What is forked from the template is a process as any other, for its test and for itself; and nothing is left of either."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.commands import outcome
from tests.harness.processes import Cluster, Member
from tests.harness.template import Forked, Template, operator_template, template

ROOT = Path(__file__).parents[2]
WITHIN_S = 120.0


def start(
    *arguments: str, output: Path, folder: Path, environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Exit code and output of `stele` with these arguments."""
    with output.open("wb") as out, folder.joinpath("claim").open("wb") as claim:
        process = template().start(
            list(arguments), environment or dict(os.environ), out.fileno(), claim.fileno(), None
        )
    assert process.wait(WITHIN_S) == process.poll() == process.returncode
    return process.returncode, output.read_text()


def test_its_exit_code_output_and_environment_are_its_own(tmp_path: Path) -> None:
    output = tmp_path / "output"
    code, said = start("--version", output=output, folder=tmp_path)
    assert code == 0 and said.startswith("stele, version "), said
    code, said = start("foo", output=output, folder=tmp_path)
    assert (code, said) == (2, "stele: No such command 'foo'; see `stele --help`\n")
    told = {**os.environ, "STELE_MASTERS": "127.0.0.1:x"}
    code, said = start("ksck", output=output, folder=tmp_path, environment=told)
    assert code == 2 and "127.0.0.1:x" in said and len(said.splitlines()) == 1, said
    assert "STELE_MASTERS" not in os.environ


def test_the_operator_has_a_template_of_its_own(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with output.open("wb") as out:
        arguments = ["run", "--kubeconfig", str(tmp_path / "none")]
        process = operator_template().start(arguments, dict(os.environ), out.fileno())
    assert process.wait(WITHIN_S) == 2
    assert output.read_text().startswith("stele-operator: kubeconfig "), output.read_text()


async def test_its_errors_go_elsewhere_if_that_is_asked_for(tmp_path: Path) -> None:
    code, output, errors = await outcome(template(), ["foo"], dict(os.environ))
    assert (code, output, errors) == (2, "", "stele: No such command 'foo'; see `stele --help`\n")
    code, output, errors = await outcome(template(), ["--version"], dict(os.environ))
    assert code == 0 and output.startswith("stele, version ") and not errors


def test_it_runs_in_a_folder_of_its_own_and_imports_what_its_path_says(tmp_path: Path) -> None:
    """As a pod of stele_local, which resolves the names of its cluster by a module on its path."""
    added, output = tmp_path / "added", tmp_path / "output"
    added.mkdir()
    (added / "sitecustomize.py").write_text("import os\nprint(os.getcwd(), flush=True)\n")
    with output.open("wb") as out:
        environment = {**os.environ, "PYTHONPATH": str(added)}
        process = template().start(["--version"], environment, out.fileno(), folder=tmp_path)
    assert os.getsid(process.pid) == process.pid, "its group can be killed at once"
    assert process.wait(WITHIN_S) == 0
    where, said = output.read_text().splitlines()
    assert Path(where).samefile(tmp_path) and said.startswith("stele, version ")


def test_a_node_has_a_session_a_group_and_chance_of_its_own_and_ends_by_signals(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, masters=2, nodes=0, groups=os.geteuid() == 0)
    tmp_path.mkdir(exist_ok=True)
    try:
        for master in cluster.masters:
            cluster.launch(master, "--first-masters", f"{master.node_id}={master.address}")
        for master in cluster.masters:
            process = process_of(master)
            assert process.poll() is None and os.getsid(process.pid) == process.pid
            if master.group is not None:
                assert f"Gid:\t{master.group}\t" in Path(f"/proc/{process.pid}/status").read_text()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0)
            listens(cluster, master)
        first, second = map(process_of, cluster.masters)
        first.send_signal(signal.SIGTERM)
        assert first.wait(WITHIN_S) == 0, cluster.masters[0].tail()
        second.send_signal(signal.SIGKILL)
        assert second.wait(WITHIN_S) == -signal.SIGKILL
        second.send_signal(signal.SIGTERM)  # to nobody
    finally:
        cluster.kill_all()


def process_of(member: Member) -> Forked:
    assert isinstance(member.process, Forked)
    return member.process


def listens(cluster: Cluster, member: Member) -> None:
    """Wait until it has begun: before, a signal ends any process."""
    until = time.monotonic() + WITHIN_S
    while "event" not in member.tail():
        assert cluster.named(member) and member.running and time.monotonic() < until, member.tail()
        time.sleep(0.05)


_MAKES_ONE = """
import os, sys, time
from tests.harness.template import template
with open(os.devnull, "wb") as null:
    made = template().start(["kv", "elect", "s", "n", "--masters", "127.0.0.1:1", "--timeout", "600"], dict(os.environ), null.fileno(), null.fileno(), None)
print(template()._process.pid, made.pid, flush=True)
time.sleep(600)
"""


def test_none_outlives_the_process_that_made_the_template() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, "-c", _MAKES_ONE], stdout=subprocess.PIPE, text=True, env=environment
    ) as maker:
        assert maker.stdout is not None
        pids = [int(word) for word in maker.stdout.readline().split()]
        assert len(pids) == 2 and all(map(lives, pids))
        maker.kill()
    until = time.monotonic() + WITHIN_S
    while any(map(lives, pids)):
        assert time.monotonic() < until, f"one of {pids} is left"
        time.sleep(0.05)


def lives(pid: int) -> bool:
    """And is no zombie, as those whose parent has gone may be for a time."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_a_template_that_has_ended_is_told() -> None:
    made = Template()
    made._process.kill()
    with pytest.raises(RuntimeError, match="the template of processes ended with -9"):
        made.start([], {}, 1, 1, None)
