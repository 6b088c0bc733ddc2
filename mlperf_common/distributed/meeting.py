# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that talk through plain files in a directory which all of them see, for launchers without torch or MPI.

They meet in a directory named after user, launcher and job, which only this user may enter. Each rank draws an id and
says hello with it; rank 0 answers with a nonce and the ids that it has seen, again and again until every rank has
found its own among them. So what an earlier job of the same name has left there is never taken for this one's,
whatever it is, and all later names carry the nonce.

Each rank has a *pulse*: a file of a fixed length whose content changes every second, written by a thread, so that a
long computation does not look like death. Others open it anew at each look, since an open sees a file's last content
also on NFS, where names that were absent and attributes are remembered for up to a minute. So the pulse also says how
many messages its rank has posted, that it has failed, or that it has left; a message is opened only after its pulse
has announced it. Rank 0 looks at all pulses, the others look at rank 0's, which passes on any failure.

Promises: messages arrive whole, in order, on the ranks that wait for them; a rank that has failed, or whose pulse has
stopped, ends the others with its number and the reason; no wait is without an end of this kind. Messages are JSON.
Not promised: that a rank which is stopped or cut off from the filesystem is told from a dead one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import socket
import stat
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from mlperf_common.distributed.launch import Launch

PREFIX = ".fastcp"

WAIT_SECONDS = 120.0  # for all ranks to come: Slurm starts those of a large job over many seconds
DEAD_SECONDS = 10.0
DEAD_SECONDS_NFS = 90.0  # an NFS client may show attributes and contents up to a minute late
BEAT_SECONDS = 1.0
LATE_SECONDS = 2.0  # that the others wait longer for rank 0 than it for them: it knows who is missing
SHORTEST, LONGEST = 0.001, 0.25  # seconds between two looks: each wait begins with the one and doubles it
FEW_LONGEST = 0.02  # seconds: the same as LONGEST where all ranks together look less often than ...
LOOKS_PER_SECOND = 4000  # ... so often. With 0.25 a job of 8 ranks lost a second of 9 in its waits.
LOOK_SECONDS = 1.0  # between two looks at the other ranks while nothing is waited for
LOOKS = 64  # pulses that rank 0 reads in one look: at 1 ms each no more than a tenth of its time

PULSE_LENGTH = 2048  # bytes
REASON_LENGTH = 1000  # characters of a failure's reason


class MeetingError(Exception):
    """The ranks cannot meet: the message says where, and why or who is missing."""


