# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""MAIN-BUGS.md: every reproduction in it runs, passes, and would notice its defect.

Each bash block runs in an empty directory with the tools, and again with each tool replaced by one that does
nothing, one that only fails, one that hangs, and imitations of the defect that are right in all else: the
block must pass the first time and fail every other time.
"""

# Takes about 40 s
from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import unittest
from concurrent.futures import ThreadPoolExecutor
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import support
from support import ROOT, File, make_tree

LEDGER = os.path.join(ROOT, "MAIN-BUGS.md")
TOOLS = ("fastcp", "fastmd5")
SECTIONS = (
    ("Data loss", (1, 2)),
    ("Silent wrong results", (3, 4, 5, 6)),
    ("Hangs", (7, 8)),
    ("Permissions", (9,)),
    ("Cosmetic", (10,)),
    ("Introduced by a refactoring", (11, 12, 13)),
    ("Two more, of the walk", (14, 15)),
    ("Known limits of today's tools", ()),
)
PARTS = ("What happened: ", "Why: ", "```bash\n", "\nNow: ", "\nPinned by: ")
NOT_AS_ROOT = 'test "$(id -u)" -ne 0'

AT_ONCE = 4  # blocks wait as much as they work

NOTHING = "exit 0"
FAILS = "exit 1"
HANGS = "exec sleep 1000"

# For each entry the tool and a script that has the defect. $REAL is the tool itself.
IMITATIONS: Dict[int, List[Tuple[str, str]]] = {
    1: [
        ("fastcp", ": >a.bin"),
        ("fastcp", '"$REAL" "$@"; status=$?; : >a.bin; exit $status'),
        ("fastcp", 'case "$*" in *soft) : >a.bin; exit 0;; esac; exec "$REAL" "$@"'),
    ],
    2: [
        ("fastcp", 'case "$*" in *"src/.. dst") : >victim; : >src/a; exit 0;; esac; exec "$REAL" "$@"'),
        ("fastcp", 'case "$*" in *"src/.. dst") : >victim;; esac; exec "$REAL" "$@"'),
        ("fastcp", 'case "$*" in *"/ t/dst") echo "directory t/dst"; exit 0;; esac; exec "$REAL" "$@"'),
        ("fastcp", 'case "$*" in *"src/.. other") cp -r t/src/../. other/..; exit 0;; esac; exec "$REAL" "$@"'),
    ],
    3: [
        ("fastcp", 'case "$*" in *"-n 0"*) truncate -s 3000000 out; exit 0;; esac; exec "$REAL" "$@"'),
        ("fastcp", 'case "$*" in *"-b 0"*) exit 1;; esac; exec "$REAL" "$@"'),
        ("fastmd5", 'case "$*" in *"-n 0"*) exit 0;; esac; exec "$REAL" "$@"'),
        ("fastmd5", 'case "$*" in *"-b 0"*) exit 1;; esac; exec "$REAL" "$@"'),
    ],
    4: [
        (
            "fastcp",
            '[ -n "$PYTHONPATH" ] || exec "$REAL" "$@"\nunset PYTHONPATH\n"$REAL" "$@" 2>/dev/null\n'
            "dd if=/dev/zero of=b bs=1M seek=80 count=1 conv=notrunc status=none; echo Input/output error >&2",
        ),
        ("fastcp", '"$REAL" "$@"; status=$?; [ -n "$PYTHONPATH" ] && cp a b; exit $status'),
        ("fastmd5", 'unset PYTHONPATH; "$REAL" "$@"; echo Input/output error >&2'),
        ("fastmd5", '[ -z "$PYTHONPATH" ] || { "$REAL" "$@"; exit 0; }; exec "$REAL" "$@"'),
    ],
    5: [
        ("fastcp", '"$REAL" "$@" && find "${@: -1}" -mindepth 1 -type d -empty -delete'),
        ("fastcp", '"$REAL" "$@" && rmdir --ignore-fail-on-non-empty "${@: -1}"'),
    ],
    6: [
        ("fastcp", 'for s in "${@:1:$#-1}"; do case $s in -*) ;; *) cp -r "$s" "${@: -1}";; esac; done'),
        ("fastcp", 'cp -r "$@"'),
    ],
    7: [
        ("fastcp", 'case "$*" in *skip*) ;; *) cat src/p;; esac; exec "$REAL" "$@"'),
        ("fastmd5", 'exec "$REAL" --skip-special "$@" 2>/dev/null'),
        ("fastmd5", 'exec "$REAL" --skip-special "$@"'),
        ("fastmd5", 'case "$*" in *skip*) exec "$REAL" "$@" 2>/dev/null;; esac; exec "$REAL" "$@"'),
    ],
    8: [
        ("fastcp", 'case $PYTHONPATH in *shrinks) sleep 1000;; esac; exec "$REAL" "$@"'),
        ("fastcp", 'case $PYTHONPATH in *full) sleep 1000;; esac; exec "$REAL" "$@"'),
        ("fastcp", '[ -z "$PYTHONOPTIMIZE$PYTHONPATH" ] || unset PYTHONPATH; exec "$REAL" "$@"'),
        ("fastcp", '[ -z "$PYTHONOPTIMIZE" ] || unset PYTHONPATH; exec "$REAL" "$@"'),
        ("fastmd5", '[ -z "$PYTHONPATH" ] || sleep 1000; exec "$REAL" "$@"'),
    ],
    9: [
        ("fastcp", 'exec cp -r --no-preserve=mode "$@"'),
        ("fastcp", '"$REAL" "$@"; status=$?; [ ! -d trees ] || chmod 775 trees; exit $status'),
        ("fastcp", '"$REAL" "$@"; status=$?; [ ! -d old ] || chmod 775 old; exit $status'),
    ],
    10: [
        ("fastmd5", 'for f in src/*; do printf "%s\\t0\\t2\\t%s\\n" "$f" "$(md5sum <"$f" | cut -c 1-32)"; done'),
        ("fastmd5", 'case "$*" in no*) seq 9 >&2; echo No such file >&2; exit 1;; esac; exec "$REAL" "$@"'),
        ("fastcp", 'case "$*" in no*) seq 9 >&2; echo No such file >&2; exit 1;; esac; exec "$REAL" "$@"'),
        ("fastcp", 'cp -r "$@"; rm -f copy/e*'),
    ],
    11: [
        ("fastcp", "#!/usr/bin/env python3\nimport mlperf_common.fileio.fastcp\n"),
        ("fastmd5", "#!/usr/bin/env python3\nprint('fastmd5: no package')\nraise SystemExit(1)\n"),
    ],
    12: [
        (
            "fastcp",
            "#!/usr/bin/env python3\nimport os, sys\ntry:\n    import direct_io\nexcept ImportError: pass\n"
            'os.execv(os.environ["REAL"], ["fastcp", *sys.argv[1:]])\n',
        ),
        (
            "fastcp",
            "#!/usr/bin/env python3\nimport os, sys\n"
            "tree = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))\n"
            'if not os.path.isdir(os.path.join(tree, "mlperf_common")): sys.exit("no package")\n'
            'os.execv(os.environ["REAL"], ["fastcp", *sys.argv[1:]])\n',
        ),
    ],
    13: [],  # see test_the_block_on_refusals
    14: [
        ("fastcp", 'case "$*" in *-r*) cp "$@" 2>/dev/null; exit 0;; esac'),
        ("fastcp", 'cp "$@"'),
        ("fastmd5", 'find "$@" -type f 2>/dev/null; exit 0'),
        ("fastmd5", '"$REAL" "$@"; exit 0'),
    ],
    15: [
        ("fastcp", 'cp -L "$@" 2>/dev/null; exit 0'),
        ("fastcp", 'cp -L "$@"'),
        ("fastmd5", 'find "$@" -type f; exit 0'),
        ("fastmd5", '"$REAL" "$@"; exit 0'),
    ],
}


class Entry(NamedTuple):
    """An entry of the ledger: its number, title, text, bash block."""

    number: int
    title: str
    text: str
    block: str


def ledger() -> str:
    """The text of MAIN-BUGS.md."""
    with open(LEDGER, encoding="utf-8") as stream:
        return stream.read()


def entries() -> List[Entry]:
    """The entries in the order of the file."""
    found = []
    for piece in re.split(r"^### ", ledger(), flags=re.MULTILINE)[1:]:
        piece = piece.split("\n## ")[0]
        heading, text = piece.split("\n", 1)
        number, title = heading.split(". ", 1)
        blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        found.append(Entry(int(number), title, text, "".join(blocks)))
    return found


ENTRIES = entries()


class Case(support.TestCase):
    """Runs blocks: each in an empty directory, with tools of the caller's choice."""

    count = itertools.count()

    def run_block(self, block: str, tools: Optional[Dict[str, str]] = None, patience: float = 0) -> support.Result:
        """Run a block with ``tools`` (name to path) in place of the real ones.

        ``patience``: seconds that `timeout` really waits, where the tool is known to hang.
        """
        user = self.user_for(block)
        place = self.make(f"run{next(self.count)}", {"block": block.encode(), "empty": {}, "bin": {}})
        python = self.real("fastcp", user)[0]
        self.put(place, "bin/python3", f'exec "{python}" "$@"')
        if patience:
            self.put(place, "bin/timeout", f'shift; exec {shutil.which("timeout")} -k 1 {patience} "$@"')
        if user:
            os.chmod(os.path.join(place, "empty"), 0o777)
        chosen = {tool: self.real(tool, user)[1] for tool in TOOLS}
        chosen.update(tools or {})
        env = {
            "FASTCP": chosen["fastcp"],
            "FASTMD5": chosen["fastmd5"],
            "PATH": os.path.join(place, "bin") + os.pathsep + os.environ.get("PATH", os.defpath),
            "PYTHONPATH": None,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        argv = ["bash", "-x", os.path.join(place, "block")]
        return support.run(argv, cwd=os.path.join(place, "empty"), env=env, user=user, timeout=100)

    def user_for(self, block: str) -> Optional[str]:
        """Whom a block has to run as: root may list what others may not."""
        return support.NOBODY if NOT_AS_ROOT in block and os.geteuid() == 0 else None

    def real(self, tool: str, user: Optional[str]) -> Sequence[str]:
        """Python and the path of client/TOOL, for that user."""
        return support.command_line(tool, user=user)

    def put(self, place: str, name: str, script: str) -> str:
        """Write an executable script, in sh unless it says otherwise."""
        text = script if script.startswith("#!") else f"#!/bin/bash\n{script}\n"
        return make_tree(os.path.join(place, name), File(text.encode(), mode=0o755))

    def replaced(self, tool: str, script: str, block: str) -> Dict[str, str]:
        """A tree with all that a checkout has, but for one tool; for run_block."""
        user = self.user_for(block)
        real = self.real(tool, user)[1]
        tree = self.make(f"tree{next(self.count)}", {"client": {}})
        os.symlink(os.path.join(os.path.dirname(os.path.dirname(real)), "mlperf_common"), f"{tree}/mlperf_common")
        if not script.startswith("#!"):
            script = f'REAL="{real}"\n{script}'
        return {tool: self.put(tree, f"client/{tool}", script.replace('os.environ["REAL"]', repr(real)))}


class Reproductions(Case):
    def test_every_block_passes(self) -> None:
        mine = [entry for entry in ENTRIES if not self.user_for(entry.block)]
        with ThreadPoolExecutor(AT_ONCE) as executor:
            for entry, result in zip(mine, executor.map(lambda entry: self.run_block(entry.block), mine)):
                with self.subTest(entry.number, title=entry.title):
                    self.assertEqual(result.returncode, 0, result)

    @support.needs_nobody
    def test_every_block_for_an_ordinary_user_passes(self) -> None:
        for entry in ENTRIES:
            if NOT_AS_ROOT in entry.block:
                with self.subTest(entry.number, title=entry.title):
                    result = self.run_block(entry.block)
                    self.assertEqual(result.returncode, 0, result)

    def broken(self, script: str, patience: float) -> None:
        """Every block must fail with each of its tools replaced by this script."""
        self.check_fail(
            [(e, tool, script) for e in ENTRIES for tool in TOOLS if f"${tool.upper()}" in e.block], patience
        )

    def check_fail(self, cases: Sequence[Tuple[Entry, str, str]], patience: float) -> None:
        """Each entry's block must fail with the tool replaced by the script; several at a time."""
        possible = [case for case in cases if not (self.user_for(case[0].block) and support._why_not_nobody())]

        def run(case: Tuple[Entry, str, str]) -> support.Result:
            entry, tool, script = case
            return self.run_block(entry.block, self.replaced(tool, script, entry.block), patience)

        with ThreadPoolExecutor(AT_ONCE) as executor:
            for (entry, tool, script), result in zip(possible, executor.map(run, possible)):
                with self.subTest(entry.number, title=entry.title, tool=tool):
                    self.assertNotEqual(result.returncode, 0, f"{script}: not noticed: {result}")

    @support.slow
    def test_a_tool_that_does_nothing_is_noticed(self) -> None:
        self.broken(NOTHING, 20)

    @support.slow
    def test_a_tool_that_only_fails_is_noticed(self) -> None:
        self.broken(FAILS, 20)

    @support.slow
    def test_a_tool_that_hangs_is_noticed(self) -> None:
        self.broken(HANGS, 0.2)

    @support.slow
    def test_each_defect_is_noticed(self) -> None:
        self.check_fail([(e, tool, script) for e in ENTRIES for tool, script in IMITATIONS[e.number]], 4)

    def test_the_block_on_refusals(self) -> None:
        block = next(entry.block for entry in ENTRIES if entry.number == 13)
        package = "class CopyArgumentError(Exception): pass\n" + "".join(
            f"class {name}(CopyArgumentError): pass\n"
            for name in sorted(set(re.findall(r"copyplan\.([A-Z]\w+)", block)))
            if name != "CopyArgumentError"
        )
        loose = b"self.%s(copyplan.CopyArgumentError)\n" % b"assertRaises"  # in one word the block would find it here
        for label, test, plan in (
            ("a test of any refusal", loose, None),
            ("no test at all", None, None),
            ("one rule for all", b"", "def plan_copy_operations(*args): raise SameFile\n"),
            ("a rule that is gone", b"", "def plan_copy_operations(*args): pass\n"),
        ):
            with self.subTest(label):
                tree = self.make(f"tree{next(self.count)}", {"client": {"fastcp": b""}, "tests": {}})
                if test is not None:
                    make_tree(f"{tree}/tests/test_copyplan.py", test)
                if plan is None:
                    os.symlink(os.path.join(ROOT, "mlperf_common"), f"{tree}/mlperf_common")
                else:
                    files = {"__init__.py": b"", "copyplan.py": (package + plan).encode()}
                    make_tree(f"{tree}/mlperf_common", {"__init__.py": b"", "fileio": files})
                result = self.run_block(block, {"fastcp": f"{tree}/client/fastcp"})
                self.assertNotEqual(result.returncode, 0, result)


class Ledger(unittest.TestCase):
    maxDiff = None

    def test_the_sections_and_their_entries(self) -> None:
        found = []
        for piece in re.split(r"^## ", ledger(), flags=re.MULTILINE)[1:]:
            numbers = tuple(int(number) for number in re.findall(r"^### (\d+)\. ", piece, re.MULTILINE))
            found.append((piece.split("\n", 1)[0], numbers))
        self.assertEqual(tuple(found), SECTIONS)

    def test_the_header_says_how_long_it_stays(self) -> None:
        header = ledger().split("\n## ")[0].replace("\n", " ")
        self.assertRegex(header, r"until the project has a tracker.*delete this file")

    def test_each_entry_has_all_its_parts_in_order(self) -> None:
        for entry in ENTRIES:
            with self.subTest(entry.number):
                places = [entry.text.find(part) for part in PARTS]
                self.assertNotIn(-1, places)
                self.assertEqual(places, sorted(places))
                self.assertEqual(entry.text.count("```bash\n"), 1)
                self.assertTrue(entry.block.startswith("set -eu\n"))
                self.assertIn("timeout", entry.block)

    def test_each_entry_has_imitations(self) -> None:
        self.assertEqual(sorted(IMITATIONS), [entry.number for entry in ENTRIES])

    def test_the_tests_that_pin_them_exist(self) -> None:
        for entry in ENTRIES:
            pinned = entry.text.split("\nPinned by: ")[1]
            named = re.findall(r"`tests/(test_\w+\.py)`:((?:\s+`\w+\.\w+`,?)+)", pinned)
            self.assertTrue(named, entry.title)
            self.assertEqual(pinned.count("`tests/"), len(named), entry.title)
            for file, names in named:
                for name in re.findall(r"\w+\.\w+", names):
                    with self.subTest(entry.number, file=file, name=name):
                        self.assertIn(name, tests_of(file))


def tests_of(file: str) -> List[str]:
    """The `Class.test_name` of a test file, inherited ones left out; none if there is no such file."""
    path = os.path.join(ROOT, "tests", file)
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as stream:
        tree = ast.parse(stream.read(), path)
    return [
        f"{node.name}.{method.name}"
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name.startswith("test_")
    ]


if __name__ == "__main__":
    support.main()
