from __future__ import annotations

from pathlib import Path

import pytest

from proxyd.core.errors import EXIT_USAGE, ConfigError
from proxyd.runtime.addresses import Address
from proxyd.runtime.config import Config, load_config, parse_config, read_job_tokens, read_token, token_files

FULL = """\
[agent]
site = "hami"
name = "gw-1"
socket = "/run/proxyd/agent.sock"
data_listen = "127.0.0.1:0"
coordinators = ["127.0.0.1:7600", "unix:/run/proxyd/coordinator.sock"]
metrics = "off"
memory = "1GiB"
arena = "64MiB"
eager = 1048576
chunk = "512KiB"
streams = 4
linger = 0

[coordinator]
listen = "127.0.0.1:7600"
owns = ["hami->*"]
reflection = "false"

[[link]]
from = "hami"
to = "shenzhen"
capacity = "400Mbit"
rtt = "60ms"
buffer = "0.1bdp"

[[link]]
from = "shenzhen"
to = "hami"
capacity = "50MB"
rtt = "0.06s"
buffer = 300000
pace = 0.9
"""


def problems(text: str, section: str | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.toml", section, environ)  # type: ignore[arg-type] # "agent" or "coordinator"
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


def test_numbers_come_out_in_bytes_and_nanoseconds() -> None:
    config = parse_config(FULL, "f.toml")
    agent, coordinator = config.require_agent(), config.require_coordinator()
    assert (agent.memory_bytes, agent.arena_bytes, agent.eager_bytes) == (1 << 30, 64 << 20, 1 << 20)
    assert (agent.chunk_bytes, agent.stream_count, agent.linger_ns) == (512 << 10, 4, 0)
    assert (agent.peer_timeout_ns, agent.resolve_timeout_ns) == (30 * 10**9, 10 * 10**9)
    assert agent.metrics_address is None
    assert agent.data_listen_address == Address(host="127.0.0.1", port=0)
    assert [str(one) for one in agent.coordinator_addresses] == ["127.0.0.1:7600", "unix:/run/proxyd/coordinator.sock"]
    assert coordinator.listen_addresses == (Address(host="127.0.0.1", port=7600),)
    assert (coordinator.beat_ns, coordinator.lease_ns, coordinator.rtt_control_ns) == (150_000_000, 2 * 10**9, 10**6)
    assert coordinator.owns == ("hami->*",)
    there, back = config.links
    assert (there.name, there.capacity_bytes_per_s, there.rtt_ns) == ("hami->shenzhen", 50_000_000, 60_000_000)
    assert (there.buffer_bytes, there.pace) == (300_000, 0.98)
    assert (back.capacity_bytes_per_s, back.rtt_ns, back.buffer_bytes, back.pace) == (
        there.capacity_bytes_per_s,
        there.rtt_ns,
        there.buffer_bytes,
        0.9,
    )


def test_the_word_false_is_false() -> None:
    assert parse_config(FULL, "f.toml").require_coordinator().reflection is False
    assert "reflection: 0 is not true or false" in problems("[coordinator]\nreflection = 0\n")
    assert "reflection: 'nope' is not true or false" in problems("[coordinator]\nreflection = 'nope'\n")


def test_defaults_need_only_a_site() -> None:
    agent = parse_config('[agent]\nsite = "a"\n', "f.toml", "agent").require_agent()
    assert agent.name
    assert agent.socket == "/run/proxyd/agent.sock"
    assert (agent.memory_bytes, agent.arena_bytes, agent.eager_bytes) == (8 << 30, 256 << 20, 64 << 20)
    assert (agent.chunk_bytes, agent.stream_count, agent.gateway_listen_address) == (None, None, None)
    assert str(agent.metrics_address) == "127.0.0.1:9601"
    assert agent.advertised_address == agent.data_listen_address
    assert parse_config("[coordinator]\n", "f.toml", "coordinator").links == ()


def test_an_unknown_buffer_counts_as_none() -> None:
    text = '[coordinator]\n[[link]]\nfrom = "a"\nto = "b"\ncapacity = "1Gbit"\nrtt = "9ms"\n'
    assert parse_config(text, "f.toml").links[0].buffer_bytes == 0


def test_models_are_frozen() -> None:
    config = parse_config(FULL, "f.toml")
    with pytest.raises(ValueError, match="frozen"):
        config.require_agent().site = "other"  # type: ignore[misc] # that is the point


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[agent]\nsite = "a"\n\nbandwith = 1\n', "f.toml:4: unknown key 'bandwith' in [agent]; known are site,"),
        ('[agent]\nsite = "a"\nsokcet = "x"\n', "f.toml:3: unknown key 'sokcet' in [agent]; did you mean 'socket'?"),
        ('[agnet]\nsite = "a"\n', "f.toml:1: unknown section or key 'agnet'; did you mean 'agent'?"),
        ('[agent]\nsite = "a"\ncapacity = "1Gbit"\n', "unknown key 'capacity' in [agent]; it belongs to [[link]]"),
        ("# hello\n\n[agent]\n", "f.toml:3: [agent] lacks the key 'site'"),
        ("[agent]\nsite = 5\n", "f.toml:2: [agent] site: must be a text in quotes, not 5"),
        ('[agent]\nsite = "a"\nadmin = "/run/x.sock"\n', "f.toml:3: [agent] admin: '/run/x.sock' must end in '.admin'"),
        ('[agent]\nsite = "a b"\n', "f.toml:2: [agent] site: 'a b' is not a name"),
        ('agent.site = "a"\nagent.memory = "lots"\n', "f.toml:2: [agent] memory: 'lots' is not a size"),
        ('[agent]\nsite = "a"\npeer_timeout = 30\n', "f.toml:3: [agent] peer_timeout: 30 is not a duration"),
        ('[agent]\nsite = "a"\nstreams = 0\n', "f.toml:3: [agent] streams: 0 is no number of streams"),
        ('[agent]\nsite = "a"\nstreams = true\n', "f.toml:3: [agent] streams: True is no number of streams"),
        ('[agent]\nsite = "a"\nchunk = "1KiB"\n', "f.toml:3: [agent] chunk: '1KiB' must be from 16KiB to 16MiB"),
        ('[agent]\nsite = "a"\narena = "4KiB"\n', "less than the smallest arena, 1MiB"),
        ('[agent]\nsite = "a"\nmemory = "300MiB"\n', "cannot hold the send and the receive arena"),
        ('[agent]\nsite = "a"\nworkers = 17\n', "divided among workers = 17, and a part cannot hold"),
        ('[agent]\nsite = "a"\nworkers = 4\nclients = 3\n', "clients = 3 is less than workers = 4"),
        ('[agent]\nsite = "a"\nworkers = 65\n', "f.toml:3: [agent] workers"),
        ('[agent]\nsite = "a"\nworkers = 0\n', "f.toml:3: [agent] workers"),
        ('[agent]\nsite = "a"\ncongestion_control = "B B R"\n', "is not a congestion control"),
        ('[agent]\nsite = "a"\ncoordinators = []\n', "f.toml:3: [agent] coordinators: must not be empty"),
        ('[agent]\nsite = "a"\ncoordinators = ["h:1", "h:1"]\n', "names one address twice"),
        ('[agent]\nsite = "a"\ncoordinators = ["h:0"]\n', "port 0 is no place to connect to"),
        ('[agent]\nsite = "a"\ndata_address = "0.0.0.0:7601"\n', "cannot be told to peers"),
        ('[agent]\nsite = "a"\ndata_address = "[fe80::1]:7601"\n', "cannot be told to peers"),
        ('[agent]\nsite = "a"\ndata_listen = "::1:7601"\n', "stands in brackets, like [::1]:7601"),
        ('[agent]\nsite = "a"\nmetrics = "fd:x"\n', "is not an inherited descriptor"),
        ("[coordinator]\nlease = '200ms'\n", "lease = '200ms' must be at least two beats"),
        ("[coordinator]\nowns = ['a']\n", "f.toml:2: [coordinator] owns: 'a' does not name links"),
        ("[coordinator]\n[log]\nlevel = 'loud'\n", "f.toml:3: [log] level: must be 'debug', 'info', 'warning'"),
        ("[coordinator]\n[link]\nfrom = 'a'\n", "f.toml:2: [[link]]: each link stands under its own header"),
        ("[agent]\nbandwith_cap: 50Mbit\n", "f.toml:2: not valid TOML"),
        ("[agent]\nsite = 'a'\nsite = 'b'\n", "f.toml:3: not valid TOML"),
        ("", "neither [agent] nor [coordinator] is here"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(text: str, expected: str) -> None:
    assert expected in problems(text)


LINK = '[[link]]\nfrom = "a"\nto = "b"\ncapacity = "4Gbit"\nrtt = "60ms"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LINK.replace("4Gbit", "-4Gbit"), "f.toml:10: [[link]] capacity: '-4Gbit' is not a rate"),
        (LINK.replace('"60ms"', "60"), "f.toml:11: [[link]] rtt: 60 is not a duration"),
        (LINK.replace('to = "b"', 'to = "a"'), "f.toml:7: [[link]]: a link joins two sites"),
        (LINK + "pace = nan\n", "f.toml:12: [[link]] pace: must be finite"),
        (LINK + "pace = 1.5\n", "f.toml:12: [[link]] pace: input should be less than or equal to 1, not 1.5"),
        (LINK + 'buffer = "0bdp"\n', "f.toml:12: [[link]] buffer: '0bdp' is not a buffer"),
        (LINK + "rttt = 1\n", "f.toml:12: unknown key 'rttt' in [[link]]; did you mean 'rtt'?"),
        (LINK.replace('to = "b"\n', ""), "f.toml:7: [[link]] lacks the key 'to'"),
        (LINK, "f.toml:7: link a->b stands here again; [[link]] number 1 has it"),
    ],
)  # fmt: skip
def test_the_second_link_is_found_on_its_own_lines(text: str, expected: str) -> None:
    assert expected in problems(f"[coordinator]\n{LINK}{text}")


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file() -> None:
    said = problems('[agent]\nsit = "a"\nmemory = "x"\n[coordinator]\nlisten = []\n').splitlines()
    assert [line.split(" ", 1)[0] for line in said] == ["f.toml:1:", "f.toml:2:", "f.toml:3:", "f.toml:5:"]