class RankFailed(Exception):
    """Another rank has failed or died; ``rank`` is its number, the message has it too, with the reason."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Pulse(NamedTuple):
    """What a rank says of itself: a count that grows while it lives, messages posted, failure, whether it has left.

    ``failed`` is (rank, words): rank 0 passes on what it knows of others. ``through``: it has seen rank 0 leave.
    ``done`` is whatever the rank counts, for rank 0 to show.
    """

    beat: int = 0
    posted: int = 0
    failed: Optional[Tuple[int, str]] = None
    gone: bool = False
    through: bool = False
    done: Tuple[int, int] = (0, 0)


class Process(NamedTuple):
    """What a rank says of its process in its hello, with its random ``id``."""

    id: str
    rank: int
    world_size: int
    host: str
    kernel: str  # boot id and pid namespace: where both are ours, so are the process numbers
    pid: int
    start: int  # clock ticks since boot


def process_of(value: Any) -> Optional[Process]:
    """The process that a JSON value describes; None if it is none, as what another version of this has left."""
    kinds = (str, int, int, str, str, int, int)
    if not isinstance(value, list) or len(value) != len(kinds):
        return None
    return Process(*value) if all(isinstance(field, kind) for field, kind in zip(value, kinds)) else None


def this_process(launch: Launch) -> Process:
    """The one that calls."""
    boot = _read_text("/proc/sys/kernel/random/boot_id").strip()
    namespace = ""
    with contextlib.suppress(OSError):  # no /proc: then only the pulse tells
        namespace = os.readlink("/proc/self/ns/pid")
    kernel = "%s %s" % (boot, namespace) if boot and namespace else ""
    pid, host = os.getpid(), socket.gethostname()
    return Process(os.urandom(16).hex(), launch.rank, launch.world_size, host, kernel, pid, start_of(pid))


def start_of(pid: int) -> int:
    """When a process began (field 22 of /proc/PID/stat, proc(5)); 0 if there is none, or it is a zombie."""
    fields = _read_text("/proc/%d/stat" % pid).rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else 0


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as stream:
            return stream.read()
    except OSError:  # no such process, or no /proc: nothing is known
        return ""


# -------------------------------------------------------------------------------------------------- the directory


class Place:
    """The directory in which the ranks meet, open; names are relative to it, links are not followed."""

    def __init__(self, path: str, fd: int, created: bool) -> None:
        self.path = path
        self.fd = fd
        self.created = created

    def write(self, name: str, value: Any) -> None:
        """A JSON value under a name, whole from the start. Raises OSError."""
        fresh = "%s.%s.new" % (name, os.urandom(4).hex())
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(fresh, flags, 0o600, dir_fd=self.fd)
        with open(fd, "w", encoding="ascii") as stream:
            json.dump(value, stream)
        os.rename(fresh, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def read(self, name: str) -> Any:
        """The JSON value under a name; None if there is none. Raises OSError, MeetingError."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        except OSError as exc:
            if exc.errno != errno.ELOOP:
                raise
            raise MeetingError("%r: not a file of ours" % os.path.join(self.path, name)) from exc
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or st.st_uid != os.geteuid():
            os.close(fd)
            raise MeetingError("%r: not a file of ours" % os.path.join(self.path, name))
        with open(fd, encoding="ascii") as stream:
            try:
                return json.load(stream)
            except ValueError as exc:
                raise MeetingError("%r: cannot be read: %s" % (os.path.join(self.path, name), exc)) from exc

    def remove(self, name: str) -> None:
        """Remove a name, if it is there. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def clear(self, nonce: str) -> None:
        """Remove everything in it, and itself if the ranks have made it. Raises OSError."""
        for name in os.listdir(self.fd):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)
        self._remove_itself(nonce)

    def remove_all_of(self, ranks: Set[int], nonce: str = "") -> None:
        """Remove what these ranks have made, and the directory if nothing is left. Raises OSError."""
        for name in os.listdir(self.fd):
            final = UNFINISHED.sub("", name)
            if final.rpartition(".")[2] in map(str, ranks) or (0 in ranks and final == "welcome"):
                self.remove(name)
        self._remove_itself(nonce)

    def step_aside(self, nonce: str) -> None:
        """Leave the name to the next meeting of the job, which may begin before this one's files are gone.

        The ranks have the directory open, and go on in it. Raises OSError.
        """
        if self.created and self._is_here(self.path):
            os.rename(self.path, self._aside(nonce))

    def _aside(self, nonce: str) -> str:
        return "%s.%s" % (self.path, nonce)

    def _is_here(self, path: str) -> bool:
        """Whether a path names this directory, not that of the job's next meeting."""
        try:
            return os.path.samestat(os.lstat(path), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def _remove_itself(self, nonce: str) -> None:
        for path in (self.path, self._aside(nonce)):
            if self.created and self._is_here(path):
                os.rmdir(path)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


def open_place(directory: str, launch: Launch) -> Place:
    """Make the ranks' directory in ``directory``, or find it; without a job's name it is ``directory`` itself.

    Raises MeetingError: it is not a directory of this user's that nobody else may enter.
    """
    path = directory
    try:
        if launch.job:
            path = os.path.join(directory, "%s-%d-%s-%s" % (PREFIX, os.geteuid(), launch.launcher, launch.job))
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise MeetingError("the ranks cannot meet in %r: %s" % (path, exc.strerror)) from exc
    problem = _unsafe(os.fstat(fd), bool(launch.job)) or _not_empty(fd, bool(launch.job))
    if problem:
        os.close(fd)
        raise MeetingError("the ranks cannot meet in %r: %s" % (path, problem))
    return Place(path, fd, bool(launch.job))


def _unsafe(st: os.stat_result, own: bool) -> str:
    if st.st_uid != os.geteuid():
        return "it is not yours"
    forbidden = 0o077 if own else 0o022
    if stat.S_IMODE(st.st_mode) & forbidden:
        return "others may %s it (mode %04o)" % ("enter" if own else "write in", stat.S_IMODE(st.st_mode))
    return ""


UNFINISHED = re.compile(r"(\.[0-9a-f]{8})?\.new$")  # what a name has before its rename
OWN_NAMES = ("hello.", "welcome", "ready.", "pulse.", "say.")


def _not_empty(fd: int, own: bool) -> str:
    """What a directory that the user gives for this one job must not hold."""
    if own:
        return ""
    for name in os.listdir(fd):
        if not name.startswith(OWN_NAMES):
            return "it must be empty, but has %r" % name
    return ""


def is_nfs(path: str) -> bool:
    """Whether a directory is on NFS, by its longest mount point (proc(5), mountinfo)."""
    path, best, kind = os.path.realpath(path), "", ""
    for line in _read_text("/proc/self/mountinfo").splitlines():
        fields = line.split(" ")
        mount = fields[4].encode("utf-8", "surrogateescape").decode("unicode_escape") if "\\" in line else fields[4]
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best) and "-" in fields:
            best, kind = mount, fields[fields.index("-") + 1]
    return kind.startswith("nfs")


