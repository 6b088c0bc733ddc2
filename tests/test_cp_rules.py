#!/usr/bin/env python3
# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What goes where: each rule, run with the real `cp -rL` and with fastcp on the same tree.

Three tables: where both succeed and must leave the same, where both refuse and fastcp must leave everything untouched,
and where fastcp differs on purpose. The first two are also the check that this cp is the cp we mean.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from typing import Any, Dict, List, Sequence, Tuple

import cpmodel
import support
from support import Dir, Fifo, File, Link, TestCase, needs, needs_nobody, needs_root, slow

SRC = {"f": b"f\n", "sub": {"g": b"g\n", "deep": {"h": b""}}, "empty": {}, "lf": Link("f"), "ld": Link("sub"),
       "out": Link("../other/o")}
OTHER = {"o": b"outside\n", "n": {"p": b"p\n"}}


def tree(**more: Any) -> Dict[str, Any]:
    """A working directory with a tree to copy, something that it links to, and what a case needs besides."""
    return {"src": SRC, "other": OTHER, **more}


FILES = {"a": b"a\n", "b": b"b\n"}

# Arguments after `-L` for both, in a tree: both succeed and leave the same.
SAME: List[Tuple[Dict[str, Any], Sequence[str]]] = [
    # A tree to a name, or into a directory.
    (tree(), ["-r", "src", "new"]),
    (tree(), ["-R", "src/", "new"]),
    (tree(), ["-r", "src", "new/"]),
    (tree(), ["-r", "src", "new//"]),
    (tree(), ["-r", "src/.", "new"]),
    (tree(), ["-r", "src/.", "new/"]),
    (tree(), ["-r", "./src", "./new"]),
    (tree(), ["--recursive", "src/sub/..", "new"]),
    (tree(e={}), ["-r", "src", "e"]),
    (tree(e={}), ["-r", "src/", "e"]),
    (tree(e={}), ["-r", "src///", "e/"]),
    (tree(e={}), ["-r", "src", "e/new"]),
    (tree(e={}), ["-r", "src", "e/../new"]),
    (tree(e={"src": {"z": b"z", "sub": {"y": b""}}}), ["-r", "src", "e"]),
    (tree(e={"sub": {}}), ["-r", "src/sub", "e"]),
    # Its contents.
    (tree(e={"z": b""}), ["-r", "src/.", "e"]),
    (tree(e={"z": b""}), ["-r", "src/./", "e"]),
    (tree(e={}), ["-r", "src/sub/..", "e"]),
    (tree(e={}), ["-r", "src/sub/../", "e"]),
    (tree(e={}), ["-r", "src/sub/../.", "e"]),
    (tree(e={}), ["-rT", "src", "e"]),
    (tree(e={}), ["-r", "-T", "src/", "e"]),
    (tree(e={}), ["-r", "--no-target-directory", "src", "e/new"]),
    (tree(e={}), ["-r", "src/sub/.", "src/empty", "other", "e"]),
    # Several sources, and -t.
    ({**FILES, "e": {}}, ["a", "b", "e"]),
    ({**FILES, "e": {}}, ["a", "b", "e/"]),
    ({**FILES, "e": {}}, ["-t", "e", "a", "b"]),
    ({**FILES, "e": {}}, ["--target-directory=e", "a", "b"]),
    ({**FILES, "e": {}}, ["a", "b", "-t", "e"]),
    ({**FILES, "e": {}}, ["-r", "a", "b", "e"]),
    (tree(a=b"a", e={}), ["-r", "a", "src", "other/o", "e"]),
    (tree(e={}), ["-r", "src", "other", "-t", "e/"]),
    # A file to a name.
    (FILES, ["a", "new"]),
    (FILES, ["-T", "a", "new"]),
    (FILES, ["./a", ".//new"]),
    (FILES, ["-f", "a", "new"]),
    ({**FILES, "d": {}}, ["a", "d/../new"]),
    # Links: followed in the sources, and in DEST where the operand is one.
    (tree(), ["src/lf", "new"]),
    (tree(e={}), ["src/lf", "src/out", "e"]),
    (tree(), ["-r", "src/ld", "new"]),
    (tree(e={}), ["-r", "src/ld", "e"]),
    (tree(e={}), ["-r", "src/ld/.", "e"]),
    (tree(e={}), ["-r", "src/ld/..", "e"]),
    (tree(e={}, l=Link("e")), ["-r", "src", "l"]),
    (tree(e={}, l=Link("e")), ["-r", "src/.", "l"]),
    (tree(e={}, l=Link("e")), ["-rT", "src", "l/"]),
    (tree(e={}, l=Link("e")), ["-r", "src", "other", "l"]),
    (tree(e={}, l=Link("e")), ["-r", "-t", "l", "src"]),
    (tree(e={}, l=Link("e")), ["-r", "src", "l/new"]),
    (tree(e={"x": {}}, l=Link("e/x")), ["-r", "src", "l/../new"]),
    (tree(w={"l": Link("../src/sub")}), ["-r", "w/l/..", "new"]),
    (tree(w={"l": Link("../src/sub")}), ["-r", "src/sub", "w/l/../new"]),
    ({"d": {"a": {"l": Link("../b")}, "b": {"f": b""}, "c": Link("b")}}, ["-r", "d", "new"]),
    # Into its own parent, which is not into itself.
    (tree(), ["-r", "src/sub", "."]),
    (tree(), ["-r", "src/sub", "src/again"]),
    (tree(), ["-r", "src/sub/.", "src"]),
    (tree(), ["-r", "src/sub/deep", "src", "other"]),
    # Names that look like something else.
    ({"...": {"..f": b"1"}, "..d": {"f": b"2"}, "e": {}}, ["-r", "...", "..d", "e"]),
    ({"-r": b"1", "--": b"2", "-": b"3", "e": {}}, ["--", "-r", "--", "-", "e"]),
    ({"-": b"1"}, ["-", "new"]),
    ({"a b": {"c\nd": b"1"}, "*": b"2", "e": {}}, ["-r", "a b", "*", "e"]),
]

