# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What the tests share: trees as literals, the tools run as a user runs them, mounts, faults, a runner.

Promised: whatever a test makes through here is gone when the test ends, also when it has mode 000 or is
mounted; a tool that hangs is killed with its process group and fails the test; a skip says why. Not promised:
that the helpers are fast on trees of more than a few thousand files.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import unittest
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CLIENT = os.path.join(ROOT, "client")
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

TOOLS = ("fastcp", "fastmd5", "dropcache")
SYSTEM_PYTHON = "/usr/bin/python3"
# Debian keeps mkfs and mount helpers where an ordinary user's PATH does not look.
PROGRAM_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


# --- Trees as literals ---

SHORT = 4096  # contents up to here are compared and shown as they are, longer ones by size and digest
_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Link:
    """A symbolic link with this target, dangling or not."""

    target: Union[str, bytes]


@dataclasses.dataclass(frozen=True)
class Fifo:
    """A named pipe."""


@dataclasses.dataclass(frozen=True)
class Socket:
    """A socket file that nobody listens on."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A device node: kind is "c" or "b". Making one takes root."""

    kind: str
    major: int
    minor: int


@dataclasses.dataclass(frozen=True)
class Random:
    """Contents of `size` bytes that look random: by the seed the same everywhere, no two blocks alike."""

    size: int
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Sparse:
    """Contents of `size` zeros, left as a hole, but for `data`: offset -> bytes."""

    size: int
    data: Mapping[int, bytes] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Digest:
    """How contents longer than SHORT are read back."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class File:
    """A regular file. mode (permission bits) and mtime_ns: None is whatever comes, or in a comparison any."""

    content: Any = b""
    mode: Optional[int] = None
    mtime_ns: Optional[int] = None


@dataclasses.dataclass(frozen=True)
class Dir:
    """A directory with mode and mtime_ns as in File; a plain dict is one without."""

    entries: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    mode: Optional[int] = None
    mtime_ns: Optional[int] = None


def make_tree(path: Union[str, bytes, os.PathLike[str]], tree: Any) -> str:
    """Make at `path` what the literal says and return the path as str.

    A literal is bytes or Random or Sparse (a regular file), a dict (a directory), Link, Fifo, Socket, Device,
    or File and Dir for those that need a mode or an mtime. Names are str (surrogateescape) or bytes. A
    directory that is there already is added to; any other name that is there already is an error.
    """
    name = os.fsdecode(path)
    if isinstance(tree, (dict, Dir)):
        _make_directory(name, tree if isinstance(tree, Dir) else Dir(tree))
    elif isinstance(tree, Link):
        os.symlink(os.fsdecode(tree.target), name)
    elif isinstance(tree, (Fifo, Socket, Device)):
        _make_special(name, tree)
    else:
        _make_file(name, tree if isinstance(tree, File) else File(tree))
    return name


def _make_directory(path: str, tree: Dir) -> None:
    os.makedirs(path, exist_ok=True)
    for name, value in tree.entries.items():
        if os.fsdecode(name) in ("", ".", "..") or "/" in os.fsdecode(name):
            raise ValueError(f"{name!r} is not a name in a directory")
        make_tree(os.path.join(path, os.fsdecode(name)), value)
    _set_metadata(path, tree)


def _make_special(path: str, value: Union[Fifo, Socket, Device]) -> None:
    if isinstance(value, Device):
        kind = {"c": stat.S_IFCHR, "b": stat.S_IFBLK}[value.kind]
        os.mknod(path, kind | 0o600, os.makedev(value.major, value.minor))
    else:
        os.mknod(path, (stat.S_IFIFO if isinstance(value, Fifo) else stat.S_IFSOCK) | 0o666)


def _make_file(path: str, value: File) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with open(descriptor, "wb", buffering=0) as stream:
        if isinstance(value.content, Sparse):
            stream.truncate(value.content.size)
            for offset, data in value.content.data.items():
                stream.seek(offset)
                stream.write(data)
        else:
            for block in _blocks(value.content):
                stream.write(block)
    _set_metadata(path, value)


def _set_metadata(path: str, value: Union[File, Dir]) -> None:
    if value.mtime_ns is not None:
        os.utime(path, ns=(value.mtime_ns, value.mtime_ns))
    if value.mode is not None:
        os.chmod(path, value.mode)


def _blocks(content: Any) -> Iterator[bytes]:
    """The bytes of a content literal, at most 1 MiB at a time."""
    if isinstance(content, Random):
        for index, start in enumerate(range(0, content.size, _BLOCK)):
            # shake_128 gave 380 MB/s, random.getrandbits 120 MB/s.
            yield hashlib.shake_128(b"%d:%d" % (content.seed, index)).digest(min(_BLOCK, content.size - start))
    elif isinstance(content, Sparse):
        for start in range(0, content.size, _BLOCK):
            block = bytearray(min(_BLOCK, content.size - start))
            for offset, data in content.data.items():
                first, last = max(offset, start), min(offset + len(data), start + len(block))
                if first < last:
                    block[first - start : last - start] = data[first - offset : last - offset]
            yield bytes(block)
    elif isinstance(content, (bytes, bytearray)):
        yield bytes(content)
    else:
        raise TypeError(f"not a file's contents: {content!r}")


def read_tree(path: Union[str, bytes, os.PathLike[str]], modes: bool = False, times: bool = False) -> Any:
    """What stands at `path`, in the shape that make_tree takes; links are not followed.

    Contents longer than SHORT come as Digest. With modes or times files are File and directories are Dir, the
    one at `path` included.
    """
    name = os.fsdecode(path)
    status = os.lstat(name)
    kept = (stat.S_IMODE(status.st_mode) if modes else None, status.st_mtime_ns if times else None)
    if stat.S_ISDIR(status.st_mode):
        entries = {entry: read_tree(os.path.join(name, entry), modes, times) for entry in _sorted(os.listdir(name))}
        return Dir(entries, *kept) if modes or times else entries
    if stat.S_ISREG(status.st_mode):
        with open(name, "rb") as stream:
            content = _condensed(iter(functools.partial(stream.read, _BLOCK), b""))
        return File(content, *kept) if modes or times else content
    if stat.S_ISLNK(status.st_mode):
        return Link(os.readlink(name))
    if stat.S_ISFIFO(status.st_mode):
        return Fifo()
    if stat.S_ISSOCK(status.st_mode):
        return Socket()
    kind = "c" if stat.S_ISCHR(status.st_mode) else "b"
    return Device(kind, os.major(status.st_rdev), os.minor(status.st_rdev))


def _sorted(names: Any) -> List[str]:
    # The order of str is not that of the bytes for undecodable names.
    return sorted(names, key=os.fsencode)


def _condensed(blocks: Iterator[bytes]) -> Union[bytes, Digest]:
    digest, size, start = hashlib.sha256(), 0, b""
    for block in blocks:
        digest.update(block)
        start = start or block
        size += len(block)
    return start if size <= SHORT else Digest(size, digest.hexdigest())


def differences(expected: Any, actual: Any, name: str = ".") -> List[str]:
    """A line for each place where two literals differ; a mode or mtime left open by either is not compared."""
    expected, actual = _normal(expected), _normal(actual)
    if type(expected) is not type(actual):
        return [f"{name}: expected {expected!r}, found {actual!r}"]
    if isinstance(expected, Dir):
        lines = _metadata_differences(expected, actual, name)
        for entry in _sorted(set(expected.entries) | set(actual.entries)):
            below = f"{name}/{entry}"
            if entry not in actual.entries:
                lines.append(f"{below}: missing, expected {expected.entries[entry]!r}")
            elif entry not in expected.entries:
                lines.append(f"{below}: unexpected {actual.entries[entry]!r}")
            else:
                lines += differences(expected.entries[entry], actual.entries[entry], below)
        return lines
    if isinstance(expected, File):
        lines = _metadata_differences(expected, actual, name)
        if expected.content != actual.content:
            lines.insert(0, f"{name}: expected {expected.content!r}, found {actual.content!r}")
        return lines
    return [] if expected == actual else [f"{name}: expected {expected!r}, found {actual!r}"]


def _metadata_differences(expected: Any, actual: Any, name: str) -> List[str]:
    lines = []
    if None not in (expected.mode, actual.mode) and expected.mode != actual.mode:
        lines.append(f"{name}: expected mode {expected.mode:04o}, found {actual.mode:04o}")
    if None not in (expected.mtime_ns, actual.mtime_ns) and expected.mtime_ns != actual.mtime_ns:
        lines.append(f"{name}: expected mtime {expected.mtime_ns} ns, found {actual.mtime_ns}")
    return lines


def _normal(value: Any) -> Any:
    """The literal with Dir for dict, File for contents, str names, Digest for long contents; one level."""
    if isinstance(value, dict):
        value = Dir(value)
    if isinstance(value, Dir):
        return Dir({os.fsdecode(name): entry for name, entry in value.entries.items()}, value.mode, value.mtime_ns)
    if isinstance(value, (Fifo, Socket, Device)):
        return value
    if isinstance(value, Link):
        return Link(os.fsdecode(value.target))
    if not isinstance(value, File):
        value = File(value)
    if isinstance(value.content, Digest):
        return value
    return File(_condensed(_blocks(value.content)), value.mode, value.mtime_ns)


def remove_tree(path: str) -> None:
    """Remove `path` and all below it, unmounting what is mounted there, whatever the directories' modes."""
    _unmount_below(path)
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        # Trees without permission, or deeper than shutil's recursion: the programs manage both.
        subprocess.run(["chmod", "-R", "u+rwX", "--", path], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", "--one-file-system", "--", path], check=False)


def leftovers(root: str, pattern: str = r"\..+\.[0-9A-Za-z_-]{8,}") -> List[str]:
    """The paths below root whose name looks like a temporary of ours: `.NAME.XXXXXXXX` or `.fastcp.XXXXXXXX`.

    `pattern` must match the whole name.
    """
    found = []
    for directory, names, files in os.walk(os.fsdecode(root)):
        found += [os.path.join(directory, name) for name in names + files if re.fullmatch(pattern, name, re.DOTALL)]
    return _sorted(found)


# --- The tools, run as a user runs them ---

NOBODY = "nobody"


class Result:
    """How a program ended: args, returncode, and its output as str (surrogateescape) and as bytes."""

    def __init__(self, args: Sequence[Any], returncode: int, stdout: Optional[bytes], stderr: Optional[bytes]) -> None:
        self.args = list(args)
        self.returncode = returncode
        self.stdout_bytes = stdout or b""
        self.stderr_bytes = stderr or b""

    @property
    def stdout(self) -> str:
        """What was written to descriptor 1."""
        return self.stdout_bytes.decode("utf-8", "surrogateescape")

    @property
    def stderr(self) -> str:
        """What was written to descriptor 2."""
        return self.stderr_bytes.decode("utf-8", "surrogateescape")

    def __repr__(self) -> str:
        return (
            f"exit status {self.returncode} of {self.args}\n"
            f"stdout: {_shown(self.stdout_bytes)}\nstderr: {_shown(self.stderr_bytes)}"
        )


def _shown(output: bytes) -> str:
    text = output[:20000].decode("utf-8", "backslashreplace")
    return text if len(output) <= 20000 else text + f"... {len(output)} bytes"


def command_line(
    name: str,
    *args: Any,
    python: Optional[str] = None,
    flags: Sequence[str] = (),
    under: Sequence[str] = (),
    user: Optional[str] = None,
) -> List[Any]:
    """The argv that runs client/NAME: in place, or for another user from a copy that everybody may read.

    `flags` go to Python (-O), `under` goes before everything (strace).
    """
    client = os.path.join(public_copy(), "client") if user else CLIENT
    program = python or (_public_python() if user else sys.executable)
    return [*under, program, *flags, os.path.join(client, name), *args]


def run(
    argv: Sequence[Any],
    env: Optional[Mapping[str, Optional[str]]] = None,
    cwd: Any = None,
    timeout: float = 60,
    input: Optional[bytes] = None,
    user: Optional[str] = None,
    expect: Optional[int] = None,
    **popen: Any,
) -> Result:
    """Run argv in a session of its own until it ends.

    env adds to this process's environment (None takes a variable away). AssertionError if it runs longer than
    `timeout` seconds (the process group is killed), prints a Python traceback, or ends with another status
    than `expect`.
    """
    popen.setdefault("stdout", subprocess.PIPE)
    popen.setdefault("stderr", subprocess.PIPE)
    popen.setdefault("stdin", subprocess.DEVNULL if input is None else subprocess.PIPE)
    process = start(argv, env=env, cwd=cwd, user=user, **popen)
    try:
        out, err = process.communicate(input, timeout)
    except subprocess.TimeoutExpired:
        kill_group(process)
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s: {Result(argv, process.returncode, out, err)}") from None
    except BaseException:
        kill_group(process)
        process.communicate()
        raise
    result = Result(argv, process.returncode, out, err)
    if b"Traceback (most recent call last)" in result.stderr_bytes:
        raise AssertionError(f"a traceback: {result}")
    if expect is not None and result.returncode != expect:
        raise AssertionError(f"expected exit status {expect}: {result}")
    return result


def run_tool(
    name: str,
    *args: Any,
    python: Optional[str] = None,
    flags: Sequence[str] = (),
    under: Sequence[str] = (),
    user: Optional[str] = None,
    **options: Any,
) -> Result:
    """Run client/NAME: command_line() says how it is found, run() takes the other options."""
    argv = command_line(name, *args, python=python, flags=flags, under=under, user=user)
    return run(argv, user=user, **options)


def start(
    argv: Sequence[Any],
    env: Optional[Mapping[str, Optional[str]]] = None,
    cwd: Any = None,
    user: Optional[str] = None,
    **popen: Any,
) -> subprocess.Popen[bytes]:
    """Start argv in a session of its own, SIGINT, SIGTERM and SIGHUP at their defaults, and do not wait."""
    if user and cwd is None:
        cwd = public_copy()
    ids = pwd.getpwnam(user) if user else None

    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if ids is not None:
            os.setgroups([])
            os.setgid(ids.pw_gid)
            os.setuid(ids.pw_uid)

    return subprocess.Popen(
        argv, env=_environment(env, user), cwd=cwd, start_new_session=True, preexec_fn=prepare, **popen
    )


def _environment(changes: Optional[Mapping[str, Optional[str]]], user: Optional[str]) -> Dict[str, str]:
    merged: Dict[str, Optional[str]] = dict(os.environ)
    if user:
        merged.update(HOME="/nonexistent", USER=user, LOGNAME=user)
    merged.update(changes or {})
    return {name: value for name, value in merged.items() if value is not None}


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the session that start() made for the process; nothing if it has gone."""
    # Once it is reaped its number may belong to somebody else, so the group is asked only before that.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@functools.lru_cache(maxsize=None)
def public_copy() -> str:
    """A copy of mlperf_common and client that every user may read; it goes when this process ends."""
    place = make_temporary()
    owner = os.getpid()
    atexit.register(lambda: remove_tree(place) if os.getpid() == owner else None)
    for name in ("mlperf_common", "client"):
        shutil.copytree(
            os.path.join(ROOT, name), os.path.join(place, name), ignore=shutil.ignore_patterns("__pycache__")
        )
    subprocess.run(["chmod", "-R", "a+rX", "--", place], check=True)
    return place


def make_temporary() -> str:
    """A new directory with mode 0755 under TMPDIR, as a real path."""
    path = os.path.realpath(tempfile.mkdtemp(prefix="fileio-test-"))
    os.chmod(path, 0o755)
    return path


def _reachable(path: str) -> bool:
    """Whether every user may get to `path` and read it."""
    path = os.path.realpath(path)
    if not os.stat(path).st_mode & stat.S_IROTH:
        return False
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & stat.S_IXOTH:
            return False
    return True


def _public_python() -> str:
    return sys.executable if _reachable(sys.executable) else SYSTEM_PYTHON


# --- What a test needs ---


def slow(item: Any) -> Any:
    """Mark a test method or class as slow: left out, and not counted as skipped, when FILEIO_FAST=1."""
    item.fileio_slow = True
    return item


needs_root = unittest.skipUnless(os.geteuid() == 0, "needs root")


def needs(*programs: str) -> Callable[[Any], Any]:
    """Skip the test unless these programs are installed (and, for strace, allowed to trace)."""
    missing = [name for name in programs if not _usable(name)]
    return unittest.skipIf(missing, f"needs {', '.join(missing)}")


@functools.lru_cache(maxsize=None)
def _usable(program: str) -> bool:
    path = shutil.which(program, path=PROGRAM_PATH)
    if path and program == "strace":
        return subprocess.run([path, "-f", "-qq", "-o", os.devnull, "true"], check=False).returncode == 0
    return path is not None


def _why_not_nobody() -> str:
    if os.geteuid() != 0:
        return "needs root, to become nobody"
    try:
        pwd.getpwnam(NOBODY)
    except KeyError:
        return "there is no user nobody"
    if not os.access(tempfile.gettempdir(), os.X_OK) or not _reachable(tempfile.gettempdir()):
        return f"nobody may not read {tempfile.gettempdir()}"
    return "" if _reachable(sys.executable) or os.path.exists(SYSTEM_PYTHON) else "no Python that nobody may run"


needs_nobody = unittest.skipIf(_why_not_nobody(), _why_not_nobody())


def python_versions() -> Dict[Tuple[int, int], str]:
    """Every CPython from 3.8 on this machine, in /usr/bin or under pyenv: (major, minor) -> interpreter."""
    names = [os.path.join("/usr/bin", name) for name in os.listdir("/usr/bin") if re.fullmatch(r"python3\.\d+", name)]
    found = {_version(name): name for name in names}
    found.update({_version(name): name for name in pyenv_pythons()})
    return {version: found[version] for version in sorted(found) if version >= (3, 8)}


def pyenv_pythons() -> List[str]:
    """The pythonX.Y of every version that pyenv has."""
    versions = os.path.join(os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv")), "versions")
    if not os.path.isdir(versions):
        return []
    found = []
    for version in sorted(os.listdir(versions)):
        match = re.fullmatch(r"(\d+\.\d+)(\.\d+)?", version)
        program = os.path.join(versions, version, "bin", f"python{match.group(1)}") if match else ""
        if os.access(program, os.X_OK):
            found.append(program)
    return found


def old_python(version: str) -> str:
    """The interpreter pythonX.Y of pyenv or of PATH; SkipTest where there is none."""
    for program in pyenv_pythons():
        if os.path.basename(program) == f"python{version}":
            return program
    program = shutil.which(f"python{version}", path="/usr/bin:/usr/local/bin")
    if not program:
        raise unittest.SkipTest(f"there is no Python {version} here")
    return program


def _version(program: str) -> Tuple[int, int]:
    major, minor = os.path.basename(program)[len("python") :].split(".")
    return int(major), int(minor)


# --- Mounts ---

# mkfs.xfs refuses less than 300 MB, mkfs.btrfs less than 109 MiB; in a sparse image that costs nothing.
IMAGE_SIZE = 320 << 20
_MKFS = {
    "ext4": ["mkfs.ext4", "-q", "-F"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
}


def new_mount_namespace() -> None:
    """Give this process mounts of its own, which end with it, even when it is killed; or SkipTest."""
    clone_newns = 0x00020000  # sched.h; os.unshare came with Python 3.12
    if os.geteuid() != 0:
        raise unittest.SkipTest("needs root, to mount")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(clone_newns) != 0:
        raise unittest.SkipTest(f"mounts are not allowed here: {os.strerror(ctypes.get_errno())}")
    done = subprocess.run(["mount", "--make-rprivate", "/"], stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise unittest.SkipTest(f"mounts are not allowed here: {os.fsdecode(done.stderr).strip()}")


_enter_mount_namespace = functools.lru_cache(maxsize=None)(new_mount_namespace)


@contextlib.contextmanager
def mounted_at(target: str, *mount_args: str) -> Iterator[str]:
    """`mount MOUNT_ARGS target` for the time of the with block, for this process and its children alone."""
    _enter_mount_namespace()
    os.makedirs(target, exist_ok=True)
    done = subprocess.run(["mount", *mount_args, target], stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise unittest.SkipTest(f"mount {' '.join(mount_args)}: {os.fsdecode(done.stderr).strip()}")
    try:
        yield target
    finally:
        _unmount(target)


@contextlib.contextmanager
def mounted(fs: str = "ext4", size: int = IMAGE_SIZE, options: str = "", mkfs: Sequence[str] = ()) -> Iterator[str]:
    """A new ext4, xfs, btrfs or tmpfs of `size` bytes, empty, with mode 0777, for the time of the with block.

    `options` go to mount -o, `mkfs` to the mkfs program. SkipTest where it cannot be had.
    """
    place = make_temporary()
    try:
        target = os.path.join(place, "mnt")
        if fs == "tmpfs":
            args = ["-t", "tmpfs", "-o", ",".join(filter(None, [f"size={size}", options])), "tmpfs"]
        else:
            image = _formatted(os.path.join(place, "image"), fs, size, mkfs)
            args = ["-t", fs, "-o", ",".join(filter(None, ["loop", options])), image]
        with mounted_at(target, *args):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(os.path.join(target, "lost+found"))
            os.chmod(target, 0o777)
            yield target
    finally:
        remove_tree(place)


def _formatted(image: str, fs: str, size: int, mkfs: Sequence[str]) -> str:
    program = shutil.which(_MKFS[fs][0], path=PROGRAM_PATH)
    if not program:
        raise unittest.SkipTest(f"needs {_MKFS[fs][0]}")
    with open(image, "wb") as stream:
        stream.truncate(size)
    subprocess.run([program, *_MKFS[fs][1:], *mkfs, image], stdout=subprocess.DEVNULL, check=True)
    return image


def _unmount(target: str) -> None:
    # A process that has just been killed may hold it for a moment; after that its last user ends the mount.
    for _ in range(20):
        if subprocess.run(["umount", target], stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return
        time.sleep(0.1)
    subprocess.run(["umount", "--lazy", target], check=False)


def _unmount_below(path: str) -> None:
    with open("/proc/self/mounts", "rb") as stream:
        targets = [os.fsdecode(_unescaped(line.split(b" ")[1])) for line in stream]
    for target in sorted(targets, reverse=True):
        if (target + "/").startswith(path + "/"):
            subprocess.run(["umount", "--lazy", target], check=False)


def _unescaped(field: bytes) -> bytes:
    """A field of /proc/mounts, where space, tab, newline and backslash are three octal digits (proc(5))."""
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match.group(1), 8)]), field)


# --- Faults ---

# What CPython's os functions are called below the C library, where the two differ.
_KERNEL_NAMES = {
    "preadv": "preadv2",
    "pwritev": "pwritev2",
    "pread": "pread64",
    "pwrite": "pwrite64",
    "open": "openat",
    "stat": "newfstatat",
    "rename": "rename or renameat2",
    "link": "linkat",
}


def strace_inject(output: str, calls: str, fault: str, trace: str = "") -> List[str]:
    """What goes before a command so that `fault` happens to its system calls `calls` ("preadv2,read").

    `fault` is as strace's -e inject= takes it after the set: "error=EIO:when=3", "retval=0",
    "signal=KILL:when=1+". when=N counts in each process: with 8 workers all 8 meet it. The calls, and those
    of `trace`, are written to `output`, one line each with the process in front. Injection needs the calls in
    the traced set, so it always is; pread64 is refused because the dynamic loader dies of it, preadv because
    CPython never makes that call.
    """
    for call in filter(None, (calls + "," + trace).split(",")):
        if call in _KERNEL_NAMES:
            raise ValueError(f"{call}: CPython makes the system call {_KERNEL_NAMES[call]} on x86_64")
    if "pread64" in calls.split(","):
        raise ValueError("pread64: the dynamic loader reads libraries by it")
    traced = ",".join(filter(None, [calls, trace]))
    program = shutil.which("strace", path=PROGRAM_PATH) or "strace"
    return [program, "-f", "-qq", "-o", output, "-e", f"trace={traced}", "-e", f"inject={calls}:{fault}"]


def injected(output: str) -> int:
    """How many calls strace tampered with, by its log: errors, return values and delays, not signals."""
    with open(output, "rb") as stream:
        return sum(line.rstrip().endswith((b"(INJECTED)", b"(DELAYED)")) for line in stream)


# --- Test cases and the runner ---


class TestCase(unittest.TestCase):
    """A test with a directory of its own, made when first used, on the disk under TMPDIR."""

    maxDiff = None
    _tmp = ""

    @property
    def tmp(self) -> str:
        """This test's directory: a real path, mode 0755, removed at the end whatever was done to it."""
        if not self._tmp:
            self._tmp = make_temporary()
            self.addCleanup(remove_tree, self._tmp)
        return self._tmp

    def path(self, *names: Union[str, bytes]) -> str:
        """The path of a name in the test's directory."""
        return os.path.join(self.tmp, *map(os.fsdecode, names))

    def make(self, name: Union[str, bytes], tree: Any) -> str:
        """make_tree() in the test's directory; returns the path."""
        return make_tree(self.path(name), tree)

    def start_tool(
        self,
        name: str,
        *args: Any,
        python: Optional[str] = None,
        flags: Sequence[str] = (),
        under: Sequence[str] = (),
        user: Optional[str] = None,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Start client/NAME and go on; if it still runs at the test's end, it is killed with its group."""
        argv = command_line(name, *args, python=python, flags=flags, under=under, user=user)
        process = start(argv, user=user, **options)
        self.addCleanup(self._end, process)
        return process

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        kill_group(process)
        process.communicate()

    def assert_same_tree(self, actual: Any, expected: Any, modes: bool = False, times: bool = False) -> None:
        """Fail, naming up to 20 differences, unless both are the same; each is a path (str) or a literal."""
        trees = [read_tree(tree, modes, times) if isinstance(tree, str) else tree for tree in (expected, actual)]
        lines = differences(*trees)
        if lines:
            more = [f"and {len(lines) - 20} more"] if len(lines) > 20 else []
            self.fail("the trees differ:\n" + "\n".join(lines[:20] + more).encode("utf-8", "backslashreplace").decode())

    def assert_no_leftovers(self, root: str, pattern: Optional[str] = None) -> None:
        """Fail if a temporary of ours is left below root."""
        self.assertEqual(leftovers(root, pattern) if pattern else leftovers(root), [])


def main(module: str = "__main__", argv: Optional[List[str]] = None) -> None:
    """Run the tests of a module by unittest's own command line, then exit 0 if all passed.

    REQUIRE_ALL=1 turns skips into failures, FILEIO_FAST=1 leaves out what is marked slow,
    FILEIO_TEST_REPORT=FILE writes the counts there as JSON. No test at all is a failure, unless all were left
    out.
    """
    report = os.environ.pop("FILEIO_TEST_REPORT", "")
    program = unittest.main(module, argv=argv, testRunner=_Runner, exit=False)
    result: Any = program.result
    counts = result.counts()
    if report:
        with open(report, "w", encoding="utf-8") as stream:
            json.dump(counts, stream)
    nothing = not (counts["passed"] or counts["failed"] or counts["skipped"] or counts["deselected"])
    sys.exit(1 if counts["failed"] or nothing else 0)


class _Result(unittest.TextTestResult):
    """Remembers how each test ended: subtests and what runs around a test count with it, once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.outcomes: Dict[str, str] = {}
        self.reasons: List[str] = []
        self.deselected = 0

    def counts(self) -> Dict[str, Any]:
        """Tests passed, failed, skipped, deselected, and the reason of each skip."""
        ended = collections.Counter(self.outcomes.values())
        return {
            "passed": ended["passed"],
            "failed": ended["failed"],
            "skipped": ended["skipped"],
            "deselected": self.deselected,
            "reasons": self.reasons,
        }

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self.outcomes[test.id()] = "passed"

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self.outcomes[test.id()] = "failed"

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self.outcomes[test.id()] = "failed"

    def addUnexpectedSuccess(self, test: Any) -> None:
        super().addUnexpectedSuccess(test)
        self.outcomes[test.id()] = "failed"

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.outcomes[test.id()] = "failed"

    def addSkip(self, test: Any, reason: str) -> None:
        whole = getattr(test, "test_case", test)  # a subtest knows its test
        if os.environ.get("REQUIRE_ALL") == "1":
            try:
                raise AssertionError(f"skipped, and REQUIRE_ALL=1 allows no skip: {reason}")
            except AssertionError:
                self.addFailure(whole, sys.exc_info())
            return
        super().addSkip(test, reason)
        self.reasons.append(reason)
        if self.outcomes.get(whole.id()) != "failed":
            self.outcomes[whole.id()] = "skipped"


class _Runner(unittest.TextTestRunner):
    resultclass = _Result

    def run(self, test: Any) -> Any:
        kept, left_out = unittest.TestSuite(), 0
        for case in _cases(test):
            if os.environ.get("FILEIO_FAST") == "1" and _is_slow(case):
                left_out += 1
            else:
                kept.addTest(case)
        result: Any = super().run(kept)
        result.deselected = left_out
        return result


def _cases(suite: Any) -> Iterator[unittest.TestCase]:
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from _cases(item)
        else:
            yield item


def _is_slow(case: unittest.TestCase) -> bool:
    method = getattr(case, getattr(case, "_testMethodName", ""), None)
    return getattr(case, "fileio_slow", False) or getattr(method, "fileio_slow", False)
