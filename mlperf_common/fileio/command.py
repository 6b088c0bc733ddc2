# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What the command lines share: reading arguments, exit statuses, standard descriptors, error lines.

Promises: ``run`` always gives an exit status (0, 1, 2) or dies of the signal that ended the run; a status of
0 means that everything written to ``stdout()`` has reached the kernel. Arguments are read as getopt_long(3)
reads them, the same on every Python. An error is one line on stderr, whatever bytes the names in it have.

Does not: decide what is an error, translate exceptions for the library, or touch the standard streams of a
program that merely imports it.

Start-up counts (a loop over many small copies starts us each time), so nothing heavy is imported up here:
argparse and what it brings already cost 7 ms (CPython 3.13) on top of the 12 ms of ``python3 -c pass``.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys

from mlperf_common.fileio.words import quote

TYPE_CHECKING = False  # a name that type checkers know; importing typing would cost 2 ms
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator, NoReturn, Sequence

    from mlperf_common.fileio.stopping import StopFlag

MAX_WORKERS = 256

# Where the user does not say. Workers mostly wait for storage, so it does not go by the CPUs. Seconds for 10,000 files
# of a byte (at 5 ms: 2,000), 2 shared CPUs, medians of 5 and 7 interleaved rounds:
#              tmpfs   0.2 ms a call   1 ms   5 ms
#   8 workers   0.44            4.0    10.7   10.7
#   16          0.49            3.1     6.2    6.8
#   32          0.58            3.8     5.0    5.6
# (local disk: too uneven to tell 8, 16 and 32 apart). A worker costs 4 ms of CPU and 8 MiB of buffer: 32 would be twice
# the processes on a login node, and twice the memory, for a fifth of the time where calls take a millisecond.
DEFAULT_WORKERS = 16
MAX_BUFFER_SIZE = 1 << 30

_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


# --- reading arguments --------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An argparse parser for options only, with GNU manners; use it through ``parse``.

    Options are added as usual; every option that takes a value needs a long name. Operands are never
    declared: ``usage`` describes them. ``--help`` is there, and ``--version`` if ``version`` is given.
    """

    def __init__(self, prog: str, *, version: str = "", **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", _help_formatter)
        super().__init__(prog=prog, add_help=False, **settings)
        self.add_argument("--help", action="help", help="show this help and exit")
        if version:
            self.add_argument("--version", action=_Version, version=f"{prog} {version}\n")

    def error(self, message: str) -> NoReturn:
        """A usage error: two lines on stderr, exit status 2."""
        say(self.prog, message)
        _write_stderr(f"Try '{self.prog} --help' for more information.\n")
        raise SystemExit(2)

    def format_help(self) -> str:
        """Without empty lines between the groups, so that it fits a screen."""
        text = super().format_help().replace("\noptional arguments:\n", "\noptions:\n")  # as before Python 3.10
        head, *groups = text.split("\n\noptions:\n")
        return "\noptions:\n".join([head, *(group.replace("\n\n", "\n") for group in groups)])

    def print_help(self, file: Any = None) -> None:
        """The help goes through ``stdout()``, so that a full disk is noticed: argparse itself ignores it."""
        if file is None:
            file = _TextOutput()
        file.write(self.format_help())


class Once(argparse.Action):
    """``action=Once``: stores a value; the option given twice is an error."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if getattr(namespace, self.dest, None) is not self.default:
            raise argparse.ArgumentError(self, "given more than once")
        setattr(namespace, self.dest, values)


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, version: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="show the version and exit")
        self.version = version

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        stdout().write(self.version.encode())
        parser.exit()


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    # A width of its own: without one argparse imports shutil (and so bz2 and lzma, 6 ms) at each start, not
    # only for --help.
    return _Formatter(prog, width=80, max_help_position=30)


class _Formatter(argparse.HelpFormatter):
    """An option takes one line: short names, the first long one, and its value once."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shorts = [name for name in action.option_strings if not name.startswith("--")]
        names = shorts + [name for name in action.option_strings if name.startswith("--")][:1]
        value = "" if action.nargs == 0 else f"[={action.metavar}]" if action.nargs == "?" else f" {action.metavar}"
        return ", ".join(names) + value


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Options and operands in any order; what follows the first ``--`` is operands. They end up in
    ``.operands``.

    argparse's own idea of which word is an option changed between releases (``--``), and takes ``-3`` and any
    word with a space for an operand. So the words are told apart here, by getopt_long(3)'s rules without
    abbreviations, and argparse sees options only, in spellings that it cannot mistake.
    """
    options: list[str] = []
    operands: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":
            operands.extend(words)
        elif word.startswith("--"):
            options.append(_long_option(parser, options, word, words))
        elif word.startswith("-") and word != "-":
            options.extend(_short_options(parser, options, word, words))
        else:
            operands.append(word)
    namespace = parser.parse_args(options)
    namespace.operands = operands
    return namespace


