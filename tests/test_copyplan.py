#!/usr/bin/env python3
# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The plan: which rule refuses which request, what the walk finds, and the order and form of what is planned.

What the rules have in common with the real cp is in test_cp_rules and test_cp_random.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import re
import sys
from typing import Any, Dict, Iterator, List, Sequence, Tuple
from unittest import mock

import cpmodel
import support
from support import Dir, Fifo, Link, TestCase, needs, needs_nobody

from mlperf_common.fileio import copyplan
from mlperf_common.fileio.choosing import NotBelow
from mlperf_common.fileio.copyplan import (
    CopyArgumentError,
    CopyIntoItself,
    DestinationExists,
    DestinationNewer,
    DirectoryInTheWay,
    JustCreated,
    MissingOperand,
    MissingSource,
    NonDirectoryInTheWay,
    NotRegularDestination,
    OmittedDirectory,
    OverwritesSource,
    SameFile,
    SpecialFiles,
    TargetNotDirectory,
    UnreadableEntries,
    UnusableDestination,
    list_relative_entries,
    list_relative_files,
    plan_copy_operations,
    validate_copy_args,
)
from mlperf_common.fileio.refusals import ManifestInTheWay
from mlperf_common.fileio.walk import SerialLister

T = {"into_directory": True}  # -t
TT = {"no_target_directory": True}  # -T
F = {"force": True}
FLAT: Dict[str, Any] = {"recursive": False}

