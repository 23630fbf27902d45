"""Inspects the program's running functions: their variables, and their name for the loss.

The name of the loss is read from the source code of the call of ``backward``. Reading the variables of a running
function has side effects before Python 3.13: it keeps their values alive, and changes what an earlier ``locals()``
returned.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
import sys
import textwrap
from types import CodeType, FrameType
from typing import Any

_FRAMES = 24
"""How many of the program's calls are inspected, from the innermost outwards."""
_LIBRARIES = frozenset({"torch", "tracer", "accelerate", "lightning", "pytorch_lightning", "transformers", "ignite"})
"""Packages whose calls are skipped, because their variables do not name the loss."""


def differentiated_name() -> str:
    """The program's name for the tensor of the running ``x.backward()`` or ``backward(x)``; "" if it has none.

    If a function differentiates one of its parameters, the name is that of the argument in the function's call.
    """
    frame = _caller(sys._getframe(1))
    name = ""
    argument: str | None = None  # the parameter that holds the tensor, in the last inspected frame
    code: CodeType | None = None
    for _ in range(_FRAMES):
        if frame is None:
            break
        call = _call(frame.f_code, frame.f_lasti)
        if call is None:
            break
        given = _root(call) if code is None else _given(call, code, argument)
        found = _name(given)
        if not found:
            break
        name, argument, code = found, found, frame.f_code
        if not isinstance(given, ast.Name) or argument not in _parameters(code):
            break
        frame = _caller(frame.f_back)
    return name


def variables_of(frame: FrameType) -> dict[str, Any]:
    """A copy of the variables of a running function or module. The frame does not keep the values alive."""
    found = frame.f_locals
    copied = dict(found)
    # if only the frame, this function and the call refer to the dictionary, it was made for us and can be emptied
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(found) is dict and sys.getrefcount(found) <= 3:
        found.clear()
    return copied


def _caller(frame: FrameType | None) -> FrameType | None:
    """The first frame, from the given one outwards, that does not belong to a library."""
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
    return frame


@functools.lru_cache(256)
def _call(code: CodeType, instruction: int) -> ast.Call | None:
    """The parsed source of the call that an instruction makes; None without source."""
    position = next(itertools.islice(code.co_positions(), instruction // 2, None), None)
    first, last, begin, end = position or (None, None, None, None)
    if first is None or last is None or begin is None or end is None:
        return None
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    try:
        parsed = ast.parse("(" + textwrap.dedent(b"".join(lines).decode()) + ")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return parsed if isinstance(parsed, ast.Call) else None


def _parameters(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _root(call: ast.Call) -> ast.expr | None:
    """The expression that a call differentiates: its first argument, or the object of the method."""
    if call.args and _name(call.args[0]):
        return call.args[0]
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def _given(call: ast.Call, code: CodeType, parameter: str | None) -> ast.expr | None:
    """The expression that a call passes for a parameter of the code that it calls."""
    for keyword in call.keywords:
        if keyword.arg == parameter:
            return keyword.value
    names = _parameters(code)[: code.co_argcount]
    if parameter not in names or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    place = names.index(parameter) - (names[:1] == ("self",))
    return call.args[place] if 0 <= place < len(call.args) else None


def _name(expression: ast.expr | None) -> str:
    """The name of a variable, an attribute or an entry. For a call with one argument, the name of the argument."""
    found = ""
    if isinstance(expression, ast.Name):
        found = expression.id
    elif isinstance(expression, ast.Attribute):
        found = expression.attr
    elif isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
        found = str(expression.slice.value)
    elif isinstance(expression, ast.Call) and len(expression.args) == 1:  # as scaler.scale(loss) is
        found = _name(expression.args[0])
    return "" if found.startswith("_") else found
