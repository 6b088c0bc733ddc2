# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""A pool of worker processes: hands out tasks, passes descriptors, sums progress, survives a worker's death.

The parent hands out one task at a time and at most one more in flight, so it always knows what each worker
holds: when one dies (OOM killer, kill -9) the task that it was in fails with the signal's name, the task behind
it goes to another worker, and the others go on. There is no lock, queue or semaphore (they need a writable
/dev/shm), no shared file offset, no thread. ``InProcess`` runs the same functions without any process.

Why not concurrent.futures.ProcessPoolExecutor (ran): when one worker dies it fails every unfinished future
alike, without pid, signal or task, and kills the healthy workers; its workers outlive a killed parent.

Not promised: a worker that hangs in the kernel is waited for, until the job itself is told to stop.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, List, NamedTuple, Optional, Sequence, Tuple

from mlperf_common.fileio import direct_io, walk
from mlperf_common.fileio.stopping import Interrupted, StopFlag

if TYPE_CHECKING:
    from mlperf_common.fileio.pacing import Pace

# A message up to this size (bytes) fits the socket's buffer beside another one, so that the parent's send never
# waits for a worker that is itself waiting to send (both stood still at 300 KB: ran). A longer one (a path of
# 1,200 components) is sent only to a worker that holds nothing and therefore reads.
MESSAGE_LIMIT = 32 << 10

REPORT_SECONDS = 0.2  # how often, at the most, a worker reports bytes moved
TICK_SECONDS = 0.25  # how often, at the least, the parent looks at the clock
STOP_SECONDS = 5.0  # how long workers may clean up before they are killed

PR_SET_PDEATHSIG = 1  # prctl(2)


class Task(NamedTuple):
    """A piece of work: the name of its function, its argument (picklable), descriptors that travel with it.

    ``context`` stays with the parent, for the one who gets the result.
    """

    kind: str
    payload: Any
    fds: Tuple[int, ...] = ()
    context: Any = None


class Failure(NamedTuple):
    """A task that has no result: the reason in words, errno or 0, the signal that killed its worker or 0."""

    reason: str
    errno: int = 0
    signum: int = 0
    trace: str = ""
    worker: int = -1


class AllWorkersDied(Exception):
    """No worker is left; the message says what the last one died of."""


def failure_of(exc: BaseException) -> Failure:
    """What ``exc`` looks like from another process: words, errno and, for FASTCP_DEBUG, the trace."""
    import traceback  # 4 ms, needed by no run that goes well

    trace = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
    if isinstance(exc, OSError) and exc.strerror:
        return Failure(exc.strerror, exc.errno or 0, 0, trace)
    return Failure("%s: %s" % (type(exc).__name__, exc), 0, 0, trace)


class Worker:
    """What a task's function gets: its number, a buffer, the stop check, a memory that lasts between tasks.

    ``memory`` is a dict for what is worth keeping: an open chain of directories, what a device cannot do. What in
    it has a ``close`` is closed at the end.
    """

    def __init__(
        self,
        number: int,
        buffer_size: int,
        check: Callable[[], None],
        report: Callable[[int], None],
        pace: Optional[Pace] = None,
    ):
        self._pace = pace
        self.number = number
        self.buffer_size = buffer_size
        self.check = check
        self.memory: Dict[Any, Any] = {}
        self._report = report
        self._unreported = 0
        self._reported_at = 0.0
        self._view: Optional[memoryview] = None

    def buffer(self) -> memoryview:
        """This worker's aligned buffer of ``buffer_size`` bytes, made on first use (after the fork). Raises OSError."""
        if self._view is None:
            try:
                self._view = direct_io.allocate_aligned_buffers(self.buffer_size, direct_io.BUFFER_ALIGN, 1)[0][0]
            except OSError as exc:
                words = "%s for a buffer of %d bytes; a smaller one will do (-b)" % (exc.strerror, self.buffer_size)
                raise OSError(exc.errno, words) from exc
        return self._view

    def turn(self, count: int, block: int = 1) -> int:
        """How many of ``count`` bytes to move now, a multiple of ``block`` or all; waits where there is a limit.

        Raises Interrupted.
        """
        if self._pace is not None:
            count = min(count, self._pace.piece(self.buffer_size, block))
        self.wait_for(count)
        return count

    def wait_for(self, count: int) -> None:
        """Look whether to stop, and wait until ``count`` bytes may move. Raises Interrupted."""
        self.check()
        if self._pace is not None and count:
            self.flush()
            self._pace.wait(count, self.check)

    def moved(self, count: int) -> None:
        """Report ``count`` more bytes written or hashed; passed on a few times a second."""
        self._unreported += count
        now = time.monotonic()
        if now - self._reported_at >= REPORT_SECONDS:
            self._reported_at = now
            self.flush()

    def flush(self) -> None:
        """Pass on what ``moved`` has collected."""
        if self._unreported:
            count, self._unreported = self._unreported, 0
            self._report(count)

    def close(self) -> None:
        """Close and forget what the memory keeps."""
        while self.memory:
            kept = self.memory.popitem()[1]
            if hasattr(kept, "close"):
                kept.close()


