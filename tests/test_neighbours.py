# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What spares others: --bwlimit, kept by all workers together; copies that a server makes itself; the stripe line."""

# Takes about 15 s
from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
import time
from typing import Any, Callable, List, Tuple
from unittest import mock

import copying
import support
from support import Random, TestCase, run_tool, slow

from mlperf_common.fileio import facts, report, serverside, stripes

KIB, MIB = 1 << 10, 1 << 20

RATE = 16 * MIB  # bytes a second
TREE = {"big": Random(9 * MIB, seed=1), "d": {f"f{i}": Random(100 * KIB, seed=i) for i in range(40)}}
SIZE = 9 * MIB + 40 * 100 * KIB
REAL = os.copy_file_range
PIECE = RATE // 4  # what may move at once


class Limit(TestCase):
    def seconds(self, *words: str, expect: int = 0) -> float:
        started = time.monotonic()
        run_tool(*words, "--bwlimit", str(RATE), cwd=self.tmp, expect=expect)
        return time.monotonic() - started

    def assert_limited(self, seconds: float, size: int) -> None:
        """At the limit, not above it, and not idle for long."""
        self.assertGreaterEqual(seconds, (size - PIECE) / RATE)
        self.assertLess(seconds, size / RATE + 2)

    def test_a_tree_by_many_workers(self) -> None:
        self.make("s", TREE)
        self.assert_limited(self.seconds("fastcp", "-n", "8", "-r", "s", "d"), SIZE)
        self.assert_same_tree(self.path("d"), self.path("s"))

    @slow
    def test_each_way_that_bytes_move(self) -> None:
        self.make("s", TREE)
        run_tool("fastcp", "-r", "s", "d", cwd=self.tmp, expect=0)
        cases: List[List[str]] = [
            ["fastcp", "s/big", "one"],
            ["fastcp", "-n", "1", "--direct=never", "s/big", "buffered"],
            ["fastcp", "-n", "2", "-r", "--manifest", "m", "s", "e"],
            ["fastcp", "-r", "-u", "--checksum", "s", "-T", "d"],
            ["fastmd5", "s"],
            ["fastmd5", "-n", "1", "s"],
            ["fastmd5", "--compare", "s", "d"],
            ["fastmd5", "-c", "-C", "e", "m"],
        ]
        for words in cases:
            with self.subTest(words=words):
                size = 9 * MIB if "s/big" in words else SIZE
                self.assert_limited(self.seconds(*words), size)

    @slow
    def test_what_is_read_back_counts(self) -> None:
        self.make("big", Random(6 * MIB, seed=1))
        self.assert_limited(self.seconds("fastcp", "--verify", "big", "copy"), 12 * MIB)

    @slow
    def test_ranks_share_it(self) -> None:
        self.make("s", TREE)
        started = time.monotonic()
        ranks = [
            self.start_tool(
                "fastcp", "--distributed", "-n", "2", "--bwlimit", str(RATE), "-r", "s", "d",
                cwd=self.tmp,
                env={
                    "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
                    "TORCHELASTIC_RUN_ID": "limit", "TORCHELASTIC_RESTART_COUNT": "0",
                },
            )
            for rank in range(2)
        ]  # fmt: skip
        self.assertEqual([rank.wait(60) for rank in ranks], [0, 0])
        self.assertGreaterEqual(time.monotonic() - started, (SIZE - 2 * PIECE) / RATE)
        self.assert_same_tree(self.path("d"), self.path("s"))

    def test_a_signal_ends_the_wait(self) -> None:
        self.make("big", Random(8 * MIB, seed=1))
        for workers in ("1", "4"):
            with self.subTest(workers=workers):
                copying = self.start_tool(
                    "fastcp", "-n", workers, "--bwlimit", "1K", self.path("big"), self.path("copy"),
                    stderr=subprocess.PIPE,
                )  # fmt: skip
                time.sleep(1)
                started = time.monotonic()
                copying.send_signal(signal.SIGTERM)
                self.assertEqual(copying.wait(10), -signal.SIGTERM)
                self.assertLess(time.monotonic() - started, 2)
                self.assert_no_leftovers(self.tmp)

    def test_what_is_no_rate(self) -> None:
        for text in ("0", "-1", "1.5M", "", "10X"):
            with self.subTest(text=text):
                run_tool("fastcp", "--bwlimit=" + text, "a", "b", cwd=self.tmp, expect=2)


