"""No secret leaves the host, wherever somebody has put it."""

from __future__ import annotations

import json
import stat
import tarfile
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from proxyd.cli.bugreport.collect import collect, log_names
from proxyd.cli.bugreport.masking import KNOWN_WORDS, MASK, Scrubber, masked, read_masked
from proxyd.cli.certificates import Authority
from proxyd.cli.main import main
from proxyd.core.errors import ConfigError
from proxyd.runtime.config import AgentConfig, CoordinatorConfig, LogConfig, parse_config
from proxyd.runtime.config_forward import ForwardConfig
from proxyd.runtime.config_links import BottleneckConfig, ClassConfig, JobConfig, LinkConfig

SECRET = "S3cr3t+Value/of=mine!"
ROOT = Path(__file__).resolve().parents[3]
TABLES: dict[str, type[BaseModel]] = {
    "[agent]": AgentConfig,
    "[coordinator]": CoordinatorConfig,
    "[log]": LogConfig,
    "[[link]]": LinkConfig,
    "[[job]]": JobConfig,
    "[[class]]": ClassConfig,
    "[[bottleneck]]": BottleneckConfig,
    "[[forward]]": ForwardConfig,
}
FIELDS = [
    (header, field.alias or name)
    for header, model in TABLES.items()
    for name, field in model.model_fields.items()
    if name != "fallback_percent"
]


def reported(text: str) -> str:
    """What of a configuration ends up in a report: its values, and the loader's verdict on it."""
    hidden: set[str] = set()
    values = read_masked(text, hidden)
    try:
        parse_config(text, "f.toml")
        verdict = "valid"
    except ConfigError as error:
        verdict = str(error)
    return Scrubber(hidden).clean(json.dumps(values) + verdict)


def test_every_key_is_known() -> None:
    assert {key for _, key in FIELDS} <= KNOWN_WORDS


@pytest.mark.parametrize(("header", "key"), FIELDS)
@pytest.mark.parametrize("form", ['"{}"', '["{}"]', '"/{}"', '"x://user:{}@host:1/"', '"{}" # and {}'])
def test_a_secret_in_any_field_stays_here(header: str, key: str, form: str) -> None:
    text = f"{header}\n{key} = {form.replace('{}', SECRET)}\n"
    assert SECRET in tomllib.loads(text).__repr__()
    assert SECRET not in reported(text)


@pytest.mark.parametrize(
    "text",
    [
        f"# token: {SECRET}\n[agent]\nsite = 'a'\n",
        f"[agent]\nsite = 'a'\ntoken = '{SECRET}'\n",
        f"[agent.{json.dumps(SECRET)}]\nx = 1\n",
        f"[agent]\nfallback_percent = {{sync = '{SECRET}'}}\n",
        f"[agent]\nsite = 'a\ntoken_file = '{SECRET}'\n",
        f"token = {SECRET}\n[agent\n",
    ],
)
def test_nor_where_nothing_belongs(text: str) -> None:
    assert SECRET not in reported(text)


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/examples").glob("*.toml")), ids=lambda path: path.name)
def test_what_is_no_secret_can_be_read(path: Path) -> None:
    """Everything but paths that are not on this host."""
    data = tomllib.loads(path.read_text())
    hidden: set[str] = set()
    shown = json.dumps(masked(data, hidden))
    assert all(one.startswith("/") for one in hidden), hidden
    assert shown.count(MASK) == len(json.dumps(data).split('"/')) - 1 or not hidden


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("GET /?token=abcdef123456&x=1", "abcdef123456"),
        ('{"password": "hunter2hunter2", "a": 1}', "hunter2hunter2"),
        ("etcd://root:hunter2hunter2@10.0.0.1:2379", "hunter2hunter2"),
        ("Authorization: Bearer eyJhbGciOi.abc.def", "eyJhbGciOi"),
        ("-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\n-----END PRIVATE KEY-----", "MIIEvQIBADANBg"),
        ("-----BEGIN EC PRIVATE KEY-----\nMIIEvQIBADANBg", "MIIEvQIBADANBg"),
    ],
)
def test_what_looks_like_a_secret_in_a_log(text: str, secret: str) -> None:
    assert secret not in Scrubber([]).clean(text)


def test_what_only_sounds_like_one_stays() -> None:
    text = 'token_file = "/etc/proxyd/token" is not here; proof=token; the token is wrong'
    assert "/etc/proxyd/token" in Scrubber([]).clean(text)


