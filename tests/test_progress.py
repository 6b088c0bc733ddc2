# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The display: what is shown when, with a clock cranked by hand; numbers in words."""
from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
import unittest
from unittest import mock

import support

from mlperf_common.fileio import progress
from mlperf_common.fileio.progress import Progress, counted, format_bytes, format_rate, format_seconds

GIB = 1 << 30


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal, without a descriptor: 80 columns."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> str:
        """What the line shows in the end, with each return to the first column obeyed."""
        shown = ""
        for piece in self.getvalue().split("\r"):
            shown = piece + shown[len(piece):]
        return shown.rstrip()


class Words(unittest.TestCase):
    def test_bytes(self) -> None:
        for count, words in {0: "0 B", 1: "1 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB",
                             (1 << 20) - 1: "1.0 MiB", 1 << 20: "1.0 MiB", GIB: "1.0 GiB",
                             1 << 40: "1.0 TiB", 1 << 50: "1.0 PiB", 1 << 60: "1.0 EiB", 12.7: "12 B",
                             1 << 80: "1048576.0 EiB"}.items():
            self.assertEqual(format_bytes(count), words)

    def test_rate(self) -> None:
        self.assertEqual(format_rate(GIB, 2), "512.0 MiB/s")
        self.assertEqual(format_rate(0, 2), "0 B/s")
        self.assertEqual(format_rate(GIB, 0), "-")
        self.assertEqual(format_rate(GIB, -1), "-")

    def test_seconds(self) -> None:
        for seconds, words in {-1: "0.0 s", 0: "0.0 s", 0.04: "0.0 s", 12.34: "12.3 s", 59.94: "59.9 s",
                               59.96: "1:00 min", 60: "1:00 min", 125: "2:05 min", 3599.4: "59:59 min",
                               3599.6: "1:00:00 h", 3725: "1:02:05 h", 360000: "100:00:00 h"}.items():
            self.assertEqual(format_seconds(seconds), words)

    def test_counted(self) -> None:
        self.assertEqual([counted(n, "file") for n in (0, 1, 2)], ["0 files", "1 file", "2 files"])
        self.assertEqual([counted(n, "directory") for n in (0, 1, 2)],
                         ["0 directories", "1 directory", "2 directories"])


class InALog(unittest.TestCase):
    def setUp(self) -> None:
        self.clock, self.stream = Clock(), io.StringIO()
        self.progress = Progress(self.stream, clock=self.clock)

    def test_a_line_every_30_seconds(self) -> None:
        for _ in range(100):
            self.clock.now += 1
            self.progress.update(GIB, 4 * GIB, 1, 4)
        lines = self.stream.getvalue().splitlines()
        self.assertEqual(len(lines), 3)
        self.assertEqual(lines[0],
                         "copying: 25 %, 1.0 GiB of 4.0 GiB, 1 of 4 files, 34.1 MiB/s, 1:30 min left")

    def test_nothing_from_a_short_job(self) -> None:
        self.clock.now += 29
        self.progress.update(1, 2, 1, 2)
        self.progress.clear()
        self.assertEqual(self.stream.getvalue(), "")

    def test_no_control_characters(self) -> None:
        for _ in range(10):
            self.clock.now += 31
            self.progress.update(5, 10, 1, 2)
        self.progress.clear()
        self.assertIsNone(re.search(r"[^\n -~]", self.stream.getvalue()))

    def test_the_label_may_change(self) -> None:
        self.progress.label = "fastcp: planning"
        self.clock.now += 31
        self.progress.update(0, None, 5, None)
        self.assertEqual(self.stream.getvalue(), "fastcp: planning: 0 B, 5 files, 0 B/s\n")


