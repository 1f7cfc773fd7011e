"""Ctrl-C at every moment of a blocking call, up to where it waits: nothing of the call goes on."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from types import FrameType, FunctionType

import pytest

from stele.client import Client
from stele.client.thread_call import ThreadCall


class Operation:
    """A call that ends when it is cancelled, and no sooner."""

    def __init__(self) -> None:
        self.running = False

    async def run(self) -> None:
        self.running = True
        try:
            await asyncio.Event().wait()
        finally:
            self.running = False


class Interrupt:
    """KeyboardInterrupt at the moment `number` of a method of the client. `last`: it was about to wait.

    CPython looks for signals where a function begins, where one has returned, in C as well, and where it waits for a lock. A
    profiler is told of these, and what it raises is raised there.
    """

    def __init__(self, method: FunctionType, number: int) -> None:
        self.number = number
        self.last = False
        self._code = method.__code__
        self._within = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if not self._within:
            self._within = frame.f_code is self._code
            return
        self.last = event == "c_call" and frame.f_code is ThreadCall.wait.__code__
        self.number -= event in ("call", "return", "c_return")
        if self.number < 0 or self.last:
            raise KeyboardInterrupt


def interrupted(method: FunctionType, number: int, *arguments: object) -> bool:
    """Call it, interrupted at that moment; whether it was about to wait."""
    interrupt = Interrupt(method, number)
    try:
        sys.setprofile(interrupt)
        method(*arguments)
    except KeyboardInterrupt:
        return interrupt.last
    finally:
        sys.setprofile(None)
    raise AssertionError("it returned")


def until_over(client: Client, operation: Operation) -> None:
    """Wait until it runs no more, once whatever the call gave the client's thread has begun."""
    client.run(asyncio.sleep(0))
    give_up = time.monotonic() + 60
    while operation.running:
        assert time.monotonic() < give_up, "it goes on, though nobody waits for it"
        time.sleep(0.001)


def closed(client: Client) -> bool:
    """Close it, from another thread; whether that ends."""
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(60)
    return not closing.is_alive() and not client._thread.is_alive()


def test_a_call_that_is_interrupted_anywhere_does_not_go_on() -> None:
    client = Client(["127.0.0.1:1"])
    number, last = 0, False
    try:
        while not last:
            operation = Operation()
            last = interrupted(Client.run, number, client, operation.run())
            until_over(client, operation)
            number += 1
        assert number > 20
    finally:
        assert closed(client)


def test_a_client_whose_closing_is_interrupted_anywhere_can_be_closed() -> None:
    number, last = 0, False
    while not last:
        client = Client(["127.0.0.1:1"])
        last = interrupted(Client.close, number, client)
        assert closed(client)
        number += 1
    assert number > 20


class Slow(Operation):
    """One that ends some time after its cancellation, within which somebody presses Ctrl-C."""

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.sleep(0.5)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts, also where a shell started the tests in the background, and so has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_a_closing_that_is_interrupted_while_others_end_leaves_none_of_them_waiting() -> None:
    client, operation = Client(["127.0.0.1:1"]), Slow()
    told: list[BaseException] = []

    def other() -> None:
        try:
            client.run(operation.run())
        except CancelledError as exc:
            told.append(exc)

    waiting = threading.Thread(target=other, daemon=True)
    waiting.start()
    give_up = time.monotonic() + 60
    while not operation.running:
        assert time.monotonic() < give_up
        time.sleep(0.001)
    with pytest.raises(KeyboardInterrupt):
        client.close()
    waiting.join(60)
    assert told and closed(client)
