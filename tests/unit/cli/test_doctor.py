"""Each check on a host that it is told of: what is wrong is found, what is well isn't, and every finding has a fix."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from proxyd import __version__
from proxyd.cli.certificates import Authority
from proxyd.cli.doctor import files, host, kernel, links, network, paths_to_peers
from proxyd.cli.doctor.ask import Answers
from proxyd.cli.doctor.checks import examine
from proxyd.cli.doctor.findings import Finding, Status, as_plain, fail, ok, run_bounded, warn, worst
from proxyd.cli.doctor.show import report
from proxyd.cli.doctor.subject import LinkPath, Subject, make_subject
from proxyd.cli.main import main
from proxyd.core.errors import ConfigError
from proxyd.v1 import admin_pb2, coordination_pb2

FAR = LinkPath("a->b", 1_500_000_000, 60_000_000, "configured")  # 12 Gbit/s, 60 ms: a BDP of 90 MB
SYSCTLS = {
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_mtu_probing": "1",
    "net/ipv4/tcp_window_scaling": "1",
    "net/ipv4/tcp_sack": "1",
    "net/ipv4/tcp_timestamps": "1",
    "net/ipv4/tcp_wmem": "4096 16384 67108864",
    "net/ipv4/tcp_rmem": "4096 131072 67108864",
    "net/ipv4/tcp_mem": "262144 1048576 2097152",
    "net/ipv4/tcp_available_congestion_control": "reno cubic bbr",
    "net/ipv4/tcp_allowed_congestion_control": "reno cubic bbr",
    "net/core/somaxconn": "4096",
    "fs/file-nr": "1000\t0\t100000",
}


def a_host(root: Path, **changed: str) -> Subject:
    """One whose sysctls are right but for what is ``changed`` (by the last part of its name)."""
    for name, value in SYSCTLS.items():
        path = root / "proc/sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changed.get(name.rpartition("/")[2], value) + "\n")
    return Subject(root=root)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {one.name: one for one in findings}


def bad(findings: list[Finding]) -> list[str]:
    return [one.name for one in findings if one.status in (Status.WARN, Status.FAIL)]


def kernel_findings(subject: Subject, *paths: LinkPath) -> list[Finding]:
    return [
        *kernel.switches(subject),
        *kernel.backlog(subject),
        *kernel.congestion_control(subject),
        *kernel.buffers(subject, paths),
    ]


def test_a_host_with_the_shipped_settings_is_well(tmp_path: Path) -> None:
    assert bad(kernel_findings(a_host(tmp_path), FAR)) == []


@pytest.mark.parametrize(
    ("name", "value", "found", "fix"),
    [
        (
            "tcp_slow_start_after_idle",
            "1",
            "sysctl tcp_slow_start_after_idle",
            "net.ipv4.tcp_slow_start_after_idle = 0",
        ),
        ("tcp_mtu_probing", "0", "sysctl tcp_mtu_probing", "net.ipv4.tcp_mtu_probing = 1"),
        ("tcp_window_scaling", "0", "sysctl tcp_window_scaling", "net.ipv4.tcp_window_scaling = 1"),
        ("tcp_sack", "0", "sysctl tcp_sack", "net.ipv4.tcp_sack = 1"),
        ("somaxconn", "128", "sysctl somaxconn", "net.core.somaxconn = 4096"),
        ("tcp_wmem", "4096 16384 4194304", "sysctl tcp_wmem", "net.ipv4.tcp_wmem = 4096 16384 67108864"),
        ("tcp_rmem", "4096 131072 4194304", "sysctl tcp_rmem", "net.ipv4.tcp_rmem = 4096 131072 67108864"),
        ("tcp_mem", "2048 4096 8192", "sysctl tcp_mem", "net.ipv4.tcp_mem ="),
        (
            "tcp_allowed_congestion_control",
            "reno",
            "congestion control",
            "tcp_allowed_congestion_control = reno cubic",
        ),
    ],
)
def test_each_wrong_setting_is_found_alone_with_its_fix(
    tmp_path: Path, name: str, value: str, found: str, fix: str
) -> None:
    findings = kernel_findings(a_host(tmp_path, **{name: value}), FAR)
    assert bad(findings) == [found]
    assert fix in by_name(findings)[found].fix


def test_the_arithmetic_of_buffers(tmp_path: Path) -> None:
    """12 Gbit/s at 60 ms is 90 MB: three streams with 64 MiB (32 usable), 43 with 4 MiB (deploy/sysctl says so too)."""
    assert FAR.bdp_bytes == 90_000_000
    assert kernel.streams_needed(FAR.bdp_bytes, 64 << 20) == 3
    assert kernel.streams_needed(FAR.bdp_bytes, 4 << 20) == 43
    text = by_name(kernel.buffers(a_host(tmp_path, tcp_wmem="4096 16384 4194304"), [FAR]))["sysctl tcp_wmem"].detail
    assert "12 Gbit/s / 8 x 60 ms = 85.83 MiB" in text
    assert "43 streams" in text
    drop_in = (Path(__file__).parents[3] / "deploy/sysctl/90-proxyd.conf").read_text()
    assert str(kernel.SHIPPED_BUFFER_BYTES) in drop_in


def test_what_the_fix_sets_is_enough() -> None:
    for rate, rtt_ms in ((50, 1), (500, 60), (5_000, 180), (12_500, 300)):
        path = LinkPath("x", rate * 1_000_000, rtt_ms * 1_000_000, "told")
        limit = kernel.wanted_limit_bytes(path.bdp_bytes)
        assert kernel.streams_needed(path.bdp_bytes, limit) <= kernel.WANTED_STREAMS
        assert limit & (limit - 1) == 0


def test_more_streams_than_an_agent_opens_is_a_failure(tmp_path: Path) -> None:
    subject = a_host(tmp_path, tcp_wmem="4096 16384 1048576")
    assert by_name(kernel.buffers(subject, [FAR]))["sysctl tcp_wmem"].status is Status.FAIL


def test_without_a_link_the_limit_is_still_told(tmp_path: Path) -> None:
    assert bad(kernel.buffers(a_host(tmp_path), [])) == []
    small = by_name(kernel.buffers(a_host(tmp_path, tcp_wmem="4096 16384 4194304"), []))["sysctl tcp_wmem"]
    assert small.status is Status.WARN
    assert "--rate" in small.detail


def test_settings_that_a_container_hides_are_skipped_with_the_reason(tmp_path: Path) -> None:
    findings = kernel_findings(Subject(root=tmp_path), FAR)
    assert {one.status for one in findings} == {Status.SKIP}
    assert all(one.detail for one in findings)


def test_a_coordinator_alone_needs_no_payload_settings(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[coordinator]\nlisten = '127.0.0.1:0'\n")
    subject = make_subject([str(file)])
    assert kernel.switches(subject)[0].status is Status.SKIP


def test_a_check_that_hangs_or_breaks_costs_only_itself() -> None:
    gone = threading.Event()

    def hangs() -> list[Finding]:
        gone.wait(60)
        return []

    def breaks() -> list[Finding]:
        raise ZeroDivisionError("by zero")

    begun_s = time.monotonic()
    findings = run_bounded([("slow", hangs), ("broken", breaks), ("well", lambda: [ok("well", "yes")])], 0.2)
    gone.set()
    assert time.monotonic() - begun_s < 30
    assert [(one.name, one.status) for one in findings] == [
        ("slow", Status.FAIL),
        ("broken", Status.FAIL),
        ("well", Status.OK),
    ]
    assert "ZeroDivisionError" in findings[1].detail


def test_the_worst_decides() -> None:
    assert worst([]) is Status.OK
    assert worst([ok("a", ""), warn("b", "", "")]) is Status.WARN
    assert worst([fail("a", "", ""), warn("b", "", "")]) is Status.FAIL


def a_config(tmp_path: Path, text: str) -> Subject:
    file = tmp_path / "f.toml"
    file.write_text(text)
    return make_subject([str(file)], timeout_s=2)


def test_a_wrong_configuration_is_a_finding_and_the_rest_goes_on(tmp_path: Path) -> None:
    subject = a_config(tmp_path, "[agent]\nsite = 'a'\ndata_lisen = 'x'\n")
    assert subject.findings[0].status is Status.FAIL
    assert "did you mean 'data_listen'" in subject.findings[0].detail
    assert len(examine(subject)) > 20
    missing = make_subject([str(tmp_path / "none.toml")]).findings[0]
    assert "proxyd config init" in missing.fix
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    assert "no regular file" in make_subject([str(pipe)]).findings[0].detail


@pytest.mark.parametrize(("mode", "status"), [(0o640, Status.OK), (0o644, Status.FAIL), (0o602, Status.FAIL)])
def test_modes_of_secrets(tmp_path: Path, mode: int, status: Status) -> None:
    token = tmp_path / "token"
    token.write_text("x" * 32)
    token.chmod(mode)
    subject = a_config(tmp_path, f"[agent]\nsite = 'a'\ntoken_file = '{token}'\n")
    found = by_name(files.secrets(subject))[f"mode of {token}"]
    assert found.status is status
    assert (str(token) in found.fix) == (status is Status.FAIL)


def test_a_token_that_a_daemon_would_refuse(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("short")
    token.chmod(0o600)
    found = files.tokens(a_config(tmp_path, f"[agent]\nsite = 'a'\ntoken_file = '{token}'\n"))[0]
    assert found.status is Status.FAIL
    assert "short" not in found.detail + found.fix, "the token itself is told"


@pytest.mark.parametrize(("days", "status"), [(29, Status.OK), (10, Status.WARN), (2, Status.FAIL), (-1, Status.FAIL)])
def test_days_left_of_a_certificate(tmp_path: Path, days: int, status: Status) -> None:
    authority = Authority(tmp_path / "ca.pem")
    paths = authority.agent(tmp_path / "agent", "a", "a-1", life_s=days * 86_400 + 3600)
    text = f"[agent]\nsite = 'a'\nname = 'a-1'\ntls_certificate = '{paths.certificate}'\ntls_key = '{paths.key}'\n"
    found = files.certificates(a_config(tmp_path, f"{text}tls_ca = '{paths.ca}'\n"))[0]
    assert found.status is status
    assert "proxyd://a/a-1" in found.detail
    other = text.replace("name = 'a-1'", "name = 'a-2'")
    assert files.certificates(a_config(tmp_path, f"{other}tls_ca = '{paths.ca}'\n"))[0].status is Status.FAIL


def test_ports_free_taken_and_of_no_interface(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = f"[agent]\nsite = 'a'\ndata_listen = '127.0.0.1:{port}'\nmetrics = '192.0.2.7:9601'\ntoken_file = '/x'\n"
        found = by_name(network.ports(a_config(tmp_path, text)))
        # The name of our own process decides whether it counts as one of proxyd's daemons.
        owner = network.listening_owner(Subject(), port)
        assert owner is not None
        assert owner.pid == os.getpid()
        assert found["port of data_listen"].status is (Status.OK if owner.is_ours else Status.FAIL)
        assert str(os.getpid()) in found["port of data_listen"].detail
        assert "no address of this host" in found["port of agent metrics"].detail
    assert by_name(network.ports(a_config(tmp_path, text)))["port of data_listen"].status is Status.OK


def test_what_answers_at_the_agents_socket(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    assert "no agent runs" in network.socket_finding(str(path), 1).detail
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(path))
        assert "nobody listens" in network.socket_finding(str(path), 1).detail
        stranger.listen()
        silent = network.socket_finding(str(path), 0.1)
        assert silent.status is Status.FAIL
        assert silent.fix


def test_a_socket_of_another_mode_says_whom_to_join(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    path.touch(mode=0o600)
    found = network._no_socket("agent socket", str(path), PermissionError(13, "Permission denied"))
    assert found.status is Status.FAIL
    assert "0600" in found.detail
    assert "usermod -aG" in found.fix


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(111, "refused"), "nothing listens there"),
        (TimeoutError("timed out"), "firewall"),
        (socket.gaierror(-2, "Name or service not known"), "name is unknown"),
        (OSError(101, "Network is unreachable"), "Network is unreachable"),
    ],
)
def test_why_a_host_is_out_of_reach(error: OSError, words: str) -> None:
    found = network.unreachable("reach peer b/b-0", "10.0.0.1:7601", error, "look there")
    assert found.status is Status.FAIL
    assert words in found.detail
    assert found.fix


def test_mtu_of_an_interface_is_the_kernels() -> None:
    assert network.interface_mtu("lo") == int(Path("/sys/class/net/lo/mtu").read_text())
    assert network.interface_mtu("no-such-one") == 0


def test_a_link_with_a_larger_mtu_than_any_interface(tmp_path: Path) -> None:
    text = "[agent]\nsite = 'a'\n[[link]]\nfrom = '{}'\nto = 'b'\nmtu = 65535\n"
    found = network.mtu(a_config(tmp_path, text.format("a")))
    if found[0].status is not Status.SKIP:  # a namespace without an interface has nothing to compare with
        assert bad(found)[0] == "mtu of a->b"
        assert "mtu of c->b" not in bad(network.mtu(a_config(tmp_path, text.format("c"))))


def test_paths_stay_whole_in_narrow_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    path = "/run/a-long/path-with/hyphens-in/it-that/must-not/be-cut.toml"
    assert path in report(Subject(), [warn("config", f"it is at {path}, and wrong", "vi it")], everything=False)


def an_agent(**changed: Any) -> admin_pb2.AgentStatusResponse:
    """One that is well, but for what is changed."""
    link = coordination_pb2.LinkName(src_site="a", dst_site="b")
    values: dict[str, Any] = {
        "agent": coordination_pb2.AgentName(site="a", name="a-0"),
        "version": __version__,
        "coordinators": [admin_pb2.ControlSession(address="c:1", connected=True)],
        "links": [
            admin_pb2.AgentLink(link=link, rate_bytes_per_s=1_500_000_000, rtt_ns=60_000_000, source="estimated")
        ],
        "peers": [admin_pb2.PeerStatus(agent=coordination_pb2.AgentName(site="b", name="b-0"), address="10.0.0.2:1")],
    }
    return admin_pb2.AgentStatusResponse(**{**values, **changed})


@pytest.mark.parametrize(
    ("changed", "status", "words"),
    [
        ({}, Status.OK, "1 coordinators"),
        ({"version": "0.0.1"}, Status.WARN, f"this command is {__version__}"),
        ({"draining": True}, Status.WARN, "it drains"),
        ({"coordinators": [admin_pb2.ControlSession(address="c:1")]}, Status.FAIL, "no session with c:1"),
        ({"links": [admin_pb2.AgentLink(fallback=True)]}, Status.WARN, "fallback rate"),
    ],
)
def test_an_agent_as_it_is(changed: dict[str, Any], status: Status, words: str) -> None:
    found = links.agent(Subject(), Answers(agent=an_agent(**changed)))[0]
    assert found.status is status
    assert words in found.detail
    assert bool(found.fix) == (status is not Status.OK)


def test_where_only_an_agent_runs_it_tells_of_links_and_peers(tmp_path: Path) -> None:
    answers = Answers(agent=an_agent())
    assert answers.peers == [("b/b-0", "10.0.0.2:1")]
    found = by_name(kernel.buffers(a_host(tmp_path, tcp_wmem="4096 16384 4194304"), answers.paths))
    assert "a->b (12 Gbit/s, 60 ms, estimated)" in found["sysctl tcp_wmem"].detail
    assert "43 streams" in found["sysctl tcp_wmem"].detail


def test_at_most_some_peers_are_tried(tmp_path: Path) -> None:
    names = [coordination_pb2.AgentName(site="b", name=f"b-{number}") for number in range(100)]
    peers = [admin_pb2.PeerStatus(agent=name, address="10.0.0.2:1") for name in names]
    tasks = paths_to_peers.tasks(Subject(), Answers(agent=an_agent(peers=peers)))
    assert len(tasks) == paths_to_peers.MOST_PEERS + 1
    assert "84 more" in tasks[-1][1]()[0].detail


def test_arenas_larger_than_the_host(tmp_path: Path) -> None:
    subject = a_config(tmp_path, "[agent]\nsite = 'a'\nmemory = '8GiB'\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       4194304 kB\n")
    object.__setattr__(subject, "root", tmp_path)
    assert host.memory(subject)[0].status is Status.FAIL
    (tmp_path / "proc/meminfo").write_text("MemTotal:       41943040 kB\n")
    assert host.memory(subject)[0].status is Status.OK


def test_a_coordinator_that_never_answers_holds_nothing_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        begun_s = time.monotonic()
        findings = by_name(examine(a_config(tmp_path, f"[agent]\nsite = 'a'\ncoordinators = '{address}'\n")))
        assert time.monotonic() - begun_s < 30
        assert findings[f"reach coordinator {address}"].status is Status.FAIL


def test_json_has_name_status_detail_and_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROXYD_CONFIG", raising=False)
    code = main(["doctor", "--json", "--timeout-s", "4"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["checks"]
    for one in shown["checks"]:
        assert set(one) == {"name", "status", "detail", "fix"}
        assert one["status"] in ("ok", "warn", "fail", "skip")
        assert one["detail"]
        assert bool(one["fix"]) == (one["status"] in ("warn", "fail")), one
    assert code == {"ok": 0, "warn": 3, "fail": 1}[shown["status"]]
    assert sum(shown["counts"].values()) == len(shown["checks"])


def test_the_report_says_what_to_do_and_heeds_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [ok("kernel", "Linux 6"), warn("clock", "nobody keeps it", "apt install chrony")]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in report(Subject(), findings, everything=False)
    monkeypatch.setenv("NO_COLOR", "1")
    text = report(Subject(), findings, everything=False)
    assert "\x1b[" not in text
    assert "fix: apt install chrony" in text
    assert text.index("WARN") < text.index("kernel")
    assert as_plain(Subject(), findings)["status"] == "warn"


def test_options_that_belong_together() -> None:
    with pytest.raises(ConfigError, match="belong together"):
        make_subject([], rate="4Gbit")
    with pytest.raises(ConfigError, match=r"from 0\.1"):
        make_subject([], timeout_s=0)
    assert make_subject([], rate="4Gbit", rtt="60ms").configured_paths()[0].bdp_bytes == 30_000_000


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_it_needs_no_root() -> None:
    """What only root sees is skipped or told; nothing breaks."""
    code = (
        "import os, sys\n"
        "from proxyd.cli.main import main\n"
        "main(['doctor', '--json'])\n"  # loads everything, from wherever only root may read
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print('AS NOBODY')\n"
        "sys.exit(main(['doctor', '--json']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=90)
    shown = json.loads(done.stdout.partition("AS NOBODY")[2])
    assert done.returncode in (0, 3), done.stderr
    assert not [one for one in shown["checks"] if "itself broke" in one["detail"]]