# The same for requests that both refuse, and what cp's message is about.
REFUSED: List[Tuple[Dict[str, Any], Sequence[str], str]] = [
    (tree(), ["-r", "src", "no/new"], "create"),
    (tree(), ["-r", "src", "new/."], "create"),
    (tree(), ["-r", "src", "new/.."], "create"),
    (tree(), ["-r", "src", ""], "create"),
    (tree(), ["-rT", "src", ""], "create"),
    (FILES, ["a", "new/"], "create"),
    (FILES, ["a", "new/."], "create"),
    (FILES, ["-T", "a", "new/"], "create"),
    (FILES, ["a", "no/new"], "create"),
    (FILES, ["a", ""], "create"),
    ({**FILES, "l": Link("no")}, ["a", "l/x"], "create"),
    (FILES, ["a", "b/"], "stat"),
    (FILES, ["a", "b/new"], "stat"),
    (FILES, ["a", "n" * 256], "stat"),
    (FILES, ["a/", "new"], "stat"),
    (FILES, ["a/.", "new"], "stat"),
    (FILES, ["", "new"], "stat"),
    (FILES, ["-r", "", "new"], "stat"),
    ({"e": {}}, ["-r", "", "e"], "stat"),
    ({"e": {}}, ["-rT", "", "e"], "stat"),
    (FILES, ["missing", "new"], "stat"),
    ({"l": Link("no")}, ["-r", "l", "new"], "stat"),
    ({"l": Link("l")}, ["l", "new"], "stat"),
    ({"e": {}}, ["missing", "no", "e"], "stat"),
    (FILES, ["a", "b", "new"], "target"),
    (FILES, ["a", "b", ""], "target"),
    (FILES, ["a", "missing", "b"], "target"),
    (FILES, ["-t", "new", "a"], "target"),
    (FILES, ["-t", "", "a"], "target"),
    (FILES, ["-t", "b", "a"], "target"),
    (FILES, ["--target-directory=", "a"], "target"),
    (tree(), ["-r", "src", "other", "new"], "target"),
    (tree(), ["src", "new"], "omitted"),
    (tree(), ["src/.", "other", "."], "omitted"),
    (tree(), ["-f", "/", "new"], "omitted"),
    (tree(x=b""), ["-r", "src", "x"], "file in the way"),
    (tree(x=b""), ["-rf", "src", "x"], "file in the way"),
    (tree(x=b""), ["-rT", "src", "x"], "file in the way"),
    (tree(e={"src": b""}), ["-rf", "src", "e"], "file in the way"),
    (tree(e={"src": {"sub": b""}}), ["-rf", "src", "e"], "file in the way"),
    (tree(e={"src": Link("../other")}), ["-rf", "src", "e"], "file in the way"),
    (tree(e={"sub": Link("../other")}), ["-r", "src/.", "e"], "file in the way"),
    (tree(e={"sub": Link("no")}), ["-r", "src/.", "e"], "file in the way"),
    (tree(l=Link("no")), ["-r", "src", "l"], "file in the way"),
    (tree(l=Link("other")), ["-rT", "src", "l"], "file in the way"),
    (tree(p=Fifo()), ["-r", "src", "p"], "file in the way"),
    ({**FILES, "e": {"a": {}}}, ["a", "e"], "directory in the way"),
    ({**FILES, "e": {"a": {}}}, ["-f", "a", "b", "e"], "directory in the way"),
    ({**FILES, "e": {}}, ["-T", "a", "e"], "directory in the way"),
    ({**FILES, "e": {}, "l": Link("e")}, ["-fT", "a", "l"], "directory in the way"),
    ({**FILES, "e": {"a": Link("../x")}, "x": {}}, ["-f", "a", "e"], "directory in the way"),
    (tree(e={"f": {}}), ["-rf", "src/.", "e"], "directory in the way"),
    (FILES, ["a", "a"], "same"),
    (FILES, ["-f", "a", "."], "same"),
    (FILES, ["a", "./a"], "same"),
    (FILES, ["-t", ".", "a"], "same"),
    ({**FILES, "l": Link("a")}, ["-f", "a", "l"], "same"),
    ({**FILES, "l": Link("a")}, ["-f", "l", "a"], "same"),
    ({**FILES, "l": Link("a"), "m": Link("a")}, ["-f", "l", "m"], "same"),
    ({**FILES, "e": {"a": Link("../a")}}, ["-f", "a", "e"], "same"),
    (tree(), ["-r", "src", "."], "same"),
    (tree(), ["-rf", "src", "."], "same"),
    (tree(), ["-rT", "src", "src"], "same"),
    (tree(), ["-r", "src/.", "src"], "same"),
    (tree(), ["-r", ".", "."], "same"),
    (tree(), ["-r", "src/..", "."], "same"),
    (tree(), ["-r", "src", "src"], "itself"),
    (tree(), ["-r", "src", "src/new"], "itself"),
    # Without a link that leads to DEST besides: whether cp then runs away depends on the order of the directory.
    ({"src": {"f": b"1", "sub": {"g": b""}}}, ["-r", "src/", "src/sub/new"], "itself"),
    ({"src": {"f": b"1", "sub": {"g": b""}}}, ["-rT", "src", "src/sub"], "itself"),
    ({"src": {"f": b"1", "sub": {"g": b""}}}, ["-r", "src/.", "src/sub"], "itself"),
    (tree(), ["-rf", "src/..", "src"], "itself"),
    (tree(), ["-rf", ".", "new"], "itself"),
    (tree(e={}), ["-r", "src/..", "e"], "itself"),
    (tree(w={"l": Link("../src/sub")}), ["-r", "src", "w/l/../new"], "itself"),
    (tree(l=Link("src")), ["-r", "src", "l"], "itself"),
    ({"d": {"l": Link(".")}}, ["-r", "d", "new"], "cycle"),
    ({"d": {"s": {"l": Link("..")}}}, ["-r", "d", "new"], "cycle"),
    ({"d": {"l": Link("l"), "m": Link("no")}}, ["-r", "d", "new"], "stat"),
    ({"x": {"a": b"1"}, "y": {"a": b"2"}, "e": {}}, ["x/a", "y/a", "e"], "twice"),
    ({"x": {"a": b"1"}, "y": {"a": b"2"}, "e": {}}, ["-f", "x/a", "y/a", "e"], "twice"),
    ({"x": {"a": b"1"}, "y": {"a": Link("../x/a")}, "e": {}}, ["x/a", "y/a", "e"], "twice"),
    ({**FILES, "l": Link("no")}, ["a", "l"], "exists"),
]


