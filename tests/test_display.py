# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What is on the screen while the tools run: in tmux, on a bare pseudo-terminal, and in a batch job's log."""

# Takes about 25 s
from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import time
from typing import Callable, Iterator, List

import support
from support import Random, TestCase, needs, run_tool, slow

MIB = 1 << 20
SMALL = {f"f{i:02}": Random(300_000, seed=i) for i in range(40)}
TOOL = {name: os.path.join(support.ROOT, "client", name) for name in ("fastcp", "fastmd5")}


class Screen:
    """One window of a tmux server, in which a shell waits for commands."""

    def __init__(self, socket: str, name: str, columns: int, directory: str) -> None:
        self._words = ["tmux", "-S", socket, "-f", "/dev/null"]
        self._name = name
        shell = ["env", "PS1=$ ", "HISTFILE=", "bash", "--norc", "--noprofile"]
        size = ["-x", str(columns), "-y", "30"]
        self._tmux("new-session", "-d", "-s", name, *size, "-c", directory, shlex.join(shell))

    def _tmux(self, *words: str) -> str:
        return subprocess.run([*self._words, *words], check=True, timeout=20, stdout=subprocess.PIPE, text=True).stdout

    def type(self, words: List[str]) -> None:
        """Run a command; its own line is wiped first."""
        self._tmux("send-keys", "-t", self._name, "-l", "clear; %s; echo status $?" % shlex.join(words))
        self._tmux("send-keys", "-t", self._name, "Enter")

    def press(self, key: str) -> None:
        """Press a key."""
        self._tmux("send-keys", "-t", self._name, key)

    def resize(self, columns: int) -> None:
        """Make the window another width."""
        self._tmux("resize-window", "-t", self._name, "-x", str(columns))

    def lines(self) -> List[str]:
        """What is on the screen, but for empty lines and prompts; a wrapped line is as many as it takes."""
        shown = self._tmux("capture-pane", "-p", "-t", self._name).splitlines()
        return [line.rstrip() for line in shown if line.strip() not in ("", "$")]

    def wait(self, ready: Callable[[List[str]], bool]) -> List[str]:
        """The lines as soon as they are as wanted."""
        deadline = time.monotonic() + 20
        while True:
            lines = self.lines()
            if ready(lines):
                return lines
            if time.monotonic() > deadline:
                raise AssertionError("not on the screen in time; there is: %r" % lines)
            time.sleep(0.05)


def shows(pattern: str) -> Callable[[List[str]], bool]:
    """Whether a line is like this."""
    return lambda lines: any(re.search(pattern, line) for line in lines)


def ended(lines: List[str]) -> bool:
    return any(line.startswith("status ") for line in lines)


@needs("tmux")
class InTmux(TestCase):
    @contextlib.contextmanager
    def server(self) -> Iterator[str]:
        socket = self.path("tmux")
        try:
            yield socket
        finally:
            subprocess.run(["tmux", "-S", socket, "kill-server"], check=False, stderr=subprocess.DEVNULL)

    @slow
    def test_each_width_has_what_fits(self) -> None:
        self.make("s", SMALL)
        full = r"copying: \d+ %, [\d.]+ [KM]iB of 11.4 MiB, \d+ of 40 files, [\d.]+ [KM]iB/s, [\d.]+ s left"
        wanted = {
            40: r"copying: \d+ %(, [\d.]+ [KM]iB/s)?, [\d.]+ s left(, \d+ of 40 files)?",
            80: full,
            200: full,
        }
        with self.server() as socket:
            screens = {columns: Screen(socket, f"w{columns}", columns, self.tmp) for columns in wanted}
            for columns, screen in screens.items():
                screen.type([TOOL["fastcp"], "-r", "--bwlimit", "5M", "s", f"d{columns}"])
            for columns, screen in screens.items():
                lines = screen.wait(shows(r"copying: [1-9].* left"))
                self.assertEqual(len(lines), 1, lines)
                self.assertRegex(lines[0], "^%s$" % wanted[columns])
                self.assertLess(len(lines[0]), columns)
            for columns, screen in screens.items():
                text = "".join(screen.wait(ended))
                self.assertRegex(text, r"^fastcp: 40 files, 1 directory, 11.4 MiB ?in .*status 0$", columns)

    @slow
    def test_resized_in_the_middle(self) -> None:
        self.make("s", SMALL)
        with self.server() as socket:
            screen = Screen(socket, "w", 120, self.tmp)
            screen.type([TOOL["fastcp"], "-r", "--bwlimit", "4M", "s", "d"])
            screen.wait(shows(r"copying: [1-9].* left"))
            screen.resize(40)
            lines = screen.wait(lambda lines: len(lines) == 1 and shows(r"^copying: ")(lines))
            self.assertLess(len(lines[0]), 40)
            screen.resize(120)
            screen.wait(shows(r"copying: .* of 40 files"))
            screen.resize(40)
            self.assertRegex("".join(screen.wait(ended)), r"^fastcp: 40 files, 1 directory, .*status 0$")

    @slow
    def test_interrupted(self) -> None:
        self.make("s", SMALL)
        with self.server() as socket:
            screen = Screen(socket, "w", 80, self.tmp)
            screen.type([TOOL["fastcp"], "-r", "--bwlimit", "1M", "s", "d"])
            screen.wait(shows(r"copying: .* left"))
            screen.press("C-c")
            lines = screen.wait(shows("stopped by SIGINT"))
            self.assertEqual(lines[0], "fastcp: stopped by SIGINT; what is there so far is whole")
            self.assertFalse(shows("copying")(lines), lines)
            self.assert_no_leftovers(self.path("d"))


