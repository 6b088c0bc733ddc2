# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""--resume: runs that are killed at swept times, and everything that must not be gone on with."""

# Takes about 30 s
from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import time
from typing import Any, List

import support
from support import Random, Sparse, TestCase, needs, run_tool, slow

from mlperf_common.fileio import resuming
from mlperf_common.fileio.resuming import merged, within, without

MIB = 1 << 20
SIZE = 200 * MIB + 777  # four extents


class Ranges(TestCase):
    def test_merged_and_without(self) -> None:
        self.assertEqual(merged([(8, 9), (0, 2), (2, 4), (3, 5)]), [(0, 5), (8, 9)])
        for ranges, done, left in (
            ([(0, 10)], [], [(0, 10)]), ([(0, 10)], [(0, 10)], []),
            ([(0, 10)], [(2, 4), (6, 7)], [(0, 2), (4, 6), (7, 10)]),
            ([(0, 4), (8, 12)], [(2, 10)], [(0, 2), (10, 12)]), ([(4, 6)], [(0, 4), (6, 9)], [(4, 6)]),
            ([(4, 6)], [(0, 9)], []), ([(0, 5)], [(5, 9)], [(0, 5)]),
        ):  # fmt: skip
            self.assertEqual(without(ranges, done), left)
        self.assertEqual(within([(0, 4), (6, 9), (20, 30)], (2, 8)), ((2, 4), (6, 8)))


