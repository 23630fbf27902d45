"""The public names of the package, for type checkers and editors."""

import analyze as analyze
from tracer import *  # noqa: F403
from tracer import __version__ as __version__
from tracer import integrations as integrations
from tracer import recorders as recorders
