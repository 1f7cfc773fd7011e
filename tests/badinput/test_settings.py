"""Wrong settings of a process: one line that says what to do, exit code 2, at once and with nothing written."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from stele.client import AsyncClient
from stele.model.errors import Retryable
from stele.model.ids import ClusterId, NodeId
from stele.tserver.volume import format_volume, lock_directory
from tests.client.small import small_cluster
from tests.harness.commands import command

ID = "a" * 32


def stele(*arguments: str) -> tuple[int, list[str]]:
    """Exit code, and the lines that the user sees."""
    code, out = command(*arguments)
    return code, out.strip().splitlines()


def arguments(role: str, directory: Path, **changed: str) -> list[str]:
    """A command line that would do, with some of it changed."""
    values = {
        "data_dir": str(directory / "data"),
        "node_id": ID,
        "cluster_id": ID,
        "listen": "127.0.0.1:0",
        "masters": "127.0.0.1:9",
        "http_port": "0",
        "flight_port": "0",
        "stream_port": "0",
        **changed,
    }
    return [role, "run", *(f"--{name.replace('_', '-')}={value}" for name, value in values.items())]


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("node_id", "xyz", "--node-id 'xyz': expected 32 hex digits"),
        ("listen", "nonsense", "--listen: address 'nonsense': expected HOST:PORT"),
        ("listen", "127.0.0.1:99999", "expected HOST:PORT"),
        ("advertise", "foo", "--advertise: address 'foo': expected HOST:PORT"),
        ("masters", "127.0.0.1:x", "expected HOST:PORT"),
        ("http_port", "99999", "--http-port 99999: expected 0 to 65535"),
        ("flight_port", "-1", "--flight-port -1: expected 0 to 65535"),
        ("stream_port", "65536", "--stream-port 65536: expected 0 to 65535"),
    ],
)
def test_a_wrong_value_names_its_flag(tmp_path: Path, flag: str, value: str, words: str) -> None:
    code, lines = stele(*arguments("node", tmp_path, **{flag: value}))
    assert code == 2, lines
    assert len(lines) == 1, lines
    assert words in lines[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("memory_mib", "-5"),
        ("log_level", "loud"),
        ("http_port", "x"),
        ("wal_sync", "often"),
        ("wal_segment_mib", "3"),
        ("wal_spare_segments", "65"),
    ],
)
def test_a_value_of_the_wrong_kind_is_a_usage_error(tmp_path: Path, flag: str, value: str) -> None:
    code, lines = stele(*arguments("node", tmp_path, **{flag: value}))
    assert code == 2, lines
    assert len(lines) == 1, lines
    assert lines[0].startswith("stele: Invalid value for '--" + flag.replace("_", "-"))
    assert lines[0].endswith("; see `stele node run --help`")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["foo"], "stele: No such command 'foo'; see `stele --help`"),
        (["table", "load"], "stele: Missing argument 'NAME'; see `stele table load --help`"),
        (
            ["table", "alter", "t", "--add", "x"],
            "stele: --add x: expected NAME:TYPE, like stops:int8 or gate:string?; see `stele table alter --help`",
        ),
    ],
)
def test_a_usage_error_is_one_line_and_where_to_look(command: list[str], line: str) -> None:
    assert stele(*command) == (2, [line])


def test_a_missing_directory_and_a_file_in_its_place(tmp_path: Path) -> None:
    code, lines = stele(*arguments("node", tmp_path, data_dir=str(tmp_path / "none" / "data")))
    assert (code, len(lines)) == (2, 1), lines
    assert lines[0].endswith("does not exist; mount the volume there")
    (tmp_path / "file").write_text("")
    code, lines = stele(*arguments("node", tmp_path, data_dir=str(tmp_path / "file")))
    assert (code, len(lines)) == (2, 1), lines
    assert "Not a directory" in lines[0] or "File exists" in lines[0]


@pytest.mark.parametrize("flag", ["listen", "http_port", "flight_port", "stream_port"])
def test_a_port_in_use_is_told_before_any_master_is_asked(tmp_path: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        value = f"127.0.0.1:{port}" if flag == "listen" else port
        code, lines = stele(*arguments("node", tmp_path, **{flag: value}))
    assert (code, len(lines)) == (2, 1), lines
    assert f"--{flag.replace('_', '-')}: cannot listen at 127.0.0.1:{port}: the port is in use" in lines[0]
    assert not (tmp_path / "data" / "node.json").exists()


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("192.0.2.1:0", "the address is not this machine's"),
        ("no-such-host.invalid:0", "the name does not resolve"),
    ],
)
def test_an_address_of_another_machine(tmp_path: Path, listen: str, words: str) -> None:
    code, lines = stele(*arguments("node", tmp_path, listen=listen))
    assert (code, len(lines)) == (2, 1), lines
    assert listen in lines[0] and words in lines[0]


@pytest.mark.parametrize(("made_by", "taken_by"), [("node", "master"), ("master", "node")])
def test_the_volume_of_the_other_role_is_foreign(tmp_path: Path, made_by: str, taken_by: str) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    fd = lock_directory(directory)
    format_volume(directory, fd, ClusterId(ID), NodeId(ID), made_by).close()
    code, lines = stele(*arguments(taken_by, tmp_path))
    assert (code, len(lines)) == (4, 1), lines
    assert f"belongs to a {made_by}, this process is a {taken_by}" in lines[0]


COMMANDS = (
    ["ksck", "--timeout", "4"],
    ["table", "scan", "t"],
    ["kv", "get", "space", "key"],
)


async def test_no_master_is_one_line_within_seconds_and_try_again() -> None:
    masters = "127.0.0.1:9,no-such-host.invalid"
    runs = [asyncio.to_thread(stele, *command, "--masters", masters) for command in COMMANDS]
    for code, lines in await asyncio.gather(*runs):
        assert code == 75, lines
        # A slow machine may not know within a second that nobody listens there.
        assert [line.replace("(no answer)", "(connection refused)") for line in lines] == [
            "stele: UNAVAILABLE: no master answers at 127.0.0.1:9 (connection refused), "
            "no-such-host.invalid:7051 (name does not resolve); check --masters; "
            "a cluster that hibernates has no masters (`kubectl get tc` shows it)"
        ]


async def test_names_that_do_not_resolve_are_told_soon() -> None:
    began = time.monotonic()
    async with AsyncClient("no-such-host.invalid,neither.invalid:7") as client:
        with pytest.raises(Retryable) as caught:
            await client.list_tables()
    assert time.monotonic() - began < 25
    assert str(caught.value) == (
        "UNAVAILABLE: no master answers at no-such-host.invalid:7051 (name does not resolve), "
        "neither.invalid:7 (name does not resolve); check the addresses of the masters"
    )


async def test_a_name_that_resolves_a_moment_later_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the name of a service does whose pods begin to run."""
    began, real = time.monotonic(), socket.getaddrinfo

    def late(host: str, port: int, *rest: int) -> object:
        if host != "service.invalid":
            return real(host, port, *rest)
        if time.monotonic() - began < 0.6:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", port, *rest)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    async with small_cluster(tmp_path) as (cluster, _):
        port = cluster.master_address.rpartition(":")[2]
        async with AsyncClient(f"service.invalid:{port}", first_contact_s=20) as client:
            assert await client.list_tables() == []


async def test_a_server_that_is_no_master_is_told_from_one_that_is_silent() -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    other = await asyncio.start_server(http, "127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ports = other.sockets[0].getsockname()[1], silent.getsockname()[1]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        wanted = (
            f"{addresses[0]} (another program listens there, not a Stele server)",
            f"{addresses[1]} (no answer)",
        )
        async with other:
            for _ in range(10):  # where the machine stands still, gRPC gives up for other reasons
                async with AsyncClient(addresses, timeout_s=60.0, first_contact_s=2.0) as client:
                    asked = (client.list_tables() for _ in range(3))
                    answers = await asyncio.gather(*asked, return_exceptions=True)
                (said,) = {str(answer) for answer in answers}
                if all(phrase in said for phrase in wanted):
                    break
    for phrase in wanted:
        assert phrase in said
