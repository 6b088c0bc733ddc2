# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""direct_io: exact counts or an exception, on real files with O_DIRECT and without, and with os.preadv and
os.pwritev made to fail. All of it runs once more under ``python -O``, where an assert would be gone.

The faults are injected by replacing the two functions. A transfer that is cut short leaves garbage behind the
bytes that it admits to, so that a caller who does not move those again is found out.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from mlperf_common.fileio import direct_io  # noqa: E402

BLOCK = direct_io.BLOCK_SIZE
BUFFER = 16 * BLOCK
SIZES = (0, 1, 511, 512, 513, 4095, 4096, 4097, BUFFER - 1, BUFFER, BUFFER + 1, 2 * BUFFER, 2 * BUFFER + 7)
IDLE = 5  # attempts that may move nothing


def pattern(size: int) -> bytes:
    """Bytes of which no block is like another, and none of which is zero."""
    return bytes(random.Random(size).choices(range(1, 256), k=size))


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def everywhere(test):
    """Run a test method for every kind of descriptor: it gets a directory and the flags to open with."""

    @functools.wraps(test)
    def run(self):
        places = [("buffered", self.disk, 0), ("direct", self.disk, os.O_DIRECT)]
        if os.path.isdir("/dev/shm"):
            places.append(("tmpfs", self.directory("/dev/shm"), 0))
        for place, directory, flags in places:
            with self.subTest(place=place):
                test(self, directory, flags)

    return run


class Case(unittest.TestCase):
    """A directory on disk, a buffer, descriptors that close themselves."""

    def setUp(self):
        self.disk = self.directory(None)
        (self.view,), self.owner = direct_io.allocate_aligned_buffers(BUFFER, BLOCK, 1)

    def directory(self, parent):
        path = tempfile.mkdtemp(dir=parent)
        self.addCleanup(shutil.rmtree, path)
        return path

    def open(self, directory, flags, content=None, name="file"):
        """A descriptor on a file with this content, if any."""
        path = os.path.join(directory, name)
        if content is not None:
            with open(path, "wb") as file:
                file.write(content)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | flags)
        except OSError as error:
            if error.errno == errno.EINVAL and flags & os.O_DIRECT:
                self.skipTest(f"no O_DIRECT in {directory}: set TMPDIR to a disk")
            raise
        self.addCleanup(os.close, fd)
        return fd

    def content(self, fd):
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            return file.read()

    @contextlib.contextmanager
    def os_error(self, number, fd, kind=OSError):
        """The body raises an OSError of this errno that knows the file's name."""
        name = os.readlink(f"/proc/self/fd/{fd}")
        with self.assertRaises(kind) as caught:
            yield caught
        self.assertIsInstance(caught.exception, OSError)
        self.assertEqual(caught.exception.errno, number)
        self.assertEqual(caught.exception.filename, name)
        self.assertIn(repr(name), str(caught.exception))


class Faulty:
    """Stands in for os.preadv or os.pwritev: each call takes the next step of a script, later ones are real.

    A step is a number of bytes to stop after (with garbage behind them), a negative errno to raise, or a
    function to run before the real call. The last step is repeated for ever where ``forever``. ``calls`` are
    the (offset, length) seen.
    """

    def __init__(self, name, *steps, forever=False):
        self.name, self.real = name, getattr(os, name)
        self.steps, self.forever = list(steps), forever
        self.calls = []

    def __enter__(self):
        self.patch = mock.patch.object(os, self.name, self)
        self.patch.start()
        return self

    def __exit__(self, *exc):
        self.patch.stop()

    def __call__(self, fd, buffers, offset):
        (view,) = buffers
        self.calls.append((offset, len(view)))
        if len(self.calls) > 1000:
            raise AssertionError("it does not stop")
        if not self.steps:
            return self.real(fd, buffers, offset)
        step = self.steps[0] if self.forever and len(self.steps) == 1 else self.steps.pop(0)
        if callable(step):
            step()
            return self.real(fd, buffers, offset)
        if step < 0:
            raise OSError(-step, os.strerror(-step))
        return self.cut(fd, view, offset, step)

    def cut(self, fd, view, offset, limit):
        if self.name == "preadv":
            got = min(self.real(fd, [view], offset), limit)
            view[got:] = b"\xee" * (len(view) - got)
            return got
        if limit:
            (scratch,), _ = direct_io.allocate_aligned_buffers(len(view), BLOCK, 1)
            scratch[:limit] = view[:limit]
            scratch[limit:] = b"\xee" * (len(view) - limit)
            self.real(fd, [scratch], offset)
        return min(limit, len(view))


class RoundUp(unittest.TestCase):
    def test_table(self):
        large = 1 << 60
        for value, multiple, expected in ((0, 4096, 0), (1, 4096, 4096), (4095, 4096, 4096),
                                          (4096, 4096, 4096), (4097, 4096, 8192), (7, 3, 9), (1, 1, 1),
                                          (large + 1, 2, large + 2)):
            with self.subTest(value=value, multiple=multiple):
                self.assertEqual(direct_io.round_up(value, multiple), expected)

    def test_multiple_must_be_positive(self):
        for multiple in (0, -1, -4096):
            with self.subTest(multiple), self.assertRaises(ValueError):
                direct_io.round_up(5, multiple)

    def test_constants(self):
        self.assertEqual((direct_io.BUFFER_ALIGN, direct_io.BLOCK_SIZE), (2 * 1024 * 1024, 4096))


