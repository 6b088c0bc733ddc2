# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What the tests of cp's rules share: photographs of a tree, running cp and fastcp in it, and a model that says
beforehand what must come out.

The model is a second, deliberately simple reading of the rules: it recurses, it calls stat wherever it likes, it
knows nothing of fastcp's modules. `test_cp_random` holds it against the real cp first and against fastcp then, so a
mistake in it shows as a disagreement with cp. Paths are bytes throughout.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import re
import signal
import stat
import subprocess
import tempfile
import warnings
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import support

OLD = 1_000_000_000  # the date of every entry before a run: whatever is written has another one
SECONDS = 60  # no run of cp or fastcp here takes longer, unless it hangs

Snapshot = Dict[bytes, Tuple[Any, ...]]


# --- photographs ---------------------------------------------------------------------------------------------------


def age(top: bytes) -> None:
    """Date everything below `top`, itself too, years back."""
    for full in [*entries(top), top]:
        os.utime(full, (OLD, OLD), follow_symlinks=False)


def entries(top: bytes) -> List[bytes]:
    """The full path of everything below `top`, parents first; links are not followed."""
    found: List[bytes] = []
    waiting = [top]
    while waiting:
        inside = sorted(os.scandir(waiting.pop()), key=lambda entry: entry.name)
        found.extend(entry.path for entry in inside)
        waiting.extend(entry.path for entry in inside if entry.is_dir(follow_symlinks=False))
    return found


def contents(top: bytes) -> Snapshot:
    """What a user would compare: for each relative path its kind, mode, and bytes or target."""
    return {os.path.relpath(full, top): _content(full, os.lstat(full)) for full in entries(top)}


def _content(full: bytes, st: os.stat_result) -> Tuple[Any, ...]:
    mode = stat.S_IMODE(st.st_mode)
    if stat.S_ISREG(st.st_mode):
        with open(full, "rb") as stream:
            return "file", mode, stream.read()
    if stat.S_ISLNK(st.st_mode):
        return "link", 0, os.readlink(full)
    return ("dir" if stat.S_ISDIR(st.st_mode) else "special"), mode, b""


def photograph(top: bytes) -> Snapshot:
    """All that tells whether anything below `top`, or `top` itself, was touched: inode, owner, size, times, content."""
    found: Snapshot = {}
    for full in [top, *entries(top)]:
        st = os.lstat(full)
        times = (st.st_mtime_ns, st.st_ctime_ns)
        numbers = (st.st_dev, st.st_ino, st.st_nlink, st.st_uid, st.st_gid, st.st_size)
        found[os.path.relpath(full, top)] = numbers + times + _content(full, st)
    return found


def difference(got: Snapshot, expected: Snapshot) -> str:
    """What differs, readable; "" if nothing."""
    lines = []
    for path in sorted(set(got) | set(expected)):
        if got.get(path) != expected.get(path):
            lines.append(f"{path!r}: is {got.get(path, 'absent')!r}, expected {expected.get(path, 'absent')!r}")
    return "\n".join(lines)


# --- running -------------------------------------------------------------------------------------------------------


def run_cp(arguments: Sequence[bytes], cwd: bytes, umask: int = 0o022) -> support.Result:
    """The real `cp -L`, in English."""
    argv = [b"cp", b"-L", *arguments]
    before = os.umask(umask)
    try:
        done = subprocess.run(argv, cwd=cwd, env=dict(os.environ, LC_ALL="C"), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=SECONDS, check=False)
    finally:
        os.umask(before)
    return support.Result(argv, done.returncode, done.stdout, done.stderr)


