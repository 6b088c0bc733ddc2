# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What a person sees while a job runs, and numbers in words for the summary at its end.

Promises: on a terminal one line that updates, elsewhere (a batch job's log) a whole line every 30 seconds
without control characters; never over 100 %, never 100 % before everything is done; no division by zero;
nothing raised, whatever happens to the stream. Time comes in through an argument.

Does not: count anything, know what a file is, or use threads. Whoever works calls ``update`` often, and it is
cheap.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False  # a name that type checkers know; importing typing would cost 2 ms
if TYPE_CHECKING:
    from typing import IO, Callable, Optional

TERMINAL_SECONDS = 0.2  # between two drawings: faster cannot be read
PLAIN_SECONDS = 30.0
RATE_SECONDS = 10.0  # the rate shown is that of the last 10 to 20 seconds

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def format_bytes(count: float) -> str:
    """A number of bytes in words: "0 B", "1023 B", "1.5 GiB"."""
    if count < 1024:
        return f"{int(count)} B"
    count /= 1024
    unit = 0
    while count >= 1023.95 and unit < len(_UNITS) - 1:  # 1023.95 would be shown as 1024.0
        count /= 1024
        unit += 1
    return f"{count:.1f} {_UNITS[unit]}"


def format_rate(count: float, seconds: float) -> str:
    """Bytes in a time as "1.5 GiB/s"; "-" where there was no time to speak of."""
    return f"{format_bytes(count / seconds)}/s" if seconds > 0 else "-"


def format_seconds(seconds: float) -> str:
    """A time in words: "0.5 s", "12.3 s", "2:05 min", "1:02:05 h"."""
    seconds = max(0.0, seconds)
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"


def counted(number: int, noun: str) -> str:
    """ "1 file", "2 files", "0 files", "2 directories"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun[:-1] + 'ies' if noun.endswith('y') else noun + 's'}"


class Progress:
    """One display on one stream. ``label`` (what is being done: "copying") may be changed at any time."""

    def __init__(
        self,
        stream: Optional[IO[str]],
        clock: Callable[[], float] = time.monotonic,
        mode: str = "auto",
        label: str = "copying",
    ) -> None:
        """``mode``: "auto" (a line that updates if ``stream`` is a terminal, else "plain"), "plain", "none".

        ``stream`` may be None, as sys.stderr is where it was closed. ``clock`` gives seconds from any origin.
        """
        self.label = label
        self._stream, self._clock = stream, clock
        self._mode = _resolved(mode, stream)
        self._interval = TERMINAL_SECONDS if self._mode == "terminal" else PLAIN_SECONDS
        self._drawn = 0
        now = clock()
        self._due = now + self._interval
        self._rate = _RecentRate(now)

    def update(
        self, bytes_done: int, bytes_total: Optional[int], files_done: int, files_total: Optional[int]
    ) -> None:
        """Say how far the job is; shown if it is time to. A total that is not known yet is None."""
        if self._mode == "none":
            return
        now = self._clock()
        if now < self._due:
            return
        self._due = now + self._interval
        rate = self._rate.at(now, bytes_done)
        self._show(_in_words(bytes_done, bytes_total, files_done, files_total, rate))

    def clear(self) -> None:
        """Take the updating line off the terminal: before a message, and at the end."""
        if self._drawn:
            self._write("\r" + " " * self._drawn + "\r")
            self._drawn = 0

    def _show(self, text: str) -> None:
        text = f"{self.label}: {text}"
        if self._mode == "plain":
            return self._write(text + "\n")
        # One column less than there are: a full line makes some terminals wrap. Padded with spaces rather
        # than cleared by an escape sequence, which not every terminal knows.
        text = text[: _columns(self._stream) - 1]
        self._write("\r" + text.ljust(self._drawn))
        self._drawn = len(text)

    def _write(self, text: str) -> None:
        try:
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()
        except (OSError, ValueError):
            # A terminal that hung up, a full log, a closed stream: the job is worth more than its display.
            self._mode = "none"
            self._drawn = 0


class _RecentRate:
    """Bytes a second between a moment 10 to 20 seconds ago (or the start) and now."""

    def __init__(self, start: float) -> None:
        self._older = self._newer = (start, 0)

    def at(self, now: float, done: int) -> float:
        if now - self._newer[0] >= RATE_SECONDS:
            self._older, self._newer = self._newer, (now, done)
        since, had = self._older
        return max(0, done - had) / (now - since) if now > since else 0.0


def _resolved(mode: str, stream: Optional[IO[str]]) -> str:
    if stream is None or mode == "none":
        return "none"
    try:
        return "terminal" if mode == "auto" and stream.isatty() else "plain"
    except ValueError:  # a closed stream
        return "none"


def _columns(stream: Optional[IO[str]]) -> int:
    try:
        # Asked each time, so that the line follows a window that is resized. 0: a terminal that does not
        # know.
        return os.get_terminal_size(stream.fileno()).columns or 80 if stream else 80
    except (OSError, ValueError):
        return 80


def _in_words(
    bytes_done: int, bytes_total: Optional[int], files_done: int, files_total: Optional[int], rate: float
) -> str:
    pieces = [_share_of_bytes(bytes_done, bytes_total), _share_of_files(files_done, files_total)]
    percent = _percent(bytes_done, bytes_total, files_done, files_total)
    if percent is not None:
        pieces.insert(0, f"{percent} %")
    pieces.append(f"{format_bytes(rate)}/s")
    if rate > 0 and bytes_total is not None and bytes_total >= bytes_done:
        pieces.append(f"{format_seconds((bytes_total - bytes_done) / rate)} left")
    return ", ".join(pieces)


def _share_of_bytes(done: int, total: Optional[int]) -> str:
    # A file that grows while it is read takes done past total, which is no longer a total then.
    if total is None or done > total:
        return format_bytes(done)
    return f"{format_bytes(done)} of {format_bytes(total)}"


def _share_of_files(done: int, total: Optional[int]) -> str:
    return counted(done, "file") if total is None else f"{done} of {counted(total, 'file')}"


def _percent(
    bytes_done: int, bytes_total: Optional[int], files_done: int, files_total: Optional[int]
) -> Optional[int]:
    """0 to 100, rounded down; by files where there are no bytes; 100 only if both are done."""
    if bytes_total is None or files_total is None:
        return None
    done, total = (bytes_done, bytes_total) if bytes_total else (files_done, files_total)
    if bytes_done >= bytes_total and files_done >= files_total:
        return 100
    return min(99, 100 * done // total)
