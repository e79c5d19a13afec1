"""``config init``, ``config schema`` and completion: what they print is right."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from proxyd.cli.main import COMMANDS, main
from proxyd.core.errors import ConfigError
from proxyd.runtime.config import config_schema, parse_config

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "deploy/examples").glob("*.toml"))


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == config_schema()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid(validator: Any, path: Path) -> None:
    validator.validate(tomllib.loads(path.read_text()))


# Each key with each of its forms: what the loader takes, the schema takes.
AGENT_FORMS = {
    "data_listen": ["0.0.0.0:0"],
    "admin": ["off", "/run/x.admin"],
    "coordinators": ["10.0.0.1:1", ["10.0.0.1:1", "unix:/run/c"]],
    "memory": ["1GiB", 1 << 30],
    "arena": ["1MiB", 2 << 20],
    "eager": ["1MiB", 4096],
    "chunk": ["auto", "64KiB", 65536],
    "streams": ["auto", 4],
    "clients": ["auto", 100],
    "peer_timeout": ["30s"],
    "linger": ["5s", 0],
    "fallback_percent": [{"sync": 50}],
    "jobs": ["any"],
    "warm": [True, False],
    "metrics": ["off", "", "127.0.0.1:1"],
}
COORDINATOR_FORMS = {
    "listen": ["127.0.0.1:1", ["127.0.0.1:1", "unix:/run/c"]],
    "owns": ["a->*", ["a->*", "b->*"]],
    "reflection": [True, "false", "True"],
    "mode": ["observe"],
    "grant_log_size": ["1MiB", 1 << 20],
    "time_zone": ["UTC"],
}


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("agent", key, value) for key, values in AGENT_FORMS.items() for value in values]
    + [("coordinator", key, value) for key, values in COORDINATOR_FORMS.items() for value in values],
)
def test_what_the_loader_takes_the_schema_takes(validator: Any, section: str, key: str, value: Any) -> None:
    site = "site = 'a'\ntoken_file = '/t'\n" if section == "agent" else ""
    text = f"[{section}]\n{site}{key} = {_toml(value)}\n"
    parse_config(text, "f.toml")
    validator.validate(tomllib.loads(text))


@pytest.mark.parametrize(
    "text",
    [
        "[agent]\nsite = 'a'\ndata_lisen = 'x'\n",
        "[agent]\nname = 'x'\n",
        "[agent]\nsite = 'a'\nstreams = 0\n",
        "[agent]\nsite = 'a'\nwarm = 1\n",
        "[coordinator]\nmode = 'watch'\n",
        "[[link]]\nfrom = 'a'\n",
        "[coordinator]\n[[job]]\nname = 'x'\nweight = 'much'\n",
        "[coordinator]\n[link]\nfrom = 'a'\nto = 'b'\n",
    ],
)
def test_what_the_schema_refuses_the_loader_refuses(validator: Any, text: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(tomllib.loads(text))
    with pytest.raises(ConfigError):
        parse_config(text, "f.toml")


@pytest.mark.parametrize(
    "options",
    [
        ["agent"],
        ["agent", "--site", "hami", "--name", "gw-1", "--coordinator", "10.1.0.1:7600", "--address", "10.1.0.5"],
        ["coordinator"],
        ["coordinator", "--site", "hami", "--peer-site", "x", "--peer-site", "y", "--rate", "4Gbit", "--rtt", "60ms"],
        ["coordinator", "--address", "10.1.0.1"],
    ],
)
def test_init_prints_what_check_accepts(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], validator: Any
) -> None:
    file = tmp_path / "f.toml"
    assert main(["config", "init", *options, "--output", str(file)]) == 0
    assert stat.S_IMODE(file.stat().st_mode) & 0o007 == 0
    capsys.readouterr()
    assert main(["config", "check", str(file)]) == 0
    validator.validate(tomllib.loads(file.read_text()))
    assert main(["config", "init", *options]) == 0
    assert capsys.readouterr().out.endswith(file.read_text())
    assert main(["config", "init", *options, "--output", str(file)]) == 2, "it would write over a file"


def test_init_refuses_what_would_be_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "init", "agent", "--site", "a b"]) == 2
    captured = capsys.readouterr()
    assert "not a name" in captured.err
    assert captured.out == ""


def test_completion_of_bash_knows_every_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    file = tmp_path / "proxyd.bash"
    file.write_text(script)
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [
            bash,
            "-c",
            f"source {file} && COMP_WORDS=(proxyd ''); COMP_CWORD=1; _shtab_proxyd; echo \"${{COMPREPLY[@]}}\"",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    words = {re.split(r"\s", name)[0] for name in COMMANDS}
    assert words <= set(done.stdout.split())


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_completion_of_the_others(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    shown = capsys.readouterr().out
    assert "doctor" in shown
    assert "undrain" in shown