# A tree, SOURCEs, DEST, options, the rule that fires, and the whole message. Here the operands tell.
Row = Tuple[Any, Sequence[str], str, Dict[str, Any], Any, str]
BY_OPERANDS: List[Row] = [
    ({}, [], "x", {}, MissingOperand, "missing file operand"),
    ({"a": b"", "b": b"", "e": {}}, ["a", "b"], "e", TT, MissingOperand, "extra operand 'e'"),
    # Sources that are not there.
    ({}, ["m"], "x", {}, MissingSource, "cannot stat 'm': No such file or directory"),
    ({}, [""], "x", {}, MissingSource, "cannot stat '': No such file or directory"),
    ({"e": {}}, [""], "e", {}, MissingSource, "cannot stat '': No such file or directory"),
    ({"a": b"", "e": {}}, ["a", ""], "e", {}, MissingSource, "cannot stat '': No such file or directory"),
    ({"a": b""}, [""], "a", TT, MissingSource, "cannot stat '': No such file or directory"),
    ({"l": Link("no")}, ["l"], "x", {}, MissingSource, "cannot stat 'l': No such file or directory"),
    ({"l": Link("l")}, ["l"], "x", {}, MissingSource, "cannot stat 'l': Too many levels of symbolic links"),
    ({"a": b""}, ["a/"], "x", {}, MissingSource, "cannot stat 'a/': Not a directory"),
    ({"a": b""}, ["a/."], "x", {}, MissingSource, "cannot stat 'a/.': Not a directory"),
    ({"a": b"", "e": {}}, ["m", "a", "n"], "e", {}, MissingSource,
     "cannot stat 'm': No such file or directory\ncannot stat 'n': No such file or directory"),
    ({}, ["it's"], "x", {}, MissingSource, "cannot stat \"it's\": No such file or directory"),
    ({}, ["100%s"], "x", {}, MissingSource, "cannot stat '100%s': No such file or directory"),
    # Directories without -r.
    ({"d": {}}, ["d"], "x", FLAT, OmittedDirectory, "-r not specified; omitting directory 'd'"),
    ({"d": {}}, ["d/."], "no/x", FLAT, OmittedDirectory, "-r not specified; omitting directory 'd/.'"),
    ({"d": {}, "f": {}, "a": b"", "e": {}}, ["d", "a", "f/"], "e", FLAT, OmittedDirectory,
     "-r not specified; omitting directory 'd'\n-r not specified; omitting directory 'f/'"),
    # A target that several sources cannot go into; it comes before the sources.
    ({"a": b"", "b": b""}, ["a", "b"], "x", {}, TargetNotDirectory, "target 'x': No such file or directory"),
    ({"a": b"", "b": b""}, ["a", "b"], "", {}, TargetNotDirectory, "target '': No such file or directory"),
    ({"a": b"", "b": b"", "f": b""}, ["a", "b"], "f", {}, TargetNotDirectory, "target 'f': Not a directory"),
    ({"a": b"", "f": b""}, ["m", "a"], "f/", {}, TargetNotDirectory, "target 'f/': Not a directory"),
    ({"a": b"", "l": Link("no")}, ["a", "a"], "l", {}, TargetNotDirectory, "target 'l': No such file or directory"),
    ({"a": b""}, ["a"], "x", T, TargetNotDirectory, "target directory 'x': No such file or directory"),
    ({"a": b""}, ["a"], "", T, TargetNotDirectory, "target directory '': No such file or directory"),
    ({"a": b"", "f": b""}, ["a"], "f", T, TargetNotDirectory, "target directory 'f': Not a directory"),
    ({"a": b"", "l": Link("l")}, ["a"], "l", T, TargetNotDirectory,
     "target directory 'l': Too many levels of symbolic links"),
    # A DEST that cannot be made or looked at.
    ({"a": b""}, ["a"], "", {}, UnusableDestination, "cannot create regular file '': No such file or directory"),
    ({"d": {}}, ["d"], "", {}, UnusableDestination, "cannot create directory '': No such file or directory"),
    ({"d": {}}, ["d"], "", TT, UnusableDestination, "cannot create directory '': No such file or directory"),
    ({"a": b""}, ["a"], "", F, UnusableDestination, "cannot create regular file '': No such file or directory"),
    ({"a": b""}, ["a"], "n/", {}, UnusableDestination, "cannot create regular file 'n/': Not a directory"),
    ({"a": b""}, ["a"], "n/.", {}, UnusableDestination, "cannot create regular file 'n/.': No such file or directory"),
    ({"a": b""}, ["a"], "no/n", {}, UnusableDestination,
     "cannot create regular file 'no/n': No such file or directory"),
    ({"d": {}}, ["d"], "no/n", {}, UnusableDestination, "cannot create directory 'no/n': No such file or directory"),
    ({"d": {}}, ["d"], "n/.", {}, UnusableDestination, "cannot create directory 'n/.': No such file or directory"),
    ({"d": {}}, ["d"], "n/..", {}, UnusableDestination, "cannot create directory 'n/..': No such file or directory"),
    ({"a": b"", "f": b""}, ["a"], "f/n", {}, UnusableDestination, "cannot stat 'f/n': Not a directory"),
    ({"a": b"", "f": b""}, ["a"], "f/", F, UnusableDestination, "cannot stat 'f/': Not a directory"),
    ({"d": {}, "f": b""}, ["d"], "f/.", {}, UnusableDestination, "cannot stat 'f/.': Not a directory"),
    ({"a": b""}, ["a"], "n" * 256, {}, UnusableDestination, f"cannot stat '{'n' * 256}': File name too long"),
    # A directory onto something else.
    ({"d": {}, "f": b""}, ["d"], "f", {}, NonDirectoryInTheWay,
     "cannot overwrite non-directory 'f' with directory 'd'"),
    ({"d": {}, "f": b""}, ["d"], "f", {**F, **TT}, NonDirectoryInTheWay,
     "cannot overwrite non-directory 'f' with directory 'd'"),
    ({"d": {}, "e": {"d": b""}}, ["d/"], "e/", F, NonDirectoryInTheWay,
     "cannot overwrite non-directory 'e/d' with directory 'd/'"),
    ({"d": {}, "e": {"d": Link("../o")}, "o": {}}, ["d"], "e", {}, NonDirectoryInTheWay,
     "cannot overwrite non-directory 'e/d' with directory 'd'"),
    ({"d": {}, "l": Link("no")}, ["d"], "l", {}, NonDirectoryInTheWay,
     "cannot overwrite non-directory 'l' with directory 'd'"),
    ({"d": {}, "l": Link("o"), "o": {}}, ["d"], "l", TT, NonDirectoryInTheWay,
     "cannot overwrite non-directory 'l' with directory 'd'"),
    ({"d": {}, "p": Fifo()}, ["d"], "p", {}, NonDirectoryInTheWay,
     "cannot overwrite non-directory 'p' with directory 'd'"),
    # A file onto a directory.
    ({"a": b"", "d": {}}, ["a"], "d", TT, DirectoryInTheWay, "cannot overwrite directory 'd' with non-directory"),
    ({"a": b"", "e": {"a": {}}}, ["a"], "e", F, DirectoryInTheWay,
     "cannot overwrite directory 'e/a' with non-directory"),
    ({"a": b"", "l": Link("o"), "o": {}}, ["a"], "l", {**F, **TT}, DirectoryInTheWay,
     "cannot overwrite directory 'l' with non-directory"),
    ({"a": b"", "e": {"a": Link("../o")}, "o": {}}, ["a"], "e", F, DirectoryInTheWay,
     "cannot overwrite directory 'e/a' with non-directory"),
    # One file, or one directory, on both sides.
    ({"a": b"x"}, ["a"], "a", {}, SameFile, "'a' and 'a' are the same file"),
    ({"a": b"x"}, ["a"], ".", F, SameFile, "'a' and './a' are the same file"),
    ({"a": b"x"}, ["a"], ".", T, SameFile, "'a' and './a' are the same file"),
    ({"a": b"x", "l": Link("a")}, ["a"], "l", F, SameFile, "'a' and 'l' are the same file"),
    ({"a": b"x", "l": Link("a")}, ["l"], "a", F, SameFile, "'l' and 'a' are the same file"),
    ({"a": b"x", "e": {"a": Link("../a")}}, ["a"], "e", F, SameFile, "'a' and 'e/a' are the same file"),
    ({"d": {"f": b"x"}}, ["d"], ".", {}, SameFile, "'d' and './d' are the same file"),
    ({"d": {"f": b"x"}}, ["d"], "d", TT, SameFile, "'d' and 'd/.' are the same file"),
    ({"d": {"f": b"x"}}, ["d/."], "d", F, SameFile, "'d/.' and 'd/.' are the same file"),
    ({"d": {"f": b"x"}, "l": Link("d")}, ["l/."], "d", {}, SameFile, "'l/.' and 'd/.' are the same file"),
    # DEST inside SOURCE.
    ({"d": {"f": b"x"}}, ["d"], "d", {}, CopyIntoItself, "cannot copy a directory, 'd', into itself, 'd/d'"),
    ({"d": {"f": b"x"}}, ["d"], "d/new", {}, CopyIntoItself, "cannot copy a directory, 'd', into itself, 'd/new'"),
    ({"d": {"s": {}}}, ["d/."], "d/s", F, CopyIntoItself, "cannot copy a directory, 'd/.', into itself, 'd/s/.'"),
    ({"d": {"s": {}}}, ["d/s/.."], "d/s", F, CopyIntoItself, "cannot copy a directory, 'd/s/..', into itself, 'd/s/.'"),
    ({"d": {"f": b"x"}, "l": Link("d")}, ["d"], "l/new", {}, CopyIntoItself,
     "cannot copy a directory, 'd', into itself, 'l/new'"),
    ({"d": {"f": b"x"}, "l": Link("d")}, ["l"], "d", {}, CopyIntoItself,
     "cannot copy a directory, 'l', into itself, 'd/l'"),
    # A source that would be overwritten by another.
    ({"e": {"x": b"2"}, "x": b"3"}, ["x", "e/x"], "e", F, SameFile, "'e/x' and 'e/x' are the same file"),
    # Two sources, one name.
    ({"x": {"a": b"1"}, "y": {"a": b"2"}, "e": {}}, ["x/a", "y/a"], "e", F, JustCreated,
     "will not overwrite just-created 'e/a' with 'y/a'"),
    ({"a": b"1", "e": {}}, ["a", "./a"], "e", {}, JustCreated, "will not overwrite just-created 'e/a' with './a'"),
    ({"x": {"d": {}}, "y": {"d": {}}, "e": {}}, ["x/d", "y/d"], "e", {}, JustCreated,
     "will not overwrite just-created 'e/d' with 'y/d'"),
    ({"x": {"a": {}}, "y": {"a": b""}, "e": {}}, ["x/a", "y/a"], "e", T, JustCreated,
     "will not overwrite just-created 'e/a' with 'y/a'"),
    ({"s": {"a": b"1"}, "t": {"a": b"2"}, "e": {}}, ["s/.", "t/."], "e", {}, JustCreated,
     "will not overwrite just-created 'e/.' with 't/.'"),
    # What DEST has already.
    ({"a": b"1", "p": Fifo()}, ["a"], "p", F, NotRegularDestination, "cannot overwrite 'p': not a regular file"),
    ({"a": b"1"}, ["a"], "/dev/null", F, NotRegularDestination, "cannot overwrite '/dev/null': not a regular file"),
]

