#!/usr/bin/env python3
# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Generated trees and command lines: cp, fastcp and the model of cpmodel.py must agree, or differ only where meant.

A case is made from its seed alone. A failure prints the seed; `CP_FIRST=SEED CP_SEEDS=1` runs that case again,
CP_SEEDS=N runs N cases instead of the usual number.
"""

from __future__ import annotations

import os
import random
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

import cpmodel
import support
from cpmodel import Request
from support import Dir, Fifo, File, Link, Random, TestCase

from mlperf_common.fileio import copyplan

USUAL_CASES = 300

TAME = [b"a", b"b", b"c", b"d"]
ODD = [b"-r", b"--", b"...", b"..a", b"a b", b"it's", b"new\nline", b"\xff", b"a\xffb", b"\xc3\xa9", b"*", b"\\", b"\t"]


class Case(NamedTuple):
    """A tree, names that are linked to another, and a command that runs in `w`."""

    tree: Dict[bytes, Any]
    hard: List[Tuple[bytes, bytes]]
    request: Request
    umask: int

    def grow(self, top: str) -> bytes:
        """Make it below `top`; the directory to run in."""
        support.make_tree(top, self.tree)
        for name, existing in self.hard:
            os.link(os.path.join(os.fsencode(top), existing), os.path.join(os.fsencode(top), name))
        cpmodel.age(os.fsencode(top))
        return os.path.join(os.fsencode(top), b"w")

    def shown(self) -> str:
        """The case as it could be typed."""
        return f"tree {self.tree!r}\nhard links {self.hard!r}\n{self.request!r} umask {self.umask:03o}"


class Generator:
    """Makes a Case from a seed. `wild` cases have what is to be refused; the others mostly succeed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.wild = self.random.random() < 0.5
        self.names = TAME + (ODD if self.random.random() < 0.3 else [])
        self.paths: List[bytes] = []  # everything in the tree, relative to top
        self.directories: List[bytes] = []
        self.files: List[bytes] = []

    def case(self) -> Case:
        """A whole case; links come last, when there is something to point at."""
        tree: Dict[bytes, Any] = {b"o": self._directory(b"o", 2), b"w": self._directory(b"w", 0)}
        for _ in range(self.random.choice([0, 1, 1, 2, 4])):
            self._add_link(tree)
        hard = [self._hard(tree) for _ in range(self._chance(0.2)) if self.files]
        return Case(tree, hard, self._request(), self.random.choice([0o022, 0o022, 0o002, 0o077, 0o027]))

    def _chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def _directory(self, path: bytes, depth: int) -> Dir:
        self.directories.append(path)
        entries: Dict[bytes, Any] = {}
        for _ in range(self.random.randint(2 if depth == 0 else 0, 4)):
            name = self.random.choice(self.names)
            inner = path + b"/" + name
            if name in entries:
                continue
            self.paths.append(inner)
            if depth < 3 and self._chance(0.5):
                entries[name] = self._directory(inner, depth + 1)
            elif self.wild and self._chance(0.03):
                entries[name] = Fifo()
            else:
                self.files.append(inner)
                content = b"%d" % self.random.randrange(10**6)
                large = Random(self.random.choice([5000, 70000]), self.random.randrange(10**6))
                entries[name] = File(self.random.choice([b"", content, content, large]), self._mode())
        return Dir(entries, self._mode(0o700))

    def _mode(self, bits: int = 0) -> int:
        modes = [0o644, 0o600, 0o777, 0o444, 0o755, 0o750, 0o400, 0o755 if bits else 0o4755]
        return self.random.choice(modes) | bits

    def _inside(self, tree: Dict[bytes, Any], path: bytes) -> Dict[bytes, Any]:
        entries = tree
        for name in path.split(b"/"):
            entries = entries[name].entries
        return entries

    def _free_name(self, tree: Dict[bytes, Any]) -> Optional[bytes]:
        path = self.random.choice(self.directories) + b"/" + self.random.choice(self.names)
        return None if path in self.paths else path

    def _add_link(self, tree: Dict[bytes, Any]) -> None:
        path = self._free_name(tree)
        if path is None:
            return
        place, name = path.rsplit(b"/", 1)
        target = self.random.choice(self.paths + self.directories)
        if not self.wild and (place + b"/").startswith(target + b"/"):
            return
        kind = self.random.random() if self.wild else 1.0
        text = os.path.relpath(target, place)
        text = b"nowhere" if kind < 0.1 else name if kind < 0.13 else b"/dev/null" if kind < 0.16 else text
        self._inside(tree, place)[name] = Link(text)
        self.paths.append(path)

    def _hard(self, tree: Dict[bytes, Any]) -> Tuple[bytes, bytes]:
        path = None
        while path is None:
            path = self._free_name(tree)
        self.paths.append(path)
        return path, self.random.choice(self.files)

    def _request(self) -> Request:
        count = self.random.choice([1, 1, 1, 1, 2, 2, 3])
        sources = [self._source() for _ in range(count)]
        into = self._chance(0.15)
        no_target = not into and self._chance(0.15)
        target = self._destination(into or len(sources) > 1)
        flags = dict(recursive=not self._chance(0.1), force=self._chance(0.4))
        if into:
            return Request(sources, into=target, **flags)
        return Request((sources[:1] if no_target else sources) + [target], no_target=no_target, **flags)

    def _typed(self, path: bytes) -> bytes:
        """One of the ways to write a path of the tree, from w."""
        relative = os.path.relpath(path, b"w")
        return self.random.choice([relative] * 6 + [b"./" + relative, b"%TOP%/" + path, relative.replace(b"/", b"//")])

    def _source(self) -> bytes:
        if self.wild and self._chance(0.06):
            return self.random.choice([b"", b"absent", b"absent/x", b".", b"..", b"absent/"])
        if self._chance(0.7):
            path = self.random.choice(self._some(self.directories, b"w"))
            decoration = [b""] * 6 + [b"/", b"//", b"/.", b"/./", b"/.."] * (1 if self.wild else 0) + [b"/", b"/."]
            return self._typed(path) + self.random.choice(decoration)
        return self._typed(self.random.choice(self._some(self.files, b"w"))) + (b"/" if self._chance(0.03) else b"")

    def _some(self, paths: List[bytes], side: bytes) -> List[bytes]:
        """In a tame case only what is below `side`, so that the copy goes from one to the other."""
        chosen = [path for path in paths if self.wild or path.startswith(side + b"/")]
        return chosen or [side]

    def _destination(self, directory: bool) -> bytes:
        if self.wild and self._chance(0.15):
            odd = [b"", b"absent/x", b".", b"..", b"absent/.", b"absent/..", b"absent/", b"absent//"]
            return self.random.choice(odd)
        directories = self._some(self.directories, b"o")
        if not directory and self._chance(0.5):
            return self._typed(self.random.choice(directories) + b"/absent") + self.random.choice([b"", b"", b"/"])
        if directory or self._chance(0.7):
            return self._typed(self.random.choice(directories)) + self.random.choice([b"", b"", b"/", b"/."])
        return self._typed(self.random.choice(self._some(self.paths, b"o"))) + self.random.choice([b"", b"", b"", b"/"])