class OnATerminal(unittest.TestCase):
    def setUp(self) -> None:
        self.clock, self.stream = Clock(), Terminal()
        self.progress = Progress(self.stream, clock=self.clock, label="hashing")

    def show(self, *numbers) -> str:
        self.clock.now += 1
        self.progress.update(*numbers)
        return self.stream.screen()

    def test_one_line_that_updates(self) -> None:
        self.assertEqual(self.show(GIB, 4 * GIB, 0, 1),
                         "hashing: 25 %, 1.0 GiB of 4.0 GiB, 0 of 1 file, 1.0 GiB/s, 3.0 s left")
        self.assertEqual(self.show(2 * GIB, 4 * GIB, 0, 1),
                         "hashing: 50 %, 2.0 GiB of 4.0 GiB, 0 of 1 file, 1.0 GiB/s, 2.0 s left")
        self.assertNotIn("\n", self.stream.getvalue())

    def test_a_shorter_line_leaves_nothing_of_a_longer_one(self) -> None:
        self.show(1000, 10_000_000, 1000, 100_000)
        self.assertEqual(self.show(0, None, 1, None), "hashing: 0 B, 1 file, 0 B/s")

    def test_clear(self) -> None:
        self.show(1, 2, 1, 2)
        self.progress.clear()
        self.assertEqual(self.stream.screen(), "")
        length = len(self.stream.getvalue())
        self.progress.clear()
        self.assertEqual(len(self.stream.getvalue()), length)

    def test_not_more_often_than_can_be_read(self) -> None:
        for _ in range(10_000):
            self.clock.now += 0.001
            self.progress.update(1, 2, 1, 2)
        self.assertLessEqual(self.stream.getvalue().count("\r"), 10 / progress.TERMINAL_SECONDS)
        self.assertGreaterEqual(self.stream.getvalue().count("\r"), 10)

    def test_the_line_fits(self) -> None:
        self.progress.label = "x" * 200
        self.assertEqual(len(self.show(1, 2, 1, 2)), 79)

    def test_what_matters_least_is_left_out(self) -> None:
        whole = "hashing: 25 %, 1.0 GiB of 4.0 GiB, 1 of 4 files, 1.0 GiB/s, 3.0 s left"
        for columns, line in (
            (200, whole),
            (len(whole) + 1, whole),
            (len(whole), "hashing: 25 %, 1.0 GiB of 4.0 GiB, 1.0 GiB/s, 3.0 s left"),
            (40, "hashing: 25 %, 1.0 GiB/s, 3.0 s left"),
            (30, "hashing: 25 %, 3.0 s left"),
            (20, "hashing: 25 %"),
            (10, "hashing"),
            (5, "hash"),
        ):
            with self.subTest(columns=columns), mock.patch.object(progress, "_columns", lambda _, c=columns: c):
                self.setUp()
                self.assertEqual(self.show(GIB, 4 * GIB, 1, 4), line)

    def test_time_left_by_files_where_bytes_say_nothing(self) -> None:
        self.assertEqual(self.show(0, 0, 100, 400), "hashing: 25 %, 100 of 400 files, 100 files/s, 3.0 s left")
        self.assertEqual(self.show(0, 0, 100, 0), "hashing: 100 %, 100 of 0 files, 50 files/s")
        self.setUp()
        self.assertIn(" 29.0 s left", self.show(999, 1000, 1000, 30_000))  # the bytes are nearly there
        self.setUp()
        self.assertIn(" 1.0 s left", self.show(500, 1000, 1, 10_000))  # one large file of many

    def test_planning(self) -> None:
        self.progress.start("planning")
        self.clock.now += 1
        self.progress.found(1)
        self.assertEqual(self.stream.screen(), "planning: 1 entry found, 1/s")
        self.clock.now += 1
        self.progress.found(50_000)
        self.assertEqual(self.stream.screen(), "planning: 50000 entries found, 25000/s")

    def test_a_window_made_narrower(self) -> None:
        for reflows, cleared in (True, "\r\x1b[1A\x1b[J"), (False, "\r" + " " * 39 + "\r"):
            self.setUp()
            self.progress = Progress(self.stream, clock=self.clock, reflows=reflows)
            self.show(GIB, 4 * GIB, 1, 4)
            before = len(self.stream.getvalue())
            with mock.patch.object(progress, "_columns", lambda _: 40):
                self.progress.clear()
            self.assertEqual(self.stream.getvalue()[before:], cleared)

    def test_never_over_100_percent_and_never_100_too_early(self) -> None:
        for numbers, percent in {
            (0, 100, 0, 1): "0 %",
            (999, 1000, 0, 1): "99 %",
            (1000, 1000, 0, 1): "99 %",  # read, but not yet finished
            (1000, 1000, 1, 1): "100 %",
            (2000, 1000, 0, 1): "99 %",  # it grew
            (2000, 1000, 1, 1): "100 %",
            (0, 0, 0, 100_000): "0 %",
            (0, 0, 50_000, 100_000): "50 %",
            (0, 0, 99_999, 100_000): "99 %",
            (0, 0, 100_000, 100_000): "100 %",
            (0, 0, 0, 0): "100 %",
            (10, 0, 1, 3): "33 %",
        }.items():
            shown = self.show(*numbers)
            self.assertTrue(shown.startswith(f"hashing: {percent}, "), (numbers, shown))

    def test_more_bytes_than_there_should_be(self) -> None:
        self.assertEqual(self.show(3 << 20, 2 << 20, 0, 1), "hashing: 99 %, 3.0 MiB, 0 of 1 file, 3.0 MiB/s")

    def test_fewer_bytes_than_before(self) -> None:
        for count in [2 << 20] * 12 + [1 << 20] * 13:
            self.show(count, 4 << 20, 0, 1)
        self.assertIn(" 0 B/s", self.stream.screen())

    def test_the_rate_is_that_of_the_last_seconds(self) -> None:
        done = 0
        for _ in range(60):
            done += 1 << 20
            self.show(done, 1 << 40, 0, 1)
        self.assertIn(" 1.0 MiB/s", self.stream.screen())
        for _ in range(60):
            self.show(done, 1 << 40, 0, 1)  # everything waits on a slow disk
        self.assertIn(" 0 B/s", self.stream.screen())
        self.assertNotIn("left", self.stream.screen())

    def test_a_clock_that_stands_still(self) -> None:
        still = Progress(self.stream, clock=lambda: 5.0)
        still._due = 5.0
        still.update(1, 2, 1, 2)
        self.assertIn("0 B/s", self.stream.screen())