Functions = Dict[str, Callable[[Worker, Any, Sequence[int]], Any]]
NextTask = Callable[[int, bool], Optional[Task]]
OnResult = Callable[[Task, Any], None]


def _nothing(*_: Any) -> None:
    """The reporter of a caller that wants no progress."""


class InProcess:
    """A pool of none: each task runs in the calling process, through the same functions."""

    width = 1

    def __init__(self, functions: Functions, buffer_size: int, stop: StopFlag, pace: Optional[Pace] = None):
        self.on_moved: Callable[[int], None] = _nothing
        self.on_tick: Callable[[], None] = _nothing
        self._functions = functions
        self._stop = stop
        self._worker = Worker(0, buffer_size, stop.check, self._moved, pace)

    def _moved(self, count: int) -> None:
        self.on_moved(count)
        self.on_tick()

    def run(self, next_task: NextTask, on_result: OnResult) -> None:
        """As ``Pool.run``."""
        while True:
            self._stop.check()
            task = next_task(0, False)
            if task is None:
                return
            on_result(task, _perform(self._functions, self._worker, task.kind, task.payload, task.fds))
            self.on_tick()

    def close(self) -> None:
        """Nothing to end but what the tasks have kept open."""
        self._worker.close()

    def abort(self) -> None:
        """Nothing to end."""


def _perform(functions: Functions, worker: Worker, kind: str, payload: Any, fds: Sequence[int]) -> Any:
    """Run one task; whatever it raises, but for a stop, becomes a ``Failure``."""
    try:
        result = functions[kind](worker, payload, fds)
    except Exception as exc:
        result = failure_of(exc)._replace(worker=worker.number)
    worker.flush()
    return result


class _Member:
    """The parent's side of one worker: process, pipe, tasks that it holds (oldest first), tasks to be sent."""

    def __init__(self, number: int, process: Any, connection: Any, channel: Any):
        self.number = number
        self.process = process
        self.connection = connection
        self.channel = channel
        self.held: Deque[Task] = deque()
        self.unsent: Deque[Tuple[bytes, Task]] = deque()

    def pump(self) -> None:
        """Send what may be sent. A broken pipe is left to the sentinel: the worker's death is seen there.

        A task that meets one is not held: a worker that has died while it waited for work has begun none.
        """
        while self.unsent:
            message, task = self.unsent[0]
            if len(self.held) >= 2 or (self.held and len(message) > MESSAGE_LIMIT):
                return
            try:
                self.connection.send_bytes(message)
                if task.fds:
                    self.channel.send(task.fds)
            except (BrokenPipeError, ConnectionResetError):
                return
            self.unsent.popleft()
            self.held.append(task)

    def load(self) -> int:
        """How many tasks this worker holds or is about to."""
        return len(self.held) + len(self.unsent)


class _Channel:
    """Descriptors over a connection's own socket (SCM_RIGHTS, unix(7)): one message for all of a task's."""

    def __init__(self, connection: Any):
        import socket

        self._socket = socket.socket(fileno=os.dup(connection.fileno()))

    def send(self, fds: Sequence[int]) -> None:
        """Send ``fds``; the receiver gets descriptors of the same open files."""
        from multiprocessing import reduction

        reduction.sendfds(self._socket, list(fds))

    def receive(self, count: int) -> List[int]:
        """Receive ``count`` descriptors, close-on-exec or not as the library leaves them (nothing execs)."""
        from multiprocessing import reduction

        return list(reduction.recvfds(self._socket, count))

    def close(self) -> None:
        """Close this side's socket."""
        self._socket.close()


