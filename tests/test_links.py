# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Symbolic links followed, copied and replaced, and names of one file kept as such: against the real cp."""

# Takes about 10 s
from __future__ import annotations

import os
from typing import Any, List, Sequence, Tuple

import keeping
import support
from keeping import looks, run_cp, run_fastcp
from support import Link, TestCase

MANY = {
    "f": b"x",
    "D": {
        "in": b"y",
        "l": Link("in"),
        "up": Link("../f"),
        "empty": {},
        "sub": {"g": b"z"},
        "dir": Link("sub"),
        "deep": Link("sub/../sub/g"),
    },
    "lf": Link("f"),
    "ld": Link("D"),
    "lld": Link("ld"),
}
DANGLING = {
    "D": {"a": b"1", "n": Link("nowhere"), "abs": Link("/nowhere/at all"), "self": Link("self")},
    "n": Link("o"),
}

# Options, sources, DEST: all of them in a directory that holds MANY and the empty directory E.
FOLLOWED: List[Tuple[str, Sequence[str], str]] = [
    (options, sources, destination)
    for options in (
        *("-P", "-L", "-H", "-rP", "-rL", "-rH", "-rTP"),
        *("-r -H -L", "-r -L -H", "-r -P -L", "-r -L -P", "-a -L"),
    )
    for sources, destination in (
        (["lf"], "new"),
        (["ld"], "new"),
        (["lld"], "new"),
        (["lf"], "E"),
        (["D"], "new"),
        (["lf", "D", "lld", "f"], "E"),
    )
    if not ("T" in options and len(sources) > 1)
] + [
    ("-rP", ["ld/"], "new"),
    ("-rP", ["ld/."], "new"),
    ("-rP", ["ld/.", "f"], "E"),
    ("-rH", ["ld/", "lld"], "E"),
    ("-rP", ["D/../ld/up"], "new"),
    ("-P", ["lf"], "E/"),
    ("-P", ["lf"], "new/"),
    ("-rP", ["lf", "ld", "-t", "E"], ""),
]


class Following(TestCase):
    """-P, -L and -H, for operands and below them."""

    def both(self, name: str, tree: Any, *words: str) -> Tuple[support.Result, support.Result]:
        """Run cp and fastcp with the same words in two copies of a tree; they are cp/NAME and fastcp/NAME."""
        for tool in ("cp", "fastcp"):
            self.make(f"{name}/{tool}", tree) if os.path.isdir(self.path(name)) else self.make(name, {tool: tree})
        return (
            run_cp(*words, cwd=self.path(name, "cp")),
            run_fastcp(*words, cwd=self.path(name, "fastcp")),
        )

    def test_as_cp(self) -> None:
        tree = {**MANY, "E": {}}
        for number, (options, sources, destination) in enumerate(FOLLOWED):
            words = [*options.split(), *sources, *([destination] if destination else [])]
            with self.subTest(words=words):
                cp, fastcp = self.both(f"{number}", tree, *words)
                self.assertEqual(cp.returncode, fastcp.returncode, (cp, fastcp))
                fields = ("kind", "content", "mode")
                lines = keeping.differences(
                    looks(self.path(f"{number}", "fastcp")), looks(self.path(f"{number}", "cp")), fields
                )
                if cp.returncode == 0:
                    self.assertEqual(lines, [])


if __name__ == "__main__":
    support.main()
