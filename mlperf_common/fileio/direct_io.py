# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Positional reads and writes of whole blocks, with O_DIRECT where the filesystem has it.

It promises:
- ``pread`` and ``pwrite`` move exactly the bytes asked for, or raise. After a short transfer they go on; an
  attempt that moves nothing is repeated a bounded number of times; end of file is ``ShortFile``.
- An OSError leaves with its errno and the file's name. An invalid argument is a ValueError, whatever ``-O``
  says.
- A ``pread`` or ``pwrite`` that goes well is one system call.

It does not promise:
- The right length of a file after ``pwrite``: the last block is padded with zeros, and the caller truncates.
- To fall back to buffered I/O by itself: only the caller knows whether a transfer was a file's first, the one
  after which ``is_unsupported`` may be asked.
- Anything about a file that changes meanwhile, except that bytes which are not there are never made up.

The rules for O_DIRECT are in open(2), NOTES: offset, length and the buffer's address must be aligned.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time

TYPE_CHECKING = False  # a name that type checkers know; importing typing would cost milliseconds
if TYPE_CHECKING:
    from typing import Any, Callable, Sequence

__all__ = [
    "BLOCK_SIZE",
    "BUFFER_ALIGN",
    "ShortFile",
    "allocate_aligned_buffers",
    "at_end",
    "is_direct",
    "is_unsupported",
    "open_direct",
    "pread",
    "pwrite",
    "round_up",
    "set_direct",
]

#: Alignment of buffers, in bytes: one huge page on x86-64 and on Arm with 4 KiB pages. Copying 1 GiB with
#: O_DIRECT through one 8 MiB buffer took 0.66 s and 0.023 s of CPU with huge pages, 1.59 s and 0.094 s with
#: small ones (medians of 9 runs each, one process, ext4 on a virtual disk, Linux 6.18).
BUFFER_ALIGN = 2 << 20

#: What offsets and lengths are padded to, in bytes: enough for sectors of 512 and of 4,096 bytes. statvfs's
#: f_bsize is no substitute: it is the preferred transfer (1 MiB on NFS, up to 16 MiB on GPFS), not the
#: alignment.
BLOCK_SIZE = 4096

_REFUSED_IO = (errno.EINVAL, errno.EOPNOTSUPP)
_REFUSED_OPEN = (*_REFUSED_IO, errno.EPERM)
_INTERRUPTED = (errno.EINTR, errno.EAGAIN)
_MAX_IDLE = 5  # attempts in a row that moved nothing
_PAUSE = 0.01  # seconds before an attempt after EAGAIN: time for a server to find its resources
_MAX_OFFSET = (1 << 63) - 1  # off_t