def test_a_section_that_a_daemon_needs() -> None:
    assert "no [agent] section, and proxyd agent needs one" in problems("[coordinator]\n", "agent")
    with pytest.raises(ConfigError, match=r"no \[coordinator\] section"):
        parse_config('[agent]\nsite = "a"\n', "f.toml").require_coordinator()


@pytest.mark.parametrize(
    "listener",
    ["data_listen = '0.0.0.0:7601'", "data_listen = '[::]:7601'", "gateway_listen = '10.0.0.1:7602'"]
    + ["metrics = '0.0.0.0:9601'", "data_listen = 'gateway.example:7601'"],
)
def test_a_listener_for_others_needs_a_token(listener: str) -> None:
    text = f"[agent]\nsite = 'a'\n{listener}\n"
    said = problems(text)
    assert said.startswith(f"f.toml:3: [agent] {listener.split(' ')[0]} = ")
    assert "token_file" in said
    assert parse_config(f"{text}token_file = '/etc/proxyd/token'\n", "f.toml").agent is not None


def test_a_coordinator_for_others_needs_a_token() -> None:
    assert "f.toml:2: [coordinator] listen = '0.0.0.0:7600'" in problems(
        "[coordinator]\nlisten = ['127.0.0.1:7600', '0.0.0.0:7600']\n"
    )
    for quiet in ("localhost:7600", "[::1]:7600", "127.3.2.1:7600", "unix:/run/proxyd/c.sock"):
        assert parse_config(f"[coordinator]\nlisten = '{quiet}'\n", "f.toml").coordinator is not None


