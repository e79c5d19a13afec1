"""What links are configured with, beside what was measured on them; and daemons beside this command's version."""

from __future__ import annotations

from proxyd import __version__
from proxyd.cli.doctor.ask import Answers, name_of
from proxyd.cli.doctor.findings import Finding, fail, ok, skip, warn
from proxyd.cli.doctor.subject import Subject
from proxyd.core.units import format_duration, format_rate

FAR_OFF = 0.25
"""A measured value is another one than the configured when they differ by this share of the configured one."""


def measured(subject: Subject, answers: Answers) -> list[Finding]:
    """Each configured link beside what the coordinator goes by now."""
    if answers.status is None:
        return [
            skip("links", "no coordinator of this host answers; run this on its host, or give --coordinator unix:/path")
        ]
    configured = {link.name: link for link in subject.links}
    found = []
    for link in answers.status.links:
        name = name_of(link.link)
        label = f"link {name}"
        rate, rtt_ns = link.bottleneck_bytes_per_s, link.rtt_ns
        now = f"{format_rate(rate)} and {format_duration(rtt_ns)} ({link.source})"
        told = configured.get(name)
        if told is None or not told.capacity_bytes_per_s:
            found.append(ok(label, f"{now}; nothing is configured to compare it with"))
            continue
        text = f"configured {told.capacity}{f' and {told.rtt}' if told.rtt else ''}; now {now}"
        wrong = []
        if link.source == "estimated" and abs(rate - told.capacity_bytes_per_s) > FAR_OFF * told.capacity_bytes_per_s:
            wrong.append(f'capacity = "{rate * 8 // 1_000_000}Mbit"')
        if told.rtt_ns and rtt_ns and abs(rtt_ns - told.rtt_ns) > FAR_OFF * told.rtt_ns:
            wrong.append(f'rtt = "{max(1, rtt_ns // 1_000_000)}ms"')
        if wrong:
            fix = f"If it stays so: {' and '.join(wrong)} for it, then proxyd policy reload or a restart"
            found.append(warn(label, text, fix))
        else:
            found.append(ok(label, text))
    return found or [skip("links", "the coordinator knows of no link yet: no agent has come")]


def agent(subject: Subject, answers: Answers) -> list[Finding]:
    """Does the agent have this version and its coordinators, and does it go by grants?"""
    status = answers.agent
    if status is None:
        return [skip("agent", f"it can't be asked: {answers.agent_problem}")]
    text = f"{status.agent.site}/{status.agent.name} {status.version}, up {format_duration(status.uptime_ns)}"
    if status.version != __version__:
        return [warn("agent", f"{text}; this command is {__version__}", "sudo systemctl restart proxyd-agent")]
    if status.draining:
        text = f"{text}: it drains, and {status.held_transfers} messages are held"
        return [warn("agent", text, "proxyd undrain --agent, when the maintenance is over")]
    lost = [one.address for one in status.coordinators if not one.connected]
    if lost:
        make = fail if len(lost) == len(status.coordinators) else warn
        fix = "journalctl -u proxyd-agent | grep -i coordinator: its log says why"
        return [make("agent", f"{text}: no session with {', '.join(lost)}", fix)]
    silent = [name_of(link.link) for link in status.links if link.fallback]
    if silent:
        text = f"{text}: at its fallback rate on {', '.join(silent)}, since the coordinator is silent"
        return [warn("agent", text, "proxyd health, on the coordinator's host")]
    return [ok("agent", f"{text}: {len(status.trainers)} trainers, {len(status.coordinators)} coordinators")]


def daemons(subject: Subject, answers: Answers) -> list[Finding]:
    """Does what runs have this version, and does it have agents?"""
    status = answers.status
    if status is None:
        return [skip("coordinator", "none answers on this host")]
    text = f"{status.coordinator} {status.version} at {answers.coordinator}, up {format_duration(status.uptime_ns)}"
    if status.version != __version__:
        return [warn("coordinator", f"{text}; this command is {__version__}", "Restart it after an upgrade")]
    if not status.agents:
        return [warn("coordinator", f"{text}: no agent is there", "journalctl -u proxyd-agent, on the agents' hosts")]
    errors = f", {status.protocol_errors} protocol errors" if status.protocol_errors else ""
    return [ok("coordinator", f"{text}: {len(status.agents)} agents, {len(status.links)} links{errors}")]