# The same, but it takes a walk to know.
BY_WALK: List[Row] = [
    # A directory onto something else.
    ({"d": {"x": {}, "y": {}}, "e": {"d": {"x": b"", "y": Link(".")}}}, ["d"], "e", F, NonDirectoryInTheWay,
     "cannot overwrite non-directory 'e/d/x' with directory 'd/x'\n"
     "cannot overwrite non-directory 'e/d/y' with directory 'd/y'"),
    # A file onto a directory.
    ({"d": {"x": b"", "y": b""}, "e": {"x": {}, "y": {}}}, ["d/."], "e", F, DirectoryInTheWay,
     "cannot overwrite directory 'e/x' with non-directory\ncannot overwrite directory 'e/y' with non-directory"),
    ({"d": {"x": b""}, "e": {"x": Link("../o")}, "o": {}}, ["d"], "e", {**F, **TT}, DirectoryInTheWay,
     "cannot overwrite directory 'e/x' with non-directory"),
    # One file, or one directory, on both sides.
    ({"d": {"f": b"x"}, "e": {"d": {"f": Link("../../d/f")}}}, ["d"], "e", F, SameFile,
     "'d/f' and 'e/d/f' are the same file"),
    # DEST inside SOURCE.
    ({"d": {}, "e": {"x": {"l": Link("../../d")}}}, ["e"], "d", {}, CopyIntoItself,
     "cannot copy a directory, 'e/x/l', into itself, 'd/e/x/l'"),
    ({"d": {"s": {}}, "e": {"l": Link("../d/s")}}, ["e"], "d/s/", {}, CopyIntoItself,
     "cannot copy a directory, 'e/l', into itself, 'd/s/e/l'"),
    # A source that would be overwritten by another.
    ({"d": {"sub": {"sub": {"f": b"x"}}}}, ["d/sub/."], "d", {}, OverwritesSource,
     "cannot overwrite source 'd/sub' with 'd/sub/./sub'"),
    ({"d": {"sub": {"sub": {"f": b"x"}}}}, ["d/sub/."], "d", F, OverwritesSource,
     "cannot overwrite source 'd/sub' with 'd/sub/./sub'"),
    ({"y": {"a": b"1"}, "x": {"b": b"2"}, "b": b"3", "a": Link("x/b")}, ["a", "b"], "x", F, OverwritesSource,
     "cannot overwrite source 'x/b' with 'b'"),
    # Two sources, one name.
    ({"s": {"a": b"1"}, "a": b"2", "e": {}}, ["s/.", "a"], "e", {}, JustCreated,
     "will not overwrite just-created 'e/a' with 's/./a'"),
    ({"s": {"a": {}}, "a": {}, "e": {}}, ["a", "s/."], "e", {}, JustCreated,
     "will not overwrite just-created 'e/a' with 's/./a'"),
    # What DEST has already.
    ({"a": b"1", "b": b"2"}, ["a"], "b", {}, DestinationExists,
     "cannot create regular file 'b': File exists (-f replaces it)"),
    ({"d": {"x": b"1", "s": {"y": b"2"}}, "e": {"d": {"x": b"", "s": {"y": b"", "z": b""}}}}, ["d"], "e", {},
     DestinationExists, "cannot create regular file 'e/d/x': File exists (-f replaces it)\n"
     "cannot create regular file 'e/d/s/y': File exists (-f replaces it)"),
    ({"a": b"1", "l": Link("no")}, ["a"], "l", {}, DestinationExists,
     "cannot create regular file 'l': File exists (-f replaces it)"),
    ({"a": b"1", "l": Link("o"), "o": b""}, ["a"], "l", {}, DestinationExists,
     "cannot create regular file 'l': File exists (-f replaces it)"),
    ({"d": {"p": b"1"}, "e": {"p": Fifo()}}, ["d"], "e", {**F, **TT}, NotRegularDestination,
     "cannot overwrite 'e/p': not a regular file"),
    ({"a": b"1", "b": b"22"}, ["a"], "b", {"update": True}, DestinationNewer,
     "'b' is not older than its source and of another size (-f replaces it)"),
    # Special files among the sources.
    ({"p": Fifo()}, ["p"], "x", {}, SpecialFiles,
     "'p' is a FIFO, neither a regular file nor a directory (--skip-special leaves it out)"),
    ({"d": {"s": {"p": Fifo()}, "q": Link("s/p")}}, ["d"], "x", F, SpecialFiles,
     "'d/q' is a FIFO, neither a regular file nor a directory (--skip-special leaves it out)\n"
     "'d/s/p' is a FIFO, neither a regular file nor a directory (--skip-special leaves it out)"),
    ({}, ["/dev/null"], "x", {}, SpecialFiles,
     "'/dev/null' is a character device, neither a regular file nor a directory (--skip-special leaves it out)"),
    # What the walk cannot look at.
    ({"d": {"l": Link("no"), "s": {"m": Link("../no")}}}, ["d"], "x", {}, UnreadableEntries,
     "cannot access 'd/l': dangling symbolic link: No such file or directory\n"
     "cannot access 'd/s/m': dangling symbolic link: No such file or directory"),
    ({"d": {"l": Link("l")}}, ["d"], "x", {}, UnreadableEntries,
     "cannot access 'd/l': Too many levels of symbolic links"),
    ({"d": {"s": {"l": Link("..")}}}, ["d"], "x", {}, UnreadableEntries,
     "cannot access 'd/s/l': cyclic symbolic link: it leads to a directory above itself"),
    ({"d": {"a": {"l": Link("../b")}, "b": {"l": Link("../a")}}}, ["d"], "x", {}, UnreadableEntries,
     "cannot access 'd/a/l/l': cyclic symbolic link: it leads to a directory above itself\n"
     "cannot access 'd/b/l/l': cyclic symbolic link: it leads to a directory above itself"),
]


