# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What a person sees while a job runs, and numbers in words for the summary at its end.

Promises: on a terminal one line that updates and fits, what matters least left out; elsewhere (a batch job's
log) a whole line every 30 seconds without control characters; never over 100 %, never 100 % before everything
is done; no division by zero; nothing raised, whatever happens to the stream. Time comes in through an argument.

Does not: count anything, know what a file is, or use threads. Whoever works calls ``update`` often, and it is
cheap.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False  # a name that type checkers know; importing typing would cost 2 ms
if TYPE_CHECKING:
    from typing import IO, Callable, List, Optional, Tuple

    Piece = Tuple[int, str]  # of a line: how important it is, and its text

TERMINAL_SECONDS = 0.2  # between two drawings: faster cannot be read
PLAIN_SECONDS = 30.0
ECHO = 2  # columns that Ctrl-C takes: the terminal shows it as ^C
MANY_FILES = 10.0  # a second: from here on their number says how long it takes
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
        reflows: bool = False,
    ) -> None:
        """``mode``: "bar" (a line that updates), "plain", "none", or "auto": the first if ``stream`` is a terminal,
        else the second.

        ``stream`` may be None, as sys.stderr is where it was closed. ``clock`` gives seconds from any origin.
        ``reflows``: the terminal wraps lines anew when it gets narrower, and knows escape sequences.
        """
        self.label = label
        self._stream, self._clock, self._reflows = stream, clock, reflows
        self._mode = _resolved(mode, stream)
        self._interval = TERMINAL_SECONDS if self._mode == "bar" else PLAIN_SECONDS
        self._drawn = 0
        now = clock()
        self._due = now + self._interval
        self._bytes, self._files = _RecentRate(now), _RecentRate(now)

    def update(
        self,
        bytes_done: int,
        bytes_total: Optional[int],
        files_done: Optional[int],
        files_total: Optional[int],
    ) -> None:
        """Say how far the job is; shown if it is time to. What is not known, or not yet, is None."""
        now = self._now_if_due()
        if now is not None:
            done = _Done(bytes_done, bytes_total, files_done or 0, files_total)
            rates = self._bytes.at(now, done.bytes), self._files.at(now, done.files)
            self._show(_in_words(done, *rates, files_done is not None))

    def found(self, count: int) -> None:
        """Say how many entries have been found so far, while nobody knows how many there are."""
        now = self._now_if_due()
        if now is not None:
            rate = self._files.at(now, count)
            noun = "entry" if count == 1 else "entries"
            self._show([(2, "%d %s found" % (count, noun)), (1, "%d/s" % rate)])

    def start(self, label: str) -> None:
        """Another phase, with rates of its own."""
        self.label = label
        now = self._clock()
        self._bytes, self._files = _RecentRate(now), _RecentRate(now)

    def clear(self) -> None:
        """Take the updating line off the terminal: before a message, and at the end."""
        if self._drawn:
            self._write(self._blank())
            self._drawn = 0

    def _now_if_due(self) -> Optional[float]:
        if self._mode == "none":
            return None
        now = self._clock()
        if now < self._due:
            return None
        self._due = now + self._interval
        return now

    def _show(self, pieces: List[Piece]) -> None:
        if self._mode == "plain":
            return self._write(_fitting(self.label, pieces, None) + "\n")
        # One column less than there are: a full line makes some terminals wrap.
        columns = _columns(self._stream)
        text = _fitting(self.label, pieces, columns - 1)
        if self._drawn < columns:
            # Padded with spaces rather than cleared by an escape sequence, which not every terminal knows.
            self._write("\r" + text.ljust(self._drawn))
        else:
            self._write(self._blank() + text)
        self._drawn = len(text)

    def _blank(self) -> str:
        """What makes the line empty, and leaves the cursor at its start."""
        columns = _columns(self._stream)
        wrapped = (self._drawn - 1) // columns  # rows more, since the window was made narrower
        if wrapped and self._reflows:
            return "\r\x1b[%dA\x1b[J" % wrapped
        # Elsewhere the rows above may be somebody else's.
        return "\r" + " " * min(self._drawn + ECHO, columns - 1) + "\r"

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
    if stream is None:
        return "none"
    try:
        if mode == "auto":
            return "bar" if stream.isatty() else "plain"
    except ValueError:  # a closed stream
        return "none"
    return mode


def _columns(stream: Optional[IO[str]]) -> int:
    try:
        # Asked each time, so that the line follows a window that is resized. 0: a terminal that does not
        # know.
        return os.get_terminal_size(stream.fileno()).columns or 80 if stream else 80
    except (OSError, ValueError):
        return 80


def _fitting(label: str, pieces: List[Piece], width: Optional[int]) -> str:
    """The line with those pieces that fit into ``width`` columns, the most important ones; in their order."""
    if width is None:
        width = len(label) + sum(len(text) + 2 for _, text in pieces)
    left = width - len(label)
    chosen = set()
    for _, text in sorted(pieces, reverse=True):
        if len(text) + 2 <= left:
            left -= len(text) + 2
            chosen.add(text)
    shown = ", ".join(text for _, text in pieces if text in chosen)
    return label[:width] + (": " + shown if shown else "")


class _Done:
    """How far a job is: bytes and files; the totals may be unknown (None)."""

    def __init__(self, bytes_done: int, bytes_total: Optional[int], files: int, files_total: Optional[int]) -> None:
        self.bytes, self.bytes_total = bytes_done, bytes_total
        self.files, self.files_total = files, files_total


def _in_words(done: _Done, bytes_rate: float, files_rate: float, with_files: bool) -> List[Piece]:
    pieces: List[Piece] = []
    percent = _percent(done.bytes, done.bytes_total, done.files, done.files_total)
    if percent is not None:
        pieces.append((5, f"{percent} %"))
    if done.bytes or done.bytes_total != 0:
        pieces.append((2, _share_of_bytes(done.bytes, done.bytes_total)))
    if with_files:
        pieces.append((1, _share_of_files(done.files, done.files_total)))
    if done.bytes_total != 0:
        pieces.append((3, f"{format_bytes(bytes_rate)}/s"))
    else:
        pieces.append((3, f"{files_rate:.0f} files/s"))
    left = _seconds_left(done, bytes_rate, files_rate)
    if left is not None:
        pieces.append((4, f"{format_seconds(left)} left"))
    return pieces


def _seconds_left(done: _Done, bytes_rate: float, files_rate: float) -> Optional[float]:
    """By bytes; by files where there are no bytes, and where many small ones make it longer."""
    found = []
    if done.bytes_total and bytes_rate > 0 and done.bytes_total >= done.bytes:
        found.append((done.bytes_total - done.bytes) / bytes_rate)
    many = done.bytes_total == 0 or files_rate >= MANY_FILES
    if done.files_total is not None and files_rate > 0 and many and done.files_total >= done.files:
        found.append((done.files_total - done.files) / files_rate)
    return max(found) if found else None


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
