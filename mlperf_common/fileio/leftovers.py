# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What killed runs have left: named temporaries, and the records that tell whose they were.

Files without a name leave nothing. A run that makes any with a name keeps one small record at DEST's top while it
lasts. A later run removes temporaries in the directories that it writes to only where a record proves that their run
is dead: containers share host names but not process ids, so names alone prove nothing.

Promises: what is not a regular file of this user, with no other name but the one that it was to get, stays.
"""

from __future__ import annotations

import os
import stat
import time
from typing import Any, Callable, NamedTuple, Optional

from mlperf_common.fileio import copyfile, walk
from mlperf_common.fileio.copyplan import CopyPlan
from mlperf_common.fileio.facts import Options
from mlperf_common.fileio.listing import Roots
from mlperf_common.fileio.report import Events, Summary
from mlperf_common.fileio.traces import RECORD, TEMPORARY, Landing
from mlperf_common.fileio.words import reason_of

TOUCH_SECONDS = 60.0
DEAD_SECONDS = 24 * 60 * 60  # without a touch, by the filesystem's own clock


class Life(NamedTuple):
    """Which process, on which boot of which machine, in which pid namespace."""

    boot: str
    namespace: str
    pid: int
    start: int  # clock ticks since boot


def own_life() -> Life:
    """This process's. Without /proc nothing is known, and nothing will ever be taken for it."""
    return Life(_boot(), _namespace(), os.getpid(), start_of(os.getpid()))


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def start_of(pid: int) -> int:
    """When a process began (field 22 of /proc/PID/stat, proc(5)); 0 if there is none, or it is a zombie."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


class Record:
    """This run's record, in the directory open as ``place``; made at once. Raises OSError."""

    def __init__(self, place: int, token: str) -> None:
        self._place = place
        self._name = RECORD + token
        self._touched = time.monotonic()
        import json

        text = json.dumps(own_life()._asdict()).encode()
        try:
            self._make_nameless(text)
        except OSError:  # as for files: no such thing here, or no /proc
            self._make_named(text)

    def _make_nameless(self, text: bytes) -> None:
        fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=self._place)
        try:
            self._write(fd, text)
            os.link("/proc/self/fd/%d" % fd, self._name, dst_dir_fd=self._place, follow_symlinks=True)
        finally:
            os.close(fd)

    def _make_named(self, text: bytes) -> None:
        # Under another name first: killed in between, an empty record would prove nothing for a day.
        fresh = self._name + ".new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(fresh, flags, 0o600, dir_fd=self._place)
        try:
            self._write(fd, text)
        finally:
            os.close(fd)
        os.rename(fresh, self._name, src_dir_fd=self._place, dst_dir_fd=self._place)

    def _write(self, fd: int, text: bytes) -> None:
        os.write(fd, text)
        self.made_ns = os.fstat(fd).st_mtime_ns  # now, by the filesystem's clock

    def touch(self) -> None:
        """Say every minute that this run is alive. A record that is gone proves nothing any more: no error."""
        now = time.monotonic()
        if now - self._touched >= TOUCH_SECONDS:
            self._touched = now
            try:
                os.utime(self._name, dir_fd=self._place, follow_symlinks=False)
            except FileNotFoundError:
                pass

    def remove(self) -> None:
        """The run is over, and has left nothing."""
        try:
            os.unlink(self._name, dir_fd=self._place)
        except FileNotFoundError:
            pass