class Case(TestCase):
    def begin(self, *options: str, seconds: float = 0.0, signum: int = signal.SIGKILL) -> int:
        """Run a copy of `s` to `d` and end it when its record has something, or after so long; what it had copied."""
        stood = os.path.exists(self.path("d"))
        words = ["fastcp", "--resume", *options, self.path("s"), self.path("d")]
        tool = self.start_tool(*words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + (seconds or 20)
        while time.monotonic() < deadline and tool.poll() is None and (seconds or not self.copied()):
            time.sleep(0.005)
        tool.send_signal(signum)
        tool.wait(20)
        self.assertIn(tool.returncode, (0, -signum, 128 + signum, 1 if stood else 0))
        return self.copied()

    def record(self) -> str:
        found = glob.glob(self.path(".fastcp-resume-*.json"))
        return found[0] if found else ""

    def part(self) -> str:
        return glob.glob(self.path(".fastcp-resume-*.part"))[0]

    def copied(self) -> int:
        """How many bytes the record says are there."""
        try:
            with open(self.record(), encoding="ascii") as stream:
                return sum(end - start for start, end in json.load(stream)[5])
        except (OSError, ValueError):
            return 0

    def finish(self, *options: str, expect: int = 0) -> Any:
        return run_tool("fastcp", "--resume", *options, "s", "d", cwd=self.tmp, expect=expect)

    def assert_whole(self) -> None:
        self.assert_same_tree(self.path("d"), self.path("s"))
        self.assertEqual(sorted(os.listdir(self.tmp)), ["d", "s"])


class Killed(Case):
    LIMIT = ("-n", "2", "--bwlimit", "150M")

    def test_the_next_run_goes_on(self) -> None:
        self.make("s", Random(SIZE, seed=1))
        for signum in (signal.SIGKILL, signal.SIGTERM):
            with self.subTest(signum=signum):
                there = self.begin(*self.LIMIT, signum=signum)
                self.assertGreater(there, 0)
                self.make(os.path.basename(self.part())[:-4] + "new", b"as when killed before the rename")
                done = self.finish()
                self.assertIn("bytes from earlier runs: %d" % there, done.stderr)
                self.assert_whole()
                os.unlink(self.path("d"))

    @slow
    def test_at_swept_times(self) -> None:
        self.make("s", Random(SIZE, seed=1))
        for step in (1, 4, 5, 6):
            with self.subTest(step=step):
                self.begin(*self.LIMIT, seconds=0.2 * step, signum=signal.SIGKILL if step % 2 else signal.SIGTERM)
                self.begin(*self.LIMIT, seconds=0.3)
                self.finish("-u")
                self.assert_whole()
                os.unlink(self.path("d"))

    @slow
    def test_what_is_read_again(self) -> None:
        self.make("s", Random(SIZE, seed=1))
        self.assertGreater(self.begin(*self.LIMIT), 0)
        with open(self.record(), encoding="ascii") as stream:
            start = json.load(stream)[5][0][0]
        with open(self.part(), "r+b") as part:
            part.seek(start)
            part.write(b"\0" * 4096)  # as a disk that has lost it
        done = self.finish("--verify", expect=1)
        self.assertIn("the storage does not have what was copied", done.stderr)
        self.assertFalse(os.path.exists(self.path("d")))

    @slow
    def test_a_manifest_has_all_of_it(self) -> None:
        self.make("s", Random(SIZE, seed=1))
        self.assertGreater(self.begin(*self.LIMIT), 0)
        self.finish("--manifest", "m", "--verify")
        self.assertIn("2 OK", run_tool("fastmd5", "-c", "m", cwd=self.tmp, expect=0).stderr)  # chunks
        os.unlink(self.path("m"))
        self.assert_whole()

    @slow
    @needs("strace")
    def test_the_storage_has_it_before_the_record(self) -> None:
        self.make("s", Random(SIZE, seed=1))
        log = self.path("log")
        under = ["strace", "-f", "-qq", "-o", log, "-e", "trace=fdatasync,rename,renameat,renameat2,fsync"]
        words = ["fastcp", "--resume", *self.LIMIT, self.path("s"), self.path("d")]
        run_tool(*words, under=under, expect=0)
        with open(log) as stream:
            lines = [line for line in stream if " = 0" in line]
        synced = [at for at, line in enumerate(lines) if "fdatasync" in line]
        records = [at for at, line in enumerate(lines) if ".json" in line]
        self.assertEqual(len(synced), 4)
        self.assertGreater(len(records), 1)
        for before, record in zip(["", *records], records):
            if before:
                self.assertTrue(any(int(before) < at < record for at in synced), lines)
            own = [line for line in lines[:record] if line.split()[0] == lines[record].split()[0]]
            self.assertIn(" fsync(", own[-1])  # of the record itself
        os.unlink(log)

    @slow
    def test_clean_ups_leave_it_alone(self) -> None:
        self.make("s", Random(SIZE, seed=1))
        self.make("other", {"f": b"x"})
        self.assertGreater(self.begin(*self.LIMIT), 0)
        before = sorted(os.listdir(self.tmp))
        run_tool("fastcp", "-rfT", "other", ".", cwd=self.tmp, expect=0)
        self.assertEqual(set(os.listdir(self.tmp)) - {"f"}, set(before))

    def test_holes(self) -> None:
        self.make("s", Sparse(SIZE, {0: b"x", 100 * MIB: b"y" * 8192, 150 * MIB: b"z" * 65536}))
        self.begin("-n", "1", "--bwlimit", "4K")
        self.finish()
        self.assert_whole()
        self.assertLess(os.stat(self.path("d")).st_blocks * 512, 20 * MIB)


class NotGoneOnWith(Case):
    """Each is begun anew, or refused; nothing that is not ours is touched."""

    def setUp(self) -> None:
        super().setUp()
        self.make("s", Random(SIZE, seed=1))
        self.assertGreater(self.begin(*Killed.LIMIT), 0)

    def assert_begun_anew(self, others: List[str]) -> None:
        done = self.finish()
        self.assertNotIn("earlier run", done.stderr)
        self.assert_same_tree(self.path("d"), self.path("s"))
        self.assertEqual(sorted(os.listdir(self.tmp)), sorted(["d", "s", *others]))

    @slow
    def test_a_changed_source(self) -> None:
        with open(self.path("s"), "r+b") as stream:
            stream.write(b"changed")
        self.assert_begun_anew([])

    @slow
    def test_another_source_of_the_same_size(self) -> None:
        os.unlink(self.path("s"))
        self.make("s", Random(SIZE, seed=2))
        self.assert_begun_anew([])

    @slow
    def test_a_replaced_temporary(self) -> None:
        part = self.part()
        os.unlink(part)
        self.make(os.path.basename(part), Sparse(SIZE, {}))
        self.assert_begun_anew([os.path.basename(part)])

    @slow
    def test_a_temporary_that_has_gone_or_is_a_link(self) -> None:
        part = self.part()
        os.rename(part, self.path("victim"))
        os.symlink("victim", part)
        self.assert_begun_anew([os.path.basename(part), "victim"])

    @slow
    def test_a_temporary_with_another_name(self) -> None:
        part = self.part()
        os.link(part, self.path("other"))
        self.assert_begun_anew([os.path.basename(part), "other"])

    def test_forged_records(self) -> None:
        with open(self.record(), encoding="ascii") as stream:
            good = json.load(stream)
        for position, value in (
            (5, [[0, SIZE + 4096]]), (5, [[1, 4096]]), (5, [[4096, 0]]), (5, [[0, 4096], [0, 8192]]), (5, [[0, "x"]]),
            (5, "x"), (0, "../../x"), (2, [1]), (3, "1"), (4, [0]), (1, []),
        ):  # fmt: skip
            with self.subTest(position=position, value=value):
                bad = list(good)
                bad[position] = value
                self.assertIsNone(resuming._decoded(json.dumps(bad).encode()))
        self.assertIsNotNone(resuming._decoded(json.dumps(good).encode()))
        for data in (b"", b"{}", b"[]", b"\xff", b"[1,2,3,4,5,6]"):
            self.assertIsNone(resuming._decoded(data))
        os.chmod(self.record(), 0o622)
        done = self.finish(expect=1)
        self.assertIn("its record is not one of yours", done.stderr)

    @slow
    def test_a_run_that_still_works(self) -> None:
        part = self.part()
        words = ["fastcp", "--resume", "-n", "2", "--bwlimit", "5M", self.path("s"), self.path("d")]
        tool = self.start_tool(*words, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while os.path.exists(part) and time.monotonic() < deadline:  # it has taken it over
            time.sleep(0.01)
        done = self.finish(expect=1)
        self.assertIn("process %d is copying it (--resume)" % tool.pid, done.stderr)
        self.assertIsNone(tool.poll())
        tool.kill()
        tool.wait()
        self.finish()
        self.assert_whole()

    @slow
    def test_another_machine(self) -> None:
        with open(self.record(), encoding="ascii") as stream:
            record = json.load(stream)
        record[1][0] = "another boot"
        with open(self.record(), "w", encoding="ascii") as stream:
            json.dump(record, stream)
        self.assertIn("another machine was copying it", self.finish(expect=1).stderr)
        os.utime(self.record(), (time.time() - 400, time.time() - 400))
        self.assertIn("bytes from earlier runs", self.finish().stderr)
        self.assert_whole()


if __name__ == "__main__":
    support.main()