# One overlap of source and destination may rightly be called by each of these names.
OVERLAP = {"same", "source", "itself", "cycle"}

RULES = {
    "MissingSource": {"stat"},
    "OmittedDirectory": {"omitted"},
    "TargetNotDirectory": {"target"},
    "UnusableDestination": {"create", "stat"},
    "NonDirectoryInTheWay": {"file in the way"},
    "DirectoryInTheWay": {"directory in the way"},
    "SameFile": {"same"},
    "CopyIntoItself": {"itself"},
    "OverwritesSource": {"source"},
    "JustCreated": {"twice"},
    "DestinationExists": {"exists"},
    "NotRegularDestination": {"not regular"},
    "SpecialFiles": {"special"},
    "UnreadableEntries": {"stat", "cycle"},
}


class Side:
    """A case grown in a directory of its own, and what the model says of it."""

    def __init__(self, case: Case, top: str) -> None:
        self.top = os.fsencode(top)
        self.cwd = case.grow(top)
        self.request = self._at(case.request)
        self.arguments = self.request.arguments()
        before = cpmodel.contents(self.top)
        self.prediction = cpmodel.Model(self.request, self.cwd).predict()
        self.expected = cpmodel.after(before, self.prediction, self.top, case.umask)

    def _at(self, request: Request) -> Request:
        operands = [word.replace(b"%TOP%", self.top) for word in request.operands]
        into = request.into
        return request._replace(operands=operands, into=into and into.replace(b"%TOP%", self.top))