def without_walk(*args: Any, **options: Any) -> None:
    """validate_copy_args, where listing any directory fails."""
    with mock.patch.object(os, "scandir", side_effect=AssertionError("a walk")):
        validate_copy_args(*args, **options)


class PlanTestCase(TestCase):
    """A test whose working directory is its own."""

    def setUp(self) -> None:
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.tmp)

    def refused(self, rule: Any, call: Any, *args: Any, **options: Any) -> Any:
        """The exception of exactly that class, nothing in the working directory having been touched."""
        before = cpmodel.photograph(os.getcwdb())
        with self.assertRaises((CopyArgumentError, UnreadableEntries)) as caught:
            call(*args, **options)
        self.assertIs(type(caught.exception), rule, caught.exception)
        self.assertEqual(cpmodel.difference(cpmodel.photograph(os.getcwdb()), before), "")
        return caught.exception


class Refusals(PlanTestCase):
    def test_each_rule_refuses_with_its_own_class_and_words(self) -> None:
        for number, (tree, sources, destination, options, rule, message) in enumerate(BY_OPERANDS + BY_WALK):
            with self.subTest(tree=tree, sources=sources, destination=destination, **options):
                os.chdir(self.make(f"{number}", tree))
                exc = self.refused(rule, plan_copy_operations, sources, destination, **options)
                self.assertEqual(str(exc), message)
                self.assertEqual("\n".join(exc.lines), message)

    def test_every_rule_is_in_the_table(self) -> None:
        def below(rule: Any) -> List[Any]:
            return [rule, *(inner for sub in rule.__subclasses__() for inner in below(sub))]

        # Refusals of a manifest are in test_proof.py, those of a list in test_choosing.py.
        rules = set(below(CopyArgumentError)) - {CopyArgumentError, ManifestInTheWay, NotBelow} | {UnreadableEntries}
        self.assertEqual(rules, {row[4] for row in BY_OPERANDS + BY_WALK})

    def test_operands_alone_are_validated_without_a_walk(self) -> None:
        for number, (tree, sources, destination, options, rule, message) in enumerate(BY_OPERANDS):
            with self.subTest(tree=tree, sources=sources, destination=destination, **options):
                os.chdir(self.make(f"{number}", tree))
                options = {name: value for name, value in options.items() if name != "force"}
                exc = self.refused(rule, without_walk, sources, destination, **options)
                self.assertEqual(str(exc), message)

    def test_hard_links_are_the_same_file(self) -> None:
        self.make("a", b"x")
        os.mkdir("e")
        for name in ("h", "e/a"):
            os.link("a", name)
        self.refused(SameFile, plan_copy_operations, ["a"], "h", force=True)
        self.refused(SameFile, plan_copy_operations, ["a"], "e", force=True)

    def test_a_source_reached_by_another_name_is_not_overwritten(self) -> None:
        self.make("d", {"a": b"1", "b": b"2"})
        os.mkdir("e")
        os.link("d/a", "e/b")
        exc = self.refused(OverwritesSource, plan_copy_operations, ["d"], "e", no_target_directory=True, force=True)
        self.assertEqual(str(exc), "cannot overwrite source 'e/b' with 'd/b'")

    def test_a_message_names_twenty_and_counts_the_rest(self) -> None:
        self.make("e", {})
        exc = self.refused(MissingSource, plan_copy_operations, [f"m{n:02}" for n in range(25)], "e")
        self.assertEqual(len(exc.lines), 21)
        self.assertEqual(exc.lines[19:], ["cannot stat 'm19': No such file or directory", "... and 5 more"])

    def test_existing_files_are_counted_too(self) -> None:
        tree = {f"f{n:04}": b"" for n in range(1021)}
        self.make("d", tree)
        self.make("e", tree)
        exc = self.refused(DestinationExists, plan_copy_operations, ["d"], "e", no_target_directory=True)
        self.assertEqual(len(exc.lines), 21)
        self.assertEqual(exc.lines[20], "... and 1001 more")

    def test_exactly_twenty_are_all_named(self) -> None:
        tree = {f"f{n:02}": b"" for n in range(20)}
        self.make("d", tree)
        self.make("e", tree)
        exc = self.refused(DestinationExists, plan_copy_operations, ["d"], "e", no_target_directory=True)
        self.assertEqual(len(exc.lines), 20)

    def test_a_plain_call_is_refused_like_the_checked_one(self) -> None:
        self.make("d", {"f": b"x"})
        with mock.patch.object(copyplan, "validate_copy_args", side_effect=AssertionError("not needed")):
            self.refused(SameFile, plan_copy_operations, ["d"], ".")