class OnATerminal(TestCase):
    """Everything that a tool writes to a pseudo-terminal."""

    def written(self, *words: str, interrupt: str = "") -> str:
        master, slave = pty.openpty()
        try:
            tool = self.start_tool(*words, cwd=self.tmp, stdin=slave, stdout=subprocess.DEVNULL, stderr=slave)
        finally:
            os.close(slave)
        got = b""
        deadline = time.monotonic() + 30
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while time.monotonic() < deadline:
                if select.select([master], [], [], 0.1)[0]:
                    got += os.read(master, 1 << 16)
                if interrupt and interrupt in got.decode():
                    tool.send_signal(signal.SIGINT)
                    interrupt = ""
        os.close(master)
        tool.wait(20)
        return got.decode()

    def percents(self, text: str) -> List[int]:
        return [int(number) for number in re.findall(r"(\d+) %", text)]

    @slow
    def test_one_huge_file(self) -> None:
        self.make("s", Random(12 * MIB, seed=1))
        text = self.written("fastcp", "-n", "4", "--bwlimit", "6M", "s", "d")
        shown = self.percents(text)
        self.assertEqual(shown, sorted(shown))
        self.assertGreater(len(set(shown)), 3)
        self.assertLessEqual(max(shown), 100)
        self.assertRegex(text, r"\r *\rfastcp: 1 file, 0 directories, 12.0 MiB in [^\n]*\r\n$")
        self.assertNotIn("\x1b", text)

    @slow
    def test_very_many_empty_files(self) -> None:
        self.make("s", {f"d{i}": {f"f{j:05}": b"" for j in range(1500)} for i in range(20)})
        text = self.written("fastcp", "-n", "2", "-r", "s", "d")
        self.assertRegex(text, r"copying: \d+ %, \d+ of 30000 files, \d+ files/s, [\d:.]+ (s|min) left")
        self.assertLessEqual(max(self.percents(text)), 100)

    @slow
    def test_each_tool(self) -> None:
        self.make("s", SMALL)
        run_tool("fastcp", "-r", "s", "c", cwd=self.tmp, expect=0)
        run_tool("fastcp", "-r", "--manifest", "m", "s", "e", cwd=self.tmp, expect=0)
        limit = ["--bwlimit", "8M"]
        for words, label in (
            (["fastmd5", *limit, "s"], "hashing"),
            (["fastmd5", *limit, "--compare", "s", "c"], "comparing"),
            (["fastmd5", *limit, "-c", "-C", "e", "m"], "checking"),
            (["fastcp", *limit, "-r", "--distributed", "s", "d"], "copying"),
            (["fastmd5", *limit, "--distributed", "s"], "hashing"),
        ):
            with self.subTest(words=words):
                text = self.written(*words)
                self.assertIn("\r%s: " % label, text)
                self.assertRegex(text, r"\r *\rfast[a-z0-9]+: [^\r\n]*\r\n$")

    @slow
    def test_options(self) -> None:
        self.make("s", SMALL)
        for number, (options, bar) in enumerate((
            ([], True), (["--progress=auto"], True), (["--progress=bar"], True), (["--progress=plain"], False),
            (["--progress=none"], False), (["-q"], False), (["-q", "--progress=bar"], False),
        )):  # fmt: skip
            with self.subTest(options=options):
                text = self.written("fastcp", "-r", "--bwlimit", "20M", *options, "s", f"d{number}")
                self.assertEqual("copying:" in text, bar, text)


class InALog(TestCase):
    def test_nothing_but_lines(self) -> None:
        self.make("s", SMALL)
        result = run_tool("fastcp", "-r", "--bwlimit", "10M", "s", "d", cwd=self.tmp, expect=0)
        self.assertRegex(result.stderr, r"^fastcp: 40 files, [^\n\r\x1b]*\n$")

    def test_a_line_that_updates_if_it_is_wanted(self) -> None:
        self.make("s", SMALL)
        words = ["fastcp", "-r", "--bwlimit", "10M", "--progress=bar", "s", "d"]
        self.assertIn("\rcopying: ", run_tool(*words, cwd=self.tmp, expect=0).stderr)

    def test_what_is_no_way(self) -> None:
        run_tool("fastcp", "--progress=often", "s", "d", cwd=self.tmp, expect=2)


if __name__ == "__main__":
    support.main()
