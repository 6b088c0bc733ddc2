# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The commands that are run against each other, as functions of a source and a fresh destination.

A peer that is not installed is left out, and said so. fio is no copier: it tells what the storage can do.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Callable, List, NamedTuple, Optional, Sequence

CLIENT = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "client")

# fio's requests, and how many of each job's are under way. With 4 jobs a side nothing was faster here: see README.md.
FIO_BLOCK = 4 << 20
FIO_DEPTH = 4
FIO_JOBS = 4  # a side, whatever the number of files


class Contestant(NamedTuple):
    """A name, a program, its command for a source and a destination, whether it makes a copy that can be checked.

    ``own_seconds`` takes from its output how long it was at work, where the time until its exit tells something
    else; ``prepare`` makes, untimed, what has to be there before.
    """

    name: str
    program: str
    command: Callable[[str, str], List[str]]
    copies: bool = True
    own_seconds: Optional[Callable[[bytes], float]] = None
    prepare: Optional[Callable[[str, str], None]] = None

    def is_installed(self) -> bool:
        """Whether its program is there."""
        return shutil.which(self.program) is not None

    def warm_up(self, source: str, destination: str) -> List[str]:
        """A command that brings the program into memory, given a tiny source."""
        if self.own_seconds is None:
            return self.command(source, destination)
        return [self.program, "version" if self.program == "openssl" else "--version"]


def tool(name: str) -> str:
    """The path of one of our scripts."""
    return os.path.join(CLIENT, name)


def fastcp(python: str = sys.executable) -> Contestant:
    """Ours, at the defaults; by the interpreter itself, since a pyenv `python3` is a script of 40 ms or more."""
    return Contestant("fastcp", python, lambda src, dst: [python, tool("fastcp"), "-r", src, dst])


def fastcp_manifest(python: str = sys.executable) -> Contestant:
    """Ours, the manifest beside the copy."""
    return Contestant(
        "fastcp --manifest",
        python,
        lambda src, dst: [python, tool("fastcp"), "-r", "--manifest", dst + ".manifest", src, dst],
    )


def fastmd5(python: str = sys.executable) -> Contestant:
    """Ours, at the defaults."""
    return Contestant("fastmd5", python, lambda src, dst: [python, tool("fastmd5"), "-q", src], copies=False)


def fastmd5_compare(python: str = sys.executable) -> Contestant:
    """Ours, of the source and a copy that is made before."""

    def copy(source: str, destination: str) -> None:
        subprocess.run([python, tool("fastcp"), "-q", "-r", source, destination], check=True)

    def command(source: str, destination: str) -> List[str]:
        if not os.path.exists(destination):  # the warm-up's
            copy(source, destination)
        return [python, tool("fastmd5"), "-q", "--compare", source, destination]

    return Contestant("fastmd5 --compare", python, command, copies=False, prepare=copy)


def cp() -> Contestant:
    """GNU cp."""
    return Contestant("cp -r", "cp", lambda src, dst: ["cp", "-r", src, dst])


def rsync() -> Contestant:
    """rsync as cp -r: the slash makes it copy what is in the directory."""
    def command(source: str, destination: str) -> List[str]:
        return ["rsync", "-r", source + "/" if os.path.isdir(source) else source, destination]

    return Contestant("rsync -r", "rsync", command)


AT_ONCE = 16  # files that the peers which can copy several at a time


def rclone() -> Contestant:
    """rclone from disk to disk."""
    options = ["--config=", "--transfers=%d" % AT_ONCE, "--checkers=%d" % AT_ONCE]
    return Contestant("rclone copy", "rclone", lambda src, dst: ["rclone", "copy", *options, src, dst])


def fpsync() -> Contestant:
    """fpart's parallel rsync."""
    script = 'mkdir "$2" && fpsync -n %d -t "$2.state" "$1" "$2" && rm -r "$2.state"' % AT_ONCE
    return Contestant("fpsync", "fpsync", lambda src, dst: ["sh", "-c", script, "sh", src, os.path.abspath(dst)])


def tar() -> Contestant:
    """One tar that packs and one that unpacks."""
    script = 'mkdir "$2" && tar -C "$1" -cf - . | tar -C "$2" -xf -'
    return Contestant("tar | tar", "tar", lambda src, dst: ["sh", "-c", script, "sh", src, dst])


def given(text: str) -> Contestant:
    """A peer of the user's: NAME=COMMAND for the shell, in which {src} and {dst} stand for the paths.

    Raises ValueError.
    """
    name, equals, command = text.partition("=")
    if not (name and equals and "{src}" in command and "{dst}" in command):
        raise ValueError("not NAME=COMMAND with {src} and {dst}: %s" % text)
    script = command.replace("{src}", '"$1"').replace("{dst}", '"$2"')
    return Contestant(name, "sh", lambda src, dst: ["sh", "-c", script, "sh", src, dst])


