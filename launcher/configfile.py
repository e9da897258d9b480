"""A YAML file of flags: what it says becomes words of a command line, to stand before those the user typed.

    num-proc: 4                    --num-proc=4
    hosts: [node1:4, node2:4]      --hosts=node1:4,node2:4
    verbose: true                  --verbose
    environment: {LR: 0.1}         -x=LR=0.1

Every flag of `flags.Parser` is a key, and its value is read as on the command line: a scalar is the text that
stands in the file, so that no rule of YAML's makes something else of the version 1.10 or the value ``no``.
Whatever is wrong is a `UsageError` that names the file, and the line where there is one. PyYAML takes 20 ms
to import, so that this module is imported only where a file is named.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

import yaml

from .errors import UsageError
from .flags import Parser, Value, closest
from .userfile import name_file, read_user_file

_MAX_BYTES = 1 << 18
# One names the file, the others answer a question.
_NO_KEYS = frozenset({"config-file", "help", "version", "check", "check-build"})
# Of the file that horovodrun has; they tune what hvdlite does not have.
_HOROVODS_SECTIONS = ("controller", "params", "autotune", "timeline", "stall_check", "library_options", "logging")
_IMPLICIT_TAGS = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"}


def config_words(path: str, parser: Parser, *, without: Collection[str] = ()) -> list[str]:
    """The file at ``path`` as words for ``parser``, but for the flags whose ``dest`` is in ``without``."""
    try:
        return list(
            _words(_entries(read_user_file(path, max_bytes=_MAX_BYTES, what="a file of flags")), parser, without)
        )
    except UsageError as error:
        raise UsageError(f"{name_file('--config-file', path)}{error}") from None


def _words(entries: list[tuple[yaml.Node, yaml.Node]], parser: Parser, without: Collection[str]) -> Iterator[str]:
    flags = {key: flag for key, flag in parser.flags_by_key().items() if key not in _NO_KEYS}
    sections = [key.value for key, _ in entries if key.value in _HOROVODS_SECTIONS and key.value not in flags]
    if sections:
        raise UsageError(f": {', '.join(sections)}: horovodrun's, to tune what hvdlite does not have; take it out")
    lines: dict[str, int] = {}
    for key, node in entries:
        line = key.start_mark.line + 1
        name = key.value.replace("_", "-") if isinstance(key, yaml.ScalarNode) else ""
        flag = flags.get(name)
        if flag is None:
            raise UsageError(f", line {line}: unknown key {key.value if name else name!r}; {closest(name, flags)}")
        if flag.dest in lines:
            raise UsageError(f", line {line}: {key.value} is in line {lines[flag.dest]} too; give it once")
        lines[flag.dest] = line
        try:
            words = parser.words_for(flag, _value(node))
        except UsageError as error:
            raise UsageError(f", line {line}: {key.value}: {error}") from None
        if flag.dest not in without:
            yield from words


def _entries(data: bytes) -> list[tuple[yaml.Node, yaml.Node]]:
    """The keys and values of the one mapping in it; none if it is empty."""
    try:
        # Not load(): that forgets the lines, and the first of two keys of the same name.
        root = yaml.compose(data, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        raise UsageError(f"{line}: not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UsageError(f": not YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise UsageError(": nested too deep for a file of flags") from None
    if root is None or (isinstance(root, yaml.ScalarNode) and _is_nothing(root)):
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
    """What a scalar says; None if nothing. No message repeats it: it may be secret."""
    if node.tag not in _IMPLICIT_TAGS:
        raise UsageError(f"the tag {node.tag!r} has no meaning here; leave it out")
    if not isinstance(node, yaml.ScalarNode):
        raise UsageError("a list or mapping has no meaning within another")
    if not _fits_on_a_command_line(node.value):
        raise UsageError("a character in it can be part of no command line")
    return None if _is_nothing(node) else str(node.value)


def _is_nothing(node: yaml.ScalarNode) -> bool:
    return node.style is None and node.value.lower() in ("", "~", "null")


def _fits_on_a_command_line(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False
