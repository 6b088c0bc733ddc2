#!/usr/bin/env python3
# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Any name that the kernel allows is copied, and can be printed: in every locale, in every kind of message.

A name is 1 to 255 bytes without NUL and slash, and neither `.` nor `..`.
"""

from __future__ import annotations

import os
import random
import subprocess
import unicodedata
from typing import Any, Dict, List, Sequence

import cpmodel
import support
from support import Dir, Fifo, File, Link, TestCase, needs, needs_nobody

from mlperf_common.fileio.words import quote

ALL_BYTES = [bytes([byte]) for byte in range(1, 256) if byte != ord("/")]
SINGLE = [byte for byte in ALL_BYTES if byte != b"."]
INSIDE = [b"n" + byte + b"m" for byte in ALL_BYTES]
LONG = [byte * 255 for byte in (b"x", b"\xff", b"\n", b"-", b"'", b" ", b".")]
LONG += [b"." + b"y" * 254, "é".encode() * 127]
ODD = [b"-r", b"--", b"-", b"--help", b"-n0", b"...", b"..a", b"it's", b"'", b"''", b'"', b'it\'s "q"', b"$HOME",
       b"`id`", b"%s", b"%", b"{}", b"\\", b"\\n", b"a\\", b"*", b"?", b"[a]", b"~", b"#", b"!x", b"it's !x",
       b"a\nb", b"\n", b"\r\n", b"tab\there", b"\x1b[31mred", b"\x07", b"\x7f", b"\xff", b"\xc3",
       b"\xc3\xa9", b"\xed\xb3\xbf", b"\xed\xa0\x80",
       b"\xf0\x9f\x98\x80", b"\xe2\x80\xae", b"\xc2\x85", b"\xc2\x9b", b"\xc2\xa0", b"\xe2\x80\xa8", b"\xef\xbb\xbf",
       b" ", b"  a  ", b"a ", b"\x01'\x02", b"0\n1", b"\n7", b"it's\n\xff", b".fastcp.0", b"con", b"a:b"]

NAMES = list(dict.fromkeys(SINGLE + ODD + LONG))
# For what takes a run each: those whose bytes mean something to somebody.
TELLING = list(dict.fromkeys([name for name in SINGLE if not name.isalnum() and name < b"\x84"] + ODD + LONG[:4]))

# As users have it, the C locale with and without Python's rescue of it, and one that Python does not know.
LOCALES: List[Dict[str, Any]] = [
    {"LC_ALL": "C.UTF-8"},
    {"LC_ALL": "C"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"},
    {"LC_ALL": "no_SUCH.locale", "LANG": None},
    {"LC_ALL": None, "LANG": None, "PYTHONUTF8": "1"},
]


def control_bytes(output: bytes) -> List[int]:
    """Bytes that a terminal might obey."""
    return sorted({byte for byte in output if (byte < 32 and byte != 10) or byte == 127})


def pasted(quoted: Sequence[bytes]) -> List[bytes]:
    """What bash takes quoted names for."""
    script = b"printf '%s\\0' " + b" ".join(quoted) + b"\n"
    done = subprocess.run(["bash"], input=script, stdout=subprocess.PIPE, env=dict(os.environ, LC_ALL="C"), check=True)
    return done.stdout.split(b"\0")[:-1]


class Copied(TestCase):
    def copy(self, *arguments: Any, expect: int = 0) -> support.Result:
        words = [os.fsencode(argument) for argument in arguments]
        result = cpmodel.run_fastcp(words, os.fsencode(self.tmp))
        self.assertEqual(result.returncode, expect, result)
        return result

    def test_every_byte_in_names_of_files_and_directories(self) -> None:
        names = SINGLE + INSIDE
        self.make("src", {"files": {name: name for name in names}, "dirs": {name: {name: b"1"} for name in SINGLE},
                          "empty": {name: {} for name in SINGLE},
                          "links": {name: Link(b"../files/" + name) for name in SINGLE}})
        self.copy("-r", "src", "new")
        copied = support.read_tree(self.path("new"))
        copied["links"] = {name: Link("../files/" + name) for name in copied["links"]}
        self.assert_same_tree(copied, self.path("src"))
        self.assert_same_tree(self.path("new/links"), {name: name for name in SINGLE})

    @support.slow
    def test_every_byte_in_operands(self) -> None:
        self.make(".", {"e": {}, "w": {name: name for name in SINGLE}})
        result = cpmodel.run_fastcp([b"-t", b"../e", b"--", *SINGLE], os.fsencode(self.path("w")))
        self.assertEqual(result.returncode, 0, result)
        self.assert_same_tree(self.path("e"), self.path("w"))

    @support.slow
    def test_every_byte_in_dest(self) -> None:
        self.make("a", b"x")
        for name in INSIDE:
            self.copy("-T", "--", "a", name)
        self.assert_same_tree(self.tmp, {"a": b"x", **{os.fsdecode(name): b"x" for name in INSIDE}})

    def test_odd_names(self) -> None:
        self.make("src", {name: {name: name, b"d" + name: {}} for name in ODD})
        self.copy("-r", "src", "new")
        self.assert_same_tree(self.path("new"), self.path("src"))

    def test_long_names_new_and_replaced(self) -> None:
        self.make("src", {name: {name: name} for name in LONG})
        self.copy("-r", "src", "new")
        self.assert_same_tree(self.path("new"), self.path("src"))
        self.make("old", {name: {name: File(b"old", 0o640)} for name in LONG})
        self.copy("-rfT", "src", "old")
        self.assert_same_tree(self.path("old"), self.path("src"))
        self.assertEqual(os.stat(os.path.join(os.fsencode(self.path("old")), LONG[0], LONG[0])).st_mode & 0o777, 0o640)
        self.assert_no_leftovers(self.tmp)

    @support.slow
    def test_every_byte_in_names_that_are_replaced(self) -> None:
        names = SINGLE + ODD
        self.make("src", {name: name for name in names})
        self.make("old", dict.fromkeys(names, b"old"))
        self.copy("-rfT", "src", "old")
        self.assert_same_tree(self.path("old"), self.path("src"))

    def test_names_that_are_too_long(self) -> None:
        self.make("a", b"x")
        for words in (["a", "n" * 256], ["n" * 256, "new"], ["a", "n" * 256 + "/x"]):
            result = self.copy(*words, expect=1)
            self.assertIn("File name too long", result.stderr)
        self.assert_same_tree(self.tmp, {"a": b"x"})

    def test_options_as_names(self) -> None:
        self.make(".", {"-r": b"1", "-f": {"--": b"2"}, "--": b"3", "-": b"4", "e": {}})
        self.copy("-r", "--", "-r", "-f", "--", "-", "e")
        self.assert_same_tree(self.path("e"), {"-r": b"1", "-f": {"--": b"2"}, "--": b"3", "-": b"4"})
        self.copy("-rt", "e", "--", "-r", "-f", expect=1)
        self.copy("--", "-r", "-n")
        self.assertEqual(support.read_tree(self.path("-n")), b"1")
        result = self.copy("-r", expect=2)
        self.assertIn("missing file operand", result.stderr)

    def test_twins_stay_apart(self) -> None:
        twins = [unicodedata.normalize(form, "é ﬁ Å").encode() for form in ("NFC", "NFD", "NFKC")]
        twins += [b"case", b"CASE", b"Case", b"a", b"a ", b"a.", b"\xc3", b"\xc3\xa9", b"e\xcc\x81"]
        self.assertEqual(len(set(twins)), len(twins))
        self.make("src", {name: {b"in": name} for name in twins})
        self.copy("-r", "src", "new")
        self.assert_same_tree(self.path("new"), self.path("src"))

    @support.slow
    def test_locales(self) -> None:
        self.make("src", {name: {name: name} for name in NAMES})
        self.make("pipes", {name: Fifo() for name in NAMES})
        for number, env in enumerate(LOCALES):
            with self.subTest(**{name: str(value) for name, value in env.items()}):
                operands = [os.path.join(b"src", name) for name in ODD]
                support.run_tool("fastcp", "-r", "src", f"new{number}", env=env, cwd=self.tmp, expect=0)
                self.assert_same_tree(self.path(f"new{number}"), self.path("src"))
                os.mkdir(self.path(f"e{number}"))
                support.run_tool("fastcp", "-rv", *operands, f"e{number}", env=env, cwd=self.tmp, expect=0)
                self.assert_same_tree(self.path(f"e{number}"), {name: {name: name} for name in ODD})
                result = support.run_tool("fastcp", "-rN", "src", "no", env=env, cwd=self.tmp, expect=0)
                self.assertEqual(result.stdout.count("\n"), 1 + 2 * len(NAMES))
                result = support.run_tool("fastcp", "-r", "pipes", "no", env=env, cwd=self.tmp, expect=1)
                self.assertEqual(result.stderr.count("\n"), 21, result)


class Printed(TestCase):
    def test_quoted_names_can_be_pasted(self) -> None:
        chance = random.Random(7)
        names = SINGLE + INSIDE + ODD + LONG
        alphabet = [b"'", b'"', b"\n", b"\xff", b"\x01", b"7", b"a", b"\\", b"$", b"!", b"\xc3\xa9", b" "]
        names += [b"".join(chance.choice(alphabet) for _ in range(chance.randint(1, 8))) for _ in range(2000)]
        self.assertEqual(pasted([os.fsencode(quote(os.fsdecode(name))) for name in names]), names)

    def test_quoted_names_are_one_printable_line(self) -> None:
        for name in SINGLE + INSIDE + ODD + LONG:
            shown = quote(os.fsdecode(name))
            self.assertTrue(shown.isprintable(), shown)
            self.assertIn(shown[0] + shown[-1], ("''", '""'))

    def test_as_cp_shows_them(self) -> None:
        # Not what is beyond ASCII, which looks as the locale has it; nor both a quote and an escape, where cp has
        # more quotes than it needs.
        names = [name for name in SINGLE + INSIDE + ODD
                 if max(name) < 128 and not (b"'" in name and (control_bytes(name) or b"\n" in name))]
        for start in range(0, len(names), 100):
            some = names[start:start + 100]
            cp = cpmodel.run_cp([b"--", *(b"no/" + name for name in some), b"."], os.fsencode(self.tmp))
            shown = [quote(os.fsdecode(b"no/" + name)) for name in some]
            expected = [f"cp: cannot stat {name}: No such file or directory\n" for name in shown]
            self.assertEqual(cp.stderr, "".join(expected))

    def test_refusals(self) -> None:
        for name in TELLING:
            top = self.make("w", {name: Fifo()})
            cwd = os.fsencode(top)
            for words, about in [
                ([b"--", name, b"new"], "special"),
                ([b"-r", b"--", b".", b"../new"], "special"),
                ([b"--", b"no/" + name, b"new"], "stat"),
                ([b"-T", b"--", b"/etc/passwd", name], "not regular"),
            ]:
                result = cpmodel.run_fastcp(words, cwd)
                self.assertEqual((result.returncode, cpmodel.message_classes(result)), (1, {about}), result)
                self.assertEqual(result.stderr_bytes.count(b"\n"), 1, result)
                self.assertEqual(control_bytes(result.stderr_bytes), [], result)
            support.remove_tree(top)

    def test_usage_errors(self) -> None:
        for name in [name for name in TELLING if not name.startswith(b"-")]:
            for words in ([name], [b"-T", b"a", b"b", name], [b"-n", name, b"a", b"b"], [b"-b", name, b"a", b"b"],
                          [b"--no-such" + name, b"a"], [b"--force=" + name, b"a"]):
                if words[0] in (b"-n", b"-b") and name.isdigit() and name != b"0":
                    continue
                result = cpmodel.run_fastcp(words, os.fsencode(self.tmp))
                self.assertEqual((result.returncode, result.stderr_bytes.count(b"\n")), (2, 2), result)
                self.assertEqual(control_bytes(result.stderr_bytes), [], result)

    def test_verbose_names_each_file_on_a_line(self) -> None:
        self.make("src", {name: {name: b"1"} for name in NAMES})
        result = cpmodel.run_fastcp([b"-rv", b"src", b"new"], os.fsencode(self.tmp))
        self.assertEqual((result.returncode, result.stdout_bytes), (0, b""), result)
        lines = result.stderr_bytes.split(b"\n")[:-2]  # the last one counts
        self.assertEqual(control_bytes(result.stderr_bytes), [])
        self.assertEqual(len(lines), len(NAMES))
        # What is pasted leads to the files, from the directory in which fastcp ran.
        words = pasted([line[len(b"fastcp: "):].replace(b" -> ", b" ") for line in lines])
        self.assertEqual(sorted(words[::2]), sorted(os.path.join(b"src", name, name) for name in NAMES))
        self.assertEqual(sorted(words[1::2]), sorted(os.path.join(b"new", name, name) for name in NAMES))

    def test_dry_run_prints_a_line_for_each_entry(self) -> None:
        self.make("src", {name: {name: b"1"} for name in NAMES})
        before = cpmodel.photograph(os.fsencode(self.tmp))
        result = cpmodel.run_fastcp([b"-rN", b"src", b"new"], os.fsencode(self.tmp))
        self.assertEqual(result.returncode, 0, result)
        self.assertEqual(control_bytes(result.stdout_bytes + result.stderr_bytes), [])
        self.assertEqual(cpmodel.photograph(os.fsencode(self.tmp)), before)
        lines = result.stdout_bytes.splitlines()
        top = os.fsencode(self.tmp)
        expected = {b"directory", b"file", top + b"/new"}
        for name in NAMES:
            inner = os.path.join(name, name)
            expected |= {top + b"/new/" + name, top + b"/new/" + inner, top + b"/src/" + inner}
        words = pasted([line.replace(b"(1 byte)", b"").replace(b" -> ", b" ") for line in lines])
        self.assertEqual(set(words), expected)
        self.assertEqual(len(lines), 1 + 2 * len(NAMES))

    @needs_nobody
    def test_files_that_fail_while_others_go_on(self) -> None:
        top = self.make("w", Dir({"src": {name: Dir({b"closed" + name[:200]: File(b"1", 0o000), b"open": b"2"}, 0o755)
                                          for name in NAMES}}, 0o777))
        for env in LOCALES[:3]:
            result = support.run_tool("fastcp", "-r", "src", "new", user=support.NOBODY, cwd=top, env=env)
            self.assertEqual(result.returncode, 1, result)
            self.assertEqual(control_bytes(result.stderr_bytes), [])
            lines = [line for line in result.stderr_bytes.splitlines() if line.startswith(b"fastcp: cannot copy ")]
            self.assertEqual(len(lines), len(NAMES), result)
            self.assertTrue(all(line.endswith(b": Permission denied") for line in lines), result)
            self.assert_same_tree(self.path("w/new"), {name: {"open": b"2"} for name in NAMES})
            support.remove_tree(self.path("w/new"))

    @needs_nobody
    @needs("bash")
    def test_unlistable_directories(self) -> None:
        top = self.make("w", Dir({"src": {name: Dir({}, 0o000) for name in ODD}}, 0o777))
        result = support.run_tool("fastcp", "-r", "src", "new", user=support.NOBODY, cwd=top)
        self.assertEqual((result.returncode, len(result.stderr.splitlines())), (1, 21), result)
        self.assertEqual(control_bytes(result.stderr_bytes), [])


if __name__ == "__main__":
    support.main()