def run_fastcp(arguments: Sequence[bytes], cwd: bytes, umask: int = 0o022) -> support.Result:
    """fastcp's main() in a forked child with descriptors, directory and umask of its own: that saves the start of an
    interpreter. The command as users type it is tested in other files."""
    main = _imported()["fastcp"].main
    words = [os.fsdecode(argument) for argument in arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            _be_fastcp(main, words, cwd, umask, out.fileno(), err.fileno())
        _, ended = os.waitpid(pid, 0)
        status = os.WEXITSTATUS(ended) if os.WIFEXITED(ended) else -os.WTERMSIG(ended)
        for stream in (out, err):
            stream.seek(0)
        result = support.Result([b"fastcp", *arguments], status, out.read(), err.read())
    if b"Traceback" in result.stderr_bytes:
        raise AssertionError(f"a traceback: {result}")
    return result


@functools.lru_cache(maxsize=None)
def _imported() -> Dict[str, Any]:
    """Every module of the package: what a child imports it imports again in each run (24 of 48 ms)."""
    names = [module.name for module in pkgutil.iter_modules([os.path.join(support.ROOT, "mlperf_common", "fileio")])]
    return {name: importlib.import_module(f"mlperf_common.fileio.{name}") for name in names}


def _be_fastcp(main: Any, words: List[str], cwd: bytes, umask: int, out: int, err: int) -> None:
    status = 70  # nothing here ends with it but a crash
    try:
        signal.alarm(SECONDS)
        warnings.simplefilter("ignore")  # unittest has switched them on for its own process
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.umask(umask)
        os.chdir(cwd)
        status = main(words)
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode("utf-8", "backslashreplace"))
    finally:
        os._exit(status)  # no atexit, no buffers of the parent's


# --- what a message is about -----------------------------------------------------------------------------------------

# The first that matches counts. Up to the names: releases of cp differ in how they spell those.
_CLASSES = (
    ("twice", r"will not overwrite just-created|specified more than once"),
    ("itself", r"cannot copy a directory, .*, into itself, "),
    ("same", r"are the same file$"),
    ("source", r"cannot overwrite source "),
    ("omitted", r"-r not specified; omitting directory "),
    ("target", r"^target (directory )?['\"].*: (No such file|Not a directory|Too many levels|Permission denied)"),
    ("directory in the way", r"cannot overwrite directory .* with non-directory$"),
    ("file in the way", r"cannot overwrite non-directory .* with directory "),
    ("not regular", r"cannot overwrite .*: not a regular file$"),
    ("exists", r"File exists \(-f replaces it\)$|not writing through dangling symlink "),
    ("create", r"cannot create (regular file|directory) .*: (No such file|Not a directory|File exists)"),
    ("special", r"is a (FIFO|socket|character device|block device), neither a regular file nor a directory"),
    ("cycle", r"cyclic symbolic link"),
    ("stat", r"cannot (stat|access) "),
)


def message_classes(result: support.Result) -> Set[str]:
    """What the lines on stderr are about; a line that fits nothing is its own class. Counts and hints are none."""
    found: Set[str] = set()
    for line in result.stderr.splitlines():
        body = line.partition(": ")[2]
        if not line.startswith("Try '") and not re.match(r"\.\.\. and \d+ more", body):
            found.add(next((name for name, pattern in _CLASSES if re.search(pattern, body)), body))
    return found


# --- the model -----------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """A command line, taken apart."""

    operands: Sequence[bytes]
    recursive: bool = False
    force: bool = False
    into: Optional[bytes] = None  # -t
    no_target: bool = False  # -T

    def arguments(self) -> List[bytes]:
        """The words after the program's name, for cp and fastcp alike."""
        words = [b"-r"] * self.recursive + [b"-f"] * self.force + [b"-T"] * self.no_target
        return words + ([b"-t", self.into] if self.into is not None else []) + [b"--", *self.operands]


class Prediction:
    """What must come of a request.

    `reasons`: why it must be refused, as `message_classes`; none: it must succeed. `cp_differs`: cp goes on with
    something that we refuse, or the other way round, or does it in another way. `runaway`: cp would go on until the
    path is too long, or wait for ever.
    """

    def __init__(self) -> None:
        self.reasons: Set[str] = set()
        self.cp_differs = False
        self.runaway = False
        self.directories: Dict[bytes, int] = {}  # real path -> mode of the source
        self.files: Dict[bytes, Tuple[bytes, int]] = {}  # real path -> content, mode of the source