NFS = "31 28 0:45 / /data rw,relatime shared:15 - nfs4 server:/data rw,relatime,vers=%s,rsize=1048576,addr=10.0.0.1"
MOUNTS = {
    NFS % "4.2": True,
    NFS % "4.1": False,
    NFS % "4.20": False,
    "31 28 0:45 / /data rw - nfs server:/data rw,vers=3,addr=10.0.0.1": False,
    "31 28 0:45 / /data rw shared:1 master:2 - cifs //server/data rw,vers=3.1.1,cache=strict": True,
    "31 28 0:45 / /data rw - smb3 //server/data rw,vers=3.1.1": True,
    "31 28 0:46 / /data rw - cifs //server/data rw,vers=3.1.1": False,
    "31 28 0:45 / /data rw - ext4 /dev/sda rw,vers=4.2": False,
    "31 28 0:45 / /data\\040vers=4.2\udcff rw - fuse.sshfs server:/data rw": False,
}


def refusing(number: int, after: int) -> Callable[..., int]:
    """The call, which moves so many bytes once and then fails, or moves nothing (no number)."""
    left = [after]

    def call(src: int, dst: int, count: int, *at: int) -> int:
        if not left[0]:
            if number:
                raise OSError(number, os.strerror(number))
            return 0
        count, left[0] = min(count, left[0]), 0
        return REAL(src, dst, count, *at)

    return call


class AtTheServer(TestCase):
    """The real call between files of the local filesystem, which is said to be a server's."""

    def test_which_mounts(self) -> None:
        for line, wanted in MOUNTS.items():
            with self.subTest(line=line), mock.patch.object(serverside, "_MOUNTS", self.path("mounts")):
                with open(self.path("mounts"), "wb") as stream:
                    stream.write(b"28 1 8:1 / / rw - ext4 /dev/sda1 rw\n%s\n" % os.fsencode(line))
                self.assertEqual(serverside.is_served(os.makedev(0, 45)), wanted)
        self.assertFalse(serverside.is_served(os.stat(self.tmp).st_dev))

    def copy(self, call: Any, served: bool = True) -> Tuple[report.Summary, int]:
        """Copy a file of three extents; what came of it, and how many bytes the server has copied."""
        source, copy = self.path("s"), self.path(f"c{len(os.listdir(self.tmp))}")
        asked: List[int] = []

        def counting(src: int, dst: int, count: int, *offsets: int) -> int:
            moved = int(call(src, dst, count, *offsets))
            asked.append(moved)
            return moved

        with mock.patch.object(serverside, "is_served", lambda dev: served):
            with mock.patch.object(os, "copy_file_range", counting), copying.limits(extent=4 * MIB):
                with copying.buffered():  # with O_DIRECT the local call moves whole blocks only
                    summary, said = copying.copy(source, copy)
        self.assertEqual(said.failures, [])
        self.assert_same_tree(copy, source)
        return summary, sum(asked)

    def test_the_whole_file(self) -> None:
        self.make("s", Random(9 * MIB + 77, seed=1))
        summary, moved = self.copy(REAL)
        self.assertEqual((moved, summary.io_mode()), (9 * MIB + 77, "copied by the server"))
        self.assertEqual(self.copy(REAL, served=False)[1], 0)

    def test_short_counts(self) -> None:
        self.make("s", Random(9 * MIB + 77, seed=1))
        short = self.copy(lambda src, dst, count, *at: REAL(src, dst, min(count, 70_001), *at))
        self.assertEqual(short[1], 9 * MIB + 77)

    def test_what_the_server_does_not_copy_is_read_and_written(self) -> None:
        self.make("s", Random(9 * MIB + 77, seed=1))
        for number in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, 0):
            for after in (0, 1, 70_001):
                with self.subTest(errno=errno.errorcode.get(number, "moves nothing"), after=after):
                    moved = self.copy(refusing(number, after))[1]
                    self.assertEqual(moved, after)

    def test_a_real_error(self) -> None:
        self.make("s", Random(9 * MIB, seed=1))
        failing = mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
        with mock.patch.object(serverside, "is_served", lambda dev: True), copying.limits(extent=4 * MIB):
            with mock.patch.object(os, "copy_file_range", failing):
                summary, said = copying.copy(self.path("s"), self.path("c"))
        self.assertEqual((summary.failed, said.reason()), (1, "Input/output error"))
        self.assertFalse(os.path.exists(self.path("c")))

    def test_a_source_that_shrinks(self) -> None:
        self.make("s", Random(9 * MIB, seed=1))

        def call(*arguments: int) -> int:
            os.truncate(self.path("s"), 4096)
            return REAL(*arguments)

        with mock.patch.object(serverside, "is_served", lambda dev: True), copying.limits(extent=4 * MIB):
            with mock.patch.object(os, "copy_file_range", call):
                summary, _ = copying.copy(self.path("s"), self.path("c"))
        self.assertEqual(summary.failed, 1)
        self.assertFalse(os.path.exists(self.path("c")))

    def test_where_it_is_not_wanted(self) -> None:
        for options in (
            {"direct": "always"}, {"direct": "never"}, {"reflink": "never"}, {"sparse": "never"},
        ):  # fmt: skip
            known = facts.Facts(facts.Options("t")._replace(**options), 0)
            with self.subTest(options), mock.patch.object(serverside, "is_served", lambda dev: True):
                self.assertFalse(known.copies_at_server(1, 1))
        known = facts.Facts(facts.Options("t"), 0)
        with mock.patch.object(serverside, "is_served", lambda dev: True):
            self.assertEqual((known.copies_at_server(1, 1), known.copies_at_server(1, 2)), (True, False))


