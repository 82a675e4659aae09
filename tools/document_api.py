"""Generates docs/api.md from the docstrings of `kvtier.client` and of the tier contract."""

from __future__ import annotations

import ast
import enum
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ForwardRef, NewType, is_typeddict

from kvtier import client, tiers
from kvtier.tiers import secondary_tier

__all__ = ["page"]

HEAD = """\
# Python API

Reference of the public names of `kvtier.client` and of the contract of a tier, generated from the docstrings by
`make generate`. [Quickstart](quickstart.md) has a first example.
"""
SECTIONS = {
    "Clients": ("Client", "Lease", "AsyncClient", "AsyncLease"),
    "Conversations": ("ConversationClient", "AsyncConversationClient", "ConversationAction"),
    "Namespaces and keys": ("Namespace", "Group", "GroupKind", "make_key", "make_hold_key", "is_hold_key"),
    "Credentials and deadlines": ("Credentials", "Timeouts"),
    "GPU buffers": ("KvBuffers", "Mark"),
}
"""Documented names, in order. Other names of `kvtier.client` are under "Results" and "Errors"."""
ASYNC = {"AsyncClient": "Client", "AsyncLease": "Lease", "AsyncConversationClient": "ConversationClient"}
WIDTH = 100
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$", re.MULTILINE)
_ITEM = re.compile(r"^    (\*{0,2}\w+):[ \n]", re.MULTILINE)