class Model:
    """Predicts by looking at the tree before the run; `cwd` is where the command will run."""

    def __init__(self, request: Request, cwd: bytes) -> None:
        self.request = request
        self.cwd = cwd
        self.result = Prediction()
        self.landed: Dict[bytes, bytes] = {}  # destination as a real path -> the source as typed
        self.sources: List[Tuple[os.stat_result, bytes]] = []  # of each source, and where it lands
        self.above: List[Tuple[int, int]] = []  # identities of the directories that DEST is or lies in
        self.beyond = False  # cp has given up on a directory above; what we look at now is for our own refusals

    def predict(self) -> Prediction:
        """The whole request."""
        before = os.getcwd()
        os.chdir(self.cwd)
        try:
            self._request()
        finally:
            os.chdir(before)
        return self.result

    def _refuse(self, reason: str, cp_differs: bool = False, runaway: bool = False) -> None:
        self.result.reasons.add(reason)
        self._note(cp_differs, runaway)

    def _note(self, cp_differs: bool = False, runaway: bool = False) -> None:
        if not self.beyond:
            self.result.cp_differs = self.result.cp_differs or cp_differs
            self.result.runaway = self.result.runaway or runaway

    def _request(self) -> None:
        sources, target, into = self._target()
        if "target" in self.result.reasons:
            return
        jobs = [job for job in (self._job(source, target, into) for source in sources) if job is not None]
        for source, landing in jobs:
            self._copy(source, landing, os.stat(source), (), True)
        self._overwritten_sources()

    def _target(self) -> Tuple[Sequence[bytes], bytes, bool]:
        """The sources, DEST, and whether they go into it or become it."""
        operands = self.request.operands
        if self.request.into is not None:
            if not os.path.isdir(self.request.into):
                self._refuse("target")
            return operands, self.request.into, True
        if self.request.no_target:
            return operands[:1], operands[1], False
        if not os.path.isdir(operands[-1]) and len(operands) > 2:
            self._refuse("target")
        return operands[:-1], operands[-1], os.path.isdir(operands[-1])

    def _job(self, source: bytes, target: bytes, into: bool) -> Optional[Tuple[bytes, bytes]]:
        """(source, where it lands), or None if it is refused as an operand."""
        try:
            st = os.stat(source)
        except OSError:
            return self._refuse("stat")
        if stat.S_ISDIR(st.st_mode) and not self.request.recursive:
            return self._refuse("omitted")
        if into:
            name = last_name(source)
            return source, os.path.join(target, b"." if name in (b"", b".", b"..") else name)
        return (source, target) if self._usable(target, stat.S_ISDIR(st.st_mode)) else None

    def _usable(self, target: bytes, directory: bool) -> bool:
        """Whether `target` exists or can be made; if not, it is refused."""
        try:
            os.lstat(target)
            return True
        except FileNotFoundError:
            pass
        except OSError:
            self._refuse("stat")
            return False
        bare = target.rstrip(b"/")
        slash = bare != target
        parent, name = os.path.split(bare)
        # A dangling link and a slash: mkdir(2) says EEXIST, open(2) ENOTDIR.
        if os.path.isdir(parent or b".") and name not in (b"", b".", b"..") and not (slash and os.path.islink(bare)):
            if directory or not slash:
                return True
        self._refuse("create")
        return False

    def _copy(self, source: bytes, landing: bytes, st: os.stat_result, line: Any, operand: bool) -> None:
        """One entry, and if it is a directory everything in it; `line`: the identities of the sources above it."""
        place = real_place(landing)
        if operand and stat.S_ISDIR(st.st_mode):
            self.above = ancestors(place)
        if place in self.landed:
            self._refuse("twice", cp_differs=True)
            if os.path.isdir(self.landed[place]) != stat.S_ISDIR(st.st_mode):
                self.result.reasons |= {"file in the way", "directory in the way"}
        self.landed[place] = source
        self.sources.append((st, place))
        if stat.S_ISDIR(st.st_mode):
            self._copy_directory(source, landing, st, line)
        elif stat.S_ISREG(st.st_mode):
            self._copy_file(source, landing, place, st)
        else:
            self._refuse("special", cp_differs=True, runaway=not self.request.recursive)

    def _copy_directory(self, source: bytes, landing: bytes, st: os.stat_result, line: Any) -> None:
        me = (st.st_dev, st.st_ino)
        beyond, self.beyond = self.beyond, self.beyond or not self._room_for_directory(landing, st)
        if me in line:
            self._refuse("cycle")
        elif me in self.above:
            self._refuse("itself", runaway=True)
        else:
            if not os.path.isdir(landing):
                self.result.directories[real_place(landing)] = stat.S_IMODE(st.st_mode)
            self._copy_entries(source, landing, (*line, me))
        self.beyond = beyond

    def _copy_entries(self, source: bytes, landing: bytes, line: Any) -> None:
        for name in sorted(os.listdir(source)):
            inner = os.path.join(source, name)
            try:
                st = os.stat(inner)
            except OSError:
                self._refuse("stat")
                continue
            self._copy(inner, os.path.join(landing, name), st, line, False)

    def _room_for_directory(self, landing: bytes, st: os.stat_result) -> bool:
        """Whether a directory may be or become `landing`."""
        try:
            there = os.lstat(landing)
        except OSError:
            return True
        if not stat.S_ISDIR(there.st_mode):
            self._refuse("file in the way")
        elif os.path.samestat(there, st):
            self._refuse("same")
        else:
            return True
        return False

    def _copy_file(self, source: bytes, landing: bytes, place: bytes, st: os.stat_result) -> None:
        with open(source, "rb") as stream:
            self.result.files[place] = stream.read(), stat.S_IMODE(st.st_mode)
        try:
            there = os.lstat(landing)
        except OSError:
            return
        if os.path.isdir(landing):
            self._refuse("directory in the way")
        elif os.path.exists(landing) and os.path.samefile(landing, source):
            self._refuse("same")
        else:
            # cp overwrites, and waits for the other end of a FIFO.
            self._note(cp_differs=True, runaway=os.path.exists(landing) and not os.path.isfile(landing))
            if not stat.S_ISREG(there.st_mode) and not stat.S_ISLNK(there.st_mode):
                self._refuse("not regular")
            elif not self.request.force:
                self._refuse("exists")

    def _overwritten_sources(self) -> None:
        """A destination that exists and is a source too; what becomes itself has been refused as such."""
        for place in self.landed:
            try:
                there = os.lstat(place)
            except OSError:
                continue
            if any(os.path.samestat(there, st) and place != other for st, other in self.sources):
                self._refuse("source", cp_differs=True)


