"""Check that the docstrings of all public functions, classes and methods document their parameters and errors.

`python tests docstrings` prints what is missing, and how many were read. A function with two or more parameters needs
an `Args:` section with an entry for each, and one whose own body raises needs `Raises:`. A class documents what
`__init__` takes. Public are the names in `__all__` of the package and of its public modules, the public methods of such
classes, and the classes of the package that public functions return. A method without a docstring that overrides one
of another library is documented there.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

PACKAGE = "hf_bmtrain"
MODULES = "config distributed inspect lr_scheduler nn store utils loss optim hf".split()
HEADINGS = "Args|Returns|Raises|Yields|Attributes|Example|Note"


class Documented(NamedTuple):
    """A function with the docstring that describes it: of its class, if it is an `__init__`."""

    name: str
    function: Any
    text: str


def is_ours(thing: Any) -> bool:
    return getattr(thing, "__module__", "").partition(".")[0] == PACKAGE


def public_objects() -> dict[str, Any]:
    """The objects of every `__all__`, by name; classes and functions under the first name only."""
    found: dict[str, Any] = {}
    for module in ["", *MODULES]:
        source = importlib.import_module(f"{PACKAGE}.{module}".rstrip("."))
        for name in source.__all__:
            value = getattr(source, name)
            if is_ours(value) and not isinstance(value, types.ModuleType) and value not in found.values():
                found[f"{module}.{name}".lstrip(".")] = value
    return found


def returned_classes(function: Any) -> Iterator[type]:
    """The classes of the package in the annotation of what a function returns."""
    try:
        hint = typing.get_type_hints(inspect.unwrap(function)).get("return")
    except (NameError, TypeError):
        return
    for each in (hint, *typing.get_args(hint)):
        if isinstance(each, type) and is_ours(each):
            yield each


def public_methods(cls: type) -> Iterator[tuple[str, Any]]:
    """The functions of a class and of its bases in the package that have public names."""
    for base in (base for base in cls.__mro__ if is_ours(base)):
        for name, value in vars(base).items():
            if isinstance(value, (classmethod, staticmethod)):
                value = value.__func__
            public = isinstance(value, types.FunctionType) and is_ours(value) and not name.startswith("_")
            if public and (value.__doc__ or not is_foreign(cls, name)):
                yield f"{base.__name__}.{name}", value


def constructor(cls: type) -> Any:
    """The function of the package that takes the arguments of a class, None if it is another library's."""
    for base in cls.__mro__:
        for name in ("__new__", "__init__"):
            if name in vars(base):
                function = inspect.unwrap(getattr(vars(base)[name], "__func__", vars(base)[name]))
                return function if isinstance(function, types.FunctionType) and is_ours(function) else None
    return None


def is_foreign(cls: type, name: str) -> bool:
    """Whether a class outside the package that `cls` derives from has the method too."""
    return any(name in vars(base) for base in cls.__mro__ if not is_ours(base))


def read_public() -> list[Documented]:
    """All public functions, and by their `__init__` the classes that users construct."""
    named = public_objects()
    pending, seen, found = [*named.items()], set(), []
    while pending:
        name, value = pending.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, type):
            own = constructor(value)
            if name in named and own is not None:
                found.append(Documented(name, own, inspect.cleandoc(value.__doc__ or "")))
            pending += public_methods(value)
        elif isinstance(value, types.FunctionType):
            found.append(Documented(name, value, inspect.getdoc(value) or ""))
            pending += [(each.__name__, each) for each in returned_classes(value)]
    return found


def sections(text: str) -> dict[str, str]:
    """The sections of a docstring by their heading; "" has what comes before them."""
    parts = re.split(rf"^({HEADINGS})::?[ ]*$", text, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2]))}


def entries(section: str) -> list[str]:
    """The names with which the entries of a section begin."""
    return re.findall(r"^    (\*{0,2}\w+)(?: \([^\n]*?\))?:", section, re.MULTILINE)


def documented_one(function: Any) -> Any:
    """The function itself, or the one that a decorator of another library wraps."""
    return function if function.__globals__.get("__name__", "").startswith(PACKAGE) else inspect.unwrap(function)


def raises(function: Any) -> bool:
    """Whether the function's own body, without functions in it, has a `raise` that is not of a caught error."""
    try:
        source = inspect.getsource(function)
    except OSError:  # of a dataclass or named tuple
        return False
    pending: list[ast.AST] = [*getattr(ast.parse(textwrap.dedent(source)).body[0], "body", [])]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Raise) and node.exc is not None and isinstance(node.exc, ast.Call):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            pending += ast.iter_child_nodes(node)
    return False


def problems(documented: Documented) -> list[str]:
    """What a docstring lacks."""
    function, text = documented_one(documented.function), documented.text
    if not text.strip():
        return ["has no docstring"]
    found = sections(text)
    names = [
        {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
        for parameter in inspect.signature(function, follow_wrapped=False).parameters.values()
        if parameter.name not in ("self", "cls") and not parameter.name.startswith("_")
    ]
    wrong = []
    if len(names) > 1 and "Args" not in found:
        wrong.append("has no Args:")
    elif "Args" in found and entries(found["Args"]) != names:
        wrong.append(f"Args: has {', '.join(entries(found['Args']))}; the parameters are {', '.join(names)}")
    if raises(function) and "Raises" not in found:
        wrong.append("raises and has no Raises:")
    return wrong


def main() -> int:
    public = read_public()
    count = 0
    for each in public:
        code = documented_one(each.function).__code__
        for problem in problems(each):
            count += 1
            print(f"{code.co_filename}:{code.co_firstlineno}: {each.name} {problem}")
    print(f"{len(public)} public functions, classes and methods, {count} problems")
    return int(count > 0)