class Buffers(unittest.TestCase):
    def test_aligned_whole_apart_and_zero(self):
        for alignment in (1, 512, 4096, 1 << 16, direct_io.BUFFER_ALIGN, 8 << 20):
            for size in (1, 4096, 5000, alignment, alignment + 512):
                for number in (1, 2, 5):
                    with self.subTest(alignment=alignment, size=size, number=number):
                        self.check(size, alignment, number)

    def check(self, size, alignment, number):
        views, owner = direct_io.allocate_aligned_buffers(size, alignment, number)
        self.assertIsInstance(views, list)
        self.assertEqual([len(view) for view in views], [size] * number)
        starts = [address(view) for view in views]
        self.assertEqual([start % alignment for start in starts], [0] * number)
        for index, view in enumerate(views):
            self.assertEqual((view[0], view[-1]), (0, 0))
            view[:] = bytes([index + 1]) * size
        for index, view in enumerate(views):
            self.assertEqual(bytes(view), bytes([index + 1]) * size)
        del owner

    def test_alignment_does_not_come_by_luck(self):
        # Linux aligns large mappings to huge pages by itself, small ones not.
        for _ in range(8):
            views, owner = direct_io.allocate_aligned_buffers(4096, 1 << 20, 1)
            self.assertEqual(address(views[0]) % (1 << 20), 0)
            self.addCleanup(len, owner)

    def test_views_outlive_the_owner(self):
        views, owner = direct_io.allocate_aligned_buffers(BUFFER, direct_io.BUFFER_ALIGN, 2)
        with self.assertRaises(BufferError):
            owner.close()
        del owner
        last = views[1]
        del views
        last[:] = pattern(BUFFER)
        self.assertEqual(bytes(last), pattern(BUFFER))

    def test_private_after_fork(self):
        (view,), _ = direct_io.allocate_aligned_buffers(BUFFER, direct_io.BUFFER_ALIGN, 1)
        view[:] = b"p" * BUFFER
        pid = os.fork()
        if pid == 0:
            view[:] = b"c" * BUFFER
            os._exit(0)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)
        self.assertEqual(bytes(view), b"p" * BUFFER)

    def test_refused(self):
        for arguments in ((0, 4096, 1), (-1, 4096, 1), (4096, 0, 1), (4096, -4096, 1), (4096, 3, 1),
                          (4096, 4097, 1), (4096, 4096, 0), (4096, 4096, -1)):
            with self.subTest(arguments), self.assertRaises(ValueError):
                direct_io.allocate_aligned_buffers(*arguments)

    @unittest.skipUnless(os.path.isdir("/sys/kernel/mm/transparent_hugepage"), "kernel without huge pages")
    def test_huge_pages_are_asked_for_from_their_size_on(self):
        for alignment, expected in ((4096, False), (direct_io.BUFFER_ALIGN, True)):
            (view,), _ = direct_io.allocate_aligned_buffers(direct_io.BUFFER_ALIGN, alignment, 1)
            with self.subTest(alignment):
                self.assertEqual("hg" in self.vm_flags(address(view)), expected)

    def vm_flags(self, where):
        inside = False
        with open("/proc/self/smaps") as smaps:
            for line in smaps:
                bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
                if bounds:
                    inside = int(bounds.group(1), 16) <= where < int(bounds.group(2), 16)
                elif inside and line.startswith("VmFlags:"):
                    return line.split()[1:]
        self.skipTest("no VmFlags in /proc/self/smaps")

    def test_without_huge_pages(self):
        owner = mock.Mock()
        owner.madvise.side_effect = OSError(errno.EINVAL, "no huge pages in this kernel")
        direct_io._ask_for_huge_pages(owner)
        owner.madvise.assert_called_once()
        direct_io._ask_for_huge_pages(object())

    def test_without_ctypes_aligned_to_the_page(self):
        with mock.patch.dict(sys.modules, {"ctypes": None}):
            views, _ = direct_io.allocate_aligned_buffers(BUFFER, direct_io.BUFFER_ALIGN, 2)
        self.assertEqual([len(view) for view in views], [BUFFER] * 2)
        self.assertEqual([address(view) % 4096 for view in views], [0, 0])