def layout(magic: int, size: int, count: int) -> bytes:
    """What Lustre says of a directory's layout."""
    return struct.pack("<II16sIHH", magic, 1, bytes(16), size, count, 0xFFFF)


LAYOUTS = {
    layout(0x0BD10BD0, 1 << 20, 1): "over 1 stripe of 1024 KiB; large files may be faster with more (lfs setstripe -c)",
    layout(0x0BD10BD0, 4 << 20, 8): "over 8 stripes of 4096 KiB",
    layout(0x0BD30BD0, 1 << 20, 0xFFFF) + b"pool".ljust(16, b"\0"): "over all servers",
    layout(0x0BD10BD0, 0, 0): "as the filesystem's default says (lfs getstripe -d)",
    layout(0x0BD60BD0, 0, 0): "over more servers as they grow (lfs getstripe -d)",
    layout(0x12345678, 0, 1): "",
    b"": "",
    b"\xd0\x0b\xd1\x0b": "",
}


class Stripes(TestCase):
    def test_what_is_said_of_each_layout(self) -> None:
        for value, wanted in LAYOUTS.items():
            with self.subTest(wanted), mock.patch.object(os, "getxattr", lambda *_, value=value: value):
                note = stripes.stripe_note(self.tmp)
                self.assertEqual(note, wanted and "Lustre spreads new files " + wanted)

    def test_no_lustre(self) -> None:
        self.assertEqual(stripes.stripe_note(self.tmp), "")
        self.assertEqual(stripes.stripe_note(self.path("nothing")), "")

    def test_the_line_of_a_copy(self) -> None:
        """Of the directory that DEST goes to; any attribute will do for the place where it is asked."""
        self.make("s", b"x")
        os.setxattr(self.tmp, "user.lov", layout(0x0BD10BD0, 1 << 20, 2))
        code = (
            "import sys; from mlperf_common.fileio import fastcp, stripes; stripes.ATTRIBUTE = 'user.lov'; "
            "sys.exit(fastcp.main(sys.argv[1:]))"
        )
        for options, lines in (["-v"], 3), ([], 1):
            words = [sys.executable, "-c", code, *options, "s", f"c{lines}"]
            result = support.run(words, cwd=self.tmp, env={"PYTHONPATH": support.ROOT}, expect=0)
            self.assertEqual(len(result.stderr.splitlines()), lines, result.stderr)
        words = [sys.executable, "-c", code, "-v", "s", self.path("c")]
        result = support.run(words, cwd=self.tmp, env={"PYTHONPATH": support.ROOT}, expect=0)
        note = "note: '%s': Lustre spreads new files over 2 stripes of 1024 KiB\n" % self.tmp
        self.assertIn("fastcp: " + note, result.stderr)


if __name__ == "__main__":
    support.main(__name__)
