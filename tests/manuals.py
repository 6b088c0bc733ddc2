# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The man pages and the bash completion of the tools, made from their option tables and the texts of README.md.

`python3 tests/manuals.py` writes them to client/man and client/completion; test_manuals.py sees that they are what it
would write.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
from typing import Any, Dict, List, Tuple

import support
from support import ROOT

from mlperf_common import __version__
from mlperf_common.fileio.fastcp import ATTRIBUTES

NAMES = {
    "fastcp": "copy files and trees, many at once",
    "fastmd5": "list, check or compare the checksums of files and trees",
    "dropcache": "empty the page cache of files",
}
STATUS = {
    "fastcp": "0 if everything that was asked for is there, complete; 1 if anything is not; 2 for a usage error.",
    "fastmd5": "0 if everything was listed, or checked and the same; 1 if not; 2 for a usage error.",
    "dropcache": "0 if everything was dropped, 1 if not, 2 for a usage error.",
}
EXAMPLES = {
    "fastcp": ["fastcp -r SRC DEST", "fastcp -a -u --fsync SRC DEST", "srun fastcp -r --distributed SRC DEST"],
    "fastmd5": ["fastmd5 --compare SRC DEST", "fastmd5 -C SRC . > sums; fastmd5 -C DEST -c sums --extra --quiet"],
    "dropcache": ["dropcache DEST"],
}
DIRECTORIES = {"--target-directory", "--directory", "--rendezvous"}
LISTS = {"--preserve", "--no-preserve"}
KEPT = (*ATTRIBUTES, "all")
FILES = {"--manifest", "--failed-list", "--files-from"}


def parser_of(tool: str) -> Any:
    """The tool's parser."""
    module = importlib.import_module("mlperf_common.fileio." + tool)
    return module._parser() if tool == "dropcache" else module.make_parser()


def told() -> Dict[Tuple[str, str], str]:
    """(tool, option) to what README.md says of it."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as stream:
        text = stream.read()
    found = {}
    for tool in NAMES:
        part = re.split(r"\n##", text.split("\n### %s\n" % tool)[1])[0]
        for left, right in re.findall(r"(?m)^\| (`-.*?) \| (.*) \|$", part):
            for option in re.findall(r"(?<![\w=-])--?[A-Za-z0-9][\w-]*", left):
                found[tool, option] = right
    for (tool, option), words in list(found.items()):
        if words.startswith("as for fastcp"):
            found[tool, option] = found["fastcp", option] + words[len("as for fastcp") :]
    return found


def roff(text: str) -> str:
    """A text of README.md as roff: what is in backquotes bold, its other sections said to be there."""
    text = re.sub(r'(see "On [^"]*")', r"\1 in README.md", text)
    text = text.replace("\\", "\\e").replace("-", "\\-")
    text = re.sub(r"`([^`]*)`", r"\\fB\1\\fP", text)
    return "\\&" + text if text[:1] in (".", "'") else text


def invocation(action: argparse.Action) -> str:
    """An option's names, with its value, as a man page has them."""
    found = []
    for name in action.option_strings:
        is_long = name.startswith("--")
        value = ""
        if action.nargs == "?":
            value = "[=\\fI%s\\fP]" % action.metavar if is_long else ""
        elif action.nargs != 0:
            value = ("=" if is_long else " ") + "\\fI%s\\fP" % action.metavar
        found.append("\\fB%s\\fP%s" % (roff(name), value))
    return ", ".join(found)