class Modes(unittest.TestCase):
    def shown(self, stream, mode: str) -> str:
        clock = Clock()
        display = Progress(stream, clock=clock, mode=mode)
        clock.now += 100
        display.update(1, 2, 1, 2)
        return stream.getvalue()

    def test_modes(self) -> None:
        self.assertEqual(self.shown(Terminal(), "none"), "")
        self.assertEqual(self.shown(io.StringIO(), "none"), "")
        self.assertTrue(self.shown(Terminal(), "plain").endswith("\n"))
        self.assertTrue(self.shown(io.StringIO(), "auto").endswith("\n"))
        self.assertTrue(self.shown(Terminal(), "auto").startswith("\r"))

    def test_streams_that_fail_never_raise(self) -> None:
        closed = io.StringIO()
        closed.close()
        full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
        unwritable = os.fdopen(os.open("/dev/null", os.O_RDONLY), "w")
        for stream in (None, closed, full, unwritable):
            clock = Clock()
            display = Progress(stream, clock=clock)
            for _ in range(3):
                clock.now += 100
                display.update(1, 2, 1, 2)
                display.clear()
            try:
                if stream:
                    stream.close()
            except OSError:
                pass  # what could not be written is still in its buffer

    def test_the_width_follows_a_real_terminal(self) -> None:
        master, slave = pty.openpty()
        with open(slave, "w") as stream, open(master, "rb", buffering=0) as screen:
            clock = Clock()
            display = Progress(stream, clock=clock)
            for columns, length in ((40, 36), (20, 13), (0, 72)):
                fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
                clock.now += 1
                display.update(GIB, 4 * GIB, 1, 4)
                self.assertEqual(len(screen.read(1000).strip(b"\r")), length)
                display.clear()
                screen.read(1000)


if __name__ == "__main__":
    support.main()