# ------------------------------------------------------------------------------------------------------- the pulse


def encode_pulse(pulse: Pulse) -> bytes:
    """A pulse in ``PULSE_LENGTH`` bytes, so that each write replaces all of the last one; a digest shows a torn one."""
    text = json.dumps(pulse).encode("ascii")
    if len(text) > PULSE_LENGTH - 34 and pulse.failed is not None:
        rank, words = pulse.failed
        return encode_pulse(pulse._replace(failed=(rank, words[: len(words) // 2])))
    return b"%s %s\n" % (hashlib.sha256(text).hexdigest()[:32].encode("ascii"), text.ljust(PULSE_LENGTH - 34))


def decode_pulse(data: bytes) -> Optional[Pulse]:
    """The pulse, or None: it was being written."""
    digest, _, text = data.rstrip(b"\n").partition(b" ")
    text = text.rstrip()
    if hashlib.sha256(text).hexdigest()[:32].encode("ascii") != digest:
        return None
    beat, posted, failed, gone, through, done = json.loads(text)
    return Pulse(beat, posted, tuple(failed) if failed else None, gone, through, (done[0], done[1]))


class Heart(threading.Thread):
    """Writes this rank's pulse every second, and when there is something to say."""

    def __init__(self, place: Place, name: str) -> None:
        super().__init__(name="pulse", daemon=True)
        self._place = place
        self._name = name
        self._pulse = Pulse()
        self.done = self._pulse.done  # goes with the next beat
        self._lock = threading.Lock()
        self._ended = threading.Event()
        fresh = name + ".new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(fresh, flags, 0o600, dir_fd=place.fd)
        try:
            os.write(fd, encode_pulse(self._pulse))
        finally:
            os.close(fd)
        os.rename(fresh, name, src_dir_fd=place.fd, dst_dir_fd=place.fd)

    def run(self) -> None:
        """The thread: a beat that cannot be written is tried again, others will take us for dead if it stays so."""
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                self.say()

    def say(self, **changes: Any) -> None:
        """Change what the pulse says, at once. Raises OSError."""
        with self._lock:
            self._pulse = self._pulse._replace(beat=self._pulse.beat + 1, done=self.done, **changes)
            fd = os.open(self._name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._place.fd)
            try:
                os.pwrite(fd, encode_pulse(self._pulse), 0)
            finally:
                os.close(fd)

    def failed(self) -> Optional[Tuple[int, str]]:
        """The failure that it tells."""
        return self._pulse.failed

    def stop(self) -> None:
        """No more beats."""
        self._ended.set()
        self.join()


class Watch:
    """What this rank has seen of another one's pulse, and since when nothing has changed, by its own clock."""

    def __init__(self, place: Place, name: str, process: Process, clock: Callable[[], float]) -> None:
        self._place = place
        self._name = name
        self._clock = clock
        self._data = b""
        self._changed = clock()
        self.process = process
        self.pulse = Pulse()

    def look(self) -> Pulse:
        """The pulse as it is now; if it cannot be read, as it was. Raises MeetingError."""
        try:
            fd = os.open(self._name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._place.fd)
            try:
                data = os.read(fd, PULSE_LENGTH)
            finally:
                os.close(fd)
        except OSError:  # gone, or the server is: silence is all that counts
            return self.pulse
        pulse = decode_pulse(data) if data != self._data else None
        if pulse is not None:
            self._data, self._changed, self.pulse = data, self._clock(), pulse
        return self.pulse

    def silence(self) -> float:
        """Seconds since it last changed."""
        return self._clock() - self._changed


# -------------------------------------------------------------------------------------------------------- the ranks


class Handshake:
    """How the ranks find each other; afterwards all have the same nonce, and each has a pulse.

    A rank whose process has been seen, and is gone, will not come any more. One that was never seen may be that of an
    earlier job, whose place the present one has not taken yet: for ``dead`` seconds.
    """

    def __init__(self, place: Place, me: Process, wait: float, dead: float, clock: Callable[[], float]) -> None:
        self._place = place
        self._me = me
        self._clock = clock
        self._deadline = clock() + wait + (LATE_SECONDS if me.rank else 0)
        self._wait = wait
        self._dead = dead
        self._gone: Dict[Process, float] = {}  # since when
        self._alive: Set[Process] = set()  # seen to be

    def run(self) -> Tuple[str, Dict[int, Process], Heart]:
        """The nonce, in rank 0 all processes, in others that of rank 0, and this rank's pulse.

        Raises MeetingError, OSError.
        """
        self._place.write(hello_name(self._me.rank), self._me)
        return self._welcome() if self._me.rank == 0 else self._come()

    def _come(self) -> Tuple[str, Dict[int, Process], Heart]:
        told = ""  # the nonce of the rank 0 that has been told that this rank takes the job for a larger or smaller one
        for _ in _pauses(self._me.world_size):
            self._check_process(self._hello(0))
            self._check_claim()
            nonce, processes, problem = self._welcomed()
            if problem:
                raise MeetingError(problem)
            if len(processes) == self._me.world_size:
                heart = Heart(self._place, pulse_name(nonce, self._me.rank))
                heart.start()
                self._place.write(ready_name(nonce, self._me.rank), self._me.id)
                return nonce, {0: processes[0]}, heart
            if nonce != told:  # rank 0 finds the same, and says so to all
                self._place.write(ready_name(nonce, self._me.rank), self._me.id)
                told = nonce
            self._check_time("rank 0 has not welcomed this rank")
        raise MeetingError("unreachable")

    def _welcomed(self) -> Tuple[str, List[Process], str]:
        """Nonce, processes and problem of a welcome that has this process in it, else nothing."""
        welcome = self._place.read("welcome")
        if not isinstance(welcome, list) or len(welcome) != 3 or not isinstance(welcome[1], list):
            return "", [], ""
        processes = [process for process in map(process_of, welcome[1]) if process is not None]
        return (str(welcome[0]), processes, str(welcome[2])) if self._me in processes else ("", [], "")

    def _welcome(self) -> Tuple[str, Dict[int, Process], Heart]:
        nonce = os.urandom(8).hex()
        heart = Heart(self._place, pulse_name(nonce, 0))
        heart.start()  # those who are welcome begin to look at it
        known: Dict[int, Process] = {0: self._me}
        try:
            for _ in _pauses(self._me.world_size):
                self._check_claim()
                if self._look_for_hellos(known):
                    self._answer(nonce, known, "")
                missing = [rank for rank in range(self._me.world_size) if rank not in known]
                if not missing:
                    missing = [rank for rank in range(1, self._me.world_size) if not self._is_ready(nonce, known[rank])]
                if not missing:
                    break
                self._check_time("of %d ranks these have not come: %s" % (self._me.world_size, _shortened(missing)))
        except MeetingError as exc:
            with contextlib.suppress(OSError):
                heart.say(failed=(0, str(exc)))
            self._send_away(nonce, known, str(exc))
            raise
        return nonce, known, heart

    def _answer(self, nonce: str, known: Dict[int, Process], problem: str) -> None:
        self._place.write("welcome", [nonce, [known[rank] for rank in sorted(known)], problem])

    def _send_away(self, nonce: str, known: Dict[int, Process], problem: str) -> None:
        """Tell those who have come, or come now, that nothing comes of it, and wait a while until they have gone."""
        end = self._clock() + self._dead
        self._answer(nonce, known, problem)
        for _ in _pauses(self._me.world_size):
            here = {rank: self._hello(rank) for rank in range(1, self._me.world_size)}
            news = {rank: hello for rank, hello in here.items() if hello and hello != known.get(rank)}
            if news:
                known.update(news)
                self._answer(nonce, known, problem)
            gone = [rank in known and (hello is None or is_gone(hello, self._me)) for rank, hello in here.items()]
            if all(gone) or self._clock() > end:
                return

    def _look_for_hellos(self, known: Dict[int, Process]) -> bool:
        """Take in who has said hello; whether the welcome is to be written (again)."""
        news = len(known) == self._me.world_size == 1
        for rank in range(1, self._me.world_size):
            hello = self._hello(rank)
            self._check_process(hello)
            if hello is not None and hello != known.get(rank):
                known[rank] = hello
                news = True
        return news and len(known) == self._me.world_size

    def _is_ready(self, nonce: str, process: Process) -> bool:
        if self._place.read(ready_name(nonce, process.rank)) != process.id:
            return False
        if process.world_size != self._me.world_size:  # of a rank that is of this job, since it knows the nonce
            raise MeetingError(
                "the ranks do not meet: rank 0 (%s) is one of %d ranks, rank %d (%s) one of %d"
                % (self._me.host, self._me.world_size, process.rank, process.host, process.world_size)
            )
        return True

    def _hello(self, rank: int) -> Optional[Process]:
        return process_of(self._place.read(hello_name(rank)))

    def _check_claim(self) -> None:
        """What an earlier job left under this name is overwritten: what stands there now is from another process."""
        other = self._hello(self._me.rank)
        if other is not None and other != self._me:
            raise MeetingError(
                "the ranks do not meet: two processes are rank %d: %d on %s and %d on %s"
                % (self._me.rank, self._me.pid, self._me.host, other.pid, other.host)
            )

    def _check_process(self, process: Optional[Process]) -> None:
        if process is None:
            return
        if not is_gone(process, self._me):
            self._alive.add(process)
            return
        since = self._gone.setdefault(process, self._clock())
        if process in self._alive or self._clock() - since > self._dead:
            raise MeetingError("the ranks do not meet: rank %d (%s) has died" % (process.rank, process.host))

    def _check_time(self, problem: str) -> None:
        if self._clock() > self._deadline:
            raise MeetingError(
                "the ranks do not meet in %r: in %g s %s (do all nodes see this directory?)"
                % (self._place.path, self._wait, problem)
            )


def hello_name(rank: int) -> str:
    """The file in which a rank says hello."""
    return "hello.%d" % rank


def ready_name(nonce: str, rank: int) -> str:
    """The file in which a rank says that it has been welcomed."""
    return "ready.%s.%d" % (nonce, rank)


def is_gone(process: Process, me: Process) -> bool:
    """Whether a process that would have to be seen from here is not."""
    return bool(me.kernel) and process.kernel == me.kernel and start_of(process.pid) != process.start


def pulse_name(nonce: str, rank: int) -> str:
    """The file of a rank's pulse."""
    return "pulse.%s.%d" % (nonce, rank)


def _shortened(ranks: List[int]) -> str:
    return ", ".join(map(str, ranks[:10])) + (" and %d more" % (len(ranks) - 10) if len(ranks) > 10 else "")


def _pauses(ranks: int) -> Iterator[None]:
    """Goes on for ever, with pauses that become longer: up to ``LONGEST``, or less where there are few ranks."""
    pause, longest = SHORTEST, min(LONGEST, max(FEW_LONGEST, ranks / LOOKS_PER_SECOND))
    while True:
        yield
        time.sleep(pause)
        pause = min(2 * pause, longest)


class Files:
    """Ranks that talk through files in a directory below ``meeting``; see the module.

    ``wait``: seconds for all to come; ``dead``: seconds without a pulse after which a rank is dead (None: 10, on NFS
    90). As a context manager an exception in the body ends the other ranks with its words.
    Raises MeetingError, RankFailed; OSError where the directory cannot be written.
    """

    def __init__(
        self,
        launch: Launch,
        meeting: str,
        wait: float = WAIT_SECONDS,
        dead: Optional[float] = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = launch.rank
        self.world_size = launch.world_size
        self._clock = clock
        self._me = this_process(launch)
        self._place = open_place(meeting, launch)
        if dead is None:
            dead = DEAD_SECONDS_NFS if is_nfs(self._place.path) else DEAD_SECONDS
        self._dead = dead
        self._closed = False
        self.on_check: Callable[[], None] = lambda: None  # called at each ``check``
        self._others = (0, 0)
        self._number = 0  # of the last collective
        self._sent: List[Tuple[int, int, str]] = []  # messages that may not have been read: number, root, name
        self._looked = clock()
        self._turn = 0
        self._watches: Dict[int, Watch] = {}
        try:
            hands = Handshake(self._place, self._me, wait, dead, clock)
            self._nonce, self._processes, self._heart = hands.run()
        except BaseException:
            with contextlib.suppress(OSError, MeetingError):
                hello = process_of(self._place.read(hello_name(self.rank)))
                mine = {self.rank} if hello in (None, self._me) else set()  # else another process goes on as this rank
                self._place.remove_all_of({*mine, *self._gone_ranks()})
            self._place.close()
            raise
        with self._ending_all():
            # From here on every pulse is there. Who the others are is known only now: a rank that came early may have
            # been welcomed beside one of an earlier job.
            known = self.broadcast(self.gather(self._me))
            self._processes = {process.rank: process for process in (Process(*fields) for fields in known)}

    # ---- collectives

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """The ``obj`` of the rank ``root``, on every rank; anything that JSON knows."""
        self.check()  # who sends does not wait
        self._number += 1
        if self.rank == root:
            self._post(root, obj)
            return obj
        received = self._receive(root)
        self._forget(root)  # it had read what it gathered before
        return received

    def gather(self, obj: Any, root: int = 0) -> Optional[List[Any]]:
        """On the rank ``root`` the ``obj`` of every rank, in order; None on the others."""
        self.check()
        self._number += 1
        if self.rank != root:
            self._post(root, obj)
            return None
        gathered = [obj if rank == root else self._receive(rank) for rank in range(self.world_size)]
        self._forget(root)  # all have come here, past what this rank had sent them
        return gathered

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.gather(None)
        self.broadcast(None)

    def _message(self, rank: int) -> str:
        return "say.%s.%d.%d" % (self._nonce, self._number, rank)

    def _post(self, root: int, obj: Any) -> None:
        name = self._message(self.rank)
        self._place.write(name, [obj])
        self._heart.say(posted=self._number)
        self._sent.append((self._number, root, name))

    def _receive(self, rank: int) -> Any:
        """Wait for the message that a rank posts in the present collective."""
        watch = self._watch(rank)
        for _ in _pauses(self._me.world_size):
            pulse = watch.look()
            if pulse.posted >= self._number:
                break
            self._judge(watch)
            if pulse.gone:
                raise RankFailed(rank, "rank %d has left the job" % rank)
            self.check()
        message = self._place.read(self._message(rank))
        if message is None:
            raise self._lost(watch)
        return message[0]

    def _lost(self, watch: Watch) -> RankFailed:
        """Why a message that was announced is not there: who finds its rank dead removes it, and then so does this."""
        end = self._clock() + self._dead
        for _ in _pauses(self._me.world_size):
            self._judge(watch)  # raises RankFailed for a rank that has failed or died
            if watch.pulse.gone or self._clock() > end:
                break
        return RankFailed(watch.process.rank, "a message of rank %d is lost" % watch.process.rank)

    def _forget(self, root: int) -> None:
        """Remove messages of this rank that, now that it has heard from ``root``, are known to have been read."""
        for number, other, name in list(self._sent):
            if other == root and number < self._number:
                self._place.remove(name)
                self._sent.remove((number, other, name))

    # ---- who is alive

    def _watch(self, rank: int) -> Watch:
        if rank not in self._watches:
            name = pulse_name(self._nonce, rank)
            self._watches[rank] = Watch(self._place, name, self._processes[rank], self._clock)
        return self._watches[rank]

    def check(self) -> None:
        """Raise RankFailed if a rank is known to have failed or died; to be called often, it rarely looks."""
        self.on_check()
        if self._clock() - self._looked < LOOK_SECONDS:
            return
        self._looked = self._clock()
        if self.rank:
            self._judge(self._watch(0))
            return
        for _ in range(min(LOOKS, self.world_size - 1)):
            self._turn = self._turn % (self.world_size - 1) + 1
            self._judge(self._watch(self._turn))
        seen = [watch.pulse.done for watch in self._watches.values()]
        self._others = sum(done[0] for done in seen), sum(done[1] for done in seen)

    def report(self, done: Tuple[int, int]) -> None:
        """Let rank 0 know, within some seconds, how much this rank has done of whatever it counts."""
        self._heart.done = done

    def reported(self) -> Tuple[int, int]:
        """In rank 0: the sums of what the other ranks have reported."""
        return self._others

    def _judge(self, watch: Watch) -> None:
        """Raise RankFailed, and pass it on, if a rank says that there is a failure, or says nothing any more."""
        pulse, process = watch.look(), watch.process
        if pulse.failed is None and not pulse.gone:
            if is_gone(process, self._me):
                pulse = watch.look()  # what it said last
                if pulse.failed is None and not pulse.gone:
                    words = "rank %d (%s) has died: its process is gone" % (process.rank, process.host)
                    pulse = pulse._replace(failed=(process.rank, words))
            elif watch.silence() > self._dead:
                words = "rank %d (%s) has died: no sign of life for %g s" % (process.rank, process.host, self._dead)
                pulse = pulse._replace(failed=(process.rank, words))
        if pulse.failed is not None:
            self._tell(*pulse.failed)
            raise RankFailed(*pulse.failed)

    def _gone_ranks(self) -> List[int]:
        """The ranks that have said hello and whose processes are gone."""
        hellos = [process_of(self._place.read(hello_name(rank))) for rank in range(self.world_size)]
        return [hello.rank for hello in hellos if hello is not None and is_gone(hello, self._me)]

    def _tell(self, rank: int, words: str) -> None:
        if self._heart.failed() is None:
            with contextlib.suppress(OSError):  # the others will see that the pulse stops
                self._heart.say(failed=(rank, words[:REASON_LENGTH]))

    def fail(self, reason: str) -> bool:
        """Tell the others that this rank has failed: they end, whatever they wait for. True; never raises OSError."""
        self._tell(self.rank, "rank %d (%s) failed: %s" % (self.rank, self._me.host, reason))
        return True

    # ---- the end

    def close(self) -> None:
        """Leave. Rank 0 says so first, and goes last: it removes the directory, or the others do if it has died.

        The others return when rank 0 has said so, or is dead: what it does before that, it does before they end.
        They say that they have seen it: were its pulse gone before they look, they would wait for its death, 10 s
        where its process cannot be seen from theirs, and 90 on NFS.
        The name of the directory is free when any of them returns. Never raises OSError; a second time does nothing.
        """
        if self._closed:
            return
        self._closed = True
        if self.rank == 0:
            with contextlib.suppress(OSError):
                self._place.step_aside(self._nonce)
        with contextlib.suppress(OSError):
            self._heart.say(gone=True)
        with contextlib.suppress(OSError, MeetingError):
            if self.rank == 0:
                self._wait_for(set(range(1, self.world_size)), lambda pulse: pulse.through)
            else:
                self._wait_for({0}, lambda pulse: pulse.gone)
                self._heart.say(through=True)
        self._heart.stop()
        with contextlib.suppress(OSError, MeetingError):
            if self.rank == 0:
                self._place.clear(self._nonce)
            elif not self._watch(0).pulse.gone:
                self._place.remove_all_of({0, self.rank, *self._gone_ranks()}, self._nonce)
        self._place.close()

    def _wait_for(self, ranks: Set[int], done: Callable[[Pulse], bool]) -> None:
        """Until each of these ranks says so, or is dead."""
        for _ in _pauses(self._me.world_size):
            for rank in list(ranks):
                watch = self._watch(rank)
                if done(watch.look()) or is_gone(watch.process, self._me) or watch.silence() > self._dead:
                    ranks.discard(rank)
            if not ranks:
                return

    @contextlib.contextmanager
    def _ending_all(self) -> Iterator[None]:
        """What goes wrong here ends the other ranks too."""
        try:
            yield
        except RankFailed:  # they know
            self.close()
            raise
        except BaseException as exc:
            self.fail("%s: %s" % (type(exc).__name__, exc) if str(exc) else type(exc).__name__)
            self.close()
            raise

    def __enter__(self) -> Files:
        return self

    def __exit__(self, kind: Any, exc: Optional[BaseException], trace: Any) -> None:
        if exc is not None and not isinstance(exc, RankFailed):
            self.fail(str(exc) or type(exc).__name__)
        self.close()