class Pool:
    """Up to ``count`` forked workers that run ``functions``; forks in the constructor, before any plan exists.

    ``width`` is how many there are; if fewer than asked for, maybe none, ``limited_by`` says why. Set
    ``on_moved(bytes)`` and ``on_tick()`` to follow the work.
    """

    def __init__(
        self, count: int, functions: Functions, buffer_size: int, stop: StopFlag, pace: Optional[Pace] = None
    ):
        import multiprocessing

        self.on_moved: Callable[[int], None] = _nothing
        self.on_tick: Callable[[], None] = _nothing
        self.limited_by = "the limit of open files (ulimit -n)"
        self._stop = stop
        self._pace = pace
        self._members: List[_Member] = []
        self._returned: Deque[Task] = deque()
        _libc()  # loaded once, before the fork: 4 ms of each worker otherwise
        context = multiprocessing.get_context("fork")
        for number in range(_affordable(count)):
            try:
                self._members.append(self._start(context, number, functions, buffer_size))
            except OSError as exc:  # fewer workers do the same, more slowly
                if exc.errno not in (errno.EMFILE, errno.ENFILE):  # fork(2): EAGAIN, ENOMEM
                    self.limited_by = "the limit of processes or memory (%s)" % exc.strerror
                break
        self.width = len(self._members)

    def _start(self, context: Any, number: int, functions: Functions, buffer_size: int) -> _Member:
        mine, its = context.Pipe()
        siblings = [m.connection for m in self._members] + [mine]
        sockets = [m.channel for m in self._members]
        process = context.Process(
            target=_serve, args=(its, siblings, sockets, functions, number, buffer_size, self._stop, self._pace)
        )
        process.daemon = True
        try:
            process.start()
            return _Member(number, process, mine, _Channel(mine))
        except OSError:
            mine.close()
            raise
        finally:
            its.close()

    def run(self, next_task: NextTask, on_result: OnResult) -> None:
        """Run tasks until there are none: ``next_task(worker, ahead)`` gives one, or None for "none now".

        ``ahead`` says that the worker is busy and the task would wait behind its present one. Every task
        ends in one ``on_result(task, result)``, ``result`` being a ``Failure`` where it has none; after each,
        ``next_task`` is asked again.

        Raises Interrupted when a signal came (the caller then calls ``abort``), AllWorkersDied.
        """
        while True:
            self._stop.check()
            if not self._members:
                raise AllWorkersDied("every worker process has died")
            self._feed(next_task)
            if not any(m.load() for m in self._members):
                return
            self._wait(on_result)
            self.on_tick()

    def _feed(self, next_task: NextTask) -> None:
        import pickle  # where there is no pool, nothing needs it

        for ahead in (False, True):
            for member in self._members:
                while member.load() < 1 + ahead:
                    task = self._returned.popleft() if self._returned else next_task(member.number, ahead)
                    if task is None:
                        break
                    message = pickle.dumps((task.kind, task.payload, len(task.fds)), pickle.HIGHEST_PROTOCOL)
                    member.unsent.append((message, task))
                    member.pump()

    def _wait(self, on_result: OnResult) -> None:
        from multiprocessing.connection import wait

        waiting: Dict[Any, _Member] = {}
        for member in self._members:
            waiting[member.connection] = member
            waiting[member.process.sentinel] = member
        wake = [self._stop.fileno()] if self._stop.fileno() >= 0 else []
        dead = []
        for ready in wait(list(waiting) + wake, TICK_SECONDS):
            found = waiting.get(ready)
            if found is None:
                continue
            if ready is found.connection:
                self._receive(found, on_result)
            else:
                dead.append(found)
        for member in dead:
            self._bury(member, on_result)

    def _receive(self, member: _Member, on_result: OnResult) -> bool:
        """Take one message; False at the end of the pipe (the sentinel tells the rest), also within a message."""
        try:
            kind, value = member.connection.recv()
        except (EOFError, OSError):
            return False
        if kind == "moved":
            self.on_moved(value)
            return True
        task = member.held.popleft()
        member.pump()
        on_result(task, value)
        return True

    def _bury(self, member: _Member, on_result: OnResult) -> None:
        """A worker has ended: read what it still said, fail the task that it was in, give back the rest."""
        while member.held and member.connection.poll() and self._receive(member, on_result):
            pass
        member.process.join()
        self._members.remove(member)
        member.connection.close()
        member.channel.close()
        reason = _cause_of_death(member.process.exitcode)
        self._returned.extend(list(member.held)[1:])
        self._returned.extend(task for _, task in member.unsent)
        if member.held:
            on_result(member.held[0], Failure(reason, 0, max(0, -member.process.exitcode), "", member.number))
        self._stop.check()
        if not self._members:
            raise AllWorkersDied("every worker process has died; the last one %s" % reason)

    def close(self) -> None:
        """End the workers: each reads the end of its pipe and leaves."""
        self._end(STOP_SECONDS)

    def abort(self) -> None:
        """Tell the workers to stop at their next buffer and clean up; kill those that do not in time."""
        for member in self._members:
            member.process.terminate()
        self._end(STOP_SECONDS)

    def _end(self, seconds: float) -> None:
        for member in self._members:
            member.connection.close()
            member.channel.close()
        deadline = time.monotonic() + seconds
        for member in self._members:
            member.process.join(max(0.0, deadline - time.monotonic()))
            if member.process.exitcode is None:
                member.process.kill()
                member.process.join(1.0)
        self._members = []


