"""Names → subscribers: the metrics and rules of this project, plug-ins by entry points, and classes in files.

A class is imported on first use, so a broken plug-in affects only those who use it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from analyze.metrics import BUILT_IN
from analyze.rules import RULES
from tracer.errors import MessageError, TracerError, UnknownNameError, did_you_mean

if TYPE_CHECKING:
    from tracer.messaging.subscriber import Subscriber

GROUP = "tracer.subscribers"
"""The group of entry points under which other packages name their subscribers."""

DESCRIPTIONS = Path(__file__).with_name("descriptions.json")
"""The result of `describe_class` for each built-in metric; `make docs` writes the file, and a test compares it."""

_OURS = {**BUILT_IN, **RULES}
"""Registry name → ``module:class``, for the metrics and the rules of this project."""

_LABEL = "as"
"""The option that every subscriber has. No constructor can have it as a parameter, because it is a Python keyword."""

_IN_FILE = re.compile(r"(?P<path>.*\.py):(?P<name>[^\W\d]\w*)(?::(?P<options>.*))?", re.DOTALL)


class _Wish(NamedTuple):
    """The parts of a text for `parse`; for a class in a file, `file` and `class_name` are set."""

    name: str
    options: list[str]
    file: Path | None = None
    class_name: str = ""

    @classmethod
    def of(cls, text: str) -> _Wish:
        in_file = _IN_FILE.fullmatch(text)
        name, _, options = text.partition(":")
        parts = (in_file["options"] or "" if in_file is not None else options).split(",")
        given = [option.strip() for option in parts if option.strip()]
        if in_file is None:
            return cls(name.strip(), given)
        path, class_name = in_file["path"], in_file["name"]
        return cls(f"{path}:{class_name}", given, Path(path).expanduser(), class_name)


def _pair(option: str) -> tuple[str, str, str]:
    """The key, the equals sign (empty if there is none) and the value of an option."""
    key, equals, value = option.partition("=")
    return key.strip(), equals, value.strip()


def subscribers() -> tuple[str, ...]:
    """The names of all metrics and plug-ins, in alphabetical order, without importing them. Rules are in `rules`.

    Examples
    --------
    >>> {"mean", "spectral_norm", "svcca"} <= set(subscribers())
    True
    """
    return tuple(sorted({*BUILT_IN, *_plug_ins()}))


def rules() -> tuple[str, ...]:
    """The names of the rules, causes before effects, without importing them.

    Examples
    --------
    >>> rules()[0]
    'not_finite'
    """
    return tuple(RULES)


def find(name: str) -> type[Subscriber]:
    """The class of a registered subscriber, or a class in a file (``"path/to/file.py:ClassName"``).

    Raises
    ------
    UnknownNameError
        If there is no such name, file or class.
    TracerError
        If the plug-in or the file cannot be imported.
    MessageError
        If it is not a subclass of `tracer.Subscriber`.
    """
    in_file = _IN_FILE.fullmatch(name)
    if in_file is not None:
        found = _from_file(in_file["path"], in_file["name"])
    elif name.endswith(".py"):
        raise MessageError(f"{name!r} names a file but no class in it; write {name}:ClassName")
    elif name in _OURS:
        module, _, attribute = _OURS[name].partition(":")
        found = getattr(importlib.import_module(module), attribute)
    else:
        plug_ins = _plug_ins()
        if name not in plug_ins:
            raise UnknownNameError.of("subscriber", name, {*_OURS, *plug_ins})
        point = plug_ins[name]
        found = _guarded(
            point.load, f"subscriber {name!r} ({point.value}, an entry point of {_package(point)}) cannot be imported"
        )
    return _checked(found, name)


def parse(text: str) -> Subscriber:
    """Make a subscriber from a text as on the command line: ``"name"`` or ``"name:key=value,key=value"``.

    Parameters
    ----------
    text : str
        The name of a registered subscriber, or ``path/to/file.py:ClassName``; then its parameters. Values are integers,
        numbers, ``true``, ``false``, ``none`` or words; ``a+b`` is the tuple of a and b. If a parameter takes only
        words, ``7`` is a word. Every subscriber has the parameter ``as``, a label that is appended to the kinds of its
        answers, so that two of one name can be used together: ``"svcca:lag=1"`` and ``"svcca:lag=5,as=lag5"``.

    Raises
    ------
    UnknownNameError
        If there is no subscriber of this name.
    MessageError
        If a parameter is unknown, missing or given twice, or has a wrong value.

    Examples
    --------
    >>> probe = parse("svcca:threshold=0.9,tag=probe,modules=conv*+fc*")
    >>> probe.produces[0], probe.threshold, probe.subscriptions[0].modules
    ('activations_svcca', 0.9, ('conv*', 'fc*'))
    >>> parse("svcca:lag=5,as=lag5").produces[0]
    'activations_svcca_lag5'
    """
    wish = _Wish.of(text)
    cls = find(wish.name)
    given = _arguments(cls, wish, text)
    label = given.pop(_LABEL, None)
    try:
        made = cls(**given)
        return made if label is None else made.labelled(label)
    except (TypeError, ValueError) as error:
        if isinstance(error, TracerError):
            raise
        raise MessageError(f"{text!r} makes no subscriber: {error}") from error


def describe(name: str) -> dict[str, Any]:
    """The description of a subscriber in JSON values, for help and documentation.

    Built-in metrics are described by a file that `make docs` writes, because importing a class imports torch.

    Parameters
    ----------
    name : str
        As in `find`.

    Returns
    -------
    dict
        ``name``, ``class`` (its dotted path), ``summary`` (the first sentence of the docstring), ``parameters`` (each
        with ``name``, ``default``, ``required`` and ``type``), ``needs`` and ``produces`` (lists of kinds, with the
        default parameters; empty if any has no default), ``scope``, ``mergeable``, ``version``, ``invariances`` (as
        of `tracer.Subscriber`), ``needs_model``, ``docstring``.

    Examples
    --------
    >>> about = describe("spectral_norm")
    >>> about["class"], about["needs"], about["produces"]
    ('analyze.metrics.spectral_norm.SpectralNorm', ['weights'], ['weights_spectral_norm',
     'weights_spectral_norm_residual', 'weights_spectral_norm_status'])
    >>> [(one["name"], one["default"]) for one in about["parameters"]]
    [('kind', 'weights'), ('exact', False), ('tolerance', 1e-06), ('certify', 100), ('tag', 'default'),
     ('subsample', 1), ('modules', None)]
    """
    if name not in BUILT_IN:
        return describe_class(name)
    described = _described()
    # a metric that was added after the last `make docs` is not in the file
    return dict(described[name]) if name in described else describe_class(name)


@functools.cache
def _described() -> dict[str, dict[str, Any]]:
    described: dict[str, dict[str, Any]] = json.loads(DESCRIPTIONS.read_text(encoding="utf-8"))
    return described


def describe_class(name: str) -> dict[str, Any]:
    """As `describe`, but always from the class itself."""
    cls = find(name)
    parameters = _parameters(cls)
    needs: list[str] = []
    produces: list[str] = []
    if all(one.default is not one.empty for one in parameters.values()):
        example = _guarded(cls, f"{name} cannot be made with its default parameters")
        needs, produces = sorted(example.needs), list(example.produces)
    docstring = inspect.getdoc(cls) or ""
    return {
        "name": name,
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "summary": " ".join(docstring.partition("\n\n")[0].split()),
        "parameters": [
            {
                "name": key,
                "default": None if one.default is one.empty else _plain(one.default),
                "required": one.default is one.empty,
                "type": _type_name(one),
            }
            for key, one in parameters.items()
        ],
        "needs": needs,
        "produces": produces,
        "scope": cls.scope,
        "mergeable": cls.mergeable,
        "version": cls.version,
        "invariances": list(cls.invariances),
        "needs_model": cls.needs_model,
        "docstring": docstring,
    }


def instances(wanted: str | Subscriber | Iterable[str | Subscriber]) -> list[Any]:
    """The subscribers in `wanted`: one or several, each an object or a text for `parse`.

    A text whose answers would be of the same kind as those of one before it gets a label made of its parameters.

    Examples
    --------
    >>> [one.produces[0] for one in instances(["cka", "cka:against=final"])]
    ['activations_cka', 'activations_cka_against_final']
    """
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        wanted = [wanted]
    made: list[Any] = []
    taken: set[str] = set()
    for one in wanted:
        subscriber = parse(one) if isinstance(one, str) else one
        options = _Wish.of(one).options if isinstance(one, str) else ()
        named = any(_pair(option)[0] == _LABEL for option in options)
        if options and not named and taken.intersection(subscriber.produces):
            subscriber = subscriber.labelled("_".join(re.findall(r"[\w.\-]+", "_".join(sorted(options)))))
        taken.update(subscriber.produces)
        made.append(subscriber)
    return made


def canonical(text: str) -> str:
    """The normal form of a text for `parse`: parameters in alphabetical order, no spaces, absolute paths of files.

    Examples
    --------
    >>> canonical("svcca: tag=probe, threshold=0.9"), canonical("norm")
    ('svcca:tag=probe,threshold=0.9', 'norm')
    """
    wish = _Wish.of(text)
    name = wish.name if wish.file is None else f"{wish.file.resolve()}:{wish.class_name}"
    written = ",".join(sorted(f"{key}={value}" for key, _, value in map(_pair, wish.options)))
    return f"{name}:{written}" if written else name


def origin(text: str) -> list[str]:
    """The place and version of a subscriber's class; stored answers are valid only for the same origin.

    Raises
    ------
    TracerError
        As `find`.

    Examples
    --------
    >>> origin("ratio:order=1")
    ['analyze.metrics.lengths:Ratio', '1']
    """
    wish = _Wish.of(text)
    cls = find(wish.name)
    if wish.file is not None:
        return [wish.class_name, str(cls.version), hashlib.sha256(wish.file.read_bytes()).hexdigest()]
    place = f"{cls.__module__}:{cls.__qualname__}"
    if wish.name in _OURS:
        return [place, str(cls.version)]
    point = _plug_ins()[wish.name]
    return [place, str(cls.version), _package(point), point.dist.version if point.dist is not None else ""]


def is_ours(text: str) -> bool:
    """Whether the subscriber that a text for `parse` names is a metric or a rule of this project.

    Examples
    --------
    >>> is_ours("ratio:order=1"), is_ours("path/to/file.py:Ratio")
    (True, False)
    """
    return _Wish.of(text).name in _OURS


def _plug_ins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _OURS}


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"


def _from_file(path: str, name: str) -> Any:
    file = Path(path).expanduser()
    if not file.is_file():
        raise UnknownNameError(f"there is no file {path!r} to take the subscriber {name} from")
    module = _guarded(lambda: _import_file(file.resolve()), f"{path!r}, which is to define {name}, cannot be imported")
    if not hasattr(module, name):
        known = [
            key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        raise UnknownNameError.of(f"class in {path!r}", name, known)
    return getattr(module, name)


def _import_file(file: Path) -> ModuleType:
    # the name depends on path and text: files of the same name do not collide, pickles find their class again, and a
    # long-lived process, such as a cluster's worker, imports a changed file anew
    text = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    name = "_subscribers_of_" + re.sub(r"\W", "_", str(file)) + "_" + text
    known = sys.modules.get(name)
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _guarded(load: Callable[[], Any], what: str) -> Any:
    """The result of foreign code; any exception becomes a `TracerError` of one sentence, with its cause."""
    try:
        return load()
    except Exception as error:  # foreign code may raise anything
        raise TracerError(f"{what}: {type(error).__name__}: {error}") from error


def _checked(found: Any, name: str) -> type[Subscriber]:
    from tracer.messaging.subscriber import Subscriber  # here, because it imports torch, which `subscribers` must not

    if not inspect.isclass(found):
        raise MessageError(f"{name} is not a subclass of tracer.Subscriber but of type {type(found).__name__}")
    if not issubclass(found, Subscriber):
        raise MessageError(f"{name} is a class, but not a subclass of tracer.Subscriber")
    if inspect.isabstract(found):
        lacking = ", ".join(sorted(found.__abstractmethods__))
        raise MessageError(f"{name} is an abstract subscriber: it does not implement {lacking}")
    return found


_Parameter = inspect.Parameter


def _parameters(cls: type[Subscriber]) -> dict[str, _Parameter]:
    variadic = (_Parameter.VAR_POSITIONAL, _Parameter.VAR_KEYWORD, _Parameter.POSITIONAL_ONLY)
    return {name: one for name, one in inspect.signature(cls).parameters.items() if one.kind not in variadic}


def _arguments(cls: type[Subscriber], wish: _Wish, text: str) -> dict[str, Any]:
    """The constructor's arguments that the options of a text give, and the label."""
    parameters = _parameters(cls)
    given: dict[str, Any] = {}
    for option in wish.options:
        key, equals, value = _pair(option)
        if not equals or not key:
            raise MessageError(f"{option!r} in {text!r} is not of the form key=value")
        if key in given:
            raise MessageError(f"{text!r} gives {key} twice")
        if key not in parameters and key != _LABEL and not _takes_any(cls):
            has = f"it has {', '.join(parameters) or 'none'}{did_you_mean(key, parameters)}"
            raise MessageError(f"{wish.name} has no parameter {key!r}; {has}")
        given[key] = value if key == _LABEL else _value(value, parameters.get(key), f"{wish.name}'s {key}")
    missing = [key for key, one in parameters.items() if one.default is one.empty and key not in given]
    if missing:
        raise MessageError(f"{wish.name} needs a value for {', '.join(missing)}; write {wish.name}:{missing[0]}=VALUE")
    return given