def peers(others: Sequence[Contestant] = ()) -> List[Contestant]:
    """All that copy trees, ``others`` too."""
    return [cp(), rsync(), rclone(), fpsync(), tar(), *others]


def md5sum() -> Contestant:
    """GNU md5sum, one process for all files."""
    return Contestant("md5sum", "md5sum", lambda src, dst: ["md5sum", *files_of(src)], copies=False)


def xargs_md5sum() -> Contestant:
    """GNU md5sum of a whole tree, as one does it in a shell."""
    script = 'find "$1" -type f -print0 | xargs -0 md5sum'
    return Contestant("find | xargs md5sum", "md5sum", lambda src, dst: ["sh", "-c", script, "sh", src], copies=False)


def openssl(size: int) -> Contestant:
    """How long the CPUs take for the MD5 of ``size`` bytes in memory, by OpenSSL's own measurement."""
    cpus = len(os.sched_getaffinity(0))
    command = ["openssl", "speed", "-multi", str(cpus), "-seconds", "2", "-bytes", str(1 << 20), "-mr", "md5"]

    def seconds(output: bytes) -> float:
        # +F:number:md5:bytes a second
        rates = [float(line.split(b":")[3]) for line in output.splitlines() if line.startswith(b"+F:")]
        return size / sum(rates)

    return Contestant("openssl speed", "openssl", lambda src, dst: command, copies=False, own_seconds=seconds)


def nothing(python: str = sys.executable) -> Contestant:
    """The interpreter alone: what no Python program can be faster than."""
    return Contestant("python -c pass", python, lambda src, dst: [python, "-c", "pass"], copies=False)


def files_of(path: str) -> List[str]:
    """A file itself, or the files of a flat directory."""
    if not os.path.isdir(path):
        return [path]
    return [os.path.join(path, name) for name in sorted(os.listdir(path))]


# --------------------------------------------------------------------------------------------------------- fio


def fio_copy() -> Contestant:
    """Direct reads of the source and direct writes of as much, both at once and neither waiting for the other."""
    return Contestant("fio", "fio", _copy_command, copies=False, own_seconds=_fio_seconds, prepare=_make_sparse)


def fio_read() -> Contestant:
    """Direct reads of the source."""

    def command(source: str, destination: str) -> List[str]:
        return [*_FIO, *_jobs("read", files_of(source))]

    return Contestant("fio read", "fio", command, copies=False, own_seconds=_fio_seconds)


def dd_read() -> Contestant:
    """Direct reads of the source, one file after the other, where there is no fio."""
    script = 'for f; do dd if="$f" of=/dev/null bs=8M iflag=direct status=none || exit; done'
    return Contestant("dd", "dd", lambda src, dst: ["sh", "-c", script, "dd", *files_of(src)], copies=False)


_FIO = (
    "fio",
    "--output-format=json",
    "--direct=1",
    "--ioengine=libaio",
    "--iodepth=%d" % FIO_DEPTH,
    "--fallocate=none",
    "--gtod_reduce=1",
)


def _copy_command(source: str, destination: str) -> List[str]:
    return [*_FIO, *_jobs("read", files_of(source)), *_jobs("write", files_of(destination))]


def _jobs(kind: str, names: List[str]) -> List[str]:
    """``FIO_JOBS`` jobs or more that share the files: each a whole one, or a part of one where they are few."""
    parts = max(1, FIO_JOBS // len(names))
    options = []
    for name in names:
        size = os.path.getsize(name)
        part = -(-size // parts // 4096) * 4096
        for start in range(0, size, part):
            count = min(part, size - start)
            options += ["--name=%s%d" % (kind, len(options)), "--rw=" + kind, "--filename=" + name.replace(":", "\\:")]
            options += ["--offset=%d" % start, "--size=%d" % count, "--bs=%d" % min(FIO_BLOCK, count)]
    return options


def _make_sparse(source: str, destination: str) -> None:
    """New files of their full size: else each write moves the end of the file, which ext4 does one at a time."""
    if os.path.isdir(source):
        os.mkdir(destination)
    for name in files_of(source):
        target = os.path.join(destination, os.path.basename(name)) if os.path.isdir(source) else destination
        with open(target, "wb") as stream:
            stream.truncate(os.path.getsize(name))


def _fio_seconds(output: bytes) -> float:
    """The time of its slowest job: starting fio and its report take a second that is no I/O."""
    jobs = json.loads(output[output.index(b"{") :])["jobs"]
    return max(max(job["read"]["runtime"], job["write"]["runtime"]) for job in jobs) / 1000.0