class RulesTestCase(TestCase):
    def both(self, literal: Any, arguments: Sequence[str], umask: int = 0o022) -> Tuple[Any, Any, bytes, bytes]:
        """cp's result, fastcp's, and the directories in which they ran, which were alike."""
        number = len(os.listdir(self.tmp)) // 2
        sides = [os.fsencode(self.make(f"{name}{number}", {"w": literal})) for name in ("cp", "fastcp")]
        for side in sides:
            cpmodel.age(side)
        words = [os.fsencode(word) for word in arguments]
        cp = cpmodel.run_cp(words, os.path.join(sides[0], b"w"), umask)
        self.before = cpmodel.photograph(sides[1])
        ours = cpmodel.run_fastcp(words, os.path.join(sides[1], b"w"), umask)
        return cp, ours, sides[0], sides[1]

    def assert_untouched(self, side: bytes) -> None:
        self.assertEqual(cpmodel.difference(cpmodel.photograph(side), self.before), "")

    def assert_same(self, literal: Any, arguments: Sequence[str], umask: int = 0o022) -> None:
        cp, ours, theirs, here = self.both(literal, arguments, umask)
        self.assertEqual((cp.returncode, cp.stderr), (0, ""), cp)
        self.assertEqual((ours.returncode, ours.stdout_bytes), (0, b""), ours)
        self.assertEqual(cpmodel.difference(cpmodel.contents(here), cpmodel.contents(theirs)), "")

    def assert_refused(self, literal: Any, arguments: Sequence[str], about: str, cp_too: bool = True) -> Any:
        cp, ours, _, here = self.both(literal, arguments)
        if cp_too:
            self.assertEqual((cp.returncode, cpmodel.message_classes(cp)), (1, {about}), cp)
        self.assertEqual((ours.returncode, cpmodel.message_classes(ours)), (1, {about}), ours)
        self.assertEqual(ours.stdout_bytes, b"")
        self.assert_untouched(here)
        return ours


