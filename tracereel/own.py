"""Finds out whether another module takes the name of a package of this distribution."""

from __future__ import annotations

import os
from importlib.util import find_spec


def hidden(name: str) -> str | None:
    """Why ``import name`` would not give this distribution's package of that name, in a sentence; None if it does.

    Runs no code of the other module.
    """
    ours = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), name, "__init__.py")
    try:
        spec = find_spec(name)
    except ValueError:  # the loaded module has no spec, as one that a program makes by hand
        spec = None
    found = None if spec is None else spec.origin
    if found is not None and os.path.isfile(found) and os.path.samefile(found, ours):
        return None
    return (
        f"Python finds {found or 'no file'} for the module {name}, which is a package of tracereel: give the other "
        f"module another name, or take its folder out of PYTHONPATH"
    )