class Plans(PlanTestCase):
    def plan(self, *args: Any, **options: Any) -> Any:
        plan = plan_copy_operations(*args, **options)
        self.assertEqual(list(plan.files), sorted(plan.files, key=lambda f: os.fsencode(f[1])))
        self.assertEqual(len(plan.files), len(list(plan.files)))
        self.assertEqual(list(plan.directories), sorted(plan.directories, key=lambda d: (d.count("/"), os.fsencode(d))))
        self.assertEqual(len(set(plan.directories)), len(plan.directories))
        return plan

    def test_files_and_directories_of_a_tree(self) -> None:
        self.make("src", {"b": b"12", "a": {"x": b"1", "empty": {}}, "a.x": b"", "a-": b"123"})
        here = os.getcwd()
        plan = self.plan(["src"], "new")
        self.assertEqual(list(plan.files), [
            (here + "/src/a-", here + "/new/a-", 3),
            (here + "/src/a.x", here + "/new/a.x", 0),
            (here + "/src/a/x", here + "/new/a/x", 1),
            (here + "/src/b", here + "/new/b", 2),
        ])
        self.assertEqual(list(plan.directories), [here + "/new", here + "/new/a", here + "/new/a/empty"])
        files, directories = plan[:2]
        self.assertEqual((list(files), list(directories)), (list(plan.files), list(plan.directories)))

    def test_an_empty_tree_plans_its_destination(self) -> None:
        self.make("src", {})
        plan = self.plan(["src"], "new")
        self.assertEqual((list(plan.files), list(plan.directories)), ([], [os.getcwd() + "/new"]))

    def test_into_an_existing_directory(self) -> None:
        self.make(".", {"src": {"d": {}, "f": b"1"}, "one": b"22", "e": {"other": b""}})
        here = os.getcwd()
        plan = self.plan(["one", "src"], "e")
        self.assertEqual(list(plan.files), [
            (here + "/one", here + "/e/one", 2),
            (here + "/src/f", here + "/e/src/f", 1),
        ])
        self.assertEqual([d for d in plan.directories if d != here + "/e"], [here + "/e/src", here + "/e/src/d"])

    def test_the_parent_of_a_lone_file_is_planned(self) -> None:
        self.make(".", {"a": b"1", "e": {}})
        self.assertEqual(list(self.plan(["a"], "e").directories), [os.getcwd() + "/e"])

    def test_paths_are_joined_and_never_normalised(self) -> None:
        self.make(".", {"real": {"in": {"f": b"1"}}, "w": {"l": Link("../real/in"), "real": {}}, "e": {}})
        here = os.getcwd()
        sources = [f[0] for f in self.plan(["w/l/.."], "new").files]
        self.assertEqual(sources, [here + "/w/l/../in/f"])
        self.assertEqual(os.stat(sources[0]).st_size, 1)
        self.assertEqual(self.plan(["w/l/f"], "e/../w//l/../copy").files[0][1], here + "/e/../w//l/../copy")
        self.assertEqual(self.plan(["./w/../w/l/f"], "copy").files[0], (here + "/./w/../w/l/f", here + "/copy", 1))

    def test_absolute_operands_stay_as_they_are(self) -> None:
        self.make(".", {"src": {"f": b"1"}})
        here = os.getcwd()
        os.chdir("/")
        plan = self.plan([here + "//src"], here + "/./new")
        self.assertEqual(list(plan.files), [(here + "//src/f", here + "/./new/f", 1)])

    def test_order_is_that_of_bytes(self) -> None:
        names = [b"a", b"a ", b"a-", b"a.b", b"a0", b"\xc3\xa9", b"\xee\x80\x80", b"\xf0\x9f\x98\x80", b"\xff",
                 b"\x80", b"\x01"]
        self.make("src", {name: {b"f": b"", b"a": {b"g": b""}} if i % 3 == 0 else b"" for i, name in enumerate(names)})
        listed = list_relative_files("src")
        self.assertEqual(listed, sorted(listed, key=os.fsencode))
        self.assertNotEqual(listed, sorted(listed))
        self.plan(["src"], "new")

    def test_order_of_random_trees_with_loose_files(self) -> None:
        chance = random.Random(1)
        for number in range(30):
            tree = random_tree(chance, 3)
            self.make(f"{number}", {"src": tree, "e": {}, "k.": b"", "k": {"f": b""}, "k!": b"", "src-": b"",
                                    "src0": {}})
            os.chdir(self.path(f"{number}"))
            self.plan(["src", "k.", "k", "k!", "src-", "src0"], "e")
            self.plan(["src/.", "src-"], "e")

    def test_files_can_be_indexed_sliced_and_read_again(self) -> None:
        self.make("src", {"a": b"", "b": b"1", "c": b"22"})
        files = self.plan(["src"], "new").files
        everything = list(files)
        self.assertEqual((files[0], files[-1], files[1:]), (everything[0], everything[-1], everything[1:]))
        self.assertEqual(list(files), everything)
        self.assertRaises(IndexError, lambda: files[3])

    def test_links_are_followed_to_files_and_directories(self) -> None:
        self.make(".", {"o": {"f": b"123"}, "src": {"lf": Link("../o/f"), "ld": Link("../o")}})
        here = os.getcwd()
        plan = self.plan(["src"], "new")
        self.assertEqual([f[1:] for f in plan.files], [(here + "/new/ld/f", 3), (here + "/new/lf", 3)])
        self.assertEqual(list(plan.directories), [here + "/new", here + "/new/ld"])

    def test_one_directory_by_two_links_is_copied_twice(self) -> None:
        self.make("src", {"d": {"f": b"1"}, "l": Link("d"), "m": {"l": Link("../d")}})
        self.assertEqual([f[0] for f in self.plan(["src"], "new").files],
                         [os.getcwd() + "/src/" + name for name in ("d/f", "l/f", "m/l/f")])

    def test_a_destination_link_to_a_directory_is_followed(self) -> None:
        self.make(".", {"src": {"f": b"1"}, "o": {}, "l": Link("o")})
        self.assertEqual(self.plan(["src"], "l").files[0][1], os.getcwd() + "/l/src/f")

    def test_force_plans_what_is_there(self) -> None:
        self.make(".", {"src": {"f": b"1", "l": b"2"}, "e": {"f": b"", "l": Link("no")}})
        self.assertEqual(len(self.plan(["src"], "e", no_target_directory=True, force=True).files), 2)

    def test_special_files_can_be_left_out(self) -> None:
        self.make(".", {"src": {"p": Fifo(), "f": b"1", "s": {"q": Fifo()}}, "e": {}, "p": Fifo()})
        plan = self.plan(["src", "p"], "e", skip_special=True)
        self.assertEqual([f[1] for f in plan.files], [os.getcwd() + "/e/src/f"])
        self.assertEqual(sorted(plan.skipped), [("p", "FIFO"), ("src/p", "FIFO"), ("src/s/q", "FIFO")])

    def test_options_have_the_documented_defaults(self) -> None:
        self.make(".", {"src": {"f": b""}, "e": {"src": {"f": b""}}})
        self.refused(DestinationExists, plan_copy_operations, ["src"], "e")
        validate_copy_args(["src"], "new")
        self.refused(OmittedDirectory, validate_copy_args, ["src"], "new", False)
        self.refused(TargetNotDirectory, validate_copy_args, ["src"], "new", True, True)