@slow
class LikeCp(RulesTestCase):
    def test_the_same_comes_out(self) -> None:
        for literal, arguments in SAME:
            with self.subTest(tree=literal, arguments=arguments):
                self.assert_same(literal, arguments)

    def test_both_refuse_and_fastcp_touches_nothing(self) -> None:
        for literal, arguments, about in REFUSED:
            with self.subTest(tree=literal, arguments=arguments):
                self.assert_refused(literal, arguments, about)

    def test_absolute_operands(self) -> None:
        for names in (["src", "new"], ["src/", "e"], ["src/.", "e"], ["src/ld", "e/new"]):
            with self.subTest(names=names):
                literal = tree(e={})
                number = len(os.listdir(self.tmp))
                sides = [self.make(f"{number}{name}", literal) for name in ("cp", "fastcp")]
                for side, run in zip(sides, (cpmodel.run_cp, cpmodel.run_fastcp)):
                    result = run([b"-r", *(os.fsencode(os.path.join(side, name)) for name in names)], b"/")
                    self.assertEqual(result.returncode, 0, result)
                self.assert_same_tree(sides[1], sides[0], modes=True)

    def test_the_root_goes_into_dest_and_not_above(self) -> None:
        self.make("w", {"e": {}, "f": b"x"})
        for source in ("/", "//", "/.", "/.."):
            before = cpmodel.photograph(os.fsencode(self.tmp))
            result = cpmodel.run_fastcp([b"-r", os.fsencode(source), b"e"], os.fsencode(self.path("w")))
            # A tree that DEST is in; nobody waits for a walk of the whole machine to learn that.
            self.assertEqual((result.returncode, cpmodel.message_classes(result)), (1, {"itself"}), result)
            self.assertEqual(cpmodel.photograph(os.fsencode(self.tmp)), before)

    def test_hard_links_are_the_same_file(self) -> None:
        for force in ([], [b"-f"]):
            for run in (cpmodel.run_cp, cpmodel.run_fastcp):
                top = self.make(f"{len(os.listdir(self.tmp))}", {"a": b"x", "e": {}})
                os.link(f"{top}/a", f"{top}/h")
                os.link(f"{top}/a", f"{top}/e/a")
                before = cpmodel.photograph(os.fsencode(top))
                for target in (b"h", b"e"):
                    result = run([*force, b"a", target], os.fsencode(top))
                    self.assertEqual((result.returncode, cpmodel.message_classes(result)), (1, {"same"}), result)
                self.assertEqual(cpmodel.photograph(os.fsencode(top)), before)


MODES = {"open": Dir({"f": File(b"1", 0o666), "x": File(b"2", 0o777), "d": Dir({}, 0o777)}, 0o777),
         "private": Dir({"f": File(b"3", 0o600), "g": File(b"", 0o640), "d": Dir({"f": b""}, 0o750)}, 0o700),
         "readonly": Dir({"f": File(b"4", 0o444), "n": File(b"5", 0o000), "d": Dir({"f": b""}, 0o555)}, 0o555),
         "odd": Dir({"setuid": File(b"6", 0o4755), "setgid": File(b"7", 0o2755), "w": File(b"8", 0o222),
                     "d": Dir({}, 0o2775)}, 0o711)}


