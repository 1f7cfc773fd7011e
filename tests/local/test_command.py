"""`stele-local` from a shell: up, down, Ctrl-C, kill -9; no process is left behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from stele_local import __main__ as stele_local
from stele_local import processes
from stele_local.controllers import is_ready
from stele_local.folder import owner_of
from tests.local.conftest import SERVE, pod

WAIT_SECONDS = 60.0


def _run(folder: Path, *words: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "stele_local", "--folder", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def _until(holds: Any, what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"waited {WAIT_SECONDS:g} s: {what}"
        time.sleep(0.05)


def _create_pod(folder: Path, body: Any) -> None:
    access = json.loads((folder / "cluster.json").read_text())
    request = urllib.request.Request(
        f"{access['url']}/api/v1/namespaces/default/pods",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {access['token']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
        assert answer.status == 201


def _ready(folder: Path) -> list[str]:
    access = json.loads((folder / "cluster.json").read_text())
    request = urllib.request.Request(
        f"{access['url']}/api/v1/namespaces/default/pods",
        headers={"Authorization": f"Bearer {access['token']}"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
        return [body["metadata"]["name"] for body in json.load(answer)["items"] if is_ready(body)]


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    yield tmp_path
    _run(tmp_path, "down")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # a zombie has none
    except OSError:
        return False


def _owner(folder: Path) -> int:
    return int(json.loads((folder / "cluster.json").read_text())["pid"])


def test_up_status_off_on_exec_down(folder: Path) -> None:
    assert f"stele-local --folder {folder} up" in _run(folder, "status", code=1)
    assert _run(folder, "down") == f"no cluster runs in {folder}\n"
    assert _run(folder, "up", "--machines", "2").startswith("export KUBECONFIG=")
    told = _run(folder, "up")
    assert "is running already" in told and told.startswith(f"export KUBECONFIG={folder}/kubeconfig\n")
    assert "there is no machine n7; the machines are n1, n2" in _run(folder, "on", "n7", code=1)
    _create_pod(folder, pod("a"))
    _until(lambda: len(processes.left_over(folder)) == 1, "the pod runs")
    assert _run(folder, "off", "n1") == "machine n1 is off: its processes were killed\n"
    _until(lambda: "n1   z1   off" in _run(folder, "status"), "n1 is off")
    told = _run(folder, "wipe", "n2", code=1)
    assert f"machine n2 is on; switch it off first with `stele-local --folder {folder} off n2`" in told
    assert (
        _run(folder, "exec", "--", sys.executable, "-c", "import os; print(os.environ['KUBECONFIG'])")
        .strip()
        .endswith("kubeconfig")
    )
    told = _run(folder, "exec", sys.executable, "-m", "stele.cli", "table", "list", "--help")
    assert "List tables and key spaces" in told and "COMMAND" not in told
    assert "Everything after COMMAND" in _run(folder, "exec", "--help")
    assert "No such option" in _run(folder, "exec", "--what", "stele", code=2)
    owner = _owner(folder)
    assert _run(folder, "down").startswith("down")
    assert processes.left_over(folder) == [] and not _lives(owner)


def test_up_waits_until_the_pods_of_before_are_ready_again(folder: Path) -> None:
    """A program that runs right after `up` finds its cluster: on a busy machine no name of it resolved yet."""
    _run(folder, "up", "--machines", "2")
    slow = ["sh", "-c", 'sleep 3; exec "$@"', "sh", "python", "-c", SERVE, "/data"]
    _create_pod(folder, pod("slow", *slow))
    _create_pod(folder, pod("never", "sleep", "1000"))
    _until(lambda: _ready(folder) == ["slow"], "one pod is ready")
    _run(folder, "down")
    _run(folder, "up")
    assert _ready(folder) == ["slow"], "it is ready again at once; nobody waited for the one that never was"
    _run(folder, "down")
    assert "after 0.5 s not ready again: slow; `kubectl describe pod slow`" in _run(
        folder, "up", "--wait", "0.5"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_cluster(
    folder: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(folder, "up", "--machines", "1")
    _create_pod(folder, pod("a"))
    _until(lambda: len(processes.left_over(folder)) == 1, "the pod runs")
    os.kill(_owner(folder), number)
    _until(lambda: not processes.left_over(folder), "its processes are gone")
    cleared = f"no cluster runs in {folder}" if number == signal.SIGINT else "down"
    _until(lambda: not (folder / "cluster.json").exists() or number == signal.SIGKILL, "it has cleared up")
    assert _run(folder, "down").startswith(f"{cleared}; its data stay (")
    _run(folder, "up")
    hangs = _owner(folder)
    os.kill(hangs, signal.SIGSTOP)
    if number == signal.SIGINT:  # while it starts nobody is told yet where it listens
        (folder / "cluster.json").unlink()
    monkeypatch.setattr(stele_local, "STOP_SECONDS", 0.5)
    done = CliRunner().invoke(stele_local.main, ["--folder", str(folder), "down"])
    assert done.exit_code == 0 and done.output.startswith("down; its data stay (")
    assert not _lives(hangs) and f"no cluster runs in {folder}; its data" in _run(folder, "down", "--wipe")
    assert list(folder.iterdir()) == [], "a lock was left"
    assert _run(folder, "down") == f"no cluster runs in {folder}\n"
    assert list(folder.iterdir()) == []


def test_down_ends_grandchildren_of_a_killed_cluster(folder: Path) -> None:
    """They do not die with their parent's parent: only the mark in their environment finds them."""
    stray = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); time.sleep(600)"
    _run(folder, "up", "--machines", "1")
    _create_pod(folder, pod("a", "python", "-c", stray, container={"readinessProbe": None}))
    _until(lambda: len(processes.left_over(folder)) == 2, "both run")
    os.kill(_owner(folder), signal.SIGKILL)
    _until(lambda: len(processes.left_over(folder)) == 1, "the stray is left")
    assert "1 leftover processes were killed" in _run(folder, "down")
    assert processes.left_over(folder) == []


