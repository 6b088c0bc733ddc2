# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""--help, the man pages and the bash completion: of one mind with the option tables, and as a person meets them."""

# Takes about 10 s
from __future__ import annotations

import os
import pty
import re
import select
import time
from typing import Any, Dict, List

import manuals
import support
from support import CLIENT, ROOT, TestCase, needs, needs_root, run_tool, slow

from mlperf_common.distributed import meeting

with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as readme:
    README = readme.read()

SCREEN = 52  # lines of the longest help


def rendered(tool: str) -> str:
    """A page as man shows it, its paragraphs in lines of any length."""
    path = os.path.join(CLIENT, "man", tool + ".1")
    return support.run(["man", "-l", path], env={"MANWIDTH": "4000", "LC_ALL": "C.UTF-8"}, expect=0).stdout


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

    @needs("groff", "lexgrog")
    def test_pages_are_clean_roff_and_nothing_of_markdown(self) -> None:
        for tool in support.TOOLS:
            with self.subTest(tool):
                path = os.path.join(ROOT, "client/man/%s.1" % tool)
                for device in ("ascii", "utf8"):
                    done = support.run(["groff", "-man", "-ww", "-z", "-T" + device, path], expect=0)
                    self.assertEqual((done.stdout, done.stderr), ("", ""))
                text = rendered(tool)
                self.assertNotRegex(text, r"[|`]|\*\*[A-Z]|\\f")
                if "see below" in text:
                    self.assertIn("\nNOTES\n", text[text.rindex("see below") :])
                sections = re.findall(r'(?<=see ")([^"]*)" in README.md', text)
                self.assertEqual(len(sections), text.count('see "'))
                self.assertEqual([name for name in sections if f"# {name}\n" not in README], [])
                support.run(["lexgrog", path], expect=0)

    @needs("man")
    def test_defaults_and_choices_are_those_of_the_option_tables(self) -> None:
        for tool in support.TOOLS:
            entries = explained(tool)
            for action in manuals.parser_of(tool)._actions:
                name = action.option_strings[-1]
                with self.subTest(tool, option=name):
                    words = entries[name]
                    for choice in action.choices or ():
                        self.assertRegex(words, r"\b%s\b" % choice)
                    if action.nargs == 0 and action.const is not None and action.const == action.default:
                        self.assertTrue(words.endswith("; the default."), words)
                    elif type(action.default) is int:
                        size = action.default >> 20
                        self.assertTrue(words.endswith(f"; default: {f'{size}M' if size else action.default}."), words)
                    elif action.choices and action.default:
                        self.assertEqual(re.findall(r"(\w+)(?::[^;:]*)? \(default\)", words), [action.default])
                    elif name == "--rank-timeout":
                        seconds = (meeting.DEAD_SECONDS, meeting.DEAD_SECONDS_NFS)
                        self.assertIn("default: %d, and %d where they meet on NFS" % seconds, words)
                    elif name != "--rendezvous":
                        self.assertNotRegex(words, r"default: |\(default\)")


def explained(tool: str) -> Dict[str, str]:
    """The entries of a page, as man shows it, by the last name of each option."""
    found: Dict[str, str] = {}
    name = ""
    for line in rendered(tool).split("\nOPTIONS\n")[1].split("\nEXIT STATUS\n")[0].splitlines():
        tag = re.match(r" {7}(?:-\w(?: [A-Z]+)?, |--[\w-]+(?:=[A-Z]+)?, )*(--?[\w-]+)\S*(?: +(\S.*))?$", line)
        if tag:
            name = tag[1]
            found[name] = tag[2] or ""
        elif line.startswith(" " * 14):
            found[name] += line.strip()
    return found