@support.slow
class RandomCases(TestCase):
    def test_cp_the_model_the_plan_and_fastcp_agree(self) -> None:
        first, count = int(os.environ.get("CP_FIRST", "0")), int(os.environ.get("CP_SEEDS", USUAL_CASES))
        seen: Dict[str, int] = {}
        for seed in range(first, first + count):
            with self.subTest(seed=seed):
                for what in self.check(seed):
                    seen[what] = seen.get(what, 0) + 1
        if count >= USUAL_CASES:
            # Were the generator to go astray, the cases would still pass.
            for what in ("copied like cp", "replaced", "refused", *sorted(set().union(*RULES.values()))):
                self.assertGreater(seen.get(what, 0), 0, f"no case of {what!r} in {seen}")
            self.assertGreater(seen["copied like cp"], count / 6, seen)

    def check(self, seed: int) -> List[str]:
        """One case on both sides; what it was a case of."""
        case = Generator(seed).case()
        tops = [self.path(f"{seed}-{name}") for name in ("cp", "fastcp")]
        try:
            self.check_cp(case, Side(case, tops[0]))
            return self.check_fastcp(case, Side(case, tops[1]), seed)
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}: {exc}\n{case.shown()}") from None
        finally:
            for top in tops:
                support.remove_tree(top)

    def check_cp(self, case: Case, side: Side) -> None:
        """The model must say what cp does, where we mean to do the same."""
        prediction = side.prediction
        if prediction.runaway or prediction.cp_differs:
            return
        result = cpmodel.run_cp(side.arguments, side.cwd, case.umask)
        if prediction.reasons:
            self.assertEqual(result.returncode, 1, f"cp should fail: {prediction.reasons} {result}")
            self.assert_about(cpmodel.message_classes(result), prediction.reasons, result)
        else:
            self.assertEqual((result.returncode, result.stderr), (0, ""), result)
            self.assertEqual(cpmodel.difference(cpmodel.contents(side.top), side.expected), "", "cp's tree")

    def check_fastcp(self, case: Case, side: Side, seed: int) -> List[str]:
        prediction = side.prediction
        before = cpmodel.photograph(side.top)
        self.check_plan(side)
        workers = random.Random(seed).choice([[], [b"-n1"], [b"-n2"], [b"-n2"], [b"-n5"]])
        result = cpmodel.run_fastcp([*workers, *side.arguments], side.cwd, case.umask)
        self.assertEqual(result.stdout_bytes, b"", result)
        if prediction.reasons:
            self.assertEqual(result.returncode, 1, f"should be refused: {prediction.reasons} {result}")
            self.assert_about(cpmodel.message_classes(result), prediction.reasons, result)
            self.assertEqual(cpmodel.difference(cpmodel.photograph(side.top), before), "", f"touched: {result}")
            return ["refused", *prediction.reasons]
        self.assertEqual(result.returncode, 0, result)
        self.assertEqual(len(result.stderr.splitlines()), 1, result)
        self.assertEqual(cpmodel.difference(cpmodel.contents(side.top), side.expected), "", f"fastcp's tree: {result}")
        return ["replaced"] if prediction.cp_differs else ["copied like cp"]

    def check_plan(self, side: Side) -> None:
        """The library refuses by the right class, and plans the places that the model names."""
        request = side.request
        os.chdir(side.cwd)
        try:
            words = [*request.operands, *([] if request.into is None else [request.into])]
            *sources, target = map(os.fsdecode, words)
            plan = copyplan.plan_copy_operations(
                sources, target, recursive=request.recursive, into_directory=request.into is not None,
                no_target_directory=request.no_target, force=request.force)
            self.assertFalse(side.prediction.reasons, "planned")
            places = [cpmodel.real_place(os.fsencode(file[1])) for file in plan.files]
            self.assertEqual(sorted(places), sorted(side.prediction.files))
            made = {cpmodel.real_place(os.fsencode(directory)) for directory in plan.directories}
            self.assertLessEqual(set(side.prediction.directories), made)
            self.assertTrue(all(os.path.isdir(place) for place in made - set(side.prediction.directories)), made)
        except (copyplan.CopyArgumentError, copyplan.UnreadableEntries) as exc:
            self.assert_about(RULES[type(exc).__name__], side.prediction.reasons, exc)
        finally:
            os.chdir("/")

    def assert_about(self, classes: Set[str], reasons: Set[str], shown: Any) -> None:
        """The model may have found more than was reported, as one kind is reported at a time."""
        if not classes & reasons and not (classes & OVERLAP and reasons & OVERLAP):
            self.fail(f"about {classes}, expected of {reasons}: {shown!r}")


if __name__ == "__main__":
    support.main()