class Modes(RulesTestCase):
    def test_new_entries_get_the_source_mode_less_the_umask(self) -> None:
        for umask in (0o000, 0o002, 0o022, 0o027, 0o077, 0o777, 0o277):
            with self.subTest(umask=f"{umask:03o}"):
                self.assert_same({"src": MODES}, ["-r", "src", "new"], umask)
                self.assert_same({"src": MODES["private"], "e": Dir({"private": Dir({}, 0o755)}, 0o700)},
                                 ["-r", "src/.", "e/private"], umask)

    def test_single_files(self) -> None:
        for mode in (0o644, 0o600, 0o444, 0o777, 0o000, 0o4755, 0o6777):
            with self.subTest(mode=f"{mode:04o}"):
                self.assert_same({"a": File(b"x", mode), "e": {}}, ["a", "e"])
                self.assert_same({"a": File(b"x", mode)}, ["a", "new"], 0o077)

    def test_directories_that_exist_keep_their_mode(self) -> None:
        self.assert_same({"src": Dir({"d": Dir({"f": b"1"}, 0o700)}, 0o711), "e": Dir({"d": Dir({}, 0o755)}, 0o750)},
                         ["-rT", "src", "e"])

    def test_a_setgid_parent_is_inherited(self) -> None:
        self.assert_same({"src": MODES, "e": Dir({}, 0o2775)}, ["-r", "src", "e"])
        self.assert_same({"src": MODES, "e": Dir({}, 0o2775)}, ["-r", "src", "e/new"], 0o077)

    ACLS = ("d:u::rwx,d:g::r-x,d:o::---", "d:u::rwx,d:g::rwx,d:o::r-x,d:u:12345:rwx,d:m::rwx")

    @needs("setfacl", "getfacl")
    def test_a_default_acl_rules_as_for_cp(self) -> None:
        # Not for directories that others may write: those cp makes without and changes afterwards, past the ACL.
        literal = {"private": MODES["private"], "readonly": MODES["readonly"], "f": File(b"", 0o666),
                   "x": File(b"", 0o777)}
        for acl in self.ACLS:
            for umask in (0o000, 0o022, 0o077):
                with self.subTest(acl=acl, umask=f"{umask:03o}"):
                    theirs, ours = (self.acls(run, literal, acl, umask) for run in (cpmodel.run_cp, cpmodel.run_fastcp))
                    self.assertEqual(ours, theirs)

    @needs("setfacl", "getfacl")
    def test_a_default_acl_rules_as_for_mkdir(self) -> None:
        def mkdirs(_: Any, cwd: bytes, umask: int) -> Any:
            before = os.umask(umask)
            try:
                for name in (b"e/src", b"e/src/d"):
                    os.mkdir(os.path.join(cwd, name), 0o777)
            finally:
                os.umask(before)
            return support.Result([], 0, b"", b"")

        for acl in self.ACLS:
            for umask in (0o000, 0o022, 0o077):
                with self.subTest(acl=acl, umask=f"{umask:03o}"):
                    literal = Dir({"d": Dir({}, 0o777)}, 0o777)
                    ours, expected = (self.acls(run, literal, acl, umask) for run in (cpmodel.run_fastcp, mkdirs))
                    self.assertEqual(ours, expected)

    def acls(self, run: Any, source: Any, acl: str, umask: int) -> str:
        """What getfacl says of a tree that `run` copied into a directory with that default ACL."""
        top = self.make(f"{len(os.listdir(self.tmp))}", {"src": source, "e": {}})
        done = subprocess.run(["setfacl", "-m", acl, f"{top}/e"], stderr=subprocess.PIPE, check=False)
        if done.returncode:
            self.skipTest(f"no ACLs here: {os.fsdecode(done.stderr)}")
        result = run([b"-r", b"src", b"e"], os.fsencode(top), umask)
        self.assertEqual(result.returncode, 0, result)
        listed = subprocess.run(["getfacl", "-RE", "e"], cwd=top, stdout=subprocess.PIPE, check=True).stdout
        return "\n\n".join(sorted(listed.decode().split("\n\n")))

    @needs_nobody
    def test_read_only_directories_as_an_ordinary_user(self) -> None:
        results = []
        for name in ("cp", "fastcp"):
            top = self.make(name, Dir({"src": {"readonly": MODES["readonly"], "private": MODES["private"]}}, 0o777))
            for full in cpmodel.entries(os.fsencode(top)):
                shutil.chown(full, support.NOBODY)
            os.chmod(f"{top}/src/readonly/n", 0o400)
            if name == "cp":
                support.run(["cp", "-rL", "src", "new"], cwd=top, user=support.NOBODY, expect=0)
            else:
                support.run_tool("fastcp", "-r", "src", "new", cwd=top, user=support.NOBODY, expect=0)
            results.append(support.read_tree(f"{top}/new", modes=True))
        self.assert_same_tree(results[1], results[0])


