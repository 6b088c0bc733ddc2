# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""One measured run of a command, and the state of the machine around it: caches, syncs, memory, free room.

Promised: user and system seconds are those of the command and of every process that it waited for; a run that
fails raises with what it said. Not promised: the work that the kernel does for it later (writeback) or in
threads of its own is in the elapsed time, because runs are timed until synced, but in nobody's CPU seconds.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, BinaryIO, Callable, Dict, List, NamedTuple, Optional, Sequence

DROP_CACHES = "/proc/sys/vm/drop_caches"
SAMPLE_SECONDS = 0.02  # between two looks at the memory of a command's processes


class RunError(Exception):
    """A command that was to be measured has failed; what is said names it and quotes its last words."""


class Run(NamedTuple):
    """What a run took: seconds until exit, seconds of the sync that followed, CPU seconds, memory; what it wrote.

    ``rss`` is the peak of its largest process, ``pss`` the peak of the sum over all of its processes, sampled
    (0: was not), both in bytes. ``output`` is its stdout, ``said`` its stderr.
    """

    until_exit: float
    syncing: float
    user: float
    system: float
    rss: int
    pss: int
    output: bytes
    said: str


def run(
    argv: Sequence[str], sync: Optional[str] = None, sample: bool = False, environ: Optional[Dict[str, str]] = None
) -> Run:
    """Run ``argv`` and measure it; ``sync`` is a path whose filesystem is synced then, and timed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.perf_counter()
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=_environment(environ))
        try:
            pss = _watch(process.pid) if sample else 0
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            _end(process)
            raise
        ended = time.perf_counter()
        if sync is not None:
            sync_filesystem(sync)
        synced = time.perf_counter()
        process.returncode = _exit_status(status)  # Popen shall not wait for it again
        said = _read_back(err).decode(errors="backslashreplace").strip()
        if process.returncode:
            raise RunError("%s ended with status %d: %s" % (" ".join(argv), process.returncode, said[-2000:]))
        taken = (ended - started, synced - ended, usage.ru_utime, usage.ru_stime)
        return Run(*taken, usage.ru_maxrss << 10, pss, _read_back(out), said)


def _read_back(stream: BinaryIO) -> bytes:
    stream.seek(0)
    return stream.read()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment(environ: Optional[Dict[str, str]]) -> Dict[str, str]:
    """Ours, but modules may be cached: compiling them anew at each start is not what is to be measured."""
    environ = dict(os.environ) if environ is None else environ
    return {name: value for name, value in environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _exit_status(status: int) -> int:
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


# ------------------------------------------------------------------------------------------------------- memory


def _watch(pid: int) -> int:
    """The largest sum of the Pss of a process and all below it until it ends, in bytes."""
    peak = 0
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        peak = max(peak, sum(_pss(each) for each in [pid, *_below(pid)]))
        time.sleep(SAMPLE_SECONDS)
    return peak


def _below(pid: int) -> List[int]:
    """The processes whose ancestor ``pid`` is, by /proc/PID/stat (proc(5))."""
    children: Dict[int, List[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb") as stream:
                    parent = int(stream.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):  # it has ended meanwhile
                continue
            children.setdefault(parent, []).append(int(name))
    found = list(children.get(pid, ()))
    for each in found:
        found.extend(children.get(each, ()))
    return found


def _pss(pid: int) -> int:
    try:
        with open("/proc/%d/smaps_rollup" % pid, "rb") as stream:
            for line in stream:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except OSError:  # it has ended meanwhile
        pass
    return 0


# ------------------------------------------------------------------------------------------- caches and syncing


def sync_filesystem(path: str) -> None:
    """Write back all of the filesystem that holds ``path``, as `sync -f` does: syncfs(2)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if library.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
    except AttributeError:  # a C library without it
        os.sync()
    finally:
        os.close(fd)


def can_drop_caches() -> bool:
    """Whether this process may empty the page cache: only root may."""
    return os.access(DROP_CACHES, os.W_OK)


def drop_caches() -> None:
    """Empty the page cache, and that of inodes and names: proc(5), drop_caches."""
    os.sync()
    with open(DROP_CACHES, "w") as stream:
        stream.write("3\n")


def read_through(path: str) -> None:
    """Read a file or a tree once, so that as much of it is in memory as fits."""
    names = [path]
    if os.path.isdir(path):
        names = [os.path.join(top, name) for top, _, files in os.walk(path) for name in files]
    for name in names:
        with open(name, "rb", buffering=0) as stream:
            while stream.read(1 << 20):
                pass


# ---------------------------------------------------------------------------------------------- what machine it is


def describe(directory: str, python: str) -> Dict[str, Any]:
    """What a reader of the figures has to know of the machine that they come from."""
    usage = shutil.disk_usage(directory)
    version = subprocess.run([python, "-V"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": version.decode().strip(),
        "filesystem": filesystem_type(directory),
        "free": usage.free,
        "load": os.getloadavg()[0],
    }


def filesystem_type(directory: str) -> str:
    """The type of the filesystem that holds ``directory``, from /proc/self/mounts."""
    wanted, best = os.path.realpath(directory), ("", "unknown")
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as stream:
        for line in stream:
            place, kind = line.split()[1:3]
            place = place.replace("\\040", " ")
            inside = wanted == place or wanted.startswith(place.rstrip("/") + "/")
            if inside and len(place) >= len(best[0]):
                best = (place, kind)
    return best[1]


def die_cleanly() -> None:
    """Have SIGTERM and SIGHUP end the program the way Ctrl-C does, so that it cleans up."""

    def leave(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    handler: Callable[[int, Any], None] = leave
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)
