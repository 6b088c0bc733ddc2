# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The rules that no reader of one file can see: who imports whom, and what every source file has."""

# Takes about 3 s
from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import unittest
from typing import Dict, Iterator, List, Set, Tuple

import support
from support import ROOT

# Who may import whom: a floor below, and on two floors one's neighbours, but never in a circle. A new module
# needs a place here.
FLOORS = {
    "tools": ("fastcp", "fastmd5", "dropcache"),
    "modes": ("md5check", "md5compare"),
    "session": ("session", "joining", "together", "outcome"),
    "command": ("command",),
    "engine": (
        *("transfer", "checksum", "hashplan", "hashtasks", "checking", "comparing", "pairtasks"),
        *("directories", "naming", "leftovers", "filework", "recording", "digest", "copymanifest", "largefile"),
        *("batches", "copytasks", "linktasks", "dressing", "workload", "serverside", "resuming"),
        *("sharing", "sharedfile", "workcode", "claims", "dealing", "rewalk"),
        *("walksharing", "hashsharing", "pairsharing"),
        *("copyfile", "facts", "metadata", "listing", "workers"),
    ),
    "plan": ("copyplan", "choosing", "landing", "refusals", "traces", "twins", "walk"),
    "leaves": ("direct_io", "manifest", "pacing", "progress", "report", "stopping", "stripes", "words"),
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names}
ORDER = list(FLOORS)
NEIGHBOURLY = ("session", "engine", "plan")
COMMAND_LINES = FLOORS["tools"] + FLOORS["modes"] + FLOORS["session"] + FLOORS["command"]
TOP_LEVEL = {"mlperf_common", "client", "tests", "setup.py", "README.md", "CLAUDE.md", "MAIN-BUGS.md"}
LAZY = {"torch", "mpi4py"}
LAZY_IN = "mlperf_common/distributed/communicator.py"
LONGEST_FUNCTION = 50
SPDX = (
    "# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors",
    "# SPDX-License-Identifier: Apache-2.0",
)


def sources() -> List[str]:
    """Every Python source of the project, the scripts included, as a path relative to the root."""
    found = [f"client/{name}" for name in support.TOOLS]
    for top in ("mlperf_common", "client", "tests"):
        for directory, names, files in os.walk(os.path.join(ROOT, top)):
            names[:] = [name for name in names if name != "__pycache__"]
            found += [os.path.relpath(os.path.join(directory, name), ROOT) for name in files if name.endswith(".py")]
    return sorted([*found, "setup.py"])


def read(path: str) -> str:
    """A source's text."""
    with open(os.path.join(ROOT, path), encoding="utf-8") as stream:
        return stream.read()


TREES = {path: ast.parse(read(path), path) for path in sources()}
PACKAGE = {path: tree for path, tree in TREES.items() if path.startswith("mlperf_common/")}
SHIPPED = {path: tree for path, tree in TREES.items() if path.startswith(("mlperf_common/", "client/"))}


