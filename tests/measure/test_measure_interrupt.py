"""Signals end a coroutine in good order: the first one cancels it, and nothing cuts short its cleaning up."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchctl.errors import RunError
from benchctl.measure.interrupt import OF_SCHEDULERS, await_signal, interruptible, run_interruptible


def test_signals_that_follow_the_first_do_not_cut_short_the_cleaning_up():
    cleaned = []

    async def work(number):
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(10)
        finally:
            for _ in range(3):
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.01)
                cleaned.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(KeyboardInterrupt):
            run_interruptible(work(number))
        assert cleaned[-3:] == [number] * 3


def test_a_signal_at_the_very_end_is_told_after_the_loop_has_closed():
    async def work():
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work())


def test_only_the_first_signal_interrupts_the_code_around_a_coroutine_also_where_it_ended_that():
    async def work():
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(10)

    for ended_by in (lambda: os.kill(os.getpid(), signal.SIGTERM), lambda: run_interruptible(work())):
        with interruptible():
            with pytest.raises(KeyboardInterrupt):
                ended_by()
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_that_is_ignored_stays_ignored():
    async def work():
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.01)
        return "done"

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_interruptible(work()) == "done"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with ThreadPoolExecutor() as threads:  # outside the main thread there are no signals
            assert threads.submit(lambda: run_interruptible(work())).result() == "done"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_fails_after_a_signal_fails_by_the_signal():
    """A job system signals a server, too: its end is not the news then."""

    async def work():
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(10)
        finally:
            raise RunError("the server died")

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work())


def test_a_task_is_ended_by_the_signals_of_schedulers_and_other_code_is_not():
    async def work():
        os.kill(os.getpid(), signal.SIGUSR2)
        await asyncio.sleep(10)

    before = signal.getsignal(signal.SIGUSR2)
    with interruptible(OF_SCHEDULERS):
        with pytest.raises(KeyboardInterrupt):
            run_interruptible(work())
        os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR2) == before


def test_a_failure_of_a_task_waits_a_moment_for_a_signal_and_of_other_code_does_not():
    began_s = time.monotonic()
    await_signal()
    assert time.monotonic() - began_s < 0.5
    with interruptible(OF_SCHEDULERS):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(KeyboardInterrupt):
            await_signal()