def test_a_long_socket_path_names_limit_and_length() -> None:
    path = "/" + "s" * 119
    said = problems(f"[agent]\nsite = 'a'\nsocket = '{path}'\n")
    assert "f.toml:3: [agent] socket" in said
    assert "120 bytes long" in said
    assert "107 bytes" in said
    fits = "/" + "s" * 106
    assert parse_config(f"[agent]\nsite = 'a'\nsocket = '{fits}'\n", "f.toml").require_agent().socket == fits
    assert "unix" not in problems(f"[coordinator]\nlisten = 'unix:{path}'\n").partition(":")[0]


def test_the_path_limit_counts_bytes_not_characters() -> None:
    assert "120 bytes long" in problems("[agent]\nsite = 'a'\nsocket = '/" + "é" * 59 + "x'\n")


def test_environment_overrides_and_is_named_when_wrong() -> None:
    config = parse_config(
        "[agent]\nsite = 'a'\n",
        "f.toml",
        "agent",
        {"PROXYD_SOCKET": "/tmp/x.sock", "PROXYD_SITE": "b", "PROXYD_LOG_FORMAT": "json", "HOME": "/"},
    )
    assert (config.require_agent().socket, config.require_agent().site) == ("/tmp/x.sock", "b")
    assert config.log.format == "json"
    said = problems("[agent]\nsite = 'a'\n", None, PROXYD_SOCKET="/" + "x" * 150)
    assert "from the environment variable PROXYD_SOCKET" in said


