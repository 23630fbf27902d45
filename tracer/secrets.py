"""Replaces secrets by ``***`` in command lines, URLs, errors and headers that are written or printed.

A secret is recognized by the name before it (``--api-key X``, ``PASSWORD=X``, ``{"token": "X"}``), by its place in a
URL (``https://user:X@host``, ``?sig=X``, the address of a webhook) or after a user's name (``--user me:X``), by the
command that it logs in with (``docker login -p X``), or by its own form (``hf_…``, ``ghp_…``, ``AKIA…``). Any other
secret cannot be distinguished from an ordinary word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

STARS = "***"

_SECRET = frozenset(
    {
        *("password", "passwords", "passwd", "passphrase", "passcode", "pwd", "secret", "secrets", "apikey", "apikeys"),
        *("credential", "credentials", "cred", "creds", "auth", "oauth", "authorization", "bearer", "jwt", "cookie"),
        *("cookies", "webhook"),
    }
)
"""Words that mark every name they are part of as a secret's."""
_HEADS = frozenset({"key", "token", "pass"})
"""Words that mark a name as a secret's if they end it, unless a word of `_ORDINARY` precedes them."""
_ORDINARY = frozenset(
    {
        *("pad", "padding", "eos", "bos", "eot", "sep", "cls", "unk", "mask", "special", "start", "end", "begin"),
        *("stop", "image", "video", "audio", "text", "new", "next", "last", "first", "prompt", "num", "n", "max"),
        *("min", "sort", "sorting", "order", "label", "target", "input", "output", "feature", "batch", "column", "row"),
        *("primary", "monitor", "metric", "query", "value", "hot", "cache", "per", "forward", "backward", "single"),
        *("two", "multi", "one", "decoder", "encoder", "loss", "dict", "config", "group", "state"),
    }
)
"""Words before `_HEADS` in ordinary names of machine learning: ``--pad-token``, ``--sort-key``, ``--forward-pass``."""
_QUALIFIERS = frozenset(
    {
        *("access", "api", "auth", "secret", "private", "shared", "signing", "encryption", "client", "account"),
        *("refresh", "bearer", "security", "service", "ssh", "hf", "wandb", "openai", "github", "aws", "azure"),
    }
)
"""Words that, before ``keys``, ``tokens`` or ``key_id``, mark a name as a secret's."""
_GLUED = re.compile(
    r"passw(or)?d|passphrase|secret|credential"
    r"|(access|account|api|auth|aws|azure|encryption|hf|master|openai|private|shared|signing|ssh|storage|wandb)keys?$"
    r"|(access|api|auth|bearer|bot|github|gitlab|hf|id|personal|refresh|session|slack|wandb)tokens?$"
)
"""Such words without a divider, as in ``mydbpassword``."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_OF_A_QUERY = frozenset({"sig", "signature", "code", "hmac", "key"})
"""Names that mark a secret only in the query of a URL."""

_NAME = r"[A-Za-z_][\w.\-/]*"
_QUOTED = r"""\\?"(?:[^"\\]|\\[^"])*\\?"|\\?'(?:[^'\\]|\\[^'])*\\?'"""
_USER = re.compile(
    # an object store's password may contain slashes; text after a host and its port is no password
    r"(?P<before>[A-Za-z][A-Za-z0-9+.\-]{0,30}://)"
    r"(?:(?!\[?[\w.\-]{0,300}\]?:\d{1,5}(?:[/?#]|$))[^\s/@:'\"<>]{0,100}:[^\s'\"<>@]{0,1000}"
    r"(?:@[^\s/'\"<>@?#]{0,300}(?=@)){0,9}|[^\s/?#'\"<>]{1,2000})@"
)
_QUERY = re.compile(r"(?P<before>[?&;#](?P<name>[\w.\-%]+)=)(?P<value>[^&\s'\"<>#]+)")
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w\-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w\-]{16,}"
    r"|xox[abeprs]-[\w\-]{10,}|xapp-[\w\-]{10,}|npm_[A-Za-z0-9]{30,}|pypi-[\w\-]{16,}|dckr_pat_[\w\-]{16,}"
    r"|(?:sk|rk|pk|whsec)_(?:live|test)_[A-Za-z0-9]{10,}|whsec_[A-Za-z0-9]{16,}|SG\.[\w\-]{16,}\.[\w\-]{16,}|dop_v1_[a-f0-9]{32,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w\-]{30,}|eyJ[\w\-]{8,2000}\.[\w\-]{8,4000}\.[\w\-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)",
    re.DOTALL,
)
_WEBHOOK = re.compile(
    r"(?P<before>https?://(?:hooks\.slack\.com/(?:services|workflows|triggers)|(?:[\w\-]+\.)?discord(?:app)?\.com/api/webhooks"
    r"|[\w\-.]*\.webhook\.office\.com/[\w\-]+|outlook\.office(?:365)?\.com/webhook|hooks\.zapier\.com/hooks/catch"
    r"|maker\.ifttt\.com/trigger|api\.telegram\.org/(?=bot)|oapi\.dingtalk\.com/robot|open\.feishu\.cn/open-apis/bot"
    r"|chat\.googleapis\.com/v1/spaces)/?)[^\s'\"<>]+",
    re.IGNORECASE,
)
"""Addresses that are secrets as a whole: whoever knows them can post."""
_USERS = ("-u", "-U", "--user", "--proxy-user")
"""Options whose value may be a user's name, a colon and a password; two numbers are ids of a user and a group."""
_USER_VALUE = r"['\"]?(?!\d+:\d+$)[\w.@\-]+:"
_USER_GIVEN = re.compile(rf"(?P<before>(?<!\S)(?:{'|'.join(_USERS)})(?:\s+|=){_USER_VALUE})(?P<value>[^\s'\"]+)")
_LOGIN = re.compile(r"(?P<before>\blogin\b[^;&|\n]*?\s-p(?:\s+|=)['\"]?)(?P<value>[^\s'\"\-][^\s'\"]*)")
"""``docker login -u me -p X``."""
_AUTHORIZED = re.compile(
    r"(?P<before>\b(?:[A-Za-z\-]{0,20}authorization['\"]?\s*[:=]\s*['\"]?)(?:[A-Za-z][\w\-]*\s+)?|\bbearer\s+(?=\S*\d))"
    r"(?P<value>[^\s'\",}\]]+)",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(
    rf"(?P<before>(?P<quote>\\?['\"]?)(?<![\w.\-/])(?P<dashes>[\-+~]*)(?P<name>{_NAME})(?P=quote)"
    rf"\s*(?P<sign>:=|=|:(?!//))\s*)(?P<value>{_QUOTED}|[^\s,;&)\]}}'\"]+)"
)
_OPTION = re.compile(
    rf"(?P<before>(?<![\w.\-/])(?P<quote>['\"]?)(?P<name>--?{_NAME})(?P=quote)(?P<sign>\s*,\s*|\s+))"
    rf"(?P<value>{_QUOTED}|(?!--?[A-Za-z])[^\s,;)\]}}'\"]+)"
)
_PROSE = frozenset(
    {
        *("and", "are", "as", "cannot", "has", "is", "may", "must", "needs", "not", "option", "or", "requires"),
        *("should", "was", "were", "with"),
    }
)
"""Words that may follow an option's name in a sentence, and so are no values."""
_FLAG = re.compile(rf"(?P<dashes>--?)(?P<name>{_NAME})")
_SET = re.compile(r"(?P<before>[\-+~]*(?P<name>[A-Za-z_][\w.\-/\[\]]*?)\s*(?::=|=|:(?!//)\s*))(?P<value>.+)", re.DOTALL)


def names_secret(name: str) -> bool:
    """Whether a name says that its value is a secret.

    Examples
    --------
    >>> [names_secret(one) for one in ("api-key", "HF_TOKEN", "db.password", "AWSAccessKeyId", "useAuth")]
    [True, True, True, True, True]
    >>> [names_secret(one) for one in ("tokenizer", "num-tokens", "keyframes", "author", "pad_token", "key_dim")]
    [False, False, False, False, False, False]
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if any(word in _SECRET or _GLUED.search(word) for word in words):
        return True
    qualified = len(words) > 1 and words[-2] in _QUALIFIERS
    if len(words) > 2 and words[-1] == "id" and words[-2] == "key":
        return words[-3] in _QUALIFIERS
    if words and words[-1] in ("keys", "tokens"):
        return qualified
    return bool(words) and words[-1] in _HEADS and (len(words) == 1 or words[-2] not in _ORDINARY)


def masked_urls(text: str) -> str:
    """A text whose URLs have no user part, and no signature in their query.

    Examples
    --------
    >>> masked_urls("s3://key:secret@bucket/run.zarr is not there; https://host/run.zarr?sig=abc&part=1 neither")
    's3://***@bucket/run.zarr is not there; https://host/run.zarr?sig=***&part=1 neither'
    """
    if "://" not in text:
        return text

    def asked(found: re.Match[str]) -> bool:
        name = found["name"].lower()
        return name in _OF_A_QUERY or "signature" in name or names_secret(found["name"])

    return _starred(_QUERY, _USER.sub(rf"\g<before>{STARS}@", text), asked)


def _starred(pattern: re.Pattern[str], text: str, secret: Callable[[re.Match[str]], bool]) -> str:
    """Replace each ``value`` that is a secret by stars, and search other values again, as they may contain secrets."""
    told, position = [], 0
    while (found := pattern.search(text, position)) is not None:
        is_secret = secret(found) and not found["value"].startswith(STARS)
        told.append(text[position : found.end("before")] + (STARS if is_secret else ""))
        position = found.end() if is_secret else found.end("before")
    return "".join(told) + text[position:]


def masked_text(text: str) -> str:
    """A text, such as an error or an argument, without its recognizable secrets.

    Examples
    --------
    >>> masked_text("ConnectionError: postgres://me:hunter2@db/x, with Namespace(api_key='abc', lr=0.1)")
    'ConnectionError: postgres://***@db/x, with Namespace(api_key=***, lr=0.1)'
    """

    def assigned(found: re.Match[str]) -> bool:
        name, bare = found["name"], found["sign"] == ":" and not found["quote"]
        secret = names_secret(name) or (found["dashes"] == "-" and name[0] in "DEe" and names_secret(name[1:]))
        # `unexpected token: 5` is a sentence
        return secret and not (bare and name.lower() in _HEADS)

    def given(found: re.Match[str]) -> bool:
        quoted = bool(found["quote"]) == ("," in found["sign"])
        return quoted and names_secret(found["name"]) and found["value"] not in _PROSE

    text = _WEBHOOK.sub(rf"\g<before>{STARS}", text)
    text = _FORMS.sub(STARS, masked_urls(text))
    text = _LOGIN.sub(rf"\g<before>{STARS}", _USER_GIVEN.sub(rf"\g<before>{STARS}", text))
    text = _AUTHORIZED.sub(rf"\g<before>{STARS}", text)
    return _starred(_OPTION, _starred(_ASSIGNED, text, assigned), given)


def masked_command(arguments: Sequence[str]) -> list[str]:
    """A command line whose secrets are ``***``.

    Examples
    --------
    >>> masked_command(["train.py", "--api-key", "abc", "--lr=0.1", "db.password=x y", "--tokenizer", "bert"])
    ['train.py', '--api-key', '***', '--lr=0.1', 'db.password=***', '--tokenizer', 'bert']
    """
    told: list[str] = []
    expected, many = False, False  # whether a secret comes next, and whether more may follow it
    for place, one in enumerate(arguments):
        before = arguments[place - 1] if place else ""
        if before in _USERS and (user := re.match(_USER_VALUE, one)):
            told.append(user[0] + STARS)
            continue
        if before == "-p" and "login" in arguments[:place]:
            told.append(STARS)
            continue
        flag = _FLAG.fullmatch(one)
        # a longer word with one dash is an option only if it names a secret; else it may be a secret with a dash
        is_option = flag is not None and (flag["dashes"] == "--" or len(one) == 2 or names_secret(flag["name"]))
        if expected and not is_option and not (many and one.startswith("--")):
            told.append(STARS)
            expected = many
            continue
        expected = is_option and flag is not None and names_secret(flag["name"])
        many = expected and one.lower().endswith("s") and not one.lower().endswith("pass")
        told.append(_masked_argument(one))
    return told


def _masked_argument(argument: str) -> str:
    found = _SET.fullmatch(argument)
    if found is not None:
        name = found["name"]
        if names_secret(name) or (argument[:2] in ("-D", "-E", "-e") and names_secret(name[1:])):
            return found["before"] + STARS
    return masked_text(argument)


def masked(value: Any) -> Any:
    """A JSON value without its recognizable secrets; lists of texts are treated as command lines.

    Examples
    --------
    >>> masked({"api_key": "abc", "argv": ["train.py", "--token", "x"], "lr": 0.1, "url": "s3://k:s@bucket/x"})
    {'api_key': '***', 'argv': ['train.py', '--token', '***'], 'lr': 0.1, 'url': 's3://***@bucket/x'}
    """
    if isinstance(value, str):
        return masked_text(value)
    if isinstance(value, Mapping):
        return {
            key: STARS if isinstance(key, str) and _holds(part) and names_secret(key) else masked(part)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        if value and all(isinstance(one, str) for one in value):
            return masked_command(value)
        return [masked(one) if isinstance(one, str | Mapping | list | tuple) else one for one in value]
    return value


def _holds(value: Any) -> bool:
    """Whether a value may be a secret: not None, a bool, or empty."""
    return value is not None and not isinstance(value, bool) and value not in ("", [], {}, ())