def is_dead(place: int, token: str, now_ns: int) -> bool:
    """Whether the run of a record in ``place`` has ended; False where that is not certain."""
    try:
        fd = os.open(RECORD + token, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    except OSError:
        return False
    try:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or st.st_uid != os.geteuid():
            return False
        over = _is_over(os.read(fd, 4096))
        if over is None:  # who knows: but it would have touched its record
            return now_ns - st.st_mtime_ns > DEAD_SECONDS * 1_000_000_000
        return over
    finally:
        os.close(fd)


def _is_over(text: bytes) -> Optional[bool]:
    """Whether a process has ended; None where it cannot be known here."""
    import json

    try:
        life: Any = Life(**json.loads(text))  # with fields of any type
    except (ValueError, TypeError, RecursionError):
        return None
    if not (isinstance(life.pid, int) and isinstance(life.start, int)):
        return None
    here = own_life()
    if not here.boot or not here.namespace or life[:2] != here[:2]:
        return None
    return not life.start or start_of(life.pid) != life.start


def remove(place: int, name: str) -> bool:
    """Remove a temporary of a dead run from the directory ``place``, if it is what it seems; whether it was."""
    match = TEMPORARY.fullmatch(name)
    standing = copyfile.standing_at(place, name)
    if match is None or standing is None or not stat.S_ISREG(standing.st_mode) or standing.st_uid != os.geteuid():
        return False
    if standing.st_nlink > 1 and not _is_only_other(place, match["name"], standing):
        return False
    os.unlink(name, dir_fd=place)
    return True


def _is_only_other(place: int, name: str, standing: os.stat_result) -> bool:
    """Whether the file's one other name is the one that it was to get (link, then killed before unlink)."""
    other: Optional[os.stat_result] = copyfile.standing_at(place, name)
    if other is None or standing.st_nlink != 2:
        return False
    return (other.st_dev, other.st_ino) == (standing.st_dev, standing.st_ino)


class Keeper:
    """Keeps this run's record, and removes what runs have left that are dead."""

    def __init__(
        self, plan: CopyPlan, roots: Roots, options: Options, summary: Summary, events: Events, names: bool = False
    ) -> None:
        """``names``: temporaries with names are sure to be made."""
        self._names = names
        self._plan = plan
        self._roots = roots
        self._options = options
        self._summary = summary
        self._events = events
        self._record: Optional[Record] = None
        self._top = -1

    def begin(self) -> None:
        """Make the record, if names will be needed or something is to be judged; look at what others have left.

        DEST's directories must be there. Where no record can be made that is a warning: the files will say more.
        """
        traces = self._plan.traces
        if not (traces.temporaries or traces.records or self._needs_names()):
            return None
        chain = self._chain()
        try:
            self._top = os.dup(chain.open(self._plan.top))
            try:
                self._record = Record(self._top, self._options.token)
            except OSError as exc:
                return self._events.warning("cannot make a record of this run: %s" % reason_of(exc))
            dead = [t for t in traces.tokens() if is_dead(self._top, t, self._record.made_ns)]
            for landing, name, token in traces.temporaries:
                if token not in dead or not self._remove(chain, landing, name):
                    self._summary.left_behind += 1
            for token in dead:
                self._remove_record(token)
        finally:
            chain.close()

    def _chain(self) -> walk.DirectoryChain:
        return walk.open_chain(os.dup(self._roots.get(self._plan.base.path, True).fd), True)

    def _needs_names(self) -> bool:
        """Whether this run may make temporaries with names: for what it replaces, or where others cannot be had."""
        if self._names or self._options.force or any(file.standing is not None for file in self._plan.loose):
            return True
        devices = {self._plan.base.identity.dev}
        for directory in walk.breadth_first(self._plan.trees):
            if directory.existing:
                return True
            if directory.destination is not None:
                devices.add(directory.destination.dev)
        return len(devices) > 1 or not self._has_nameless()

    def _has_nameless(self) -> bool:
        chain = self._chain()
        try:
            place = chain.open(self._plan.top)
            fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=place)
            try:
                return os.path.exists("/proc/self/fd/%d" % fd)
            finally:
                os.close(fd)
        except OSError:  # whatever the reason, the copy will say what matters
            return False
        finally:
            chain.close()

    def _remove(self, chain: walk.DirectoryChain, landing: Landing, name: str) -> bool:
        try:
            return remove(chain.open(landing), name)
        except OSError as exc:
            self._events.warning("cannot remove the leftover %r: %s" % (name, reason_of(exc)))
            return False

    def _remove_record(self, token: str) -> None:
        try:
            os.unlink(RECORD + token, dir_fd=self._top)
        except OSError as exc:
            self._events.warning("cannot remove the leftover %r: %s" % (RECORD + token, reason_of(exc)))

    def ticking(self, show: Callable[[], None]) -> Callable[[], None]:
        """What is to be called often: it keeps the record young, and calls ``show``."""

        def tick() -> None:
            if self._record is not None:
                self._record.touch()
            show()

        return tick

    def end(self) -> None:
        """The run is over: whatever it made has its name, or is gone."""
        record, self._record = self._record, None
        if record is not None:
            try:
                record.remove()
            except OSError as exc:  # the copy is what it is
                self._events.warning("cannot remove the record of this run: %s" % reason_of(exc))
        if self._top >= 0:
            os.close(self._top)
            self._top = -1
