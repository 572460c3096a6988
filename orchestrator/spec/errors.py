"""What is wrong with a job file, told so that it can be mended: file, key, value, remedy.

Promises: all problems of a file are collected before any is raised; a problem's key is
the dotted path that the file uses (``drills[0].factor``), its line where the file has
one; values that look like secrets are never repeated.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from monitoring.secrets import secrets_of, without

KeyPath = tuple[str | int, ...]
"""Where a value stands: mapping keys and list indices from the top of the file."""

_NEAREST_CUTOFF = 0.55
_VALUE_LIMIT = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    file: str
    key: str
    value: str
    """As YAML would show it, shortened; empty when there is none."""
    message: str
    remedy: str
    line: int | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        shown = f"{self.key}: {self.value}" if self.key and self.value else self.key or self.value
        head = f"{place}: {shown}: {self.message}" if shown else f"{place}: {self.message}"
        return f"{head} ({self.remedy})" if self.remedy else head

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Problem:
        line = row.get("line")
        file, key, value, message, remedy = (
            str(row.get(k, "")) for k in ("file", "key", "value", "message", "remedy")
        )
        return cls(file, key, value, message, remedy, line if isinstance(line, int) else None)


class SpecError(ValueError):
    """A job file that can't be run, with every problem found in it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(tuple(problems))
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem before its file, value and line are known."""

    path: KeyPath
    message: str
    remedy: str = ""
    meant: KeyPath | None = None
    """For an unknown key: the valid one that was probably meant."""


@dataclass(frozen=True)
class Source:
    """A job file read: its data, and the line of every value."""

    file: str
    data: dict[str, Any]
    lines: Mapping[KeyPath, int]

    def problem(self, finding: Finding, value: object = None) -> Problem:
        """``finding`` with its place in this file; ``value`` where the file doesn't have one."""
        path = finding.path
        shown = shown_value(path, value_at(self.data, path, value))
        line = next(
            (self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), None
        )
        # What a factory raised may quote the environment of the controller that tried it.
        message = without(finding.message, secrets_of(os.environ))
        return Problem(self.file, dotted(path), shown, message, finding.remedy, line)


def dotted(path: KeyPath) -> str:
    """``("drills", 0, "step")`` → ``drills[0].step``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def value_at(data: object, path: KeyPath, default: object = None) -> object:
    """The value at ``path``, or ``default`` where the path ends early."""
    for part in path:
        mapped = isinstance(data, Mapping) and part in data
        listed = isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)
        if not (mapped or listed):
            return default
        data = data[part]  # type: ignore[index]
    return data


def shown_value(path: KeyPath, value: object) -> str:
    """One short line of ``value``; an environment's values and webhooks are left out."""
    if value is None:
        return ""
    if (path[:1] == ("envs",) and len(path) > 1) or path == ("notifications", "webhook"):
        return "***"
    if isinstance(value, str):
        text = repr(value)
    else:
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n")
    text = " ".join(text.split())
    return text if len(text) <= _VALUE_LIMIT else text[: _VALUE_LIMIT - 1] + "…"


def nearest(word: object, choices: Iterable[str]) -> str:
    """``did you mean 'x'?``, or an empty string when nothing is near, in whatever case."""
    folded = {choice.casefold(): choice for choice in choices}
    near = difflib.get_close_matches(str(word).casefold(), folded, n=1, cutoff=_NEAREST_CUTOFF)
    return f"did you mean {folded[near[0]]!r}?" if near else ""


def read_text(path: Path) -> str:
    """The text of a file of YAML; ``SpecError`` where it can't be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        problem = Problem(str(path), "", "", f"can't be read: {error.strerror}", "")
        raise SpecError([problem]) from None
    except UnicodeDecodeError as error:
        raise SpecError([Problem(str(path), "", "", f"is not UTF-8: {error.reason}", "")]) from None


def read_yaml(
    text: str, file: str, *, what: str = "a job", start: str = "start with `name: my-job`"
) -> Source:
    """Parse one YAML mapping; ``SpecError`` for broken YAML and for keys given twice.

    ``what`` it is and how to ``start`` it are for messages.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise SpecError([Problem(file, "", "", f"not YAML: {problem}", "", line)]) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise SpecError([Problem(file, "", "", f"not YAML: {error}", "")]) from None
    if root is None:
        raise SpecError([Problem(file, "", "", "the file is empty", start)])
    walk = _Walk(file)
    data = walk.value(root, ())
    if not isinstance(data, dict):
        message = f"{what} is a mapping of keys to values, this is a {type(data).__name__}"
        raise SpecError([Problem(file, "", "", message, start, 1)])
    if walk.problems:
        raise SpecError(walk.problems)
    return Source(file, data, walk.lines)


