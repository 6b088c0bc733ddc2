# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""--help, the man pages and the bash completion: of one mind with the option tables, and as a person meets them."""

# Takes about 10 s
from __future__ import annotations

import os
import re
from typing import List

import manuals
import support
from support import ROOT, TestCase, needs, needs_root, run_tool, slow

SCREEN = 52  # lines of the longest help


class Files(TestCase):
    def test_they_are_those_of_the_option_tables(self) -> None:
        for path, text in manuals.files().items():
            with self.subTest(path), open(os.path.join(ROOT, path), encoding="utf-8") as stream:
                self.assertEqual(stream.read(), text, "python3 tests/manuals.py makes it anew")

    @needs("man")
    def test_man_shows_every_option_and_has_nothing_to_complain_of(self) -> None:
        for tool in support.TOOLS:
            with self.subTest(tool):
                path = os.path.join(ROOT, "client/man/%s.1" % tool)
                words = ["man", "--warnings", "-E", "ascii", "-l", path]
                done = support.run(words, env={"MANWIDTH": "80", "MANPAGER": "cat", "LC_ALL": "C"}, expect=0)
                self.assertEqual(done.stderr, "")
                for option in manuals.parser_of(tool)._option_string_actions:
                    self.assertRegex(done.stdout, r"(?m)^ {7}(.*, )?%s\b" % re.escape(option))

    def complete(self, line: str) -> List[str]:
        """What bash offers for a command line, the cursor at its end."""
        words = [word for word in re.split(r"( |=)", line) if word not in ("", " ")] + ([""] if line[-1] in " " else [])
        script = (
            'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); compopt() { :; }; "_$1"; '
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        path = os.path.join(ROOT, "client/completion", words[0])
        return support.run(["bash", "-c", script, "bash", path, *words], expect=0).stdout.split()

    def test_completion_by_bash(self) -> None:
        for line, wanted in {
            "fastcp --verb": ["--verbose"],
            "fastcp --no-d": ["--no-dereference"],
            "fastcp --direct=": ["auto", "always", "never"],
            "fastcp --direct=a": ["auto", "always"],
            "fastcp --progress ": ["auto", "bar", "plain", "none"],
            "fastcp -r sr": [],
            "fastmd5 --comp": ["--compare"],
            "fastmd5 --distributed=": ["job"],
            "fastcp --distributed=n": ["node"],
            "dropcache --sk": ["--skip-special"],
        }.items():
            with self.subTest(line):
                self.assertEqual(self.complete(line), wanted)
        offered = self.complete("fastcp -")
        self.assertEqual(sorted(offered), sorted(manuals.parser_of("fastcp")._option_string_actions))


class Help(TestCase):
    def test_it_fits_a_screen(self) -> None:
        for tool in support.TOOLS:
            with self.subTest(tool):
                lines = run_tool(tool, "--help", expect=0).stdout.splitlines()
                self.assertLessEqual(len(lines), SCREEN)
                self.assertLess(max(map(len, lines)), 80)
                options = [line for line in lines if re.match(r"  -", line)]
                self.assertEqual(len(options), len(manuals.parser_of(tool)._actions))  # a line each
                for line in options:
                    self.assertRegex(line, r"^  -\S.* [^-\s]\S*")

    def test_it_is_grouped(self) -> None:
        text = run_tool("fastcp", "--help", expect=0).stdout
        found = re.findall(r"(?m)^([a-z].*):$", text)
        self.assertEqual(found[1:3], ["what is copied", "what exists already, and what is kept"])
        self.assertGreaterEqual(len(found), 7)


class NextStep(TestCase):
    """An error says what to do, where that is known."""

    def test_what_a_refusal_suggests(self) -> None:
        self.make("s", {"d": {"f": b"1"}, "f": b"2", "pipe": support.Fifo()})
        self.make("d", {"f": b"old"})
        for words, step in (
            (["s/d", "e"], "-r not specified"), (["s/f", "d"], "(-f replaces it)"),
            (["-r", "s", "e"], "--skip-special"), (["--option", "s", "e"], "Try 'fastcp --help'"),
            (["-r", "--manifest", "d/f", "s/d", "e"], "(-f replaces it)"),
        ):  # fmt: skip
            with self.subTest(words=words):
                status = 2 if "--option" in words else 1
                self.assertIn(step, run_tool("fastcp", *words, cwd=self.tmp, expect=status).stderr)

    @needs_root
    def test_no_inodes(self) -> None:
        self.make("s", {f"f{i}": b"1" for i in range(40)})
        with support.mounted("tmpfs", 8 << 20, "nr_inodes=20") as place:
            done = run_tool("fastcp", "-r", self.path("s"), os.path.join(place, "d"), expect=1)
        self.assertIn("stopped early: No space left on device (no inodes are left: df -i)\n", done.stderr)
        with support.mounted("tmpfs", 1 << 20) as place:
            self.make("big", support.Random(2 << 20, seed=1))
            done = run_tool("fastcp", self.path("big"), os.path.join(place, "d"), expect=1)
        self.assertIn("stopped early: No space left on device\n", done.stderr)

    @slow
    @needs("strace")
    def test_a_quota(self) -> None:
        self.make("s", {"a": b"1", "b": b"2"})
        under = support.strace_inject(self.path("log"), "pwritev2", "error=EDQUOT")
        done = run_tool("fastcp", "-n", "1", "-r", "s", "d", cwd=self.tmp, under=under)
        self.assertIn("stopped early: Disk quota exceeded (quota -s shows yours", done.stderr)


if __name__ == "__main__":
    support.main()
