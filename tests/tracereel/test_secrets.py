"""What is kept of secrets: nothing, wherever a command, a URL, an error or a header is written or printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tracer
from tests import processes
from tracer.errors import TraceError, summary
from tracer.secrets import masked, masked_command, masked_text
from tracer.stores.locations import location
from tracer.trace.writer import TraceWriter
from tracereel.command import Refusal
from tracereel.main import main

S = "hUnter2/x+Y"  # with a slash, as keys of object stores have
PROGRAM = """
import argparse, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--api-key")
given = parser.parse_args()
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    nn.functional.cross_entropy(net(torch.ones(2, 4)), torch.tensor([0, 1])).backward()
    opt.step()
raise ValueError(f"refused: {given}")
"""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--api-key", S], ["--api-key", "***"]),
        ([f"--api-key={S}"], ["--api-key=***"]),
        ([f"--api_key={S} and more, too"], ["--api_key=***"]),
        ([f"api_key={S}"], ["api_key=***"]),
        ([f"+wandb.api_key={S}", f"++db.password={S}", "lr=1"], ["+wandb.api_key=***", "++db.password=***", "lr=1"]),
        ([f"-DTOKEN={S}", "-D", f"TOKEN={S}"], ["-DTOKEN=***", "-D", "TOKEN=***"]),
        ([f"API_KEY={S}", "python", "x.py"], ["API_KEY=***", "python", "x.py"]),
        (["-token", S, "-password", S], ["-token", "***", "-password", "***"]),
        (["--token", "-" + S, "--lr", "-1"], ["--token", "***", "--lr", "-1"]),
        (["--password", "--verbose", "x"], ["--password", "--verbose", "x"]),
        (["--api-keys", "a", "b", "--lr", "1"], ["--api-keys", "***", "***", "--lr", "1"]),
        (["--hf_token", S, "data"], ["--hf_token", "***", "data"]),
        (["--HF_TOKEN", S, "--aws-secret-access-key", S], ["--HF_TOKEN", "***", "--aws-secret-access-key", "***"]),
        (["--aws-access-key-id", S], ["--aws-access-key-id", "***"]),
        (["--dbpassword", S, "--apiKey", S], ["--dbpassword", "***", "--apiKey", "***"]),
        (["--passwd", S, "--credentials", S], ["--passwd", "***", "--credentials", "***"]),
        (["--auth", S, "--basic-auth", f"me:{S}"], ["--auth", "***", "--basic-auth", "***"]),
        (["--db", f"https://me:{S}@host/x"], ["--db", "https://***@host/x"]),
        ([f"--data=s3://AKIA0:{S}@bucket/run.zarr"], ["--data=s3://***@bucket/run.zarr"]),
        (["https://tokentoken@github.com/a/b.git"], ["https://***@github.com/a/b.git"]),
        (["postgresql+psycopg://me:p@ss@db:5432/x"], ["postgresql+psycopg://***@db:5432/x"]),
        (["https://h/x?a=1&X-Amz-Signature=ab12&b=2"], ["https://h/x?a=1&X-Amz-Signature=***&b=2"]),
        (["https://h/x?X-Amz-Credential=AK%2F1&sig=a%2B&z=1"], ["https://h/x?X-Amz-Credential=***&sig=***&z=1"]),
        (["https://h/x?token=abc", "https://h/x?AWSAccessKeyId=a"], ["https://h/x?token=***", "https://h/x?AWSAccessKeyId=***"]),
        ([f'{{"api_key": "{S}", "lr": 1}}'], ['{"api_key": ***, "lr": 1}']),
        ([f"db={{user:me,password:{S}}}"], ["db={user:me,password:***}"]),
        (["--header", "Authorization: Basic bWU6eA=="], ["--header", "Authorization: ***"]),
        (["--header", f"X-Api-Key: {S}"], ["--header", "X-Api-Key: ***"]),
        (["token: abc"], ["token: ***"]),
        (["sh", "-c", f"python x.py --api-key {S} --lr 1"], ["sh", "-c", "python x.py --api-key *** --lr 1"]),
        (["hf_abcdefghijklmnopqrstuv", "AKIAABCDEFGHIJKLMNOP"], ["***", "***"]),
        (["npm_" + "a1B2" * 9, "pypi-AgEIcHlwaS5vcmcCJDU5", "sk_live_4eC39HqLyjWDarjtT1"], ["***", "***", "***"]),
        (["--hook", "https://hooks.slack.com/services/T0/B0/x9Y"], ["--hook", "https://hooks.slack.com/services/***"]),
        (["https://discord.com/api/webhooks/12/ab-c"], ["https://discord.com/api/webhooks/***"]),
        (["https://x.webhook.office.com/webhookb2/a@b/c"], ["https://x.webhook.office.com/webhookb2/***"]),
        (["https://api.telegram.org/bot12:ab_c/sendMessage"], ["https://api.telegram.org/***"]),
        (["curl", "--user", f"me:{S}", "-u", f"a@b.c:{S}"], ["curl", "--user", "me:***", "-u", "a@b.c:***"]),
        ([f"--user=me:{S}"], ["--user=me:***"]),
        (["sh", "-c", f"curl -u me:{S} https://h/x"], ["sh", "-c", "curl -u me:*** https://h/x"]),
        (["docker", "login", "-u", "me", "-p", S], ["docker", "login", "-u", "me", "-p", "***"]),
        (["sh", "-c", f"az acr login -p '{S}' && x -p 1"], ["sh", "-c", "az acr login -p '***' && x -p 1"]),
    ],
)  # fmt: skip
def test_values_of_secrets_are_stars(given: list[str], told: list[str]) -> None:
    """However a command line gives them."""
    assert masked_command(given) == told


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokenizer", "bert", "--tokenizer=bert"], ["--num-tokens", "5", "num_tokens=5"], ["--keyframes", "3"],
        ["--author", "me", "author=me"], ["--max-tokens", "7", "--max_new_tokens=7"], ["--keys", "image", "label"],
        ["--pad-token", "<pad>", "--eos_token_id=2", "--mask-token=[MASK]"], ["--sort-key", "loss", "sort_key=loss"],
        ["--token-dropout", "0.1", "--key-dim=64", "--key_padding"], ["--monkey", "x", "--keyboard=de"],
        ["--tokens-per-batch", "4096"], ["--passes", "3", "--bypass", "x", "--forward-pass=2"], ["--seconds", "2"],
        ["https://host:8080/a/b@2x.png", "s3://bucket/run.zarr", "user@host:path", "me@example.org"],
        ["https://host/x?page=2&size=10", "a?b=c"], ["--lr", "0.1", "-b", "8", "-k", "3"], ["model.key_proj=linear"],
        ["-u", "1000:1000", "--user", "me", "-p", "8080", "train.py", "-p", "fp16", "--user=1000:100"],
        ["https://hooks.example.org/services/a", "npm_config_cache", "pypi-mirror", "sk_learn"],
        ["--compass", "north", "--path=/home/me/keys", "C:/data/x:y"], ["--authors", "2", "--authored", "x"],
    ],
)  # fmt: skip
def test_other_words_stay(arguments: list[str]) -> None:
    """What only looks like the name of a secret."""
    assert masked_command(arguments) == arguments


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (f"ValueError: no login: password={S}, user=me", "ValueError: no login: password=***, user=me"),
        (f"no answer from https://me:{S}@host:1/x: 403", "no answer from https://***@host:1/x: 403"),
        (f"Namespace(hf_token='{S} x', lr=0.1)", "Namespace(hf_token=***, lr=0.1)"),
        (f"{{'api_key': '{S}', 'n': 1}}", "{'api_key': ***, 'n': 1}"),
        (f"Command '['curl', '--token', '{S}']' returned 1", "Command '['curl', '--token', ***]' returned 1"),
        (f"refused: Namespace(lr=1, api_key='{S}')", "refused: Namespace(lr=1, api_key=***)"),
        (f"see https://h/x?to=https://i/y?token={S}", "see https://h/x?to=https://i/y?token=***"),
        ("401 for Bearer abc123def", "401 for Bearer ***"),
        ("Incorrect API key provided: sk-abcdefghijklmnop123", "Incorrect API key provided: ***"),
        *((one, one) for one in (
            "KeyError: 'api_key'", "unexpected token: 5", "the option --token is required", "step=3, loss: nan",
            "Missing key(s) in state_dict: 'token_embedding.weight'", "size mismatch for key: 3 vs 4",
            "password authentication failed for user me", "see https://pytorch.org/docs/x.html#a=b",
        )),
    ],
)  # fmt: skip
def test_secrets_in_sentences(given: str, told: str) -> None:
    """Errors quote what they failed at."""
    assert masked_text(given) == told


def test_secrets_in_values() -> None:
    """Of a header, whatever is called so; what is only switched by such a name stays."""
    given = {"config": {"password": S, "use_auth": True, "tokens": 5, "token": None, "lrs": [0.1, 0.2]}, "k": (1, "a")}
    told = {"config": {"password": "***", "use_auth": True, "tokens": 5, "token": None, "lrs": [0.1, 0.2]}}
    assert masked(given) == told | {"k": [1, "a"]}
    assert masked([{"secret": [S]}, ["--key", S]]) == [{"secret": "***"}, ["--key", "***"]]


def bytes_of(folder: Path) -> bytes:
    """All that is in the files of a folder or in a file."""
    files = [folder] if folder.is_file() else [one for one in folder.rglob("*") if one.is_file()]
    return b"".join(one.read_bytes() for one in files)


def test_a_writer_keeps_no_secret(tmp_path: Path) -> None:
    """Neither of a header nor of a note nor of a status, and a copy of a trace has none either."""
    path = tmp_path / "run.zarr"
    writer = TraceWriter(
        path, header={"argv": ["x.py", "--token", S], "config": {"password": S}, "model": {"key": "v"}}
    )
    writer.note({"problem": {"what": "a subscriber", "why": f"OSError: https://me:{S}@host", "count": 1}})
    writer.finish(f"failed: OSError: https://me:{S}@host")
    with tracer.open(path) as trace:
        assert trace.status == "failed: OSError: https://***@host"
        assert trace.header["argv"] == ["x.py", "--token", "***"]
        assert trace.header["config"] == {"password": "***"}
        assert trace.header["model"] == {"key": "v"}  # names of the program are none of the user
        assert trace.notes[0]["problem"]["why"] == "OSError: https://***@host"
    assert S.encode() not in bytes_of(path)


def test_trace_record_keeps_no_secret(tmp_path: Path) -> None:
    """Neither of the command nor of the error; ``--no-command`` leaves out the command."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)

    def run(*options: str) -> Path:
        out = tmp_path / ("run.h5" if options else "run.zarr")
        command = [sys.executable, "-m", "tracereel", "record", "--out", str(out), *options]
        command += [str(script), "--api-key", S]
        done = processes.run(
            command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 1
        assert S in done.stderr  # the script's own traceback is the script's
        assert S.encode() not in bytes_of(out)
        return out

    with tracer.open(run()) as trace:
        assert trace.header["argv"][1:] == ["--api-key", "***"]
        assert trace.status == "failed: ValueError: refused: Namespace(api_key=***)"
    with tracer.open(run("--no-command")) as trace:
        assert "argv" not in trace.header


def test_the_command_line_prints_no_secret() -> None:
    """Whatever library an error is of."""
    failure = Refusal.of(OSError(f"no answer from https://me:{S}@host/x?sig={S}"))
    assert failure.message == "OSError: no answer from https://***@host/x?sig=*** (--debug shows where)"


def test_record_can_leave_the_command_out(tmp_path: Path) -> None:
    """From Python, too."""
    model = torch.nn.Linear(2, 2)
    for command in (True, False):
        with tracer.record(tmp_path / f"{command}.zarr", model, (), command=command, capture=tracer.Capture()) as run:
            run.step()
        with tracer.open(tmp_path / f"{command}.zarr") as trace:
            assert ("argv" in trace.header) == command


@pytest.mark.parametrize(
    "url",
    [f"s3://key:{S}@bucket/run.zarr", f"https://me:{S}@host/run.zarr", f"gs://{S[:7]}@b/run.zarr", "https://h/run.zarr?sig=abc7"],
)  # fmt: skip
def test_paths_with_credentials_are_refused_without_them(url: str, tmp_path: Path) -> None:
    """In no error, printed or stored, and in no file of a batch is the secret."""
    with pytest.raises(TraceError, match="no password") as caught:
        location(url)
    told = str(caught.value) + summary(ValueError(f"cannot open {url}"))
    done = CliRunner().invoke(main, ["info", url])
    assert done.exit_code == 1
    told += done.output
    assert "***" in told
    for secret in (S, S[:7], "abc7"):
        assert secret not in told


FAILS = """
from tracer import Subscriber, Subscription

class Fails(Subscriber):
    \"\"\"Fails with a secret.\"\"\"
    def __init__(self):
        super().__init__(Subscription("weights"), produces="weights_fails")
    def compute(self, message):
        raise OSError("no answer from https://me:" + "/".join(["hUnter2", "x+Y"]) + "@host")
"""


def test_a_batch_keeps_no_secret(tmp_path: Path) -> None:
    """What a subscriber failed at is told without what would have opened it, and so is a trace that is refused."""
    pytest.importorskip("pyarrow")
    from analyze.batching.batch import batch

    model = torch.nn.Linear(2, 2)
    with tracer.record(tmp_path / "run.zarr", model, (), capture=tracer.Capture()) as run:
        run.step()
    (tmp_path / "fails.py").write_text(FAILS)
    results = batch([tmp_path / "run.zarr"], [f"{tmp_path / 'fails.py'}:Fails"], tmp_path / "answers", workers=0)
    assert [one.reason for one in results.failures] == [
        "OSError: no answer from https://***@host (raised by Fails on weights of global step 0)"
    ]
    assert S.encode() not in bytes_of(tmp_path / "answers")
    with pytest.raises(TraceError, match="no password") as caught:
        batch([f"s3://key:{S}@bucket/run.zarr"], ["norm"], tmp_path / "answers", workers=0)
    assert S not in str(caught.value)