def _long_option(parser: Parser, before: list[str], word: str, words: Iterator[str]) -> str:
    name, equals, value = word.partition("=")
    action = parser._option_string_actions.get(name)  # the only table of them, of that name in 3.8 to 3.14
    if action is None:
        _refuse(parser, before, f"unrecognized option {quote(word)}")
    if action.nargs == 0 and equals:
        _refuse(parser, before, f"option '{name}' doesn't allow an argument")
    if action.nargs is None:
        return f"{name}={_value(parser, before, name, value if equals else None, words)}"
    return word  # no value, or one that may only be attached (nargs="?")


def _short_options(parser: Parser, before: list[str], word: str, words: Iterator[str]) -> list[str]:
    found: list[str] = []
    for position, letter in enumerate(word[1:], start=2):
        action = parser._option_string_actions.get("-" + letter)
        if action is None:
            _refuse(parser, before + found, f"invalid option -- {quote(letter)}")
        if action.nargs == 0:
            found.append("-" + letter)
            continue
        value = _value(parser, before + found, "-" + letter, word[position:] or None, words)
        # Only the long form says unmistakably that an empty value is a value.
        long_name = next(name for name in action.option_strings if name.startswith("--"))
        return [*found, f"{long_name}={value}"]
    return found


def _value(parser: Parser, before: list[str], name: str, attached: str | None, words: Iterator[str]) -> str:
    """The value of option ``name``: the one attached to it, or the next word, whatever it looks like."""
    value = next(words, None) if attached is None else attached
    if value is None:
        _refuse(parser, before, f"option '{name}' requires an argument")
    if value == "--":  # before 3.13, argparse drops it and stores an empty list
        _refuse(parser, before, f"option '{name}': not '--'; a file of that name is './--'")
    return value


def _refuse(parser: Parser, before: list[str], message: str) -> NoReturn:
    parser.parse_args(before)  # a --help, or a bad value, that came first has its say first, as with getopt
    parser.error(message)


def worker_count(text: str) -> int:
    """``type=`` of -n: a whole number from 1; it may be more than MAX_WORKERS (see ``clamp``)."""
    return _positive(text, text)


def buffer_size(text: str) -> int:
    """``type=`` of -b: bytes, with K, M or G for powers of 1024; it may be more than MAX_BUFFER_SIZE."""
    unit = _SUFFIXES.get(text[-1:].upper())
    return _positive(text, text[:-1]) * unit if unit else _positive(text, text)


def _positive(text: str, digits: str) -> int:
    # int() alone would take " 1", "+1", "1_0" and Arabic digits. From 3.11 it refuses more than 4300 digits.
    if not (digits.isascii() and digits.isdigit()):
        raise argparse.ArgumentTypeError(f"not a positive whole number: {quote(text)}")
    digits = digits.lstrip("0")
    if not digits:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {quote(text)}")
    return int(digits) if len(digits) < 19 else sys.maxsize


def clamp(wanted: int, limit: int, what: str) -> tuple[int, str]:
    """(``wanted`` but at most ``limit``, a note for the user or ""); ``what`` is as in "workers"."""
    if wanted <= limit:
        return wanted, ""
    return limit, f"note: {what}: {wanted} is more than {limit}, using {limit}"


# --- standard descriptors -----------------------------------------------------------------------------------


class OutputError(OSError):
    """Standard output could not be written: told apart, since EPIPE here is how a pipeline ends, EPIPE from a
    worker a fault."""


class Output:
    """Standard output as bytes, buffered. A failure is an OutputError, and is raised again at each later use,
    so that nobody can lose it. With a ``stop_flag`` (installed), waiting for a slow reader ends in
    Interrupted too.

    Not an io.BufferedWriter: from 3.13 those print a traceback when they are collected with bytes that could
    not be written.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pending = bytearray()
        self._failure: OutputError | None = None
        self.used = False
        self.stop_flag: StopFlag | None = None

    def write(self, data: bytes) -> int:
        """Takes all of ``data``; returns its length."""
        self.used = True
        self._pending += data
        if len(self._pending) >= 1 << 16:
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Everything written so far is with the kernel when this returns."""
        if self._failure is not None:
            raise self._failure
        try:
            self._drain()
        except OSError as exc:
            self._failure = OutputError(exc.errno, exc.strerror)
            raise self._failure from exc
        finally:
            self._pending.clear()

    def _drain(self) -> None:
        if self.stop_flag is None:
            return _write_all(self._descriptor, self._pending)
        import select

        # A handler that only sets a flag does not end a write(2) to a pipe that nobody empties (PEP 475), so
        # wait for room and the flag both. Where there is room, PIPE_BUF bytes never block (pipe(7)).
        for start in range(0, len(self._pending), select.PIPE_BUF):
            select.select([self.stop_flag], [self._descriptor], [])
            self.stop_flag.check()
            _write_all(self._descriptor, self._pending[start : start + select.PIPE_BUF])

    def finish(self) -> None:
        """Flush, and ask for what only close(2) tells (a full disk or a quota on NFS): of a duplicate, since
        number 1 must never become free for another file."""
        self.flush()
        try:
            os.close(os.dup(self._descriptor))
        except OSError as exc:
            raise OutputError(exc.errno, exc.strerror) from exc