class RoundTrip(Case):
    @everywhere
    def test_every_size(self, directory, flags):
        # Not every disk has sectors of 512 bytes.
        for block in (BLOCK,) if flags & os.O_DIRECT else (512, BLOCK):
            for size in SIZES:
                with self.subTest(block=block, size=size):
                    self.round_trip(directory, flags, block, size)

    def round_trip(self, directory, flags, block, size):
        data = pattern(size)
        fd = self.open(directory, flags, content=b"")
        for start in range(0, size, BUFFER):
            count = min(BUFFER, size - start)
            self.view[:] = b"\xff" * BUFFER
            self.view[:count] = data[start : start + count]
            self.assertEqual(direct_io.pwrite(fd, self.view, count, start, block), count)
        written = self.content(fd)
        self.assertEqual(written[:size], data)
        self.assertEqual(written[size:], bytes(direct_io.round_up(size, block) - size))
        os.ftruncate(fd, size)
        self.assertTrue(direct_io.at_end(fd, self.view, size, block))
        for start in range(0, size, BUFFER):
            count = min(BUFFER, size - start)
            self.assertEqual(direct_io.pread(fd, self.view, count, start, block), count)
            self.assertEqual(bytes(self.view[:count]), data[start : start + count])

    @everywhere
    def test_any_count_at_any_block(self, directory, flags):
        data = pattern(2 * BUFFER)
        fd = self.open(directory, flags, content=data)
        for count in SIZES[:-3]:
            for offset in (0, BLOCK, BUFFER - BLOCK):
                direct_io.pread(fd, self.view, count, offset, BLOCK)
                self.assertEqual(bytes(self.view[:count]), data[offset : offset + count])

    @everywhere
    def test_what_lies_behind_the_padded_request_is_left_alone(self, directory, flags):
        fd = self.open(directory, flags, content=pattern(BUFFER))
        for transfer in (direct_io.pread, direct_io.pwrite):
            self.view[:] = b"\xff" * BUFFER
            transfer(fd, self.view, BLOCK + 1, BLOCK, BLOCK)
            self.assertEqual(bytes(self.view[2 * BLOCK :]), b"\xff" * (BUFFER - 2 * BLOCK))

    @everywhere
    def test_a_write_leaves_the_rest_of_the_file_alone(self, directory, flags):
        data = pattern(BUFFER)
        fd = self.open(directory, flags, content=data)
        self.view[:3] = b"new"
        direct_io.pwrite(fd, self.view, 3, BLOCK, BLOCK)
        self.assertEqual(self.content(fd), data[:BLOCK] + b"new" + bytes(BLOCK - 3) + data[2 * BLOCK :])

    def test_nothing_is_moved_for_nothing(self):
        fd = self.open(self.disk, 0, content=b"")
        with Faulty("preadv") as reading, Faulty("pwritev") as writing:
            self.assertEqual(direct_io.pread(fd, self.view, 0, 0, BLOCK), 0)
            self.assertEqual(direct_io.pwrite(fd, self.view, 0, BLOCK, BLOCK), 0)
        self.assertEqual((reading.calls, writing.calls), ([], []))

    def test_thread_id_changes_nothing(self):
        fd = self.open(self.disk, 0, content=b"abc")
        self.assertEqual(direct_io.pread(fd, self.view, 3, 0, BLOCK, 7), 3)
        self.assertEqual(direct_io.pread(fd, self.view, 3, 0, BLOCK, thread_id=7), 3)

    @everywhere
    def test_whole_blocks_may_be_written_from_a_read_only_view(self, directory, flags):
        fd = self.open(directory, flags)
        self.view[:] = pattern(BUFFER)
        direct_io.pwrite(fd, self.view.toreadonly(), BUFFER, 0, BLOCK)
        self.assertEqual(self.content(fd), pattern(BUFFER))

    @everywhere
    def test_under_a_storm_of_signals(self, directory, flags):
        seen = []
        before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
        self.addCleanup(signal.signal, signal.SIGALRM, before)
        self.addCleanup(signal.setitimer, signal.ITIMER_REAL, 0)
        size = 8 << 20
        (view,), _ = direct_io.allocate_aligned_buffers(size, BLOCK, 1)
        fd = self.open(directory, flags)
        view[:] = data = pattern(4096) * (size // 4096)
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for _ in range(4):
            direct_io.pwrite(fd, view, size - 1, 0, BLOCK)
            direct_io.pread(fd, view, size - 1, 0, BLOCK)
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.assertEqual(bytes(view[:-1]), data[:-1])
        self.assertTrue(seen)


class OneSystemCall(Case):
    @everywhere
    def test_a_transfer_that_goes_well(self, directory, flags):
        for count in (1, BLOCK - 1, BLOCK, BUFFER - 1, BUFFER):
            fd = self.open(directory, flags, content=pattern(count))
            padded = direct_io.round_up(count, BLOCK)
            for name, transfer in (("preadv", direct_io.pread), ("pwritev", direct_io.pwrite)):
                with self.subTest(count=count, call=name), self.no_other_call(), Faulty(name) as seen:
                    transfer(fd, self.view, count, 0, BLOCK)
                self.assertEqual(seen.calls, [(0, padded)])

    @contextlib.contextmanager
    def no_other_call(self):
        unexpected = AssertionError("not on the fast path")
        with mock.patch.object(fcntl, "fcntl", side_effect=unexpected), \
                mock.patch.object(os, "fstat", side_effect=unexpected), \
                mock.patch.object(os, "readlink", side_effect=unexpected), \
                mock.patch.object(direct_io, "_address", side_effect=unexpected):
            yield

    def test_importing_it_does_not_import_ctypes(self):
        code = "import sys, mlperf_common.fileio.direct_io; sys.exit('ctypes' in sys.modules)"
        self.assertEqual(subprocess.call([sys.executable, "-c", code], cwd=ROOT), 0)


class ShortTransfers(Case):
    COUNT = BUFFER - 100

    def both(self, *steps, direct, forever=False):
        """Run the script of faults against a read and a write; the bytes must be right. Returns the calls."""
        data = pattern(BUFFER)
        flags = os.O_DIRECT if direct else 0
        fd = self.open(self.disk, flags, content=data)
        with Faulty("preadv", *steps, forever=forever) as reading:
            self.assertEqual(direct_io.pread(fd, self.view, self.COUNT, 0, BLOCK), self.COUNT)
        self.assertEqual(bytes(self.view[: self.COUNT]), data[: self.COUNT])
        with Faulty("pwritev", *steps, forever=forever) as writing:
            self.assertEqual(direct_io.pwrite(fd, self.view, self.COUNT, 0, BLOCK), self.COUNT)
        self.assertEqual(self.content(fd)[: self.COUNT], data[: self.COUNT])
        self.assertEqual(reading.calls, writing.calls)
        return reading.calls

    def test_buffered_goes_on_at_the_very_byte(self):
        self.assertEqual(self.both(1, direct=False), [(0, BUFFER), (1, BUFFER - 1)])
        self.assertEqual(self.both(5000, 1, direct=False),
                         [(0, BUFFER), (5000, BUFFER - 5000), (5001, BUFFER - 5001)])

    def test_direct_goes_on_at_the_block(self):
        self.assertEqual(self.both(BLOCK, direct=True), [(0, BUFFER), (BLOCK, BUFFER - BLOCK)])
        self.assertEqual(self.both(1, direct=True), [(0, BUFFER)] * 2)
        self.assertEqual(self.both(5000, direct=True), [(0, BUFFER), (BLOCK, BUFFER - BLOCK)])
        self.assertEqual(self.both(3 * BLOCK - 1, BLOCK, direct=True),
                         [(0, BUFFER), (2 * BLOCK, BUFFER - 2 * BLOCK), (3 * BLOCK, BUFFER - 3 * BLOCK)])

    def test_a_block_at_a_time(self):
        for direct in (False, True):
            with self.subTest(direct=direct):
                calls = self.both(BLOCK, direct=direct, forever=True)
                self.assertEqual(calls, [(at, BUFFER - at) for at in range(0, BUFFER, BLOCK)])

    def test_a_few_bytes_at_a_time(self):
        # 700 bytes at a time never leave the first block of an O_DIRECT descriptor: that is in NoProgress.
        self.assertEqual(len(self.both(700, direct=False, forever=True)), -(-self.COUNT // 700))

    def test_one_byte_less_than_due_and_exactly_enough(self):
        for direct in (False, True):
            with self.subTest(direct=direct):
                self.assertEqual(len(self.both(self.COUNT - 1, direct=direct)), 2)
                self.assertEqual(len(self.both(self.COUNT, direct=direct)), 1)

    def test_attempts_without_progress_before_it_works(self):
        for direct in (False, True):
            with self.subTest(direct=direct):
                steps = [-errno.EINTR] * (IDLE - 1) + [2 * BLOCK] + [-errno.EINTR] * (IDLE - 1)
                self.assertEqual(len(self.both(*steps, direct=direct)), len(steps) + 1)

    @everywhere
    def test_at_an_offset(self, directory, flags):
        data = pattern(2 * BUFFER)
        fd = self.open(directory, flags, content=data)
        with Faulty("preadv", 100, 5000, 2 * BLOCK):
            direct_io.pread(fd, self.view, BUFFER, BUFFER, BLOCK)
        self.assertEqual(bytes(self.view), data[BUFFER:])
        with Faulty("pwritev", 100, 5000, 2 * BLOCK):
            direct_io.pwrite(fd, self.view, BUFFER, BLOCK, BLOCK)
        self.assertEqual(self.content(fd), data[:BLOCK] + data[BUFFER:] + data[BUFFER + BLOCK :])

    def test_a_write_that_stops_at_the_end_of_the_file_goes_on(self):
        fd = self.open(self.disk, os.O_DIRECT)
        self.view[:] = pattern(BUFFER)
        status = os.stat_result((0,) * 6 + (5000,) + (0,) * 3)
        with Faulty("pwritev", 5000), mock.patch.object(os, "fstat", return_value=status):
            direct_io.pwrite(fd, self.view, BUFFER, 0, BLOCK)
        self.assertEqual(self.content(fd), pattern(BUFFER))

    def test_for_real(self):
        """A file size limit cuts a write short, then fails the next one."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        fd = self.open(self.disk, 0)
        self.view[:] = pattern(BUFFER)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        with Faulty("pwritev") as seen, self.os_error(errno.EFBIG, fd):
            direct_io.pwrite(fd, self.view, BUFFER, 0, BLOCK)
        self.assertEqual(seen.calls, [(0, BUFFER), (5000, BUFFER - 5000)])


class NoProgress(Case):
    @everywhere
    def test_a_write_that_writes_nothing(self, directory, flags):
        fd = self.open(directory, flags)
        with Faulty("pwritev", 0, forever=True) as seen, self.os_error(errno.EIO, fd):
            direct_io.pwrite(fd, self.view, BUFFER, 0, BLOCK)
        self.assertEqual(len(seen.calls), IDLE)

    def test_a_write_that_stops_half_way(self):
        fd = self.open(self.disk, 0)
        with Faulty("pwritev", 5000, 0, forever=True) as seen, self.os_error(errno.EIO, fd) as caught:
            direct_io.pwrite(fd, self.view, BUFFER, 0, BLOCK)
        self.assertEqual(seen.calls, [(0, BUFFER)] + [(5000, BUFFER - 5000)] * IDLE)
        self.assertIn("5000", str(caught.exception))

    def test_direct_that_never_leaves_a_block(self):
        data = pattern(BUFFER)
        for name, transfer in (("preadv", direct_io.pread), ("pwritev", direct_io.pwrite)):
            with self.subTest(name):
                fd = self.open(self.disk, os.O_DIRECT, content=data)
                with Faulty(name, 700, forever=True) as seen, self.os_error(errno.EIO, fd) as caught:
                    transfer(fd, self.view, BUFFER, 0, BLOCK)
                self.assertEqual(len(seen.calls), 1 + IDLE)
                self.assertNotIsInstance(caught.exception, direct_io.ShortFile)

    def test_progress_starts_the_count_again(self):
        fd = self.open(self.disk, 0)
        steps = ([0] * (IDLE - 1) + [100]) * 6
        with Faulty("pwritev", *steps) as seen:
            direct_io.pwrite(fd, self.view, BUFFER, 0, BLOCK)
        self.assertEqual(len(seen.calls), len(steps) + 1)

    def test_interrupted_for_ever(self):
        for number in (errno.EINTR, errno.EAGAIN):
            for name, transfer in (("preadv", direct_io.pread), ("pwritev", direct_io.pwrite)):
                with self.subTest(number=number, call=name):
                    fd = self.open(self.disk, 0, content=pattern(BUFFER))
                    with mock.patch.object(direct_io.time, "sleep") as sleep, \
                            Faulty(name, -number, forever=True) as seen, self.os_error(number, fd):
                        transfer(fd, self.view, BUFFER, 0, BLOCK)
                    self.assertEqual(len(seen.calls), IDLE)
                    self.assertEqual(sleep.call_count, IDLE if number == errno.EAGAIN else 0)
                    self.assertTrue(all(call[0][0] <= 0.1 for call in sleep.call_args_list))


class EndOfFile(Case):
    @everywhere
    def test_every_size(self, directory, flags):
        for size in SIZES[:-2]:
            for missing in (1, 511, 512, BLOCK, BUFFER):
                offset = max(0, size + missing - BUFFER) // BLOCK * BLOCK
                count = size + missing - offset
                if count <= BUFFER and size >= offset:
                    fd = self.open(directory, flags, content=pattern(size))
                    with self.subTest(size=size, missing=missing):
                        self.ends(fd, count, offset, missing)

    def ends(self, fd, count, offset, missing):
        with Faulty("preadv") as seen, self.os_error(errno.EIO, fd, direct_io.ShortFile) as caught:
            direct_io.pread(fd, self.view, count, offset, BLOCK)
        self.assertIn(f" {missing} bytes early", str(caught.exception))
        self.assertLessEqual(len(seen.calls), 2)

    @everywhere
    def test_beyond_the_end(self, directory, flags):
        fd = self.open(directory, flags, content=b"abc")
        with self.os_error(errno.EIO, fd, direct_io.ShortFile):
            direct_io.pread(fd, self.view, 1, BUFFER, BLOCK)

    @everywhere
    def test_shrinks_after_a_short_read(self, directory, flags):
        for left in (0, 100, BLOCK, BLOCK + 100, 2 * BLOCK):
            fd = self.open(directory, flags, content=pattern(BUFFER))

            def shrink(fd=fd, left=left):
                os.ftruncate(fd, left)

            with self.subTest(left=left), Faulty("preadv", 5000, shrink) as seen:
                with self.assertRaises(OSError) as caught:
                    direct_io.pread(fd, self.view, BUFFER, 0, BLOCK)
            self.assertEqual(caught.exception.errno, errno.EIO)
            self.assertLessEqual(len(seen.calls), 2 + IDLE)

    def test_the_exception_travels_between_processes(self):
        fd = self.open(self.disk, 0)
        with self.assertRaises(direct_io.ShortFile) as caught:
            direct_io.pread(fd, self.view, 10, 0, BLOCK)
        copy = pickle.loads(pickle.dumps(caught.exception))
        self.assertIs(type(copy), direct_io.ShortFile)
        self.assertEqual(str(copy), str(caught.exception))
        self.assertEqual((copy.errno, copy.filename), (errno.EIO, os.path.join(self.disk, "file")))


class Errors(Case):
    NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EINVAL, errno.EOPNOTSUPP, errno.ESTALE)

    @everywhere
    def test_errno_and_name_at_the_first_call_and_later(self, directory, flags):
        for number in self.NUMBERS:
            for steps in ([-number], [5000, -number], [-errno.EINTR, -number]):
                for name, transfer in (("preadv", direct_io.pread), ("pwritev", direct_io.pwrite)):
                    fd = self.open(directory, flags, content=pattern(BUFFER))
                    with self.subTest(number=number, steps=steps, call=name), self.os_error(number, fd), \
                            Faulty(name, *steps) as seen:
                        transfer(fd, self.view, BUFFER, 0, BLOCK)
                    self.assertEqual(len(seen.calls), len(steps))

    def test_full_device(self):
        fd = os.open("/dev/full", os.O_WRONLY)
        self.addCleanup(os.close, fd)
        with self.os_error(errno.ENOSPC, fd):
            direct_io.pwrite(fd, self.view, BUFFER, 0, BLOCK)

    def test_directory(self):
        fd = os.open(self.disk, os.O_RDONLY)
        self.addCleanup(os.close, fd)
        with self.os_error(errno.EISDIR, fd):
            direct_io.pread(fd, self.view, 1, 0, BLOCK)

    def test_odd_names(self):
        fd = self.open(self.disk, 0, name=b"\xff\n\t".decode("utf-8", "surrogateescape"))
        with self.os_error(errno.EIO, fd):
            direct_io.pread(fd, self.view, 1, 0, BLOCK)

    def test_a_closed_descriptor_has_a_number(self):
        fd = os.open(self.disk, os.O_RDONLY)
        os.close(fd)
        for call, *arguments in ((direct_io.pread, self.view, 1, 0, BLOCK), (direct_io.set_direct, True),
                                 (direct_io.pwrite, self.view, 1, 0, BLOCK)):
            with self.assertRaises(OSError) as caught:
                call(fd, *arguments)
            self.assertEqual((caught.exception.errno, caught.exception.filename),
                             (errno.EBADF, f"file descriptor {fd}"))

    def test_errors_of_the_looks_between_two_calls_have_the_name_too(self):
        stale = OSError(errno.ESTALE, "stale")
        for module, name in ((os, "fstat"), (fcntl, "fcntl")):
            fd = self.open(self.disk, os.O_DIRECT, content=pattern(BUFFER))
            stale.filename = None
            with self.subTest(name), Faulty("preadv", 100), self.os_error(errno.ESTALE, fd), \
                    mock.patch.object(module, name, side_effect=stale):
                direct_io.pread(fd, self.view, BUFFER, 0, BLOCK)

    def test_an_exception_of_a_signal_handler_passes(self):
        class Stop(BaseException):
            pass

        fd = self.open(self.disk, 0, content=b"abc")
        with mock.patch.object(os, "preadv", side_effect=Stop), self.assertRaises(Stop):
            direct_io.pread(fd, self.view, 3, 0, BLOCK)


class Unsupported(Case):
    def test_table(self):
        for number in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
            self.assertTrue(direct_io.is_unsupported(OSError(number, "")))
        for error in (OSError(errno.ENOSPC, ""), OSError(errno.EIO, ""), OSError(errno.EPERM, ""), OSError(),
                      direct_io.ShortFile(errno.EIO, "", ""), ValueError("x"), KeyboardInterrupt()):
            self.assertFalse(direct_io.is_unsupported(error))

    def test_refused_at_first_then_buffered(self):
        for number in (errno.EINVAL, errno.EOPNOTSUPP):
            for name, transfer in (("preadv", direct_io.pread), ("pwritev", direct_io.pwrite)):
                with self.subTest(number=number, call=name):
                    fd = self.open(self.disk, os.O_DIRECT, content=pattern(BUFFER))
                    with Faulty(name, -number), self.assertRaises(OSError) as caught:
                        transfer(fd, self.view, 100, 0, BLOCK)
                    self.assertTrue(direct_io.is_unsupported(caught.exception))
                    direct_io.set_direct(fd, False)
                    self.assertFalse(is_direct(fd))
                    self.assertEqual(transfer(fd, self.view, 100, 0, BLOCK), 100)


class InvalidArguments(Case):
    def setUp(self):
        super().setUp()
        self.fd = self.open(self.disk, 0, content=pattern(BUFFER))

    def refused(self, call, *arguments):
        with Faulty("preadv") as reading, Faulty("pwritev") as writing, self.assertRaises(ValueError):
            call(self.fd, *arguments)
        self.assertEqual((reading.calls, writing.calls), ([], []))

    def test_numbers(self):
        for count, offset, block in ((-1, 0, BLOCK), (1, -1, BLOCK), (1, -BLOCK, BLOCK), (1, 1, BLOCK),
                                     (1, BLOCK - 1, BLOCK), (1, 512, BLOCK), (0, 1, BLOCK), (1, 0, 0),
                                     (1, 0, -BLOCK), (1, 0, 3), (1, 0, 4097), (BUFFER + 1, 0, BLOCK),
                                     (1 << 70, 0, BLOCK), (1, (1 << 63) - BLOCK, BLOCK), (1, 1 << 63, BLOCK),
                                     (1, 1 << 70, BLOCK)):
            for transfer in (direct_io.pread, direct_io.pwrite):
                with self.subTest(count=count, offset=offset, block=block, call=transfer.__name__):
                    self.refused(transfer, self.view, count, offset, block)

    def test_the_padded_count_must_fit(self):
        for transfer in (direct_io.pread, direct_io.pwrite):
            self.refused(transfer, self.view[: BUFFER - 1], BUFFER - 1, 0, BLOCK)
            self.refused(transfer, self.view[:512], 512, 0, BLOCK)
            self.assertEqual(transfer(self.fd, self.view[:512], 512, 0, 512), 512)

    def test_views(self):
        wide = self.view.cast("Q")
        table = self.view.cast("B", (BUFFER // 2, 2))
        for buffer in (self.view[::2], self.view[::-1], wide, table, bytearray(BUFFER), self.owner, None):
            for transfer in (direct_io.pread, direct_io.pwrite):
                with self.subTest(buffer=repr(buffer), call=transfer.__name__):
                    self.refused(transfer, buffer, 1, 0, BLOCK)

    def test_read_only_views(self):
        for count in (0, 1, BLOCK):
            self.refused(direct_io.pread, self.view.toreadonly(), count, 0, BLOCK)
        self.refused(direct_io.pwrite, self.view.toreadonly(), 1, 0, BLOCK)
        self.refused(direct_io.at_end, self.view.toreadonly(), 1, BLOCK)

    def test_at_end(self):
        for size, block in ((-1, BLOCK), (-BLOCK, BLOCK), (1, 0), (1, -1), (1, 3), (1, 2 * BUFFER),
                            (BUFFER, BUFFER), (1 << 63, BLOCK)):
            with self.subTest(size=size, block=block):
                self.refused(direct_io.at_end, self.view, size, block)
        self.refused(direct_io.at_end, bytearray(BUFFER), 1, BLOCK)


class MisalignedViews(Case):
    def test_direct_says_so(self):
        fd = self.open(self.disk, os.O_DIRECT, content=pattern(BUFFER))
        view = self.view[1:]
        for call, *arguments in ((direct_io.pread, 1, 0), (direct_io.pwrite, 1, 0), (direct_io.at_end, 1)):
            said = self.assertRaisesRegex(ValueError, f"aligned to {BLOCK} .* {address(view):#x}")
            with Faulty("preadv", -errno.EINVAL), Faulty("pwritev", -errno.EINVAL), said:
                call(fd, view, *arguments, BLOCK)

    def test_for_real(self):
        """Some filesystems (btrfs) take any address and copy."""
        data = pattern(BUFFER)
        fd = self.open(self.disk, os.O_DIRECT, content=data)
        try:
            os.preadv(fd, [self.view[1 : BLOCK + 1]], 0)
        except OSError as error:
            self.assertEqual(error.errno, errno.EINVAL)
            with self.assertRaises(ValueError):
                direct_io.pread(fd, self.view[1:], BLOCK, 0, BLOCK)
        else:
            direct_io.pread(fd, self.view[1:], BLOCK, 0, BLOCK)
            self.assertEqual(bytes(self.view[1 : BLOCK + 1]), data[:BLOCK])

    def test_buffered_takes_any(self):
        data = pattern(BUFFER)
        fd = self.open(self.disk, 0, content=data)
        direct_io.pread(fd, self.view[1:], BLOCK, BLOCK, BLOCK)
        self.assertEqual(bytes(self.view[1 : BLOCK + 1]), data[BLOCK : 2 * BLOCK])
        direct_io.pwrite(fd, self.view[1:], BLOCK, 0, BLOCK)
        self.assertEqual(self.content(fd), data[BLOCK : 2 * BLOCK] + data[BLOCK:])

    def test_another_reason_for_einval_stays_an_oserror(self):
        for flags, view in ((0, self.view[1:]), (os.O_DIRECT, self.view), (os.O_DIRECT, self.view[BLOCK:])):
            fd = self.open(self.disk, flags, content=pattern(BUFFER))
            with Faulty("preadv", -errno.EINVAL), self.os_error(errno.EINVAL, fd):
                direct_io.pread(fd, view, 1, 0, BLOCK)

    def test_where_the_address_cannot_be_known(self):
        fd = self.open(self.disk, os.O_DIRECT, content=pattern(BUFFER))
        with mock.patch.dict(sys.modules, {"ctypes": None}), self.os_error(errno.EINVAL, fd), \
                Faulty("preadv", -errno.EINVAL):
            direct_io.pread(fd, self.view[1:], 1, 0, BLOCK)
        with self.os_error(errno.EINVAL, fd), Faulty("pwritev", -errno.EINVAL):
            direct_io.pwrite(fd, self.view[1:].toreadonly(), BLOCK, 0, BLOCK)


class AtEnd(Case):
    @everywhere
    def test_every_size(self, directory, flags):
        for size in SIZES:
            fd = self.open(directory, flags, content=pattern(size))
            near = [size + step for step in (-BLOCK, -512, -1, 0, 1, 512, BLOCK, 2 * BLOCK)]
            for claimed in {0, 1, 512, BLOCK, 1 << 40, (1 << 40) + 1, *near}:
                if claimed >= 0:
                    with self.subTest(size=size, claimed=claimed):
                        self.check(fd, claimed, claimed == size)

    def check(self, fd, claimed, expected):
        with Faulty("preadv") as seen:
            self.assertIs(direct_io.at_end(fd, self.view, claimed, BLOCK), expected)
        self.assertLessEqual(len(seen.calls), 2)
        for offset, length in seen.calls[:1]:
            self.assertGreater(offset + length, claimed)

    def test_two_blocks_of_buffer_are_enough(self):
        fd = self.open(self.disk, os.O_DIRECT, content=pattern(2 * BLOCK))
        self.assertTrue(direct_io.at_end(fd, self.view[: 2 * BLOCK], 2 * BLOCK, BLOCK))
        self.assertFalse(direct_io.at_end(fd, self.view[:BLOCK], 2 * BLOCK - 1, BLOCK))

    @everywhere
    def test_a_short_read_is_not_the_end(self, directory, flags):
        fd = self.open(directory, flags, content=pattern(BLOCK + 200))
        for step in (1, 99, 100, 101, -errno.EINTR):
            for claimed in (BLOCK + 99, BLOCK + 100, BLOCK + 101, BLOCK + 200):
                with self.subTest(step=step, claimed=claimed), Faulty("preadv", step):
                    self.assertIs(direct_io.at_end(fd, self.view, claimed, BLOCK), claimed == BLOCK + 200)

    def test_not_claimed_where_the_length_says_otherwise(self):
        fd = self.open(self.disk, os.O_DIRECT, content=pattern(BLOCK))
        with Faulty("preadv", 100, forever=True) as seen, self.os_error(errno.EIO, fd):
            direct_io.at_end(fd, self.view, 100, BLOCK)
        self.assertEqual(len(seen.calls), 1 + IDLE)

    def test_files_that_do_not_know_their_length(self):
        with open("/proc/version", "rb") as file:
            content = file.read()
            self.assertEqual(os.fstat(file.fileno()).st_size, 0)
            self.assertTrue(direct_io.at_end(file.fileno(), self.view, len(content), BLOCK))
            self.assertFalse(direct_io.at_end(file.fileno(), self.view, 0, BLOCK))

    def test_errors(self):
        fd = self.open(self.disk, 0, content=b"abc")
        with Faulty("preadv", -errno.ESTALE), self.os_error(errno.ESTALE, fd):
            direct_io.at_end(fd, self.view, 3, BLOCK)


class OpenDirect(Case):
    def close_later(self, opened):
        self.addCleanup(os.close, opened[0])
        return opened

    def path(self, content=None):
        path = os.path.join(self.disk, "file")
        if content is not None:
            with open(path, "wb") as file:
                file.write(content)
        return path

    def need_direct(self):
        self.open(self.disk, os.O_DIRECT, name="probe")

    @contextlib.contextmanager
    def refusing(self, number, without=None):
        """os.open as where O_DIRECT is refused with this errno, after making the file, as Linux does."""
        real = os.open

        def fake(name, flags, *arguments, **keywords):
            if flags & os.O_DIRECT:
                if flags & os.O_CREAT:
                    os.close(real(name, flags & ~os.O_DIRECT, *arguments, **keywords))
                raise OSError(number, os.strerror(number), name)
            if without:
                raise OSError(without, os.strerror(without), name)
            return real(name, flags, *arguments, **keywords)

        with mock.patch.object(os, "open", side_effect=fake) as seen:
            yield seen

    def test_direct(self):
        self.need_direct()
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT):
            fd, direct, reason = self.close_later(direct_io.open_direct(self.path(b"abc"), flags))
            self.assertEqual((direct, reason), (True, ""))
            self.assertTrue(is_direct(fd))
            self.assertFalse(os.get_inheritable(fd))

    def test_new_file(self):
        self.need_direct()
        umask = os.umask(0o027)
        self.addCleanup(os.umask, umask)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        fd, direct, reason = self.close_later(direct_io.open_direct(self.path(), flags, 0o664))
        self.assertEqual((direct, reason, is_direct(fd)), (True, "", True))
        self.assertEqual(os.fstat(fd).st_mode & 0o7777, 0o640)
        with self.assertRaises(FileExistsError):
            direct_io.open_direct(self.path(), flags)

    def test_nameless_file(self):
        self.need_direct()
        fd, direct, _ = self.close_later(direct_io.open_direct(self.disk, os.O_WRONLY | os.O_TMPFILE, 0o600))
        self.assertTrue(direct)
        self.assertEqual(direct_io.pwrite(fd, self.view, 10, 0, BLOCK), 10)

    def test_relative_to_a_directory_and_as_bytes(self):
        directory = os.open(self.disk, os.O_RDONLY)
        self.addCleanup(os.close, directory)
        self.path(b"abc")
        for name in ("file", b"file"):
            for flags in (os.O_RDONLY, os.O_RDONLY | os.O_EXCL):
                fd, _, _ = self.close_later(direct_io.open_direct(name, flags, dir_fd=directory))
                self.assertEqual(self.content(fd), b"abc")

    def test_refused_for_real(self):
        fd, direct, reason = self.close_later(direct_io.open_direct("/proc/version", os.O_RDONLY))
        self.assertEqual((direct, reason), (False, "O_DIRECT refused at open: Invalid argument"))
        self.assertFalse(is_direct(fd))
        self.assertTrue(os.pread(fd, 1, 0))

    def test_refused(self):
        for number in (errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
            with self.subTest(number), self.refusing(number):
                fd, direct, reason = self.close_later(direct_io.open_direct(self.path(b"abc"), os.O_RDWR))
            self.assertFalse(direct)
            self.assertIn(os.strerror(number), reason)
            self.assertEqual(direct_io.pread(fd, self.view, 3, 0, BLOCK), 3)

    def test_refused_for_a_new_file(self):
        for number in (errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
            path = os.path.join(self.disk, str(number))
            refusal = OSError(number, os.strerror(number))
            with self.subTest(number), self.refusing(number), \
                    mock.patch.object(fcntl, "fcntl", side_effect=[0, refusal]):
                opened = self.close_later(direct_io.open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            self.assertEqual(opened[1:], (False, f"O_DIRECT refused at open: {os.strerror(number)}"))
            os.stat(path)

    def test_real_errors(self):
        with self.assertRaises(FileNotFoundError) as caught:
            direct_io.open_direct(self.path(), os.O_RDONLY)
        self.assertEqual(caught.exception.filename, self.path())
        for number in (errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOSPC):
            with self.subTest(number), self.refusing(number) as seen, self.assertRaises(OSError) as caught:
                direct_io.open_direct(self.path(), os.O_RDONLY)
            self.assertEqual((caught.exception.errno, caught.exception.filename), (number, self.path()))
            self.assertEqual(seen.call_count, 1)

    def test_the_error_without_it_counts(self):
        for number in (errno.EINVAL, errno.EPERM):
            with self.subTest(number), self.refusing(number, number), self.assertRaises(OSError) as caught:
                direct_io.open_direct(self.path(), os.O_RDONLY)
            self.assertEqual((caught.exception.errno, caught.exception.filename), (number, self.path()))

    def test_a_new_file_that_fails_otherwise_is_closed(self):
        before = len(os.listdir("/proc/self/fd"))
        failing = mock.patch.object(fcntl, "fcntl", side_effect=OSError(errno.EIO, ""))
        with failing, self.assertRaises(OSError):
            direct_io.open_direct(self.path(), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)

    def test_set_direct(self):
        self.need_direct()
        fd = self.open(self.disk, os.O_APPEND, content=b"abc")
        before = fcntl.fcntl(fd, fcntl.F_GETFL)
        direct_io.set_direct(fd, True)
        direct_io.set_direct(fd, True)
        self.assertEqual(fcntl.fcntl(fd, fcntl.F_GETFL), before | os.O_DIRECT)
        direct_io.set_direct(fd, False)
        self.assertEqual(fcntl.fcntl(fd, fcntl.F_GETFL), before)

    def test_set_direct_refused(self):
        with open("/proc/version") as file, self.os_error(errno.EINVAL, file.fileno()) as caught:
            direct_io.set_direct(file.fileno(), True)
        self.assertTrue(direct_io.is_unsupported(caught.exception))


class Shim(Case):
    SHIM = os.path.join(ROOT, "client", "direct_io.py")

    def run_beside(self, directory, code, **environment):
        """Run code as a script in the directory; return what it prints."""
        script = os.path.join(directory, "script.py")
        with open(script, "w") as file:
            file.write(code)
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        run = subprocess.run([sys.executable, script], cwd="/", env={**clean, **environment}, check=False,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return run.stdout

    def tree(self, parent):
        """A copy of what matters of a checkout."""
        for directory in ("client", os.path.join("mlperf_common", "fileio")):
            os.makedirs(os.path.join(parent, directory))
        for name in ("client/direct_io.py", "mlperf_common/__init__.py", "mlperf_common/fileio/__init__.py",
                     "mlperf_common/fileio/direct_io.py"):
            shutil.copy(os.path.join(ROOT, name), os.path.join(parent, name))
        return parent

    WHERE = "import direct_io; print(direct_io.pread.__globals__['__file__'])"

    def test_same_names_same_things(self):
        code = ("import sys; before = list(sys.path); import direct_io\n"
                "from mlperf_common.fileio import direct_io as d\n"
                "print(sorted(direct_io.__all__) == sorted(d.__all__), sys.path == before,"
                " all(getattr(direct_io, n) is getattr(d, n) for n in d.__all__))")
        checkout = self.tree(os.path.join(self.disk, "checkout"))
        self.assertEqual(self.run_beside(os.path.join(checkout, "client"), code), "True True True\n")

    def test_public_names_are_all_exported(self):
        public = {name for name, value in vars(direct_io).items()
                  if not name.startswith("_") and getattr(value, "__module__", None) == direct_io.__name__}
        self.assertEqual(public | {"BLOCK_SIZE", "BUFFER_ALIGN"}, set(direct_io.__all__))

    def test_own_tree_comes_before_an_installed_package(self):
        installed = self.tree(os.path.join(self.disk, "site"))
        checkout = self.tree(os.path.join(self.disk, "checkout"))
        where = self.run_beside(os.path.join(checkout, "client"), self.WHERE, PYTHONPATH=installed)
        self.assertEqual(where, os.path.join(checkout, "mlperf_common", "fileio", "direct_io.py") + "\n")

    def test_through_a_link(self):
        checkout = self.tree(os.path.join(self.disk, "checkout"))
        programs = os.path.join(self.disk, "bin")
        os.mkdir(programs)
        os.symlink(os.path.join(checkout, "client", "direct_io.py"), os.path.join(programs, "direct_io.py"))
        where = self.run_beside(programs, self.WHERE)
        self.assertEqual(where, os.path.join(checkout, "mlperf_common", "fileio", "direct_io.py") + "\n")

    def test_installed(self):
        installed = self.tree(os.path.join(self.disk, "site"))
        programs = os.path.join(self.disk, "bin")
        os.mkdir(programs)
        shutil.copy(self.SHIM, programs)
        where = self.run_beside(programs, self.WHERE, PYTHONPATH=installed)
        self.assertEqual(where, os.path.join(installed, "mlperf_common", "fileio", "direct_io.py") + "\n")

    def test_nowhere(self):
        programs = os.path.join(self.disk, "bin")
        os.makedirs(programs)
        shutil.copy(self.SHIM, programs)
        code = "try:\n    import direct_io\nexcept ImportError as error:\n    print(error.name)\n"
        self.assertEqual(self.run_beside(programs, code).partition(".")[0].strip(), "mlperf_common")


if __debug__:

    class Optimised(unittest.TestCase):
        """Only where asserts are on, or it would start itself for ever."""

        def test_the_same_under_dash_O(self):
            run = subprocess.run([sys.executable, "-O", os.path.abspath(__file__)], check=False,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.assertEqual(run.returncode, 0, run.stdout)
            self.assertRegex(run.stdout, r"Ran \d\d+ tests")


if __name__ == "__main__":
    unittest.main()