class _Code(str):
    """Source text that a signature shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def page() -> str:
    """Returns the text of docs/api.md."""
    names = {name: getattr(client, name) for name in client.__all__}
    parts = [HEAD]
    for title, chosen in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [each for name in chosen for each in _entry(name, names.pop(name))]
    errors = {name: names.pop(name) for name in list(names) if _is_error(names[name])}
    parts.append("## Results\n")
    parts += [each for name in sorted(names) for each in _entry(name, names[name])]
    parts += ["## Errors\n", _section_text(client.errors), "| exception | base | meaning |\n|---|---|---|"]
    parts += [f"| `{name}` | `{value.__base__.__name__}` | {_line(value)} |" for name, value in errors.items()]
    parts.append("\n## Writing a tier\n")
    parts.append(
        "Reference of the names of `kvtier.tiers`. [Writing a tier](writing-a-tier.md) explains how to use them.\n"
    )
    public: ModuleType = tiers if getattr(tiers, "__all__", None) else secondary_tier
    contract = {name: getattr(public, name) for name in public.__all__}
    for name, value in sorted(contract.items(), key=lambda item: item[0] != "SecondaryTier"):
        parts += _entry(name, value)
    return "\n".join(parts).rstrip() + "\n"


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}\n"
    if not isinstance(value, type):
        if inspect.isfunction(value):
            yield _signature(name, value)
        # The docstring of a `NewType` describes `typing.NewType`.
        yield f"`NewType` of `{value.__supertype__.__name__}`.\n" if isinstance(value, NewType) else _text(value)
        return
    if is_typeddict(value):
        yield _text(value)
        yield "\n".join(f"- `{key}: {kind.__forward_arg__}`" for key, kind in value.__annotations__.items()) + "\n"
        return
    if not (_is_error(value) or issubclass(value, enum.Enum) or inspect.isabstract(value)):
        yield _signature(name, value, skip_self="__init__" in vars(value))
    yield _text(value)
    if name in ASYNC:
        yield from _same_calls(value, ASYNC[name])
        return
    if "__init__" in vars(value) and value.__init__.__doc__ and "dataclass" not in str(value.__init__):
        yield _text(value.__init__)
    attributes = _attributes(value)
    if attributes:
        yield "\n".join(f"- `{each}`{f': {text}' if text else ''}" for each, text in attributes.items()) + "\n"
    for member, function in _members(value):
        if isinstance(function, property):
            yield f"#### {name}.{member}\n\nProperty. {_text(function)}"
        else:
            yield f"#### {name}.{member}\n"
            yield _signature(member, function, skip_self=True)
            manager = "Context manager. " if inspect.isgeneratorfunction(inspect.unwrap(function)) else ""
            yield f"{manager}{_text(function)}"


def _same_calls(value: type, sync: str) -> Iterator[str]:
    """Yields the text of an asynchronous class: a link to the sync class, and its coroutines."""
    coroutines = [each for each, function in _members(value) if inspect.iscoroutinefunction(function)]
    managers = [each for each, function in _members(value) if inspect.isasyncgenfunction(inspect.unwrap(function))]
    yield f"Members and arguments are those of [{sync}](#{sync.lower()}).\n"
    if coroutines:
        yield f"Coroutines: {', '.join(f'`{each}`' for each in coroutines)}.\n"
    if managers:
        yield f"Asynchronous context managers: {', '.join(f'`{each}`' for each in managers)}.\n"


def _members(value: type) -> Iterator[tuple[str, Any]]:
    """Yields methods and properties with a docstring, including those of base classes."""
    seen: set[str] = set()
    for owner in value.__mro__:
        if not owner.__module__.startswith("kvtier."):
            continue
        for name, found in vars(owner).items():
            function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
            if name.startswith("_") or name in seen or not (callable(function) or isinstance(function, property)):
                continue
            seen.add(name)
            if function.__doc__:
                yield name, function


def _attributes(value: type) -> dict[str, str]:
    """Returns members of an enum, and class attributes with the docstring below them."""
    found: dict[str, str] = {}
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    assert isinstance(definition, ast.ClassDef)
    for node, below in zip(definition.body, [*definition.body[1:], None], strict=True):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
        for target in targets:
            is_member = issubclass(value, enum.Enum) or text
            if isinstance(target, ast.Name) and not target.id.startswith("_") and is_member:
                found[target.id] = " ".join(str(text).split())
    return found


def _signature(name: str, function: Any, *, skip_self: bool = False) -> str:
    signature = inspect.signature(function)
    parameters = [
        each.replace(annotation=_code(each.annotation), default=_default(each.default))
        for each in signature.parameters.values()
        if not (skip_self and each.name in ("self", "cls"))
    ]
    result = inspect.Signature.empty if isinstance(function, type) else _code(signature.return_annotation)
    text = f"{name}{signature.replace(parameters=parameters, return_annotation=result)}"
    if len(text) > WIDTH:
        head, arguments, tail = text.partition("(")[0], map(str, parameters), text.rpartition(")")[2]
        lines = list(arguments)
        first_keyword = next((at for at, each in enumerate(parameters) if each.kind is each.KEYWORD_ONLY), None)
        if first_keyword is not None and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
            lines.insert(first_keyword, "*")
        text = f"{head}(\n" + "".join(f"    {line},\n" for line in lines) + f"){tail}"
    return f"```python\n{text}\n```\n"


def _code(annotation: Any) -> Any:
    if isinstance(annotation, ForwardRef):  # of a named tuple
        annotation = annotation.__forward_arg__
    return _Code(annotation) if isinstance(annotation, str) else annotation


def _default(value: Any) -> Any:
    return _Code(f"{type(value).__name__}.{value.name}") if isinstance(value, enum.Enum) else value


def _text(value: Any) -> str:
    """Returns a docstring as Markdown. Sections such as Args become lists."""
    document = inspect.getdoc(value) or ""
    pieces = _SECTION.split(document.replace("``", "`"))
    text = pieces[0].strip() + "\n"
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        items = _ITEM.split("\n" + body.strip("\n") + "\n")
        lines = [f"- `{name}`: {' '.join(said.split())}" for name, said in zip(items[1::2], items[2::2], strict=True)]
        text += f"\n{title}:\n\n" + "\n".join(lines or [" ".join(body.split())]) + "\n"
    return text


def _section_text(module: ModuleType) -> str:
    """Returns the last paragraph of a module's docstring."""
    return " ".join((inspect.getdoc(module) or "").rpartition("\n\n")[2].split()) + "\n"


def _line(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").split()).replace("|", "\\|")