def test_an_archive_with_secrets_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    token, job_token = "0123456789abcdef" * 2 + "site", "fedcba9876543210" * 2 + "job"
    (tmp_path / "token").write_text(token + "\n")
    (tmp_path / "job.token").write_text(job_token)
    tls = Authority(tmp_path / "ca.pem").agent(tmp_path / "tls", "a", "a-0")
    key_line = Path(tls.key).read_text().splitlines()[1]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "from-the-environment-1")
    config = tmp_path / "agent.toml"
    config.write_text(
        f"# comment {SECRET}\n[agent]\nsite = 'a'\nname = 'a-0'\nsocket = '{tmp_path}/a.sock'\n"
        f"token_file = '{tmp_path}/token'\ntls_certificate = '{tls.certificate}'\ntls_key = '{tls.key}'\n"
        f"tls_ca = '{tls.ca}'\n[[job]]\nname = 'llama'\ntoken_file = '{tmp_path}/job.token'\n"
    )
    broken = tmp_path / "broken.toml"
    broken.write_text(f"[coordinator]\nlock = 'etcd://root:{SECRET}@10.0.0.1:2379'\ntokn = 'unknown-{SECRET}'\n")
    log = tmp_path / "agent.log"
    log.write_text(f"old line\n{token} and {job_token}\n{key_line}\nfrom-the-environment-1\npassword={SECRET}\n")
    out = tmp_path / "report.tar.gz"
    argv = ["bugreport", "--output", str(out), "--log", str(log), "--log-lines", "4"]
    assert main([*argv, "--config", str(config), "--config", str(broken)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    with tarfile.open(out) as archive:
        files = {Path(one.name).name: archive.extractfile(one).read().decode() for one in archive.getmembers()}  # type: ignore[union-attr]
    for name, text in files.items():
        for secret in (SECRET, token, job_token, key_line, "from-the-environment-1"):
            assert secret not in text, f"{name} has {secret}"
    assert {"versions.json", "doctor.json", "config-1.json", "config-2.json", "sysctl.txt", "missing.txt"} <= set(files)
    values: dict[str, Any] = json.loads(files["config-1.json"])["values"]
    assert values["agent"]["site"] == "a"
    assert values["agent"]["token_file"] == f"{tmp_path}/token", "where it stands is no secret"
    assert json.loads(files["config-2.json"])["values"]["coordinator"]["lock"] == MASK
    assert "old line" not in files["log-agent.log.txt"]
    assert "etcd" not in files["config-2.json"]
    assert main([*argv, "--config", str(config)]) == 2, "it would write over a file"


def test_metrics_are_taken_along(tmp_path: Path) -> None:
    page = b"proxyd_build_info 1\n"

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file = tmp_path / "c.toml"
        file.write_text(f"[coordinator]\nlisten = '127.0.0.1:0'\nmetrics = '127.0.0.1:{server.server_port}'\n")
        other = tmp_path / "a.toml"
        other.write_text(f"[agent]\nsite = 'a'\nsocket = '{tmp_path}/a.sock'\nmetrics = 'fd:9'\n")
        files = collect([str(file), str(other)], None, [], 0)
        server.shutdown()
    assert files["metrics-coordinator.txt"] == page.decode()
    assert "metrics-agent.txt: the page's port is not in the configuration (fd:9)" in files["missing.txt"]


def test_without_anything_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROXYD_CONFIG", raising=False)
    monkeypatch.setenv("PROXYD_SOCKET", "/nowhere/agent.sock")
    files = collect([], None, [], 10)
    assert "status-agent.json: no agent runs here" in files["missing.txt"]
    assert json.loads(files["versions.json"])["proxyd"]


def test_what_is_forwarded_can_be_read() -> None:
    text = (
        "[agent]\nsite = 'a'\ncoordinators = '127.0.0.1:7600'\n"
        '[[forward]]\nkind = "socks5"\nlisten = "10.1.0.1:1080"\nto = "b"\ntraffic = "bulk"\n'
        'clients = ["10.1.0.0/16"]\n'
        '[[forward]]\nlisten = "127.0.0.1:8022"\nto = "b"\ntarget = "10.2.0.9:22"\n'
        '[[forward]]\nkind = "exit"\nallow = ["10.2.0.0/16:22,873", "[fd00::/8]:*", "10.2.0.9/32:*"]\n'
    )
    parse_config(text, "f.toml")
    hidden: set[str] = set()
    assert read_masked(text, hidden) == tomllib.loads(text)
    assert not hidden


@pytest.mark.parametrize("secret", ["pässwört-1", 'one"word\\12', 'it\'s-a-"secret"', "pla\tcated-9"])
def test_a_secret_that_errors_and_json_write_otherwise_stays_here(tmp_path: Path, secret: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f"[agent]\nsite = 'a'\ncoordinators = '127.0.0.1:7600'\ndata_listen = {json.dumps(secret)}\n")
    doctor = json.loads(collect([str(file)], None, [], 0)["doctor.json"])
    told = [one["detail"] for one in doctor["checks"] if one["name"] == f"config {file}"]
    assert MASK in told[0]
    assert secret not in told[0]
    assert repr(secret)[1:-1] not in told[0]


def test_logs_of_one_name_are_all_taken_along() -> None:
    names = log_names(["/var/a/agent.log", "/var/b/agent.log", "/var/c/agent.log", "/var/agent.log-2", "x.log"])
    assert names[:3] == ["log-agent.log.txt", "log-agent.log-2.txt", "log-agent.log-3.txt"]
    assert len(set(names)) == 5
