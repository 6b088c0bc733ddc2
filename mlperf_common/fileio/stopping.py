# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Signals that end a job: a flag that is looked at between buffers, never an exception out of nowhere.

A handler that raised would do so between any two bytecodes, also between the making of a temporary file and
the line that remembers to remove it. So SIGINT, SIGTERM and SIGHUP only set a flag and wake whoever waits;
``check`` turns the flag into ``Interrupted`` where the caller can clean up. The command line then restores the
default action and raises the signal again, so that a shell sees 128 + signal.

Not promised: a system call that hangs in the kernel (a dead NFS server) is not left before it returns; the
second signal ends the process there and then.
"""

from __future__ import annotations

import os
import signal
import time

TYPE_CHECKING = False  # a name that type checkers know; importing typing would cost 2 ms
if TYPE_CHECKING:
    from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# GNU timeout signals its child twice, by process id and by process group, within a millisecond: one wish.
SAME_WISH_SECONDS = 0.1


class Interrupted(BaseException):
    """A signal asked this process to stop; ``signum`` is its number."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class StopFlag:
    """Whether a signal has asked this process to stop, and a descriptor that becomes readable when it has."""

    def __init__(self) -> None:
        self.signum = 0
        self._since = 0.0
        self._read_end = -1
        self._write_end = -1

    def install(self) -> None:
        """Handle SIGINT, SIGTERM and SIGHUP, but leave alone what was ignored at the start (nohup).

        Main thread only (signal(7)). A second signal, later than ``SAME_WISH_SECONDS`` after the first, gets
        its default action at once.
        """
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: Any) -> None:
        now = time.monotonic()
        if self.signum and now - self._since > SAME_WISH_SECONDS:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        if not self.signum:
            self.signum, self._since = signum, now

    def check(self) -> None:
        """Raise ``Interrupted`` if a signal has come."""
        if self.signum:
            raise Interrupted(self.signum)

    def fileno(self) -> int:
        """The descriptor to wait on: readable once a signal has come; -1 before ``install``."""
        return self._read_end

    def forget(self) -> None:
        """In a forked child: stop sharing the wake-up pipe with the parent."""
        signal.set_wakeup_fd(-1)
        for fd in (self._read_end, self._write_end):
            if fd >= 0:
                os.close(fd)
        self._read_end = self._write_end = -1
        self.signum = 0