def test_an_unknown_variable_with_our_prefix_is_refused() -> None:
    said = problems("[agent]\nsite = 'a'\n", None, PROXYD_SOCKT="/tmp/x")
    assert "PROXYD_SOCKT is unknown (did you mean PROXYD_SOCKET?)" in said


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"[agent]\nsite = '\xff'\n")
    with pytest.raises(ConfigError, match=r"binary\.toml:2: not UTF-8 text"):
        load_config(binary)
    huge = tmp_path / "huge.toml"
    huge.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="larger than"):
        load_config(huge)


def test_a_file_is_loaded_with_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f.toml"
    file.write_text(FULL)
    monkeypatch.setenv("PROXYD_NAME", "gw-2")
    assert load_config(file, "agent").require_agent().name == "gw-2"
    monkeypatch.setenv("PROXYD_NAMES", "gw-2")
    with pytest.raises(ConfigError, match="PROXYD_NAMES"):
        load_config(file)


def test_tokens(tmp_path: Path) -> None:
    assert read_token(None) is None
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match="No such file"):
        read_token(str(file))
    file.write_text("  0123456789abcdef\n")
    file.chmod(0o600)
    assert read_token(str(file)) == b"0123456789abcdef"
    file.write_text("hunter2\n")
    with pytest.raises(ConfigError, match="holds 7 bytes") as caught:
        read_token(str(file))
    assert "hunter2" not in str(caught.value)
    file.write_text("0123456789abcdef")
    file.chmod(0o602)
    with pytest.raises(ConfigError, match="written by everybody"):
        read_token(str(file))


def test_token_files_are_listed_once() -> None:
    text = "[agent]\nsite = 'a'\ntoken_file = '/t'\n[coordinator]\ntoken_file = '/t'\n"
    assert token_files(parse_config(text, "f.toml")) == [("/t", "")]
    assert token_files(Config()) == []


def test_a_jobs_token_is_an_agents_business() -> None:
    job = "[[job]]\nname = 'llama'\ntoken_file = '/j'\n[[job]]\nname = 'free'\n"
    assert token_files(parse_config("[agent]\nsite = 'a'\n" + job, "f.toml")) == [("/j", "llama")]
    assert token_files(parse_config("[coordinator]\n" + job, "f.toml")) == []


def test_job_tokens_are_read_by_job_and_mistakes_name_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "llama"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o640)
    jobs = parse_config(
        f"[agent]\nsite = 'a'\n[[job]]\nname = 'llama'\ntoken_file = '{file}'\n[[job]]\nname = 'free'\n", "f.toml"
    ).jobs
    assert read_job_tokens(jobs) == {"llama": b"0123456789abcdef"}
    assert not caplog.records
    file.chmod(0o644)
    assert read_job_tokens(jobs)
    assert "of job llama can be read by every user" in caplog.text
    for harm in (lambda: file.chmod(0o602), lambda: file.write_text("short"), file.unlink):
        harm()
        with pytest.raises(ConfigError, match="of job llama") as caught:
            read_job_tokens(jobs)
        assert "short" not in str(caught.value).replace("shorter", "")


def test_a_gateway_whose_trainers_all_prove_their_jobs_needs_no_other_token() -> None:
    text = "[agent]\nsite = 'a'\ngateway_listen = '10.0.0.1:7602'\njobs = 'proven'\n"
    with pytest.raises(ConfigError, match=r"f\.toml:4: .*no trainer could attach"):
        parse_config(text, "f.toml")
    job = "[[job]]\nname = 'llama'\ntoken_file = '/j'\n"
    assert parse_config(text + job, "f.toml").require_agent().jobs == "proven"
    with pytest.raises(ConfigError, match="anybody could use it"):
        parse_config(text.replace("proven", "any") + job, "f.toml")