def random_tree(chance: random.Random, depth: int) -> Dict[bytes, Any]:
    """A literal with names that sort before and after a slash."""
    letters = b"a-. !0~\xff\xc3\n"
    tree: Dict[bytes, Any] = {}
    for _ in range(chance.randint(0, 5)):
        name = bytes(chance.choice(letters) for _ in range(chance.randint(1, 3)))
        if name not in (b".", b".."):
            tree[name] = random_tree(chance, depth - 1) if depth and chance.random() < 0.5 else b""
    return tree


def flatten(tree: Dict[bytes, Any], prefix: bytes = b"") -> Tuple[List[bytes], List[bytes]]:
    """The files and the directories of a literal, as relative paths."""
    files, directories = [], []
    for name, value in tree.items():
        if isinstance(value, dict):
            inner = flatten(value, prefix + name + b"/")
            directories += [prefix + name, *inner[1]]
            files += inner[0]
        else:
            files.append(prefix + name)
    return files, directories


@contextlib.contextmanager
def recursion_limit(limit: int) -> Iterator[None]:
    """What recurses a level of a tree at a time fails in here."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


class Walks(PlanTestCase):
    def test_files_and_directories(self) -> None:
        self.make("t", {"b": b"", "a": {"y": b"", "x": {"z": b""}}, "c": {}})
        self.assertEqual(list_relative_files("t"), ["a/x/z", "a/y", "b"])
        entries = list_relative_entries("t")
        self.assertEqual(entries, (["a/x/z", "a/y", "b"], ["a", "c", "a/x"]))
        self.assertEqual(entries.files, entries[0])
        self.assertEqual(entries.directories, entries[1])

    def test_random_trees_agree_with_the_literal(self) -> None:
        chance = random.Random(2)
        for number in range(40):
            tree = random_tree(chance, 4)
            root = self.make(f"{number}", tree)
            files, directories = flatten(tree)
            found = list_relative_entries(root)
            self.assertEqual([os.fsencode(name) for name in found.files], sorted(files))
            self.assertEqual([os.fsencode(name) for name in found.directories],
                             sorted(directories, key=lambda name: (name.count(b"/"), name)))

    def test_a_root_that_cannot_be_walked(self) -> None:
        self.make(".", {"f": b"", "l": Link("l"), "d": Link("no")})
        for root, reason in [("no", "No such file or directory"), ("", "No such file or directory"),
                             ("f", "Not a directory"), ("d", "No such file or directory"),
                             ("l", "Too many levels of symbolic links")]:
            with self.subTest(root=root):
                exc = self.refused(UnreadableEntries, list_relative_files, root)
                self.assertEqual(exc.entries, [(root, reason)])

    def test_a_root_may_be_a_link_and_end_in_slashes(self) -> None:
        self.make(".", {"t": {"f": b""}, "l": Link("t")})
        for root in ("l", "l/", "t//", "./t/.", "t/../l"):
            self.assertEqual(list_relative_files(root), ["f"], root)

    def test_special_files_are_refused_or_left_out(self) -> None:
        self.make("t", {"f": b"", "p": Fifo(), "l": Link("p"), "d": {"n": Link("/dev/null")}})
        exc = self.refused(SpecialFiles, list_relative_files, "t")
        words = "neither a regular file nor a directory (--skip-special leaves it out)"
        self.assertEqual(exc.lines, [f"'t/d/n' is a character device, {words}", f"'t/l' is a FIFO, {words}",
                                     f"'t/p' is a FIFO, {words}"])
        skipped: List[Any] = []
        self.assertEqual(list_relative_files("t", skip_special=True, skipped=skipped), ["f"])
        self.assertEqual(skipped, [("t/d/n", "character device"), ("t/l", "FIFO"), ("t/p", "FIFO")])

    def test_what_is_unreadable_comes_before_what_is_special(self) -> None:
        self.make("t", {"a": Fifo(), "l": Link("no")})
        self.refused(UnreadableEntries, list_relative_files, "t", skip_special=True)
        self.refused(UnreadableEntries, list_relative_files, "t")

    def test_all_dangling_links_are_found_in_one_pass(self) -> None:
        self.make("t", {f"d{n}": {"f": b"", "s": {f"l{m}": Link("no") for m in range(10)}} for n in range(3)})
        exc = self.refused(UnreadableEntries, list_relative_files, "t")
        self.assertEqual([path for path, _ in exc.entries], [f"t/d{n}/s/l{m}" for n in range(3) for m in range(10)])
        self.assertEqual(len(str(exc).split("\n")), 21)
        self.assertEqual(exc.lines[-1], "... and 10 more")

    def test_cycles_are_found_and_the_rest_is_reported_too(self) -> None:
        self.make("t", {"a": {"up": Link(".."), "self": Link(".")}, "b": {"to": Link("../a"), "l": Link("no")}})
        exc = self.refused(UnreadableEntries, list_relative_files, "t")
        cyclic, dangling = "cyclic symbolic link", "dangling symbolic link"
        self.assertEqual([(path, reason.split(":")[0]) for path, reason in exc.entries], [
            ("t/a/self", cyclic), ("t/a/up", cyclic), ("t/b/l", dangling), ("t/b/to/self", cyclic),
            ("t/b/to/up", cyclic),
        ])

    def test_links_that_only_look_cyclic_are_walked(self) -> None:
        self.make("t", {"a": {"l": Link("../b")}, "b": {"c": {"f": b""}}, "x": Link("a/l/c"), "y": Link("../t/b")})
        self.assertEqual(list_relative_files("t"), ["a/l/c/f", "b/c/f", "x/f", "y/c/f"])

    def test_deep_trees_do_not_recurse(self) -> None:
        root = self.deep("d", 1200)
        with recursion_limit(150):
            entries = list_relative_entries(root)
        below = "/".join("d" * 1200)
        self.assertEqual(entries.files, [below + "/f"])
        self.assertEqual((len(entries.directories), entries.directories[-1]), (1200, below))

    def test_deep_plans_pass_path_max(self) -> None:
        root, there = self.deep("a long name", 450), self.deep("a long name", 440)
        with recursion_limit(150):
            plan = plan_copy_operations([root], "new")
            files, directories = list(plan.files), list(plan.directories)
            plan_copy_operations([root], there, no_target_directory=True)
        below = "/".join(["a long name"] * 450)
        self.assertEqual(files, [(f"{root}/{below}/f", f"{os.getcwd()}/new/{below}/f", 1)])
        self.assertEqual((len(directories), directories[-1]), (451, f"{os.getcwd()}/new/{below}"))

    def test_deep_destinations_are_compared(self) -> None:
        roots = [self.deep("a long name", 450, f"{number}") for number in range(2)]
        with recursion_limit(150), self.assertRaises(DestinationExists) as caught:
            plan_copy_operations(roots[:1], roots[1], no_target_directory=True)
        self.assertEqual(len(caught.exception.lines), 1)

    def deep(self, name: str, levels: int, top: str = "") -> str:
        root = self.path(top or f"{levels} levels")
        os.mkdir(root)
        at = os.open(root, os.O_RDONLY)
        for _ in range(levels):
            os.mkdir(name, dir_fd=at)
            inner = os.open(name, os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = inner
        with open(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=at), "wb") as stream:
            stream.write(b"x")
        os.close(at)
        return root

    def test_descriptors_are_closed_again(self) -> None:
        self.make(".", {"t": {"a": {"b": {"l": Link("no")}, "c": {"f": b""}}}, "ok": {"a": {"f": b""}},
                        "e": {"ok": {}}})
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            with contextlib.suppress(UnreadableEntries):
                list_relative_files("t")
            with contextlib.suppress(UnreadableEntries):
                list_relative_files("no")
            plan_copy_operations(["ok"], "e")
        self.assertEqual(os.listdir("/proc/self/fd"), before)


class Recorder:
    """A list_directories that answers like the serial one, but backwards and one at a time, and remembers."""

    def __init__(self) -> None:
        self.levels: List[List[Any]] = []

    def __call__(self, requests: Sequence[Any]) -> Sequence[Any]:
        self.levels.append(list(requests))
        return [self._answer(request) for request in reversed(requests)][::-1]

    def _answer(self, request: Any) -> Any:
        lister = SerialLister()
        try:
            return lister([request])[0]
        finally:
            lister.close()


TREE = {"a": {"x": {"f": b"1"}, "y": {}}, "b": {"z": {"g": b"22"}}, "l": Link("b"), "f": b""}


class Listers(PlanTestCase):
    def test_another_lister_gives_the_same(self) -> None:
        self.make(".", {"t": TREE, "e": {"t": {"a": {"x": {}}}}, "one": b"1"})
        lister = Recorder()
        self.assertEqual(list_relative_entries("t", list_directories=lister), list_relative_entries("t"))
        plans = [plan_copy_operations(["t", "one"], "e", list_directories=chosen)
                 for chosen in (Recorder(), None)]
        self.assertEqual(list(plans[0].files), list(plans[1].files))
        self.assertEqual(list(plans[0].directories), list(plans[1].directories))

    def test_another_lister_finds_the_same_problems(self) -> None:
        self.make("t", {"a": {"l": Link("no"), "c": Link(".")}, "b": {"l": Link("l"), "p": Fifo()}})
        found = [self.refused(UnreadableEntries, list_relative_files, "t", list_directories=chosen).entries
                 for chosen in (Recorder(), None)]
        self.assertEqual(found[0], found[1])

    def test_each_level_is_one_call_and_each_directory_one_request(self) -> None:
        self.make("t", TREE)
        lister = Recorder()
        list_relative_entries("t", list_directories=lister)
        paths = [["/".join(request.components) for request in level] for level in lister.levels]
        self.assertEqual([sorted(level) for level in paths], [[""], ["a", "b", "l"], ["a/x", "a/y", "b/z", "l/z"]])

    def test_destination_is_listed_where_it_exists_and_nowhere_else(self) -> None:
        self.make(".", {"t": TREE, "e": {"t": {"a": {"other": {}}, "unrelated": {}}}})
        lister = Recorder()
        plan_copy_operations(["t"], "e", list_directories=lister)
        asked = ["/".join(r.components) for level in lister.levels for r in level if r.destination]
        self.assertEqual(asked, ["t", "t/a"])

    @needs("strace")
    def test_one_listing_a_directory_and_at_most_one_stat_an_entry(self) -> None:
        self.make("t", {f"d{n}": {f"f{m}": b"" for m in range(20)} for n in range(10)})
        self.make("e", {"t": {f"d{n}": {"other": b""} for n in range(10)}})
        cpmodel.age(os.fsencode(self.tmp))
        code = (f"import os, sys\nsys.path.insert(0, {support.ROOT!r})\nfrom mlperf_common.fileio import copyplan\n"
                "os.access('begin', 0)\ncopyplan.plan_copy_operations(['t'], 'e')\nos.access('end', 0)")
        log = self.path("log")
        support.run(["strace", "-qq", "-o", log, "-e", "trace=%file,getdents64", sys.executable, "-c", code], expect=0)
        with open(log) as stream:
            calls = stream.read().partition('"begin"')[2].partition('"end"')[0]
        # By name; an fstat(2) of what has just been opened asks no server.
        stats = re.findall(r"^(?:stat|lstat|newfstatat|statx)\((?!.*AT_EMPTY_PATH).*", calls, re.MULTILINE)
        entries = [line for line in stats if '"f' in line]
        self.assertEqual(len(entries), 200)
        self.assertLessEqual(len(stats), 200 + 10, stats)
        self.assertEqual(calls.count("getdents64("), 2 * (11 + 11))


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Permissions as nobody has them, for a while."""
    user = pwd.getpwnam(support.NOBODY)
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@needs_nobody
class Permissions(PlanTestCase):
    def setUp(self) -> None:
        super().setUp()
        os.chmod(self.tmp, 0o777)  # new names can be made here by anybody

    def test_all_that_is_unreadable_is_named_at_once(self) -> None:
        closed = Dir({"f": b""}, 0o000)
        self.make("t", {"a": closed, "b": {"c": closed, "f": b""}, "unsearchable": Dir({"d": {}, "f": b""}, 0o444),
                        "l": Link("a/f"), "listable": Dir({"f": b""}, 0o555)})
        with as_nobody():
            exc = self.refused_quietly(list_relative_files, "t")
        self.assertEqual(exc.entries, [(name, "Permission denied") for name in
                                       ("t/a", "t/b/c", "t/l", "t/unsearchable/d", "t/unsearchable/f")])
        self.assertEqual(exc.lines[0], "cannot access 't/a': Permission denied")

    def refused_quietly(self, call: Any, *args: Any, **options: Any) -> Any:
        with self.assertRaises((CopyArgumentError, UnreadableEntries)) as caught:
            call(*args, **options)
        return caught.exception

    def test_an_unlistable_root_is_not_an_empty_tree(self) -> None:
        self.make("t", Dir({"f": b""}, 0o311))
        with as_nobody():
            self.assertEqual(self.refused_quietly(list_relative_files, "t").entries, [("t", "Permission denied")])
            exc = self.refused_quietly(plan_copy_operations, ["t"], "new")
        self.assertEqual(str(exc), "cannot access 't': Permission denied")

    def test_an_unreadable_file_is_planned(self) -> None:
        self.make("t", {"f": support.File(b"123", 0o000)})
        with as_nobody():
            self.assertEqual(plan_copy_operations(["t"], "new").files[0][2], 3)

    def test_a_destination_that_cannot_be_listed_is_asked_name_by_name(self) -> None:
        self.make(".", {"t": {"f": b"1", "d": {"g": b"2"}, "x": {}}, "e": Dir({"f": b"", "other": b""}, 0o733)})
        with as_nobody():
            exc = self.refused_quietly(plan_copy_operations, ["t"], "e", no_target_directory=True)
            self.assertIs(type(exc), DestinationExists)
            self.assertEqual(str(exc), "cannot create regular file 'e/f': File exists (-f replaces it)")
            plan = plan_copy_operations(["t"], "e", no_target_directory=True, force=True)
            self.assertEqual(len(plan.files), 2)
            plan_copy_operations(["t"], "e")

    def test_a_destination_that_cannot_be_searched(self) -> None:
        self.make(".", {"t": {"f": b"1"}, "e": Dir({}, 0o666), "q": Dir({"z": {}}, 0o000)})
        with as_nobody():
            for destination in ("e", "q/z", "q/z/new", "q/new"):
                with self.subTest(destination=destination):
                    exc = self.refused_quietly(plan_copy_operations, ["t"], destination)
                    self.assertIn("Permission denied", str(exc))
                    self.assertIsInstance(exc, CopyArgumentError)


if __name__ == "__main__":
    support.main()