def imports(path: str, tree: ast.AST) -> Iterator[Tuple[int, str]]:
    """(line, absolute dotted name) of everything imported anywhere in a module, `from a import b` as a.b."""
    package = path[: -len(".py")].split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Every function and method, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def called(tree: ast.AST) -> Iterator[Tuple[int, str]]:
    """(line, name as written) of everything called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, written(node.func)


def written(node: ast.AST) -> str:
    """`a.b.c` for such an expression, else nothing."""
    if isinstance(node, ast.Attribute):
        return f"{written(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


class Case(unittest.TestCase):
    maxDiff = None

    def assert_none(self, findings: List[str]) -> None:
        """Fail with one line for each finding."""
        self.assertFalse(findings, "\n" + "\n".join(findings))


class Imports(Case):
    def fileio(self) -> Dict[str, ast.AST]:
        """The modules of fileio by their short name."""
        start = "mlperf_common/fileio/"
        return {
            path[len(start) : -len(".py")]: tree
            for path, tree in PACKAGE.items()
            if path.startswith(start) and not path.endswith("__init__.py")
        }

    def test_every_module_has_its_floor(self) -> None:
        self.assert_none([f"{name}: give it a place in FLOORS" for name in self.fileio() if name not in FLOOR])

    def siblings(self) -> Iterator[Tuple[str, int, str]]:
        """(module, line, module of fileio that it imports)."""
        for name, tree in self.fileio().items():
            for line, target in imports(f"mlperf_common/fileio/{name}.py", tree):
                parts = target.split(".")
                if parts[:2] == ["mlperf_common", "fileio"] and parts[2] != name:
                    yield name, line, parts[2]

    def test_imports_point_down(self) -> None:
        findings = []
        for name, line, other in self.siblings():
            here, there = FLOOR.get(name, "?"), FLOOR.get(other, "?")
            if "?" in (here, there):
                continue  # another test says so
            below = ORDER.index(there) > ORDER.index(here) or (here == there and here in NEIGHBOURLY)
            if not below:
                findings.append(f"{name}.py:{line} imports {other}, which is not below it")
        self.assert_none(findings)

    def test_no_imports_in_a_circle(self) -> None:
        edges: Dict[str, Set[str]] = {}
        for name, _, other in self.siblings():
            edges.setdefault(name, set()).add(other)
        while True:
            ends = {name for name, others in edges.items() if not others & set(edges)}
            if not ends:
                break
            edges = {name: others for name, others in edges.items() if name not in ends}
        self.assert_none([f"{name} imports {', '.join(sorted(others))}" for name, others in edges.items()])

    def test_the_plan_touches_no_file(self) -> None:
        # It only reads directories, and those through whatever lists them: no pool, no buffers.
        self.assert_none(
            [
                f"{name}.py:{line} imports {other}"
                for name, line, other in self.siblings()
                if FLOOR.get(name) == "plan" and FLOOR.get(other) != "plan" and other != "words"
            ]
        )

    def test_only_the_command_lines_know_distributed(self) -> None:
        self.assert_none(
            [
                f"{name}.py:{line} imports {target}"
                for name, tree in self.fileio().items()
                for line, target in imports(f"mlperf_common/fileio/{name}.py", tree)
                if target.startswith("mlperf_common.distributed") and name not in COMMAND_LINES
            ]
        )

    def test_distributed_does_not_know_fileio(self) -> None:
        self.assert_none(
            [
                f"{path}:{line} imports {target}"
                for path, tree in PACKAGE.items()
                if path.startswith("mlperf_common/distributed/")
                for line, target in imports(path, tree)
                if target.startswith("mlperf_common.fileio")
            ]
        )

    def test_initialisers_import_nothing_of_fileio(self) -> None:
        # Whoever wants direct_io alone should not pay for, or break on, the rest.
        for path in ("mlperf_common/__init__.py", "mlperf_common/fileio/__init__.py"):
            self.assert_none(
                [
                    f"{path}:{line} imports {target}"
                    for line, target in imports(path, PACKAGE[path])
                    if target.startswith("mlperf_common")
                ]
            )

    @unittest.skipIf(sys.version_info < (3, 10), "needs the list of the library's modules (Python 3.10)")
    def test_nothing_but_the_standard_library(self) -> None:
        library = set(getattr(sys, "stdlib_module_names", ())) | {"mlperf_common"}
        self.assert_none(
            [
                f"{path}:{line} imports {target}"
                for path, tree in SHIPPED.items()
                for line, target in imports(path, tree)
                if target.split(".")[0] not in library and not (target.split(".")[0] in LAZY and path == LAZY_IN)
            ]
        )

    def test_what_is_optional_is_imported_late_and_in_one_place(self) -> None:
        for path, tree in TREES.items():
            if path.startswith("tests/"):
                continue
            for line, target in imports(path, tree):
                if target.split(".")[0] in LAZY:
                    self.assertEqual(path, LAZY_IN, line)
                    top = {node.lineno for node in ast.iter_child_nodes(tree)}
                    self.assertNotIn(line, top, f"{path}:{line} is imported at the top")

    def test_only_the_command_lines_know_the_command_line(self) -> None:
        findings = []
        for name, tree in self.fileio().items():
            if name in COMMAND_LINES:
                continue
            path = f"{name}.py"
            findings += [
                f"{path}:{line} imports {target}"
                for line, target in imports(path, tree)
                if target.split(".")[0] in ("argparse", "optparse", "getopt", "logging")
            ]
            findings += [
                f"{path}:{line} calls {what}"
                for line, what in called(tree)
                if what in ("print", "input", "exit", "sys.exit", "quit")
            ]
            findings += [
                f"{path}:{node.lineno} reads {written(node)}"
                for node in ast.walk(tree)
                if written(node) in ("sys.argv", "sys.stdout", "sys.stderr", "os.environ", "os.getenv")
            ]
        self.assert_none(findings)

    def test_each_module_imports_alone_with_warnings_as_errors(self) -> None:
        for path in PACKAGE:
            name = re.sub(r"(/__init__)?\.py$", "", path).replace("/", ".")
            with self.subTest(name):
                result = support.run([sys.executable, "-W", "error", "-c", f"import {name}"], cwd=ROOT)
                self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "", ""))


class Sources(Case):
    def test_licence_and_docstring(self) -> None:
        findings = []
        for path, tree in TREES.items():
            lines = read(path).splitlines()
            start = 1 if lines and lines[0].startswith("#!") else 0
            if tuple(lines[start : start + 2]) != SPDX:
                findings.append(f"{path}: the first lines are not the SPDX header")
            if not ast.get_docstring(tree):
                findings.append(f"{path}: no docstring")
        self.assert_none(findings)

    def test_what_is_public_says_what_it_does(self) -> None:
        self.assert_none(
            [
                f"{path}:{node.lineno}: {node.name} has no docstring"
                for path, tree in PACKAGE.items()
                for node in ast.iter_child_nodes(tree)
                if isinstance(node, (ast.FunctionDef, ast.ClassDef))
                and not node.name.startswith("_")
                and not ast.get_docstring(node)
            ]
        )

    def test_no_assert_decides_anything(self) -> None:
        self.assert_none(
            [
                f"{path}:{node.lineno}: assert is gone under python -O"
                for path, tree in SHIPPED.items()
                for node in ast.walk(tree)
                if isinstance(node, ast.Assert)
            ]
        )

    def test_no_exception_is_swallowed_whole(self) -> None:
        findings = []
        for path, tree in TREES.items():
            for node in ast.walk(tree):
                if not isinstance(node, ast.ExceptHandler):
                    continue
                if node.type is None:
                    findings.append(f"{path}:{node.lineno}: bare except")
                elif written(node.type) in ("Exception", "BaseException") and all(
                    isinstance(step, (ast.Pass, ast.Continue)) for step in node.body
                ):
                    findings.append(f"{path}:{node.lineno}: swallows every exception")
        self.assert_none(findings)

    def test_functions_fit_on_a_screen(self) -> None:
        findings = []
        for path, tree in SHIPPED.items():
            for node in functions(tree):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                declares = any(name.endswith(".add_argument") for _, name in called(node))
                if length > LONGEST_FUNCTION and not declares:
                    findings.append(f"{path}:{node.lineno}: {node.name} is {length} lines long")
        self.assert_none(findings)

    def test_annotations_are_not_evaluated(self) -> None:
        # `X | Y` and `list[str]` in them would fail on Python 3.8.
        self.assert_none(
            [
                f"{path}: annotations without `from __future__ import annotations`"
                for path, tree in PACKAGE.items()
                if any(node.returns or any(arg.annotation for arg in node.args.args) for node in functions(tree))
                and "__future__.annotations" not in {target for _, target in imports(path, tree)}
            ]
        )

    def test_the_scripts_parse_on_every_python(self) -> None:
        code = "import sys\nfor name in sys.argv[1:]: compile(open(name).read(), name, 'exec')"
        names = [os.path.join(support.CLIENT, tool) for tool in support.TOOLS]
        for version in ("2.7", "3.6", "3.7"):
            with self.subTest(version):
                support.run([support.old_python(version), "-c", code, *names], expect=0)


class TopLevel(Case):
    def names(self) -> Set[str]:
        """What git knows at the top level, or what lies there if this is no clone."""
        if os.path.exists(os.path.join(ROOT, ".git")):
            done = subprocess.run(
                ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                check=False,
            )
            if done.returncode == 0:
                return {os.fsdecode(name).split("/")[0] for name in done.stdout.split(b"\0") if name}
        return set(os.listdir(ROOT))

    def test_nothing_but_what_belongs_there(self) -> None:
        self.assertEqual({name for name in self.names() - TOP_LEVEL if not name.startswith(".")}, set())

    def test_what_is_run_can_be_run(self) -> None:
        for path in ["client/" + tool for tool in support.TOOLS] + [".ci/run"]:
            with self.subTest(path):
                self.assertTrue(os.access(os.path.join(ROOT, path), os.X_OK))

    def test_the_ci_script(self) -> None:
        self.assertEqual(tuple(read(".ci/run").splitlines()[1:3]), SPDX)
        support.run(["bash", "-n", os.path.join(ROOT, ".ci", "run")], expect=0)


if __name__ == "__main__":
    support.main()