def _affordable(count: int) -> int:
    """As many workers as the limit of open files allows, raised as far as it may be (getrlimit(2))."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 5 * count + 2 * walk.OPEN_AT_MOST + 64  # per worker: pipe, channel, sentinel, two operands
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return count
    if hard == resource.RLIM_INFINITY or hard > soft:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(count, (soft - 2 * walk.OPEN_AT_MOST - 64) // 5))


def _cause_of_death(exitcode: int) -> str:
    if exitcode < 0:
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:  # a real-time signal has no name of its own
            name = "signal %d" % -exitcode
        return "was killed by %s" % name
    return "ended with status %d" % exitcode


class _Leave:
    """SIGTERM in a worker: at once while it waits for work, else at the next buffer (``check``)."""

    def __init__(self) -> None:
        self.signum = 0
        self.idle = False

    def on_signal(self, signum: int, frame: Any) -> None:
        """The handler: note the signal, and leave now if nothing is being done."""
        self.signum = signum
        if self.idle:
            raise Interrupted(signum)

    def check(self) -> None:
        """Raise Interrupted if SIGTERM has come."""
        if self.signum:
            raise Interrupted(self.signum)

    def receive(self, connection: Any) -> bytes:
        """The next message; a signal that comes between the check and the read still ends the wait."""
        self.idle = True
        self.check()
        message = connection.recv_bytes()
        self.idle = False
        return bytes(message)


def _serve(
    connection: Any,
    siblings: List[Any],
    sockets: List[_Channel],
    functions: Functions,
    number: int,
    buffer_size: int,
    stop: StopFlag,
    pace: Optional[Pace],
) -> None:
    """The life of a worker: until the end of its pipe, SIGTERM, or the parent's death."""
    leave = _Leave()
    signal.signal(signal.SIGTERM, leave.on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop.forget()
    for other in [*siblings, *sockets]:
        other.close()
    _die_with_parent()
    worker = Worker(number, buffer_size, leave.check, lambda count: connection.send(("moved", count)), pace)
    try:
        _work(worker, leave, connection, functions)
    except Interrupted as exc:
        signal.signal(exc.signum, signal.SIG_DFL)
        os.kill(os.getpid(), exc.signum)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent has closed the pipe: that is how a worker is told to go


def _work(worker: Worker, leave: _Leave, connection: Any, functions: Functions) -> None:
    import pickle

    with contextlib.closing(_Channel(connection)) as channel:
        while True:
            kind, payload, count = pickle.loads(leave.receive(connection))
            fds = channel.receive(count) if count else []
            try:
                result = _perform(functions, worker, kind, payload, fds)
            finally:
                for fd in fds:
                    os.close(fd)
            connection.send(("done", result))


def _die_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent dies, kill -9 included; without ctypes the pipe's end does."""
    libc = _libc()
    if libc is not None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _libc() -> Any:
    """The C library, or None in a Python without ctypes."""
    try:
        import ctypes

        return ctypes.CDLL(None, use_errno=True)
    except (ImportError, OSError):
        return None