class _Walk:
    """Values of YAML nodes, with the line of each and the keys that occur twice."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self._scalars = yaml.SafeLoader("")
        self._open: set[int] = set()

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        if id(node) in self._open:
            self._add(path, node, "an alias inside of what it stands for")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
        try:
            # `<<: *alias`: what is written out wins over what is merged in.
            own = [k for k, _ in node.value if k.tag != "tag:yaml.org,2002:merge"]
            self._scalars.flatten_mapping(node)
        except yaml.YAMLError as error:
            self._add(path, node, f"not YAML: {error}")
            return {}
        result: dict[Any, Any] = {}
        first: dict[Any, int] = {}
        written = {id(k) for k in own}
        for key_node, value_node in node.value:
            key = self._scalar(key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                self._add(path, key_node, "a key must be a word")
                continue
            here = (*path, key)
            line = key_node.start_mark.line + 1
            if key in first and id(key_node) in written:
                message = f"given twice, first on line {first[key]}"
                self.problems.append(
                    Problem(self.file, dotted(here), "", message, "keep one of them", line)
                )
            if id(key_node) in written:
                first[key] = line
            self.lines[here] = line
            result[key] = self.value(value_node, here)
        return result

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        try:
            return self._scalars.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            what = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
            self._add(path, node, f"not a plain value: {what}")
            return None

    def _add(self, path: KeyPath, node: yaml.Node, message: str) -> None:
        line = node.start_mark.line + 1
        self.problems.append(Problem(self.file, dotted(path), "", message, "", line))


def pydantic_findings(
    error: ValidationError,
    model: type[BaseModel],
    data: Mapping[str, Any],
    *,
    what: str = "a job",
) -> list[Finding]:
    """Every error of a validation in our words, with the nearest valid key or word."""
    return [
        _finding(e, model, data, what)
        for e in error.errors(include_url=False, include_context=True)
    ]


def _finding(error: Any, model: type[BaseModel], data: Mapping[str, Any], what: str) -> Finding:
    path = file_path(error["loc"], data)
    kind, context, given = error["type"], error.get("ctx", {}), error.get("input")
    if kind == "extra_forbidden":
        valid = _keys_at(model, path[:-1], data)
        owner = dotted(path[:-1]) or what
        near = difflib.get_close_matches(str(path[-1]), valid, n=1, cutoff=_NEAREST_CUTOFF)
        meant = (*path[:-1], near[0]) if near else None
        return Finding(path, f"{owner} has no such key", _choices(path[-1], valid), meant)
    if kind == "missing":
        return Finding(path, "is missing", f"add `{path[-1]}:`")
    if kind == "literal_error":
        words = [w.strip().strip("'") for w in context["expected"].replace(" or ", ", ").split(",")]
        return Finding(path, "is not one of the words it can be", _choices(given, words))
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        words = [w.strip().strip("'") for w in context.get("expected_tags", "").split(",") if w]
        if kind == "union_tag_not_found":
            words = list(_drill_kinds(model))
            return Finding((*path, "kind"), "is missing", _choices("", words))
        return Finding((*path, "kind"), "is not a kind of drill", _choices(context["tag"], words))
    if kind == "string_pattern_mismatch":
        name = "lower-case letters, digits and dashes, at most 63, beginning with a letter"
        # The other one there is, of an environment variable's name.
        variable = "letters, digits and underscores, beginning with no digit"
        remedy = variable if "A-Z" in context["pattern"] else name
        return Finding(path, f"doesn't match {context['pattern']}", remedy)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        keys = ", ".join(sorted(_keys_at(model, path, data))[:6])
        hint = f"write {path[-1]}: {{…}}" + (f" with keys such as {keys}" if keys else "")
        return Finding(path, "must be a mapping", hint)
    if kind in ("tuple_type", "list_type"):
        # In quotes: an asterisk in front means something else in YAML.
        inside = f'"{given}"' if isinstance(given, str) else "…"
        return Finding(path, "must be a list", f"write {path[-1]}: [{inside}]")
    # Pydantic's own prefix to what a validator of ours says.
    told = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = told[:1].lower() + told[1:]
    remedy = "put it in quotes" if kind == "string_type" and isinstance(given, int | float) else ""
    return Finding(path, message.replace("input should be", "must be"), remedy)


_LARGEST = 2**53 - 1
"""In JSON, in which a spec is stored and sent."""


def type_findings(model: type[BaseModel], data: object, path: KeyPath = ()) -> list[Finding]:
    """What pydantic lets pass: ``true`` as a number, and numbers that nothing can reckon with."""
    found: list[Finding] = []
    if isinstance(data, float) and not math.isfinite(data):
        found.append(Finding(path, "must be a finite number"))
    elif isinstance(data, bool):
        # DeepSpeed's own section has values of any kind.
        if path[:1] != ("deepspeed",) and bool not in _types_at(model, path):
            found.append(Finding(path, "is a yes-or-no value where another kind is wanted"))
    elif isinstance(data, int) and abs(data) > _LARGEST:
        found.append(Finding(path, f"is beyond {_LARGEST:,}, the largest number that is exact"))
    elif isinstance(data, dict):
        for key, value in data.items():
            found += type_findings(model, value, (*path, key))
    elif isinstance(data, list):
        for i, value in enumerate(data):
            found += type_findings(model, value, (*path, i))
    return found


def file_path(loc: Iterable[str | int], data: object) -> KeyPath:
    """Pydantic's location without the parts that aren't in the file (tags of a union)."""
    parts = list(loc)
    path: list[str | int] = []
    for i, part in enumerate(parts):
        tagged = isinstance(data, Mapping) and data.get("kind") == part and part not in data
        if tagged and i < len(parts):
            continue
        path.append(part)
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, Sequence) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            data = None
    return tuple(path)


def _choices(word: object, valid: Iterable[str]) -> str:
    words = sorted(valid)
    hint = nearest(word, words)
    listed = "one of " + ", ".join(words) if words else ""
    return hint if hint and len(words) > 8 else "; ".join(filter(None, (hint, listed)))


def _keys_at(model: type[BaseModel], path: KeyPath, data: object) -> set[str]:
    """Keys that a mapping at ``path`` may have."""
    keys: set[str] = set()
    for candidate in _models_at(model, path, data):
        keys |= set(candidate.model_fields)
    return keys


def _models_at(model: type[BaseModel], path: KeyPath, data: object) -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = [model]
    for part in path:
        data = value_at(data, (part,))
        if isinstance(part, int):
            tag = data.get("kind") if isinstance(data, Mapping) else None
            kinds = [(m, m.model_fields["kind"]) for m in found if "kind" in m.model_fields]
            named = [m for m, kind in kinds if tag in get_args(kind.annotation)]
            found = named or found
            continue
        fields = [m.model_fields[part].annotation for m in found if part in m.model_fields]
        found = [m for f in fields for m in _flatten(f) if _is_model(m)]
    return found


def _types_at(model: type[BaseModel], path: KeyPath) -> set[object]:
    """All plain types that the annotations at ``path`` allow."""
    if not path:
        return set()
    *above, last = path
    if isinstance(last, int):
        return _types_at(model, tuple(above))
    models = _models_at(model, tuple(above), None)
    annotations = [m.model_fields[last].annotation for m in models if last in m.model_fields]
    # An unknown key has its own finding; don't call its value wrong as well.
    return {t for a in annotations for t in _flatten(a)} or {bool}


def _flatten(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return [str]
    args = get_args(annotation)
    if not args:
        return [annotation]
    return [t for a in args for t in _flatten(a)]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _drill_kinds(model: type[BaseModel]) -> list[str]:
    models = _models_at(model, ("drills",), None)
    return [k for m in models for k in get_args(m.model_fields["kind"].annotation)]
