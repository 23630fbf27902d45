"""A model as JSON, for the header of a trace."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tracer import walking
from tracer.observing.pytorch.wrappers import named_parts


def summary_of(name: str, model: nn.Module) -> dict[str, Any]:
    """A short description of a model as JSON: its name, class and number of parameters.

    Examples
    --------
    >>> summary_of("head", nn.Linear(3, 2))
    {'name': 'head', 'class': 'torch.nn.modules.linear.Linear', 'parameters': 8}
    """
    counted = sum(0 if is_lazy(one) else one.numel() for one in walking.parameters(model))
    return {"name": name, "class": class_name(model), "parameters": counted}


def structure_of(root: nn.Module) -> dict[str, Any]:
    """The model as JSON: names and classes of modules, settings of convolutions, parameters, tied aliases."""
    names_of: dict[int, list[str]] = {}
    parameters: dict[int, Tensor] = {}
    for path, one in named_parts(root, repeat=True):
        for name, parameter in one._parameters.items():
            if parameter is not None:
                parameters[id(parameter)] = parameter
                names_of.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    return {
        "class": class_name(root),
        "modules": [{"name": name, "class": class_name(one), **_settings(one)} for name, one in named_parts(root)],
        "parameters": [
            {
                "name": names_of[key][0],
                "shape": None if is_lazy(parameter) or parameter.is_nested else list(parameter.shape),
                "dtype": str(parameter.dtype).removeprefix("torch."),
                "requires_grad": parameter.requires_grad,
            }
            for key, parameter in parameters.items()
        ],
        "tied": [names for names in names_of.values() if len(names) > 1],
    }


def class_name(one: nn.Module) -> str:
    """The dotted name of a module's class."""
    return f"{type(one).__module__}.{type(one).__qualname__}"


def _settings(one: nn.Module) -> dict[str, Any]:
    """Settings of a convolution or dropout that neither its class nor its weights show, as JSON."""
    if isinstance(one, nn.modules.dropout._DropoutNd):
        return {"probability": one.p}
    if not isinstance(one, nn.modules.conv._ConvNd):
        return {}
    said: dict[str, Any] = {name: list(getattr(one, name)) for name in ("stride", "dilation", "output_padding")}
    said["padding"] = one.padding if isinstance(one.padding, str) else list(one.padding)
    return {"convolution": said | {name: getattr(one, name) for name in ("groups", "padding_mode", "transposed")}}
