"""Reads flags from a YAML file, as words of a command line that precede those that the user typed.

    num-proc: 4                    --num-proc=4
    hosts: [node1:4, node2:4]      --hosts=node1:4,node2:4
    verbose: true                  --verbose
    environment: {LR: 0.1}         -x=LR=0.1
    timeline: {filename: t.json}   --timeline-filename=t.json

Every flag of `flag_parser.Parser` is a key, at the top level or in the section that horovodrun has for it. A scalar
value is read as the text in the file, as on the command line: YAML's rules do not turn the version 1.10 into 1.1, or
``no`` into false. Every error is a `UsageError` that names the file, and the line if there is one. `hvdlite_run`
imports this module only when a file is given, as PyYAML takes 20 ms to import.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import yaml

from ..errors import UsageError
from ..system.user_files import name_file, read_user_file
from .flag_parser import Parser, Value, closest

_MAX_BYTES = 1 << 18
# The first names the file itself; the others print something and start no job.
_NO_KEYS = frozenset({"config-file", "help", "version", "cb", "check", "check-build", "ps", "report", "diagnose"})
# The prefix of the flags in each section. In a section, `enabled` is the switch with the section's own name.
_SECTIONS = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall-check": "stall-check-",
    "library-options": "",
    "logging": "log-",
}
_TRUE = yaml.ScalarNode("tag:yaml.org,2002:str", "true")
_IMPLICIT_TAGS = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"}


def config_words(path: str, parser: Parser, *, without: Collection[str] = ()) -> list[str]:
    """Returns the file at ``path`` as words for ``parser``, without the flags whose ``dest`` is in ``without``."""
    try:
        return list(
            _words(_entries(read_user_file(path, max_bytes=_MAX_BYTES, what="a file of flags")), parser, without)
        )
    except UsageError as error:
        raise UsageError(f"{name_file('--config-file', path)}{error}") from None


def _words(entries: list[tuple[yaml.Node, yaml.Node]], parser: Parser, without: Collection[str]) -> Iterator[str]:
    flags = {key: flag for key, flag in parser.flags_by_key().items() if key not in _NO_KEYS}
    lines: dict[str, int] = {}
    for line, key, name, node in _flat(entries):
        flag = flags.get(name)
        if flag is None:
            raise UsageError(f", line {line}: unknown key {key!r}; {closest(name, flags)}")
        if flag.dest in lines:
            raise UsageError(f", line {line}: {key} is already set in line {lines[flag.dest]}: set it once")
        lines[flag.dest] = line
        try:
            words = parser.words_for(flag, _value(node))
        except UsageError as error:
            raise UsageError(f", line {line}: {key}: {error}") from None
        if flag.dest not in without:
            yield from words


def _flat(entries: list[tuple[yaml.Node, yaml.Node]]) -> Iterator[tuple[int, str, str, yaml.Node]]:
    """Yields line, key as written, flag's name and value of each entry, and of each entry of horovodrun's sections."""
    for key, node in entries:
        line, shown = key.start_mark.line + 1, _shown(key)
        name = shown.replace("_", "-")
        if name == "controller":
            yield line, shown, _controller(node, line), _TRUE
        elif name in _SECTIONS and name != "stall-check" and isinstance(node, yaml.SequenceNode):
            raise UsageError(f", line {line}: {shown}: it must be a section of flags and values, not a list")
        elif name not in _SECTIONS or not (isinstance(node, yaml.MappingNode) or _is_nothing(node)):
            yield line, shown, name, node
        else:
            prefix = _SECTIONS[name]
            for inner_key, inner in node.value or ():
                inner_name = _shown(inner_key).replace("_", "-").removeprefix(prefix)
                flag = name if inner_name == "enabled" else prefix + inner_name
                yield inner_key.start_mark.line + 1, f"{shown}: {_shown(inner_key)}", flag, inner


def _controller(node: yaml.Node, line: int) -> str:
    if isinstance(node, yaml.ScalarNode) and node.value.lower() in ("gloo", "mpi", "jsrun"):
        return str(node.value.lower())
    raise UsageError(f", line {line}: controller: it must be gloo, mpi or jsrun")


def _shown(key: yaml.Node) -> str:
    return str(key.value) if isinstance(key, yaml.ScalarNode) else ""


def _entries(data: bytes) -> list[tuple[yaml.Node, yaml.Node]]:
    """Returns the keys and values of the file's one mapping; none if the file is empty."""
    try:
        # Not load(), which drops the line numbers, and the first of two keys of the same name.
        root = yaml.compose(data, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        raise UsageError(f"{line}: not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UsageError(f": not YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise UsageError(": nested too deeply for a file of flags") from None
    if root is None or _is_nothing(root):
        return []
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(": it must be lines of flags and values, such as num-proc: 4")
    entries: list[tuple[yaml.Node, yaml.Node]] = root.value
    return entries


def _value(node: yaml.Node) -> Value:
    if isinstance(node, yaml.SequenceNode):
        return [_text(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        texts = {_text(name) or "": _text(value) for name, value in node.value}
        if len(texts) < len(node.value):
            raise UsageError("a name in it is given twice")
        return texts
    return _text(node)


def _text(node: yaml.Node) -> str | None:
    """Returns the text of a scalar, None if it is empty. No message contains it, as it may be secret."""
    if node.tag not in _IMPLICIT_TAGS:
        raise UsageError(f"the YAML tag {node.tag!r} is not supported here: leave it out")
    if not isinstance(node, yaml.ScalarNode):
        raise UsageError("a list or mapping within another is not supported")
    return None if _is_nothing(node) else str(node.value)


def _is_nothing(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value.lower() in ("", "~", "null")