TLS = "tls_certificate = '/c.pem'\ntls_key = '/k.pem'\ntls_ca = '/ca.pem'\n"


@pytest.mark.parametrize(
    ("section", "key", "tls_is_enough"),
    [
        ("agent", 'data_listen = "10.0.0.1:7601"', True),
        ("agent", 'data_listen = "[2001:db8::1]:7601"', True),
        ("agent", 'data_listen = "0.0.0.0:0"', True),
        ("agent", 'gateway_listen = "10.0.0.1:7602"', False),
        ("agent", 'metrics = "[::]:9601"', True),
        ("coordinator", 'listen = ["unix:/x.sock", "host:7600"]', True),
        ("coordinator", 'metrics = "0.0.0.0:9600"', True),
    ],
)
def test_what_others_can_reach_needs_a_token_or_tls(section: str, key: str, tls_is_enough: bool) -> None:
    text = f"[{section}]\n" + ("site = 'a'\n" if section == "agent" else "") + f"{key}\n"
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.toml")
    said = str(caught.value)
    assert caught.value.exit_code == 2
    assert "token_file" in said
    assert ("tls_certificate" in said) == tls_is_enough, "it says what would help"
    assert parse_config(f"{text}token_file = '/t'\n", "f.toml")
    if tls_is_enough:
        assert parse_config(text + TLS, "f.toml")
    else:
        with pytest.raises(ConfigError, match="token_file"):
            parse_config(text + TLS, "f.toml")


def test_tls_needs_all_of_its_files() -> None:
    for line in TLS.splitlines():
        with pytest.raises(ConfigError, match=line.partition(" ")[0]):
            parse_config("[coordinator]\n" + TLS.replace(line, ""), "f.toml")
    section = parse_config("[coordinator]\n" + TLS, "f.toml").require_coordinator()
    assert section.tls == ("/c.pem", "/k.pem", "/ca.pem")
    assert parse_config("[coordinator]\n", "f.toml").require_coordinator().tls is None


def test_what_a_job_may_use() -> None:
    text = (
        "[coordinator]\njobs = 'named'\n[[job]]\nname = 'b'\n[[job]]\nname = 'a'\nlinks = 'x->*'\nclasses = ['sync']\n"
    )
    permissions = parse_config(text, "f.toml").policy.permissions
    assert permissions.only_named
    assert [(rule.job, rule.links, rule.classes) for rule in permissions.rules] == [
        ("a", ("x->*",), ("sync",)),
        ("b", (), ()),
    ]
    permissions = parse_config(text.replace("jobs = 'named'\n", ""), "f.toml").policy.permissions
    assert [rule.job for rule in permissions.rules] == ["a"], "a job without rules needs none"
    for wrong in ("links = 'x'", "classes = ['urgent']"):
        with pytest.raises(ConfigError, match=r"f\.toml:4"):
            parse_config(f"[coordinator]\n[[job]]\nname = 'a'\n{wrong}\n", "f.toml")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("lock_ca = '/ca'\n", "is for lock"),
        ("lock = 'kubernetes://proxyd'\nlock_ca = '/ca'\n", "brings its own CA"),
        ("lock = 'etcd://h:2379'\nlock_certificate = '/c'\nlock_key = '/k'\n", "needs lock_ca"),
        ("lock = 'etcd://h:2379'\nlock_ca = '/ca'\nlock_key = '/k'\n", "belong together"),
        ("lock = 'etcd://h:2379'\nlock_ca = '/ca'\n", ""),
        ("lock = 'etcd://h:2379'\nlock_ca = '/ca'\nlock_certificate = '/c'\nlock_key = '/k'\n", ""),
    ],
)
def test_tls_to_etcd_is_whole_or_refused(keys: str, words: str) -> None:
    if words:
        with pytest.raises(ConfigError, match=words):
            parse_config("[coordinator]\n" + keys, "f.toml")
    else:
        assert parse_config("[coordinator]\n" + keys, "f.toml").require_coordinator().lock_ca == "/ca"