class _TextOutput:
    def write(self, text: str) -> None:
        stdout().write(text.encode("utf-8", "surrogateescape"))


_STDOUT = Output(1)


def stdout() -> Output:
    """The stream for data that was asked for; what goes through it is checked by ``run`` before the status is
    0."""
    return _STDOUT


def _write_all(descriptor: int, data: bytes | bytearray) -> None:
    view = memoryview(bytes(data))
    while view:
        view = view[os.write(descriptor, view) :]


def _fill_standard_descriptors() -> None:
    """Give each closed descriptor of 0 to 2 to /dev/null: else a file that we open gets number 2, and the
    next message is written into it.

    Opened the wrong way round, as gnulib's stdopen does: reading from a closed stdin and writing to a closed
    stdout still fail with EBADF, which is how it is remembered that they were closed.
    """
    for descriptor, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(descriptor)
        except OSError:  # EBADF is the only error that fstat(2) has for a number
            os.set_inheritable(os.open(os.devnull, mode), True)  # the lowest free number is this one


# --- messages and exit statuses -----------------------------------------------------------------------------


def say(program: str, message: str) -> None:
    """``PROGRAM: MESSAGE`` as one line on stderr, in one write. Never raises; control characters are
    escaped."""
    _write_stderr(f"{program}: {_printable(message)}\n")


def _printable(message: str) -> str:
    # Also U+0080 to U+009F: some terminals obey them. Undecodable bytes (surrogates) go out as they came.
    return "".join(c if c.isprintable() or "\udc80" <= c <= "\udcff" else ascii(c)[1:-1] for c in message)


def _write_stderr(text: str) -> None:
    try:
        data = os.fsencode(text)
    except UnicodeEncodeError:  # an ASCII locale without UTF-8 mode, or a surrogate that came from no name
        data = text.encode("ascii", "backslashreplace")
    try:
        _write_all(2, data)
    except OSError:
        pass  # stderr is full or gone: there is no place left to report to, and the exit status still tells


def run(program: str, body: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Call ``body(argv)`` (sys.argv[1:] if None) and return the exit status for what became of it.

    - its own return value, or the status that the parser exits with;
    - 1 and a line on stderr for a CopyArgumentError, UnreadableEntries, OSError or a bug of ours (whose
      traceback is shown if FASTCP_DEBUG=1 is in the environment);
    - 1 where ``stdout()`` was used and is full or closed; without a line if its reader is gone (EPIPE), as
      that is how pipelines end;
    - stopping.Interrupted and KeyboardInterrupt: does not return, the process dies of that signal, so that a
      shell sees it and stops its loop.
    """
    try:
        _fill_standard_descriptors()
        status = _status(body, sys.argv[1:] if argv is None else argv)
        if _STDOUT.used:
            _STDOUT.finish()
        return status
    except BaseException as exc:
        signum = _signal_of(exc)
        if signum:
            return _die(signum)
        if not isinstance(exc, Exception):
            raise
        _flush_quietly()
        explain(program, exc)
        return 1


def _status(body: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    try:
        return body(argv)
    except SystemExit as exc:  # how argparse leaves after --help or an error: a status like any other
        if isinstance(exc.code, int):
            return exc.code
        if exc.code is None:
            return 0
        raise


def _signal_of(exc: BaseException) -> int:
    from mlperf_common.fileio.stopping import Interrupted

    if isinstance(exc, Interrupted):
        return int(exc.signum)
    return int(signal.SIGINT) if isinstance(exc, KeyboardInterrupt) else 0


def _die(signum: int) -> int:
    signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signum])
    os.kill(os.getpid(), signum)
    return 128 + signum  # reached only where the default action does not end us


def _flush_quietly() -> None:
    try:
        if _STDOUT.used:
            _STDOUT.flush()
    except OSError:
        pass  # already on the way to status 1, with a line about the first failure


def explain(program: str, exc: Exception) -> None:
    """Say what went wrong, on stderr; under FASTCP_DEBUG=1 with the traceback."""
    if os.environ.get("FASTCP_DEBUG") == "1":
        import traceback

        _write_stderr(traceback.format_exc())
    for line in lines_of(exc):
        say(program, line)


def lines_of(exc: Exception) -> list[str]:
    """What there is to say of an exception, line by line."""
    from mlperf_common.fileio.refusals import CopyArgumentError, UnreadableEntries

    if isinstance(exc, (CopyArgumentError, UnreadableEntries)):
        return exc.lines
    if isinstance(exc, OutputError):
        return [] if exc.errno == errno.EPIPE else [f"cannot write to standard output: {exc.strerror}"]
    if isinstance(exc, OSError) and exc.strerror:
        return [": ".join([quote(os.fsdecode(name)) for name in _names(exc)] + [exc.strerror])]
    return [f"internal error: {type(exc).__name__}: {exc} (FASTCP_DEBUG=1 shows where)"]


def _names(exc: OSError) -> list[Any]:
    return [name for name in (exc.filename, exc.filename2) if isinstance(name, (str, bytes))]
