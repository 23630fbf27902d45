"""What commands print with ``--json`` is what ``trace schema`` says of it: checked wherever tests ask for JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from tracereel.agents import schema_of


@cache
def validator(name: str) -> Draft202012Validator:
    """Of the answers of a command, or of errors."""
    return Draft202012Validator(schema_of(name))


def documents(text: str) -> Iterator[Any]:
    """The JSON documents of an output, one after the other."""
    rest = text.lstrip()
    while rest:
        document, end = json.JSONDecoder(parse_constant=_refuse).raw_decode(rest)
        yield document
        rest = rest[end:].lstrip()


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def check(words: Sequence[object], text: str) -> None:
    """Check what a command line printed on stdout; nothing is checked of lines that ask for no JSON."""
    line = [str(word) for word in words]
    if "--json" in line and "--markdown" not in line:
        for document in documents(text):
            is_error = isinstance(document, dict) and document.keys() == {"error"}
            validator("error" if is_error else line[0]).validate(document)