def _takes_any(cls: type[Subscriber]) -> bool:
    return any(one.kind is _Parameter.VAR_KEYWORD for one in inspect.signature(cls).parameters.values())


def _type_name(parameter: _Parameter | None) -> str:
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return ""
    annotation = parameter.annotation
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _plain(value: Any) -> Any:
    """A default value as a JSON value."""
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else repr(value)


_NAMED = {"str": str, "int": int, "float": (int, float), "bool": bool, "None": type(None)}


def _value(text: str, parameter: _Parameter | None, what: str) -> Any:
    """The value of a text for a parameter, by the parameter's annotation. Raise `MessageError` if it does not fit."""
    allowed = [name.strip() for name in _type_name(parameter).split("|") if name.strip()]
    wordy = "str" in allowed and not {"int", "float"}.intersection(allowed)
    value = _literal(text, wordy)
    if isinstance(value, str) and "+" in value and any("[" in name or name == "tuple" for name in allowed or ["tuple"]):
        value = tuple(_literal(part, wordy) for part in value.split("+"))
    if allowed and all(name in _NAMED for name in allowed):
        fits = any(isinstance(value, _NAMED[name]) for name in allowed)  # type: ignore[arg-type] # a table of classes
        if not fits or (isinstance(value, bool) and "bool" not in allowed):
            raise MessageError(f"{what} is {' or '.join(allowed)}, not {text!r}")
        if isinstance(value, int) and not isinstance(value, bool) and "int" not in allowed:
            value = float(value)
    return value


def _literal(text: str, wordy: bool) -> Any:
    word = text.lower()
    if word in ("none", "null"):
        return None
    if not wordy:
        if word in ("true", "false"):
            return word == "true"
        for number in (int, float):
            try:
                return number(text)
            except ValueError:
                continue
    return text
