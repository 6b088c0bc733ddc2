#!/usr/bin/env python3
# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The pool: every task ends in one result, whatever becomes of the worker that has it, and no worker outlives us."""

# Takes about 10 s
from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import resource
import signal
import sys
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple
from unittest import mock

import copying
import support
from support import ROOT

from mlperf_common.fileio import stopping, workers
from mlperf_common.fileio.stopping import Interrupted
from mlperf_common.fileio.workers import AllWorkersDied, Failure, Task, Worker

MIB = 1 << 20
IN_PROCESS = copying.IN_PROCESS
POOLS = (IN_PROCESS, 2, 4)
LONG = 30  # seconds: longer than any test may take


def echo(worker: Worker, payload: Any, fds: Sequence[int]) -> Any:
    return payload


def number(worker: Worker, payload: Any, fds: Sequence[int]) -> int:
    return worker.number


def process(worker: Worker, payload: Any, fds: Sequence[int]) -> int:
    return os.getpid()


def fail(worker: Worker, payload: Any, fds: Sequence[int]) -> Any:
    raise payload


def die(worker: Worker, payload: Tuple[int, float], fds: Sequence[int]) -> None:
    signum, seconds = payload
    time.sleep(seconds)
    os.kill(os.getpid(), signum)
    time.sleep(LONG)


def leave(worker: Worker, payload: int, fds: Sequence[int]) -> None:
    os._exit(payload)


def sleep(worker: Worker, payload: float, fds: Sequence[int]) -> int:
    """Busy for a time without a look at anything."""
    time.sleep(payload)
    return worker.number


def work(worker: Worker, payload: str, fds: Sequence[int]) -> None:
    """At work for ever, with a look at the signals every 10 ms; what it leaves behind tells that it cleaned up."""
    support.make_tree(payload, b"a temporary")
    try:
        for _ in range(100 * LONG):
            worker.check()
            time.sleep(0.01)
    finally:
        os.unlink(payload)


def large(worker: Worker, payload: int, fds: Sequence[int]) -> bytes:
    return bytes([worker.number + 1]) * payload


def die_while_sending(worker: Worker, payload: float, fds: Sequence[int]) -> bytes:
    """SIGALRM, at its default action, comes when the result is on its way and nobody reads it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, payload)
    return bytes(20 * MIB)


def write(worker: Worker, payload: bytes, fds: Sequence[int]) -> List[int]:
    return [os.pwrite(fd, payload, 0) for fd in fds]


def descriptors(worker: Worker, payload: Any, fds: Sequence[int]) -> Tuple[int, int]:
    return worker.number, len(os.listdir("/proc/self/fd")) - len(fds)


def own_sockets() -> int:
    """How many of this process's descriptors are sockets."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return found


def sockets(worker: Worker, payload: Any, fds: Sequence[int]) -> int:
    return own_sockets()


def moved(worker: Worker, payload: List[int], fds: Sequence[int]) -> None:
    for count in payload:
        worker.moved(count)


def remember(worker: Worker, payload: Any, fds: Sequence[int]) -> Tuple[int, int]:
    worker.memory["count"] = worker.memory.get("count", 0) + 1
    time.sleep(0.002)  # so that the others get some
    return worker.number, worker.memory["count"]


def scribble(worker: Worker, payload: int, fds: Sequence[int]) -> Tuple[int, int]:
    """Mark the buffer, wait, look at it."""
    view = worker.buffer()
    view[0] = payload
    time.sleep(0.05)
    return view[0], len(view)


FUNCTIONS = {
    function.__name__: function
    for function in (
        *(echo, number, process, fail, die, leave, sleep, work, large, die_while_sending),
        *(write, descriptors, sockets, moved, remember, scribble),
    )
}


class NoAnswer(Exception):
    """It took longer than it may."""