def test_a_folder_has_one_cluster_at_a_time(folder: Path) -> None:
    """Else the second would end the first one's processes as what an earlier owner left behind. However it was started."""
    started = "import runpy; runpy.run_module('stele' + '_local', run_name='__main__')"
    command = [sys.executable, "-c", started, "--folder", str(folder), "run", "--machines", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as first:
        _until((folder / "cluster.json").exists, "it is up")
        _create_pod(folder, pod("a"))
        _until(lambda: len(processes.left_over(folder)) == 1, "the pod runs")
        before = processes.left_over(folder)
        assert "a cluster runs in" in _run(folder, "run", code=1)
        assert "running already" in _run(folder, "up")
        assert processes.left_over(folder) == before and _owner(folder) == first.pid
        first.send_signal(signal.SIGHUP)  # its terminal was closed
        assert first.wait(WAIT_SECONDS) == 0 and processes.left_over(folder) == []


def test_two_ups_at_once_make_one_cluster(folder: Path) -> None:
    command = [sys.executable, "-m", "stele_local", "--folder", str(folder), "up", "--machines", "1"]
    ups = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {up.communicate(timeout=200)[0] for up in ups} == {f"export KUBECONFIG={folder}/kubeconfig\n"}
    assert [up.returncode for up in ups] == [0, 0]
    assert _owner(folder) == owner_of(folder), "the access file is that of the cluster that runs"


def test_after_a_failure_eval_fails_and_kubectl_reaches_no_other_cluster(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    (tmp_path / "file").write_text("")
    shown = 'eval "$(%s -m stele_local --folder %s %s)"; echo "$? $KUBECONFIG"'
    for where, words, why in (
        (tmp_path, "up", "state.json cannot be read"),
        (tmp_path, "env", "no cluster runs in"),
        (tmp_path / "file", "up", "File exists"),
        (Path("/proc/there"), "up", "No such file or directory"),
    ):
        script = shown % (sys.executable, where, words)
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=200)
        assert done.stdout == f"1 {where}/kubeconfig\n" and why in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--folder", "", "up"], "Invalid value for '--folder': it is empty; give the path of a folder"),
        (["--folder=", "down", "--wipe"], "Invalid value for '--folder': it is empty"),
        (["up", "--folder", ""], "--folder stands before the command: `stele-local --folder FOLDER up`"),
        (["up", "--machine", "3"], "No such option '--machine'"),
    ],
)
def test_an_empty_folder_is_not_the_current_one(tmp_path: Path, words: list[str], why: str) -> None:
    """As of a shell variable that is not set: a cluster's files came to lie where the user stood."""
    line = f'eval "$({shlex.join([sys.executable, "-m", "stele_local", *words])})"; echo "$?"'
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert why in done.stderr, done.stderr
    assert done.stdout == ("0\n" if "down" in words else "1\n")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_up_leaves_nothing(folder: Path) -> None:
    command = [sys.executable, "-m", "stele_local", "--folder", str(folder), "up", "--machines", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as up:
        _until((folder / "stele-local.log").exists, "it starts a cluster")
        up.send_signal(signal.SIGINT)
        printed, told = up.communicate(timeout=200)
    assert "Error: interrupted; nothing was started" in told and "false" in printed
    assert owner_of(folder) is None and processes.left_over(folder) == []