class ShortFile(OSError):
    """The file ended before the bytes that were due: it shrank. errno is EIO."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``.

    :raises ValueError: ``multiple`` is zero or negative.
    """
    if multiple <= 0:
        raise ValueError(f"multiple must be positive, not {multiple}")
    return -(-value // multiple) * multiple


def allocate_aligned_buffers(
    buffer_size: int, alignment: int, num_bufs: int
) -> tuple[list[memoryview], mmap.mmap]:
    """Return ``num_bufs`` writable views of ``buffer_size`` bytes each, and the memory that they lie in.

    Each view starts at a multiple of ``alignment`` and is zero at first. The memory is private: after a fork
    neither process sees what the other writes. It stays as long as the second value or any view does. Pages
    that are never touched cost nothing; from ``BUFFER_ALIGN`` upwards they are huge pages where the kernel
    has them.

    A Python built without ctypes cannot ask for an address: there, a larger ``alignment`` than a page's is
    not kept. O_DIRECT does not need it.

    :param buffer_size: bytes, positive.
    :param alignment: bytes, a power of two.
    :raises ValueError: an argument out of range.
    :raises OSError: no memory (mmap(2)).
    """
    _check_power_of_two("alignment", alignment)
    if buffer_size <= 0:
        raise ValueError(f"buffer_size must be positive, not {buffer_size}")
    if num_bufs <= 0:
        raise ValueError(f"num_bufs must be positive, not {num_bufs}")
    stride = round_up(buffer_size, alignment)
    slack = max(alignment - mmap.PAGESIZE, 0)  # a mapping starts at a page
    # A mapping without a file is shared with forked children unless flags say otherwise.
    owner = mmap.mmap(-1, num_bufs * stride + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if alignment >= BUFFER_ALIGN:
        _ask_for_huge_pages(owner)
    memory = memoryview(owner)
    first = -(_address(memory) or 0) % alignment if slack else 0
    starts = range(first, first + num_bufs * stride, stride)
    return [memory[start : start + buffer_size] for start in starts], owner


def pread(
    fd: int, aligned_memview: memoryview, count: int, offset: int, fs_block_size: int, thread_id: int = 0
) -> int:
    """Read exactly ``count`` bytes at ``offset`` into the start of the view; return ``count``.

    The request is padded up to ``fs_block_size``: the rest of the last block in the view may be overwritten.
    The descriptor may be O_DIRECT or not.

    :param count: bytes, 0 or more; padded, it must fit into the view.
    :param offset: bytes from the start of the file, a multiple of ``fs_block_size``.
    :param fs_block_size: bytes, a power of two.
    :param thread_id: not used; for callers that pass it.
    :raises ValueError: an invalid argument, or a view that is not aligned where O_DIRECT needs it.
    :raises ShortFile: the file ends before ``offset + count``.
    :raises OSError: everything else, from preadv(2); EIO when several attempts in a row moved nothing.
    """
    got = _read(fd, aligned_memview, count, offset, fs_block_size)
    if got < count:
        message = f"file ends {count - got} bytes early, at {offset + got}"
        raise ShortFile(errno.EIO, message, _name_of(fd))
    return count


def pwrite(fd: int, aligned_memview: memoryview, count: int, offset: int, fs_block_size: int) -> int:
    """Write exactly the first ``count`` bytes of the view at ``offset``; return ``count``.

    The request is padded up to ``fs_block_size`` with zeros, which are put into the view too. They may make
    the file longer than it should be: the caller truncates. The descriptor may be O_DIRECT or not.

    :param count: bytes, 0 or more; padded, it must fit into the view.
    :param offset: bytes from the start of the file, a multiple of ``fs_block_size``.
    :param fs_block_size: bytes, a power of two.
    :raises ValueError: an invalid argument, or a view that is not aligned where O_DIRECT needs it.
    :raises OSError: everything else, from pwritev(2); EIO when several attempts in a row moved nothing.
    """
    padded = _padded_count(aligned_memview, count, offset, fs_block_size)
    if count == 0:
        return 0
    if padded > count:
        if aligned_memview.readonly:
            raise ValueError("cannot pad a write from a read-only view")
        # Whatever the view held before belongs to another file.
        aligned_memview[count:padded] = bytes(padded - count)
    _transfer(os.pwritev, fd, aligned_memview[:padded], count, offset, fs_block_size)
    return count


def at_end(fd: int, aligned_memview: memoryview, size: int, fs_block_size: int) -> bool:
    """Tell whether the file ends exactly at ``size`` bytes, by reading its last byte and asking for one more.

    The first two blocks of the view may be overwritten. The descriptor may be O_DIRECT or not.

    :param size: bytes, 0 or more; need not be aligned.
    :param fs_block_size: bytes, a power of two; the view holds two blocks, or one if ``size`` is not aligned.
    :raises ValueError: an invalid argument, as for ``pread``.
    :raises OSError: as for ``pread``, but a file that ends early is False.
    """
    _check_power_of_two("fs_block_size", fs_block_size)
    if size < 0:
        raise ValueError(f"size must not be negative: {size}")
    # From the block of the last byte: a read that starts at the end or anywhere behind it says 0 alike.
    offset = max(size - 1, 0) // fs_block_size * fs_block_size
    due = size - offset
    return _read(fd, aligned_memview, due + 1, offset, fs_block_size) == due


def open_direct(
    name: str | bytes, flags: int, mode: int = 0o666, dir_fd: int | None = None
) -> tuple[int, bool, str]:
    """Open a file with O_DIRECT, or without it where it is refused; return (descriptor, direct, reason).

    ``reason`` says why ``direct`` is False, and is empty where it is True. The other arguments are those of
    os.open().

    :raises OSError: what the open without O_DIRECT says: open(2).
    """
    if flags & os.O_EXCL:
        # The kernel refuses O_DIRECT only after it has made the file: what is left (seen on ramfs) would make
        # a second exclusive open fail with EEXIST.
        fd = os.open(name, flags, mode, dir_fd=dir_fd)
        return (fd, *_switch_to_direct(fd))
    try:
        return os.open(name, flags | os.O_DIRECT, mode, dir_fd=dir_fd), True, ""
    except OSError as error:
        if error.errno not in _REFUSED_OPEN:
            raise
        reason = _refusal(error)
    return os.open(name, flags, mode, dir_fd=dir_fd), False, reason


def set_direct(fd: int, on: bool) -> None:
    """Switch O_DIRECT on or off for the open file that ``fd`` refers to, and for every duplicate of ``fd``.

    :raises OSError: from F_SETFL, fcntl(2): EINVAL where the filesystem has no O_DIRECT.
    """
    flags = _named(fcntl.fcntl, fd, fcntl.F_GETFL)
    _named(fcntl.fcntl, fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


def is_direct(fd: int) -> bool:
    """Tell whether the open file that ``fd`` refers to has O_DIRECT now.

    :raises OSError: from F_GETFL, fcntl(2).
    """
    return bool(_named(fcntl.fcntl, fd, fcntl.F_GETFL) & os.O_DIRECT)


def is_unsupported(error: BaseException) -> bool:
    """Tell whether an error of a file's *first* transfer means that its filesystem has no direct I/O.

    The same errno later on is a real error: bytes have moved.
    """
    return isinstance(error, OSError) and error.errno in _REFUSED_IO


def _check_power_of_two(what: str, value: int) -> None:
    if value <= 0 or value & (value - 1):
        raise ValueError(f"{what} must be a power of two, not {value}")


def _padded_count(view: memoryview, count: int, offset: int, block: int) -> int:
    """Validate a request; return its length padded up to the block."""
    _check_power_of_two("fs_block_size", block)
    # A slice of a bytearray would be a copy: the bytes would be read into it and lost.
    if not isinstance(view, memoryview) or view.ndim != 1 or view.itemsize != 1 or not view.contiguous:
        raise ValueError("the buffer must be a contiguous memoryview of bytes")
    if count < 0:
        raise ValueError(f"count must not be negative: {count}")
    if offset < 0 or offset % block:
        raise ValueError(f"offset must be a multiple of {block}: {offset}")
    padded = (count + block - 1) & -block
    if padded > len(view):
        raise ValueError(f"{count} bytes, padded to {padded}, do not fit into a view of {len(view)}")
    if offset + padded > _MAX_OFFSET:
        raise ValueError(f"no file has an offset of {offset + padded}")
    return padded


def _read(fd: int, view: memoryview, count: int, offset: int, block: int) -> int:
    """Return how many bytes there are at ``offset``; fewer than ``count`` only when the file ends there."""
    padded = _padded_count(view, count, offset, block)
    if view.readonly:
        raise ValueError("cannot read into a read-only view")
    if count == 0:
        return 0
    return _transfer(os.preadv, fd, view[:padded], count, offset, block, zero_is_end=True)


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    view: memoryview,
    count: int,
    offset: int,
    block: int,
    zero_is_end: bool = False,
) -> int:
    """Repeat ``call`` (os.preadv, os.pwritev) until ``count`` bytes or more have moved; return how many.

    Fewer only at end of file: a call answers 0 where ``zero_is_end``, or stops within a block, at the file's
    length.
    """
    done = start = idle = 0
    while True:
        failure = None
        try:
            end = start + call(fd, (view[start:],), offset + start)
        except OSError as error:
            failure = _retriable(error, fd, view[start:], block)
            end = start
        if end >= count:
            return end
        if end > done:
            done, idle = end, 0
        elif end == start and zero_is_end and failure is None:
            return end
        else:
            idle += 1
            _give_up_when_idle(idle, failure, fd, offset + done)
        start = done
        if done % block and is_direct(fd):
            if zero_is_end and _named(os.fstat, fd).st_size == offset + done:
                return done
            start -= done % block  # move some bytes once more: O_DIRECT cannot start within a block


def _retriable(error: OSError, fd: int, view: memoryview, block: int) -> OSError:
    """Return an error after which the same call may succeed; raise any other.

    EINTR is here although Python repeats the call itself (PEP 475): an interposed library may say it.
    """
    _fill_in_name(error, fd)
    if error.errno == errno.EAGAIN:
        time.sleep(_PAUSE)
    if error.errno in _INTERRUPTED:
        return error
    if error.errno == errno.EINVAL:
        _check_address(fd, view, block)
    raise error


def _give_up_when_idle(idle: int, failure: OSError | None, fd: int, position: int) -> None:
    if idle < _MAX_IDLE:
        return
    if failure is not None:
        raise failure
    raise OSError(errno.EIO, f"{idle} attempts moved nothing at {position}", _name_of(fd))


def _check_address(fd: int, view: memoryview, block: int) -> None:
    """Raise ValueError if O_DIRECT was refused for the view's address, which is the caller's mistake.

    Not before the call: the kernel checks it anyway, and buffered I/O takes any address.
    """
    alignment = min(block, mmap.PAGESIZE)
    address = _address(view)
    if address is not None and address % alignment and is_direct(fd):
        raise ValueError(f"O_DIRECT needs a view aligned to {alignment} bytes, not one at {address:#x}")


def _address(view: memoryview) -> int | None:
    """Return where in memory the view starts; None if Python cannot tell."""
    try:
        import ctypes  # here, because it takes 3 to 4 ms, half as long as Python takes to start
    except ImportError:
        return None
    if view.readonly:
        return None  # ctypes takes writable memory only
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _ask_for_huge_pages(owner: mmap.mmap) -> None:
    try:
        owner.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):
        pass  # a kernel (EINVAL) or a Python built without them: small pages do the same, slower


def _switch_to_direct(fd: int) -> tuple[bool, str]:
    try:
        set_direct(fd, True)
    except OSError as error:
        if error.errno in _REFUSED_OPEN:
            return False, _refusal(error)
        os.close(fd)
        raise
    return True, ""


def _refusal(error: OSError) -> str:
    return f"O_DIRECT refused at open: {os.strerror(error.errno or 0)}"


def _named(function: Callable[..., Any], fd: int, *arguments: int) -> Any:
    """Call ``function`` on a descriptor; let its OSError leave with the file's name."""
    try:
        return function(fd, *arguments)
    except OSError as error:
        _fill_in_name(error, fd)
        raise


def _fill_in_name(error: OSError, fd: int) -> None:
    """Set the name that errors of calls on descriptors lack."""
    if error.filename is None:
        error.filename = _name_of(fd)


def _name_of(fd: int) -> str:
    """Return the name of the file that is open as ``fd``. For errors only: it takes a system call."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"file descriptor {fd}"  # no /proc, or not open: the error at hand matters more