def page(tool: str) -> str:
    """The man page."""
    parser, words = parser_of(tool), told()
    lines = ['.TH %s 1 "" "mlperf\\-common %s" "User Commands"' % (tool.upper(), __version__)]
    lines += [".SH NAME", "%s \\- %s" % (tool, NAMES[tool]), ".SH SYNOPSIS", ".nf"]
    lines += [roff(line.strip()) for line in parser.usage.splitlines()]
    lines += [".fi", ".SH DESCRIPTION", roff(" ".join(parser.description.split()))]
    lines.append(".SH OPTIONS")
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.option_strings]
        if actions and group.title not in ("options", "optional arguments"):
            lines.append(".SS " + group.title.capitalize())
        for action in actions:
            lines += [".TP", invocation(action), roff(words[tool, action.option_strings[0]]) + "."]
    for number, paragraph in enumerate(paragraphs(tool)):
        lines += [".PP" if number else ".SH NOTES", roff(paragraph)]
    lines += [".SH EXIT STATUS", roff(STATUS[tool]), "Ended by a signal, a tool dies of that signal."]
    lines += [".SH ENVIRONMENT", ".TP", "\\fBFASTCP_DEBUG\\fP", "1: unexpected errors show where they came from."]
    lines.append(".SH EXAMPLES")
    for example in EXAMPLES[tool]:
        lines += [".nf", "\\fB%s\\fP" % roff(example), ".fi"]
    others = [name for name in NAMES if name != tool]
    lines += [".SH SEE ALSO", ", ".join("\\fB%s\\fP(1)" % name for name in [*others, "cp", "md5sum", "rsync"])]
    return "\n".join(lines) + "\n"


def paragraphs(tool: str) -> List[str]:
    """What README.md says below the table of options, if anything."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as stream:
        part = re.split(r"\n##", stream.read().split("\n### %s\n" % tool)[1])[0]
    text = re.split(r"(?m)^\|.*$", part)[-1]
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"\*\*([A-Z][^*`]*)\*\*", r"\1", text)
    return [" ".join(piece.split()) for piece in text.split("\n\n") if piece.strip()]


def completion(tool: str) -> str:
    """The bash completion: options, and the values of those that take one; names of files are left to readline."""
    actions = parser_of(tool)._actions
    options = [name for action in actions for name in action.option_strings]
    cases = [
        "        %s) %s ;;" % ("|".join(action.option_strings), values(action))
        for action in actions
        if action.nargs != 0
    ]
    with_value = [name for action in actions if action.nargs is None for name in action.option_strings]
    letters = "".join(name[1] for name in with_value if not name.startswith("--"))
    bundle = "^-([^-%s][^%s]*)?([%s])$" % (letters, letters, letters)
    longs = " ".join(name for name in with_value if name.startswith("--"))
    return "\n".join([
        "# bash completion for %s; made by tests/manuals.py" % tool,
        "_%s() {" % tool,
        "    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} option=",
        "    COMPREPLY=()",
        '    [[ " ${COMP_WORDS[*]:1:COMP_CWORD - 1} " != *" -- "* ]] || return 0',
        "    # whose value is completed; bash takes = for a word of its own",
        "    if [[ $current == = ]]; then option=$previous current=",
        "    elif [[ $previous == = ]]; then option=${COMP_WORDS[COMP_CWORD - 2]}",
        *(["    elif [[ $previous =~ %s ]]; then option=-${BASH_REMATCH[2]}" % bundle] if letters else []),
        *(['    elif [[ " %s " == *" $previous "* ]]; then option=$previous' % longs] if longs else []),
        "    fi",
        "    case $option in",
        '        "") [[ $current != -* ]] || COMPREPLY=($(compgen -W "%s" -- "$current")) ;;' % " ".join(options),
        *cases,
        "    esac",
        "}",
        "complete -o default -F _%s %s" % (tool, tool),
        "",
    ])  # fmt: skip


def values(action: argparse.Action) -> str:
    """What bash does to complete an option's value: nothing, where only the user knows it."""
    names = set(action.option_strings)
    if action.choices:
        return 'compopt +o default; COMPREPLY=($(compgen -W "%s" -- "$current"))' % " ".join(action.choices)
    if names & DIRECTORIES:
        return "compopt +o default -o dirnames"
    if names & LISTS:
        return (
            "compopt +o default -o nospace; "
            'COMPREPLY=($(compgen -P "${current%%"${current##*,}"}" -W "%s" -- "${current##*,}"))' % " ".join(KEPT)
        )
    return ":" if names & FILES else "compopt +o default"


def files() -> Dict[str, str]:
    """Every file, by its path below the root."""
    found = {}
    for tool in support.TOOLS:
        found["client/man/%s.1" % tool] = page(tool)
        found["client/completion/%s" % tool] = completion(tool)
    return found


if __name__ == "__main__":
    for path, text in files().items():
        os.makedirs(os.path.dirname(os.path.join(ROOT, path)), exist_ok=True)
        with open(os.path.join(ROOT, path), "w", encoding="utf-8") as stream:
            stream.write(text)