def last_name(path: bytes) -> bytes:
    """The last component, slashes after it left out; empty for / alone."""
    return path.rstrip(b"/").rpartition(b"/")[2]


def real_place(landing: bytes) -> bytes:
    """The absolute path of what `landing` names: links above it resolved, but not one that it is itself."""
    if last_name(landing) in (b"", b".", b"..") or (landing.endswith(b"/") and os.path.isdir(landing)):
        return os.path.realpath(landing)
    parent, name = os.path.split(landing.rstrip(b"/"))
    return os.path.join(os.path.realpath(parent or b"."), name)


def ancestors(place: bytes) -> List[Tuple[int, int]]:
    """The identities of the existing directories from `place` up to the root."""
    found = []
    while True:
        if os.path.isdir(place):
            st = os.stat(place)
            found.append((st.st_dev, st.st_ino))
        if place == b"/":
            return found
        place = os.path.dirname(place)


def after(before: Snapshot, prediction: Prediction, top: bytes, umask: int) -> Snapshot:
    """What `contents` must be once a request that is not refused has run."""
    expected = dict(before)
    for place, mode in prediction.directories.items():
        expected[os.path.relpath(place, top)] = ("dir", mode & 0o777 & ~umask, b"")
    for place, (content, mode) in prediction.files.items():
        path = os.path.relpath(place, top)
        replaced = before.get(path, ("absent",))
        kept = replaced[1] & 0o777 if replaced[0] == "file" else mode & 0o777 & ~umask
        expected[path] = ("file", kept, content)
    return expected