class Differences(RulesTestCase):
    """Where cp does the rest, or something else, and fastcp refuses or leaves more alone."""

    def test_what_cannot_be_done_whole_is_refused_whole(self) -> None:
        for literal, arguments, about in [
            ({**FILES, "e": {}}, ["a", "missing", "b", "e"], "stat"),
            ({**FILES, "e": {}}, ["-t", "e", "", "a"], "stat"),
            ({**FILES, "e": {}, "d": {}}, ["a", "d", "e"], "omitted"),
            ({"d": {"f": b"1", "l": Link("no")}, "e": {}}, ["-r", "d", "e"], "stat"),
            ({"d": {"f": b"1", "s": {"l": Link("..")}}, "e": {}}, ["-r", "d", "e"], "cycle"),
            ({**FILES, "e": {"a": {}}}, ["b", "a", "e"], "directory in the way"),
            ({"d": {"f": b"1", "s": {}}, "e": {"s": b""}}, ["-r", "d/.", "e"], "file in the way"),
        ]:
            with self.subTest(tree=literal, arguments=arguments):
                self.assert_refused(literal, arguments, about)

    def test_a_source_named_twice(self) -> None:
        for literal, arguments in [
            ({**FILES, "e": {}}, ["a", "a", "e"]),
            ({**FILES, "e": {}}, ["a", "./a", "e"]),
            ({"d": {"f": b""}, "e": {}}, ["-r", "d", "d/", "e"]),
            ({"d": {"f": b""}, "e": {}}, ["-r", "d/.", "d/.", "e"]),
        ]:
            with self.subTest(arguments=arguments):
                cp = self.both(literal, arguments)[0]
                self.assertEqual((cp.returncode, cpmodel.message_classes(cp)), (0, {"twice"}), cp)
                self.assert_refused(literal, arguments, "twice", cp_too=False)

    def test_sources_that_cp_merges(self) -> None:
        for literal, arguments in [
            ({"x": {"d": {"f": b"1"}}, "y": {"d": {"f": b"2"}}, "e": {}}, ["-r", "x/d", "y/d", "e"]),
            ({"x": {"d": {"f": b"1"}}, "y": {"d": {"g": b"2"}}, "e": {}}, ["-r", "x/d", "y/d", "e"]),
            ({"s": {"a": b"1"}, "a": b"2", "e": {}}, ["-r", "a", "s/.", "e"]),
            ({"s": {"a": b"1"}, "t": {"a": b"2"}, "e": {}}, ["-r", "s/.", "t/.", "e"]),
        ]:
            with self.subTest(arguments=arguments):
                self.assertEqual(self.both(literal, arguments)[0].returncode, 0)
                self.assert_refused(literal, arguments, "twice", cp_too=False)
                self.assert_refused(literal, ["-f", *arguments], "twice", cp_too=False)

    def test_a_file_and_a_directory_of_one_name(self) -> None:
        literal = {"x": {"a": {}}, "y": {"a": b"1"}, "e": {}}
        for sources in (["x/a", "y/a"], ["y/a", "x/a"]):
            self.assertEqual(self.both(literal, ["-r", *sources, "e"])[0].returncode, 1)
            self.assert_refused(literal, ["-r", *sources, "e"], "twice", cp_too=False)

    def test_existing_files_without_force(self) -> None:
        literal = {"src": {"f": b"1", "new": b"2", "s": {"g": b"3"}}, "e": {"f": b"0", "s": {"g": b""}, "z": b""}}
        ours = self.assert_refused(literal, ["-rT", "src", "e"], "exists", cp_too=False)
        self.assertEqual(len(ours.stderr.splitlines()), 2, ours)
        self.assertIn("'e/f'", ours.stderr)
        self.assertIn("'e/s/g'", ours.stderr)
        self.assert_refused({**FILES}, ["a", "b"], "exists", cp_too=False)
        self.assert_refused({**FILES, "e": {"a": b""}}, ["b", "a", "e"], "exists", cp_too=False)

    def test_twenty_existing_files_are_named_and_the_rest_counted(self) -> None:
        many = {f"f{n:02}": b"" for n in range(27)}
        ours = self.assert_refused({"src": many, "e": many}, ["-rT", "src", "e"], "exists", cp_too=False)
        lines = ours.stderr.splitlines()
        self.assertEqual((len(lines), lines[-1]), (21, "fastcp: ... and 7 more"), ours)

    def test_existing_files_with_force(self) -> None:
        literal = {"src": {"f": File(b"1", 0o755), "s": {"g": b"long" * 2000}, "h": b""},
                   "e": {"f": File(b"old and longer", 0o640), "s": {"g": File(b"", 0o400)}, "z": b"z"}}
        self.assert_same(literal, ["-rfT", "src", "e"])
        self.assert_same({**FILES}, ["-f", "a", "b"])
        self.assert_same({**FILES}, ["--force", "-T", "a", "b"])

    def test_a_replaced_file_leaves_its_other_links_alone(self) -> None:
        top = self.make("w", {"a": b"new", "b": File(b"old", 0o640)})
        os.link(f"{top}/b", f"{top}/other")
        result = cpmodel.run_fastcp([b"-f", b"a", b"b"], os.fsencode(top))
        self.assertEqual(result.returncode, 0, result)
        self.assert_same_tree(support.read_tree(top, modes=True),
                              {"a": b"new", "b": File(b"new", 0o640), "other": File(b"old", 0o640)})

    def test_a_link_at_dest_is_replaced_and_its_target_left_alone(self) -> None:
        for target in ("real", "nowhere", "l"):
            with self.subTest(target=target):
                literal = {"a": File(b"new", 0o644), "real": File(b"old", 0o600), "l": Link(target)}
                self.assert_refused(literal, ["a", "l"], "exists", cp_too=False)
                _, ours, _, here = self.both(literal, ["-f", "a", "l"])
                self.assertEqual(ours.returncode, 0, ours)
                self.assert_same_tree(os.fsdecode(here) + "/w", {**literal, "l": File(b"new", 0o644)}, modes=True)
                inside = {"src": {"l": b"new"}, "e": {"l": Link(target), "real": b"old"}}
                self.assert_refused(inside, ["-rT", "src", "e"], "exists", cp_too=False)
                _, ours, _, here = self.both(inside, ["-rfT", "src", "e"])
                self.assertEqual(ours.returncode, 0, ours)
                self.assert_same_tree(os.fsdecode(here) + "/w/e", {"l": b"new", "real": b"old"})

    def test_special_files_in_a_tree(self) -> None:
        literal = {"src": {"f": b"1", "s": {"p": Fifo()}, "l": Link("s/p"), "n": Link("/dev/null")}}
        cp, ours, _, here = self.both(literal, ["-r", "src", "new"])
        self.assertEqual((cp.returncode, ours.returncode), (0, 1))
        self.assertEqual(cpmodel.message_classes(ours), {"special"})
        for name, kind in [("src/s/p", "FIFO"), ("src/l", "FIFO"), ("src/n", "character device")]:
            self.assertIn(f"'{name}' is a {kind}", ours.stderr)
        self.assert_untouched(here)
        result = cpmodel.run_fastcp([b"-r", b"--skip-special", b"src", b"new"], os.path.join(here, b"w"))
        self.assertEqual(result.returncode, 0, result)
        self.assertIn("src/s/p", result.stderr)
        self.assert_same_tree(os.fsdecode(here) + "/w/new", {"f": b"1", "s": {}})

    def test_special_files_as_operands(self) -> None:
        top = self.make("w", {"p": Fifo(), "l": Link("p"), "a": b"x", "e": {}})
        before = cpmodel.photograph(os.fsencode(top))
        for arguments in (["p", "new"], ["l", "new"], ["-r", "p", "e"], ["a", "l", "e"], ["/dev/zero", "new"]):
            result = cpmodel.run_fastcp([os.fsencode(word) for word in arguments], os.fsencode(top))
            self.assertEqual((result.returncode, cpmodel.message_classes(result)), (1, {"special"}), result)
        self.assertEqual(cpmodel.photograph(os.fsencode(top)), before)

    def test_standard_input_as_a_source(self) -> None:
        self.make("a", b"content")
        fastcp = " ".join(support.command_line("fastcp"))
        for line, status in (
            (f"{fastcp} <(seq 100000) new", 1),  # a pipe is a FIFO, whatever its name
            (f"seq 9 | {fastcp} /dev/stdin new", 1),
            (f"{fastcp} /dev/stdin new <a", 0),
        ):
            with self.subTest(line):
                done = support.run(["bash", "-c", line], cwd=self.tmp)
                self.assertEqual(done.returncode, status, done)
                self.assertEqual(os.path.exists(self.path("new")), status == 0)
                self.assertEqual("is a FIFO" in done.stderr, status == 1)
        self.assert_same_tree(self.path("new"), b"content")

    def test_what_cp_and_others_have_and_we_have_not_is_no_option(self) -> None:
        source = self.make("s", {"a": b"x"})
        for option in ("--delete", "--backup", "--remove-destination", "-b=x", "--attributes-only", "--append", "-i"):
            with self.subTest(option):
                support.run_tool("fastcp", option, "-r", source, self.path("new"), expect=2)
                self.assertFalse(os.path.exists(self.path("new")))

    @needs_root
    def test_special_files_at_dest(self) -> None:
        null = support.Device("c", 1, 3)
        literal = {"a": b"x", "p": Fifo(), "null": null, "s": support.Socket(), "src": {"p": b"1"},
                   "e": {"p": Fifo(), "a": null}}
        top = self.make("w", literal)
        before = cpmodel.photograph(os.fsencode(top))
        for force in ([], ["-f"]):
            for arguments in (["a", "p"], ["a", "null"], ["a", "s"], ["-rT", "src", "e"], ["a", "e"]):
                result = cpmodel.run_fastcp([os.fsencode(word) for word in force + arguments], os.fsencode(top))
                self.assertEqual((result.returncode, cpmodel.message_classes(result)), (1, {"not regular"}), result)
        self.assertEqual(cpmodel.photograph(os.fsencode(top)), before)

    def test_the_null_device_is_not_replaced(self) -> None:
        top = self.make("w", {"a": b"x"})
        result = cpmodel.run_fastcp([b"-f", b"a", b"/dev/null"], os.fsencode(top))
        self.assertEqual((result.returncode, cpmodel.message_classes(result)), (1, {"not regular"}), result)
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/null").st_mode))

    def test_into_itself_by_a_link_where_cp_runs_away(self) -> None:
        for literal, arguments in [
            (tree(l=Link("src")), ["-r", "src", "l/new"]),
            (tree(l=Link("src")), ["-r", "l", "src"]),
            (tree(l=Link("src")), ["-r", "l", "src/new"]),
            (tree(e={"x": {"l": Link("../../src")}}), ["-r", "e", "src"]),
            (tree(e={"x": {"l": Link("../../src")}}), ["-r", "e/.", "src/new"]),
            (tree(e={"x": {"l": Link("../..")}}), ["-rf", "e", "src/sub"]),
            (tree(new={}, d={"l": Link("../new")}), ["-r", "d", "new"]),
            (tree(new={}, d={"l": Link("../new")}), ["-r", "d/.", "new"]),
        ]:
            with self.subTest(tree=literal, arguments=arguments):
                top = self.make(f"{len(os.listdir(self.tmp))}", literal)
                before = cpmodel.photograph(os.fsencode(top))
                result = cpmodel.run_fastcp([os.fsencode(word) for word in arguments], os.fsencode(top))
                classes = cpmodel.message_classes(result)
                self.assertEqual((result.returncode, bool(classes & {"itself", "cycle"})), (1, True), result)
                self.assertEqual(cpmodel.photograph(os.fsencode(top)), before)

    def test_sources_that_would_be_overwritten(self) -> None:
        literal = {"d": {"sub": {"s": b"1", "sub": {"s": b"2"}}}}
        self.assertEqual(self.both(literal, ["-r", "d/sub/.", "d"])[0].returncode, 0)
        for force in ([], ["-f"]):
            self.assert_refused(literal, ["-r", *force, "d/sub/.", "d"], "source", cp_too=False)

    def test_a_source_met_again_by_a_hard_link(self) -> None:
        for run, kept in ((cpmodel.run_cp, False), (cpmodel.run_fastcp, True)):
            top = self.make(f"{len(os.listdir(self.tmp))}", {"a": b"precious", "x": b"other", "e": {}})
            os.link(f"{top}/a", f"{top}/e/x")
            result = run([b"-f", b"x", b"a", b"e"], os.fsencode(top))
            self.assertEqual(support.read_tree(top)["a"] == b"precious", kept, result)
            if kept:
                self.assertEqual((result.returncode, cpmodel.message_classes(result)), (1, {"source"}), result)

    @needs_nobody
    def test_unlistable_directories_are_refused_whole(self) -> None:
        closed = {"f": b"1", "x": Dir({"g": b"2"}, 0o000), "y": Dir({"h": b""}, 0o311)}
        top = self.make("w", Dir({"src": closed}, 0o777))
        before = cpmodel.photograph(os.fsencode(top))
        result = support.run_tool("fastcp", "-r", "src", "new", cwd=top, user=support.NOBODY)
        self.assertEqual(result.returncode, 1, result)
        for name in ("src/x", "src/y"):
            self.assertIn(f"'{name}': Permission denied", result.stderr)
        self.assertEqual(cpmodel.photograph(os.fsencode(top)), before)

    @needs_nobody
    def test_force_on_an_unwritable_file_asks_the_directory(self) -> None:
        top = self.make("w", Dir({"a": b"new", "b": File(b"old", 0o444), "e": Dir({"b": File(b"old", 0o666)}, 0o755)},
                                 0o777))
        result = support.run_tool("fastcp", "-f", "a", "b", cwd=top, user=support.NOBODY)
        self.assertEqual((result.returncode, support.read_tree(top)["b"]), (0, b"new"), result)
        result = support.run_tool("fastcp", "-f", "a", "e/b", cwd=top, user=support.NOBODY)
        self.assertEqual((result.returncode, support.read_tree(top)["e"]), (1, {"b": b"old"}), result)


