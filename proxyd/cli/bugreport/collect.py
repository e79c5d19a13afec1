"""Everything that goes into the archive, as texts by name, each after the scrubber."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxyd import __version__
from proxyd.cli.bugreport.masking import MASK, MOST_FILE_BYTES, Scrubber, read_masked, secrets_in_files, secrets_of_file
from proxyd.core.errors import ProxydError

if TYPE_CHECKING:
    from proxyd.cli.doctor.subject import Subject
    from proxyd.runtime.addresses import Address

UNITS = ("proxyd-agent", "proxyd-coordinator")
COMMAND_S = 10.0
PAGE_S = 5.0
_SECRET_VARIABLES = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")


def collect(
    configs: Sequence[str] | None, coordinator: str | None, logs: Sequence[str], log_lines: int
) -> dict[str, str]:
    """Name in the archive -> text. What can't be had is named in ``missing.txt`` with the reason."""
    from proxyd.cli.doctor.ask import ask_coordinator
    from proxyd.cli.doctor.checks import examine
    from proxyd.cli.doctor.findings import as_plain
    from proxyd.cli.doctor.subject import make_subject

    subject = make_subject(configs, coordinator=coordinator)
    hidden = set(_secret_environment())
    files: dict[str, str] = {}
    missing: list[str] = []

    def take(name: str, make: Callable[[], str | None]) -> None:
        try:
            text = make()
        except (OSError, ProxydError, subprocess.SubprocessError, ValueError) as error:
            missing.append(f"{name}: {error}")
            return
        if text is None:
            missing.append(f"{name}: there is none")
        else:
            files[name] = text

    for number, path in enumerate(subject.paths, 1):
        take(f"config-{number}.json", lambda path=path: _config(path, hidden))  # type: ignore[misc]
    for config in subject.configs:
        hidden.update(secrets_in_files(config.model_dump(mode="json", by_alias=True)))
    take("versions.json", _versions)
    findings = examine(subject)
    files["doctor.json"] = _json(as_plain(subject, findings))
    status, _ = ask_coordinator(subject)
    take("status-coordinator.json", lambda: _plain(status))
    take("status-agent.json", lambda: _agent_status(subject))
    for name, address in _pages(subject):
        take(f"metrics-{name}.txt", lambda address=address: _page(address))  # type: ignore[misc]
    for path, name in zip(logs, log_names(logs), strict=True):
        take(name, lambda path=path: _tail(path, log_lines))  # type: ignore[misc]
    if not logs:
        for unit in UNITS:
            take(f"log-{unit}.txt", lambda unit=unit: _journal(unit, log_lines))  # type: ignore[misc]
    take("sysctl.txt", _sysctls)
    take("sockets.txt", lambda: Path("/proc/net/sockstat").read_text())
    files["missing.txt"] = "\n".join(missing) + "\n" if missing else "nothing\n"
    scrubber = Scrubber(hidden)
    return {name: scrubber.clean(text) for name, text in files.items()}


def log_names(paths: Sequence[str]) -> list[str]:
    """What logs are called in the archive: by their own names, numbered from the second of a name on."""
    names: list[str] = []
    for path in paths:
        base = os.path.basename(path)
        number = 1
        while (name := f"log-{base}{f'-{number}' if number > 1 else ''}.txt") in names:
            number += 1
        names.append(name)
    return names


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _secret_environment() -> list[str]:
    """Values of variables whose name says that they are secret; a PROXYD_TOKEN_FILE's content too."""
    found = []
    for name, value in os.environ.items():
        if name.endswith("_FILE"):
            if name.startswith("PROXYD_"):
                found += list(secrets_of_file(value))
        elif any(word in name.upper() for word in _SECRET_VARIABLES):
            found.append(value)
    return found


def _config(path: str, hidden: set[str]) -> str | None:
    text = Path(path).read_bytes()[:MOST_FILE_BYTES].decode("utf-8", "replace")
    values = read_masked(text, hidden)
    if values is None:
        return _json({"file": path, "problem": "it is no TOML, so nothing of it is shown; doctor.json has its line"})
    import tomllib

    hidden.update(secrets_in_files(tomllib.loads(text)))
    return _json({"file": path, "values": values})


def _versions() -> str:
    from proxyd.cli.version import about
    from proxyd.runtime.environment import KNOWN

    names = sorted(name for name in os.environ if name.startswith(("PROXYD_", "GRPC_")))
    variables = {name: os.environ[name] if name in KNOWN or name.startswith("GRPC_") else MASK for name in names}
    return _json(
        {
            **about(),
            "system": platform.platform(),
            "processors": os.cpu_count(),
            "uid": os.getuid(),
            "environment": variables,
            "collected_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
    )


def _plain(status: Any) -> str | None:
    from proxyd.runtime.json_values import as_plain

    return None if status is None else _json(as_plain(status))


def _agent_status(subject: Subject) -> str | None:
    from proxyd.cli.agent_status import fetch
    from proxyd.runtime.json_values import as_plain

    path = "" if subject.agent is None else subject.agent.admin_path
    return None if path is None else _json(as_plain(fetch(path)))


def _pages(subject: Subject) -> list[tuple[str, Address]]:
    """The daemons' metrics pages that can be read from here."""
    found = []
    for name, section in (("agent", subject.agent), ("coordinator", subject.coordinator)):
        address = None if section is None else section.metrics_address
        if address is not None:
            if address.is_unspecified:
                address = dataclasses.replace(address, host="::1" if ":" in address.host else "127.0.0.1")
            found.append((name, address))
    return found


def _page(address: Address) -> str:
    if address.is_fd or not address.port:
        raise ValueError(f"the page's port is not in the configuration ({address})")
    url = f"http://{address}/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=PAGE_S) as response:
        content: bytes = response.read(16 << 20)
    return content.decode("utf-8", "replace")


def _tail(path: str, lines: int) -> str:
    """The last lines of a file, from its last megabytes."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - 16 * MOST_FILE_BYTES))
        text = file.read().decode("utf-8", "replace")
    return "\n".join(text.splitlines()[-lines:] if lines else []) + "\n"


def _journal(unit: str, lines: int) -> str | None:
    program = shutil.which("journalctl")
    if program is None:
        return None
    done = subprocess.run(
        [program, "-u", unit, "-n", str(lines), "--no-pager", "-o", "short-iso"],
        capture_output=True,
        timeout=COMMAND_S,
        check=False,
    )
    text = done.stdout.decode("utf-8", "replace")
    return text if done.returncode == 0 and text.strip() and "-- No entries --" not in text else None


def _sysctls() -> str:
    """Of TCP and of sockets: settings, no secrets."""
    lines = [f"proxyd = {__version__}"]
    for directory, pattern in (
        ("/proc/sys/net/ipv4", "tcp_*"),
        ("/proc/sys/net/core", "*mem_*"),
        ("/proc/sys/fs", "*nr*"),
    ):
        for path in sorted(Path(directory).glob(pattern)):
            try:
                lines.append(f"{path.relative_to('/proc/sys')} = {' '.join(path.read_text().split())}")
            except OSError:
                continue  # tcp_fastopen_key and others are root's
    return "\n".join(line for line in lines if "_key" not in line) + "\n"