@contextlib.contextmanager
def deadline(seconds: float = 10) -> Iterator[None]:
    """NoAnswer if what is inside takes longer."""

    def late(signum: int, frame: Any) -> None:
        raise NoAnswer(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Feeder:
    """Gives out tasks in order and keeps what comes back: each result with its task's context."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = [task._replace(context=index) for index, task in enumerate(tasks)]
        self.given: List[Tuple[int, bool]] = []  # by task: the worker, and whether ahead
        self.results: Dict[int, Any] = {}
        self.doubles: List[int] = []

    def next(self, worker: int, ahead: bool) -> Optional[Task]:
        if len(self.given) == len(self.tasks):
            return None
        self.given.append((worker, ahead))
        return self.tasks[len(self.given) - 1]

    def take(self, task: Task, result: Any) -> None:
        if task.context in self.results:
            self.doubles.append(task.context)
        self.results[task.context] = result


class PoolCase(support.TestCase):
    def open(self, count: int, buffer_size: int = 2 * MIB) -> Any:
        pool = copying.make_pool(FUNCTIONS, count, buffer_size)
        self.addCleanup(pool.close)
        return pool

    def run_all(self, pool: Any, *tasks: Task, seconds: float = 10) -> List[Any]:
        """The results in the order of the tasks, each of which has exactly one."""
        feeder = Feeder(tasks)
        with deadline(seconds):
            pool.run(feeder.next, feeder.take)
        self.assertEqual(feeder.doubles, [])
        self.assertEqual(sorted(feeder.results), list(range(len(tasks))))
        return [feeder.results[index] for index in range(len(tasks))]


class Results(PoolCase):
    def test_every_task_has_its_result(self) -> None:
        for count in POOLS:
            payloads = [*range(100), "words", b"bytes", None, ("a", 1)]
            found = self.run_all(self.open(count), *[Task("echo", payload) for payload in payloads])
            self.assertEqual(found, payloads)

    def test_no_tasks(self) -> None:
        for count in POOLS:
            self.assertEqual(self.run_all(self.open(count)), [])

    def test_a_pool_runs_again(self) -> None:
        for count in POOLS:
            pool = self.open(count)
            for payload in range(3):
                self.assertEqual(self.run_all(pool, *[Task("echo", payload)] * 5), [payload] * 5)

    def test_one_worker_is_this_process_and_more_are_not(self) -> None:
        self.assertEqual(self.run_all(self.open(IN_PROCESS), Task("process", None)), [os.getpid()])
        found = self.run_all(self.open(2), Task("process", None))
        self.assertNotEqual(found, [os.getpid()])

    def test_all_workers_get_something(self) -> None:
        pool = self.open(4)
        self.assertEqual(pool.width, 4)
        self.assertEqual(set(self.run_all(pool, *[Task("sleep", 0.1)] * 8)), {0, 1, 2, 3})

    def test_a_result_may_ask_for_more(self) -> None:
        # The pool stands idle when the last of the first tasks ends; what that brings must still be done.
        for count in POOLS:
            pool, waiting, done = self.open(count), [Task("echo", 0)], []

            def next_task(worker: int, ahead: bool, waiting: List[Task] = waiting) -> Optional[Task]:
                return waiting.pop() if waiting else None

            def take(task: Task, result: int, waiting: List[Task] = waiting, done: List[int] = done) -> None:
                done.append(result)
                waiting += [Task("echo", result + 1)] if result < 5 else []

            with deadline():
                pool.run(next_task, take)
            self.assertEqual(done, [0, 1, 2, 3, 4, 5])

    def test_large_results(self) -> None:
        for count in POOLS:
            found = self.run_all(self.open(count), *[Task("large", 20 * MIB)] * 6)
            self.assertEqual({len(result) for result in found}, {20 * MIB})
            for result in found:
                self.assertEqual(result.count(result[:1]), len(result))

    def test_large_messages_both_ways(self) -> None:
        # Both sides in send, each waiting for the other to read, is what this must not come to.
        for count in POOLS:
            payloads = [bytes([index]) * MIB for index in range(20)]
            found = self.run_all(self.open(count), *[Task("echo", payload) for payload in payloads])
            self.assertEqual(found, payloads)

    def test_messages_around_the_limit(self) -> None:
        for count in POOLS:
            payloads = [bytes(workers.MESSAGE_LIMIT + step) for step in range(-200, 200, 7)] * 4
            found = self.run_all(self.open(count), *[Task("echo", payload) for payload in payloads])
            self.assertEqual(found, payloads)

    def test_memory_lasts_and_is_each_worker_s_own(self) -> None:
        for count in POOLS:
            found = self.run_all(self.open(count), *[Task("remember", None)] * 50)
            for worker in range(count if count != IN_PROCESS else 1):
                counts = [seen for who, seen in found if who == worker]
                self.assertEqual(sorted(counts), list(range(1, len(counts) + 1)))
            self.assertEqual(len({who for who, _ in found}), 1 if count == IN_PROCESS else count)

    def test_buffers_are_private_and_of_the_size_asked_for(self) -> None:
        for count in POOLS:
            found = self.run_all(self.open(count, 3 * MIB), *[Task("scribble", mark) for mark in range(8)])
            self.assertEqual(found, [(mark, 3 * MIB) for mark in range(8)])

    def test_progress_adds_up(self) -> None:
        for count in POOLS:
            pool, seen, ticks = self.open(count), [], []
            pool.on_moved, pool.on_tick = seen.append, lambda ticks=ticks: ticks.append(1)
            self.run_all(pool, *[Task("moved", [1, 10, 100])] * 20)
            self.assertEqual(sum(seen), 20 * 111)
            self.assertTrue(ticks)
            self.assertLess(len(seen), 41, "each task reports at most once in a while, and at its end")


class Descriptors(PoolCase):
    def test_the_same_open_file(self) -> None:
        for count in POOLS:
            names = [self.make(f"{count}-{index}", b"") for index in range(6)]
            fds = [os.open(name, os.O_WRONLY) for name in names]
            tasks = [Task("write", b"%d" % index, (fds[index], fds[index + 1])) for index in range(0, 6, 2)]
            self.assertEqual(self.run_all(self.open(count), *tasks), [[1, 1]] * 3)
            self.assertEqual([support.read_tree(name) for name in names], [b"0", b"0", b"2", b"2", b"4", b"4"])
            for fd in fds:  # still open here: whoever gave them closes them
                os.close(fd)

    def test_a_worker_closes_them_after_the_task(self) -> None:
        fds = tuple(os.open("/", os.O_RDONLY) for _ in range(3))
        for count in (2, 4):
            tasks = [Task("descriptors", None, fds)] * 200 + [Task("fail", ValueError(), fds)] * 20
            found = self.run_all(self.open(count), *tasks, *[Task("descriptors", None, fds)] * 50)
            counts: Dict[int, set] = {}
            for who, seen in [result for result in found if not isinstance(result, Failure)]:
                counts.setdefault(who, set()).add(seen)
            self.assertEqual([len(seen) for seen in counts.values()], [1] * len(counts))
        for fd in fds:
            os.close(fd)

    def test_a_worker_has_nothing_of_the_others(self) -> None:
        # The other end of a pipe in a third process would keep it open when its owner has gone. Two are its own.
        for count in (2, 6):
            before = own_sockets()
            pool = self.open(count)
            found = self.run_all(pool, *[Task("sockets", None)] * 50)
            self.assertEqual(set(found), {before + 2})
            pool.close()


class Limits(PoolCase):
    """Where the kernel allows fewer workers than wanted, those that there are do it all; who opens it is told why."""

    def in_a_child(self, wanted: int, limit: int, value: int) -> Tuple[int, str, List[Any]]:
        """Width, reason and results of a pool in a process under this limit, of a user that has no other process."""
        self.run_all(self.open(2), Task("echo", 1))  # imports what that user may not read
        receiving, sending = multiprocessing.Pipe(duplex=False)
        child = os.fork()
        if not child:
            status = 1
            try:
                os.setuid(100000 + os.getpid())
                resource.setrlimit(limit, (value, value))
                pool = workers.Pool(wanted, FUNCTIONS, 2 * MIB, stopping.StopFlag())
                results = self.run_all(pool, *[Task("echo", 1)] * 50) if pool.width else []
                pool.close()
                sending.send((pool.width, pool.limited_by, results))
                status = 0
            finally:
                os._exit(status)
        with receiving, sending:
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            found: Tuple[int, str, List[Any]] = receiving.recv()
        return found

    @support.needs_root
    def test_processes(self) -> None:
        for allowed, width in ((1, 0), (2, 1), (4, 3), (5, 4), (50, 4)):  # itself is one
            with self.subTest(allowed=allowed):
                found, reason, results = self.in_a_child(4, resource.RLIMIT_NPROC, allowed)
                self.assertEqual((found, results), (width, [1] * 50 if width else []))
                if width < 4:
                    self.assertEqual(reason, f"the limit of processes or memory ({os.strerror(errno.EAGAIN)})")

    @support.needs_root
    def test_open_files(self) -> None:
        for allowed in (4096, 250, 60):
            with self.subTest(allowed=allowed):
                found, reason, results = self.in_a_child(16, resource.RLIMIT_NOFILE, allowed)
                self.assertEqual(results, [1] * 50)
                self.assertLessEqual(found, 16)
                if allowed == 4096:
                    self.assertEqual(found, 16)
                else:
                    self.assertLess(found, 16)
                    self.assertEqual(reason, "the limit of open files (ulimit -n)")

    @support.needs_root
    def test_fewer_open_files_than_thought(self) -> None:
        # The kernel's refusal counts, not the estimate.
        with mock.patch.object(workers, "_affordable", lambda count: count):
            found, reason, results = self.in_a_child(16, resource.RLIMIT_NOFILE, 40)
        self.assertTrue(0 < found < 16)
        self.assertEqual((reason, results), ("the limit of open files (ulimit -n)", [1] * 50))


class Failures(PoolCase):
    def test_a_task_that_raises_fails_alone(self) -> None:
        for count in POOLS:
            exceptions: List[BaseException] = [
                ValueError("why"),
                OSError(errno.ENOSPC, "No space left on device", "/some/name"),
                MemoryError(),
                RecursionError("deep"),
            ]
            tasks = [task for exc in exceptions for task in (Task("echo", 1), Task("fail", exc))]
            found = self.run_all(self.open(count), *tasks, *[Task("echo", 1)] * 20)
            failures = found[1:8:2]
            self.assertEqual(found[:8:2] + found[8:], [1] * 24)
            reasons = ["ValueError: why", "No space left on device", "MemoryError: ", "RecursionError: deep"]
            self.assertEqual([failure.reason for failure in failures], reasons)
            self.assertEqual([failure.errno for failure in failures], [0, errno.ENOSPC, 0, 0])
            self.assertEqual({failure.signum for failure in failures}, {0})
            self.assertIn("in fail\n", failures[0].trace)

    def test_an_unknown_function_fails(self) -> None:
        for count in POOLS:
            found = self.run_all(self.open(count), Task("none", None), Task("echo", 1))
            self.assertIsInstance(found[0], Failure)
            self.assertEqual(found[1], 1)


class Deaths(PoolCase):
    def assert_first_fails_and_second_is_done(self, first: Task, reason: str, signum: int) -> None:
        """Worker 0 gets `first` and a task behind it, and dies in `first`."""
        feeder = Feeder([first, Task("sleep", 0.5), Task("number", None), *[Task("number", None)] * 9])
        pool = self.open(2)
        with deadline():
            pool.run(feeder.next, feeder.take)
        self.assertEqual(feeder.given[:4], [(0, False), (1, False), (0, True), (1, True)])
        failure = feeder.results[0]
        self.assertEqual((failure.reason, failure.signum, failure.worker), (reason, signum, 0))
        self.assertEqual([feeder.results[index] for index in range(1, 12)], [1] * 11)
        self.assertEqual(feeder.doubles, [])

    def test_killed(self) -> None:
        self.assert_first_fails_and_second_is_done(
            Task("die", (signal.SIGKILL, 0.2)), "was killed by SIGKILL", signal.SIGKILL
        )

    def test_killed_by_a_fault(self) -> None:
        self.assert_first_fails_and_second_is_done(
            Task("die", (signal.SIGBUS, 0.2)), "was killed by SIGBUS", signal.SIGBUS
        )

    def test_killed_by_a_signal_without_a_name(self) -> None:
        signum = signal.SIGRTMIN + 3
        self.assert_first_fails_and_second_is_done(Task("die", (signum, 0.2)), f"was killed by signal {signum}", signum)

    def test_ended(self) -> None:
        self.assert_first_fails_and_second_is_done(Task("leave", 7), "ended with status 7", 0)

    def test_all_die(self) -> None:
        pool = self.open(3)
        feeder = Feeder([Task("die", (signal.SIGKILL, 0))] * 20)
        with deadline(), self.assertRaisesRegex(AllWorkersDied, "every worker process has died.*SIGKILL"):
            pool.run(feeder.next, feeder.take)
        self.assertEqual(len(feeder.results), 3)
        self.assertEqual({failure.reason for failure in feeder.results.values()}, {"was killed by SIGKILL"})

    def test_all_have_died_before(self) -> None:
        # A pool without workers must not say that the work is done.
        pool = self.open(2)
        for _ in range(2):
            feeder = Feeder([Task("die", (signal.SIGKILL, 0))] * 5)
            with deadline(), self.assertRaises(AllWorkersDied):
                pool.run(feeder.next, feeder.take)

    def test_killed_while_it_waits_for_work(self) -> None:
        # It holds nothing, so nothing fails; what is sent to it before its death is seen goes to another.
        pool = self.open(2)
        pids = self.run_all(pool, *[Task("process", None)] * 20)
        os.kill(pids[0], signal.SIGKILL)
        self.assertTrue(ended(pids[0], 2))
        self.assertEqual(self.run_all(pool, *[Task("echo", 1)] * 20), [1] * 20)

    def test_killed_with_nothing_left_to_do(self) -> None:
        pool = self.open(2)
        feeder = Feeder([Task("die", (signal.SIGKILL, 0.1))])
        with deadline():
            pool.run(feeder.next, feeder.take)
        self.assertEqual(feeder.results[0].signum, signal.SIGKILL)

    def test_killed_while_it_sends_a_result(self) -> None:
        # With a task behind the kernel says that the connection was reset, without one that it has ended.
        for more in (0, 5):
            pool = self.open(2)
            feeder = Feeder([Task("die_while_sending", 0.3), Task("echo", "first"), *[Task("echo", 1)] * more])

            def take(task: Task, result: Any, feeder: Feeder = feeder) -> None:
                if result == "first":
                    time.sleep(0.6)  # nobody reads until it is dead
                feeder.take(task, result)

            with deadline():
                pool.run(feeder.next, take)
            self.assertEqual(feeder.results.pop(0).reason, "was killed by SIGALRM")
            self.assertEqual(list(feeder.results.values()), ["first"] + [1] * more)

    def test_what_it_had_finished_counts(self) -> None:
        # Its results are read before its death is: they are in the pipe when it dies.
        pool = self.open(2)
        die = Task("die", (signal.SIGKILL, 0))
        feeder = Feeder([Task("echo", "mine"), Task("echo", "first"), die, Task("echo", 1)])

        def take(task: Task, result: Any) -> None:
            feeder.take(task, result)
            time.sleep(0.1)

        with deadline():
            pool.run(feeder.next, take)
        died = [index for index, result in feeder.results.items() if isinstance(result, Failure)]
        self.assertEqual(died, [2])
        self.assertEqual(len(feeder.results), 4)


class SignalsToAWorker(PoolCase):
    def start_work(self, then: Any) -> Tuple[Feeder, str]:
        """Both workers are asked for their number first, then worker 0 is in `work`; `then(pid)` in between."""
        pool = self.open(2)
        marker = self.path("temporary")
        pids = self.run_all(pool, *[Task("process", None)] * 20)
        feeder = Feeder([Task("work", marker), *[Task("process", None)] * 10])
        acted: List[int] = []

        def tick() -> None:
            if not acted and os.path.exists(marker):
                acted.append(1)
                others = {1: {result for index, result in feeder.results.items() if index}}
                then(next(pid for pid in pids if pid not in others[1]))

        pool.on_tick = tick
        with deadline():
            pool.run(feeder.next, feeder.take)
        return feeder, marker

    def test_sigterm_ends_the_task_cleanly_and_the_others_go_on(self) -> None:
        feeder, marker = self.start_work(lambda pid: os.kill(pid, signal.SIGTERM))
        self.assertEqual(feeder.results.pop(0).reason, "was killed by SIGTERM")
        self.assertFalse(os.path.exists(marker), "it was not cleaned up")
        self.assertEqual(len(feeder.results), 10)
        self.assertEqual([result for result in feeder.results.values() if isinstance(result, Failure)], [])

    def test_sigterm_while_it_waits_for_work(self) -> None:
        pool = self.open(2)
        pids = self.run_all(pool, *[Task("process", None)] * 20)
        os.kill(pids[0], signal.SIGTERM)
        self.assertTrue(ended(pids[0], 2))
        self.assertEqual(self.run_all(pool, *[Task("echo", 1)] * 20), [1] * 20)

    def test_sigint_and_sighup_are_the_parent_s_matter(self) -> None:
        pool = self.open(2)
        pids = set(self.run_all(pool, *[Task("process", None)] * 20))
        for pid in pids:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGHUP)
        time.sleep(0.1)
        self.assertEqual(set(self.run_all(pool, *[Task("process", None)] * 40)) - pids, set())


def ended(pid: int, seconds: float) -> bool:
    """Whether the process is gone, or a zombie, within that time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat", "rb") as stream:
                if stream.read().rsplit(b")", 1)[1].split()[0] in (b"Z", b"X"):
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


class Ending(PoolCase):
    def test_close_ends_the_workers(self) -> None:
        pool = self.open(4)
        pids = set(self.run_all(pool, *[Task("process", None)] * 60))
        started = time.monotonic()
        pool.close()
        self.assertLess(time.monotonic() - started, 2)
        self.assertTrue(all(ended(pid, 0.1) for pid in pids))
        pool.close()  # again is nothing

    def stop_when(self, there: str) -> Any:
        """A stop flag that goes up when this file is there."""

        class Flag(stopping.StopFlag):
            def check(self) -> None:
                if os.path.exists(there):
                    self.signum = signal.SIGTERM
                super().check()

        return Flag()

    def test_a_stop_ends_the_run_and_abort_the_workers_after_they_have_cleaned_up(self) -> None:
        marker = self.path("temporary")
        pool = workers.Pool(2, FUNCTIONS, 2 * MIB, self.stop_when(marker))
        self.addCleanup(pool.close)
        feeder = Feeder([Task("process", None)] * 5 + [Task("work", marker)] + [Task("process", None)] * 5)
        started = time.monotonic()
        with deadline(), self.assertRaises(Interrupted) as caught:
            pool.run(feeder.next, feeder.take)
        self.assertEqual(caught.exception.signum, signal.SIGTERM)
        pool.abort()
        self.assertLess(time.monotonic() - started, 2)
        self.assertFalse(os.path.exists(marker))
        pids = [result for result in feeder.results.values() if isinstance(result, int)]
        self.assertTrue(all(ended(pid, 0.1) for pid in pids))

    def test_a_stop_reaches_a_task_in_this_process(self) -> None:
        marker = self.path("temporary")
        pool = workers.InProcess(FUNCTIONS, 2 * MIB, self.stop_when(marker))
        feeder = Feeder([Task("echo", 1), Task("work", marker), Task("echo", 1)])
        with deadline(), self.assertRaises(Interrupted):
            pool.run(feeder.next, feeder.take)
        self.assertFalse(os.path.exists(marker))
        self.assertEqual(feeder.results, {0: 1})

    def test_a_worker_that_does_not_stop_is_killed(self) -> None:
        pool = self.open(2)
        pids = set(self.run_all(pool, *[Task("process", None)] * 20))
        feeder = Feeder([Task("sleep", LONG)] * 2)
        with self.assertRaises(NoAnswer), deadline(0.2):
            pool.run(feeder.next, feeder.take)
        started = time.monotonic()
        with mock.patch.object(workers, "STOP_SECONDS", 0.3):
            pool.abort()
        self.assertLess(time.monotonic() - started, 1.5)
        self.assertTrue(all(ended(pid, 0.1) for pid in pids))


ORPHANS = """
import os, sys
sys.path[:0] = [{root!r}, {tests!r}]
import test_workers as t
from mlperf_common.fileio import workers
if {by_pipe_alone}:
    workers._die_with_parent = lambda: None
pool = t.copying.make_pool(t.FUNCTIONS, 4)
feeder = t.Feeder([t.Task("process", None)] * 100)
pool.run(feeder.next, feeder.take)
print(*set(feeder.results.values()), flush=True)
feeder = t.Feeder([t.Task({kind!r}, {payload!r})] * 2)
pool.run(feeder.next, feeder.take)
"""


class Orphans(PoolCase):
    """A parent that is killed with -9 leaves no workers: two of them are at work, two wait."""

    def orphan(self, kind: str, payload: Any, by_pipe_alone: bool) -> List[int]:
        script = ORPHANS.format(
            root=ROOT, tests=os.path.join(ROOT, "tests"), by_pipe_alone=by_pipe_alone, kind=kind, payload=payload
        )
        parent = support.start([sys.executable, "-c", script], stdout=-1)
        try:
            pids = [int(word) for word in parent.stdout.readline().split()]  # type: ignore[union-attr]
            time.sleep(0.2)
            self.assertEqual([pid for pid in pids if ended(pid, 0.01)], [])
        finally:
            parent.kill()
            parent.communicate()
        return pids

    def test_the_kernel_tells_them(self) -> None:
        pids = self.orphan("work", self.path("temporary"), by_pipe_alone=False)
        self.assertEqual(len(pids), 4)
        self.assertEqual([pid for pid in pids if not ended(pid, 2)], [])

    def test_the_pipe_tells_them(self) -> None:
        # Without ctypes: those that wait leave at once, the others when they send their result.
        pids = self.orphan("sleep", 1.0, by_pipe_alone=True)
        self.assertEqual(len(pids), 4)
        self.assertEqual([pid for pid in pids if not ended(pid, 3)], [])


if __name__ == "__main__":
    support.main()