class Shell:
    """A bash on a terminal of its own, in which completions are loaded; ``reply`` is what a line becomes."""

    PROMPT = b"what next? "

    def __init__(self, place: str, directory: str) -> None:
        support.make_tree(place, {
            "inputrc": b'set enable-bracketed-paste off\n"\\C-xi": insert-completions\n',
            "rc": "\n".join([
                f"PS1='{os.fsdecode(self.PROMPT)}'",
                *(f". {CLIENT}/completion/{tool}" for tool in support.TOOLS),
                *(f"{tool}() {{ printf '%s\\0' $# \"$@\" >&$ANSWERS; }}" for tool in support.TOOLS),
            ]).encode(),
        })  # fmt: skip
        self._terminal, there = pty.openpty()
        self._answers, writing = os.pipe()
        env = {"INPUTRC": os.path.join(place, "inputrc"), "ANSWERS": str(writing), "TERM": "dumb", "HISTFILE": None,
               "LC_ALL": "C.UTF-8"}  # fmt: skip
        self.process = support.start(
            ["bash", "--noprofile", "--rcfile", os.path.join(place, "rc"), "-i"],
            env=env, cwd=directory, stdin=there, stdout=there, stderr=there, pass_fds=[writing],
        )  # fmt: skip
        os.close(there)
        os.close(writing)
        self._wait()

    def _wait(self) -> bytes:
        """What the terminal shows up to the next prompt."""
        seen, end = b"", time.monotonic() + 20
        while not seen.endswith(self.PROMPT):
            ready, _, _ = select.select([self._terminal], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise AssertionError(f"no prompt: {seen!r}")
            seen += os.read(self._terminal, 1 << 16)
        return seen

    def reply(self, line: str) -> List[str]:
        """The arguments of a command line whose last word is replaced by all its completions."""
        os.write(self._terminal, os.fsencode(line) + b"\x18i\r")
        seen = self._wait()
        if seen.count(b"\n") != 1:
            raise AssertionError(f"more than the line is shown: {seen!r}")
        data = b""
        while data.count(b"\0") < 1 + int(data.split(b"\0")[0] or b"9999"):
            ready, _, _ = select.select([self._answers], [], [], 20)
            data += os.read(self._answers, 1 << 16) if ready else b"0\0no answer"
        return os.fsdecode(data).split("\0")[1:-1]

    def close(self) -> None:
        """The shell ends."""
        support.kill_group(self.process)
        self.process.wait()
        os.close(self._terminal)
        os.close(self._answers)


@needs("bash")
class Completion(TestCase):
    """Operands and values as readline itself puts them into the line."""

    shell: Any = None

    @classmethod
    def setUpClass(cls) -> None:
        place = support.make_temporary()
        cls.addClassCleanup(support.remove_tree, place)
        tree: Dict[str, Any] = dict.fromkeys(EVERYTHING, b"")
        here = os.path.join(place, "here")
        cls.shell = Shell(place, support.make_tree(here, {**tree, "dir": {"below": b""}, "other": {}}))
        cls.addClassCleanup(cls.shell.close)

    def completed(self, line: str) -> List[str]:
        """The completions of a line's last word: an option's value without the option."""
        before, last = line.rsplit(" ", 1)
        found = self.shell.reply(line)[len(before.split()) - 1 :]
        if found == [last] or not found:
            return []
        head = last[: last.find("=") + 1]
        return sorted([found[0][len(head) :], *found[1:]])

    def test_the_options_are_those_that_exist(self) -> None:
        for tool in support.TOOLS:
            with self.subTest(tool):
                wanted = sorted(manuals.parser_of(tool)._option_string_actions)
                self.assertEqual(self.completed(f"{tool} -"), wanted)

    def test_values_of_every_option(self) -> None:
        for tool in support.TOOLS:
            for name, action in manuals.parser_of(tool)._option_string_actions.items():
                if action.nargs == 0:
                    continue
                with self.subTest(tool, option=name):
                    wanted = values(action)
                    if name.startswith("--"):
                        self.assertEqual(self.completed(f"{tool} {name}="), wanted)
                    if action.nargs == "?":  # the next word is an operand
                        self.assertEqual(self.completed(f"{tool} {name} jo"), ["job.sh"])
                    else:
                        self.assertEqual(self.completed(f"{tool} x {name} "), wanted)
                    if len(name) == 2:
                        self.assertEqual(self.completed(f"{tool} -q{name[1]} "), wanted)

    def test_beginnings(self) -> None:
        for line, wanted in {
            "fastcp --verb": ["--verbose"],
            "fastcp --di": ["--direct", "--distributed"],
            "fastcp --direct=a": ["always", "auto"],
            "fastcp --progress p": ["plain"],
            "fastcp --preserve=mode,li": ["mode,links"],
            "fastcp --no-preserve links,x": ["links,xattr"],
            "fastcp -rft d": ["dir"],
            "fastcp --manifest fi": ["file"],
            "fastmd5 --comp": ["--compare"],
            "fastmd5 -qC o": ["other"],
            "dropcache --sk": ["--skip-special"],
        }.items():
            with self.subTest(line):
                self.assertEqual(self.completed(line), wanted)

    def test_operands_are_files(self) -> None:
        for tool in support.TOOLS:
            with self.subTest(tool):
                self.assertEqual(self.completed(f"{tool} "), EVERYTHING)
                self.assertEqual(self.completed(f"{tool} -q a"), ["a file", "auto.txt"])
                self.assertEqual(self.completed(f"{tool} -- -q"), ["-qodd"])
                self.assertEqual(self.completed(f"{tool} dir/b"), ["dir/below"])


EVERYTHING = ["-qodd", "a file", "auto.txt", "dir", "file", "job.sh", "other"]


def values(action: Any) -> List[str]:
    """What may follow an option, in the directory of the tests: nothing, where only the user knows it."""
    kinds = {"LIST": manuals.KEPT, "DIR": ["dir", "other"], "FILE": EVERYTHING}
    return sorted(action.choices or kinds.get(action.metavar, []))


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