class Usage(RulesTestCase):
    """Requests that are wrong whatever the tree: exit status 2, where cp has 1."""

    def test_operands(self) -> None:
        top = os.fsencode(self.make("w", {**FILES, "e": {}}))
        before = cpmodel.photograph(top)
        for arguments, message in [
            ([], "missing file operand"),
            (["-r"], "missing file operand"),
            (["a"], "missing destination file operand after 'a'"),
            (["--", "a"], "missing destination file operand after 'a'"),
            (["it's"], "missing destination file operand after \"it's\""),
            (["-T"], "missing file operand"),
            (["-T", "a"], "missing destination file operand after 'a'"),
            (["-t", "e"], "missing file operand"),
            (["-T", "a", "b", "e"], "extra operand 'e'"),
            (["-T", "a", "b", "c", "d"], "extra operand 'c'"),
            (["-t", "e", "-T", "a"], "cannot combine --target-directory (-t) and --no-target-directory (-T)"),
        ]:
            with self.subTest(arguments=arguments):
                words = [os.fsencode(word) for word in arguments]
                cp, ours = cpmodel.run_cp(words, top), cpmodel.run_fastcp(words, top)
                self.assertEqual((cp.returncode, cp.stderr.splitlines()[0]), (1, f"cp: {message}"), cp)
                self.assertEqual((ours.returncode, ours.stderr.splitlines()[0]), (2, f"fastcp: {message}"), ours)
        self.assertEqual(cpmodel.photograph(top), before)

    def test_target_directory_twice(self) -> None:
        top = os.fsencode(self.make("w", {**FILES, "e": {}}))
        for words in ([b"-t", b"e", b"-t", b"e", b"a"], [b"-te", b"--target-directory=.", b"a"]):
            self.assertEqual(cpmodel.run_fastcp(words, top).returncode, 2)
        self.assertEqual(os.listdir(os.path.join(top, b"e")), [])


if __name__ == "__main__":
    support.main()
