"""All checks, and in which order they are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from proxyd.cli.doctor import files, host, kernel, links, network, paths_to_peers
from proxyd.cli.doctor.ask import Answers, ask_daemons
from proxyd.cli.doctor.findings import Finding, Task, run_bounded
from proxyd.cli.doctor.subject import Subject

LOCAL: tuple[tuple[str, Callable[[Subject], Sequence[Finding]]], ...] = (
    ("kernel", kernel.kernel),
    ("python", host.python),
    ("sysctl tcp", kernel.switches),
    ("sysctl backlog", kernel.backlog),
    ("congestion control", kernel.congestion_control),
    ("qdisc", kernel.qdisc),
    ("network namespace", network.namespace),
    ("mtu", network.mtu),
    ("open files", host.descriptors),
    ("locked memory", host.memlock),
    ("memory", host.memory),
    ("/dev/shm", host.shared_memory),
    ("clock", host.clock),
    ("file modes", files.secrets),
    ("tokens", files.tokens),
    ("certificates", files.certificates),
    ("ports", network.ports),
    ("agent socket", network.local_socket),
)
"""Those that need no daemon but, for the last one, look for it."""


def examine(subject: Subject) -> list[Finding]:
    """Run everything: first what needs nobody's answer, while the daemons are asked, and then what their answers are
    needed for. Takes at most twice the subject's time limit, and half a second."""
    told: list[Answers] = []

    def ask() -> list[Finding]:
        told.append(ask_daemons(subject))
        return []

    tasks: list[Task] = [(name, partial(check, subject)) for name, check in LOCAL]
    tasks += network.coordinator_tasks(subject)
    tasks.append(("ask the daemons", ask))
    findings = [*subject.findings, *run_bounded(tasks, subject.timeout_s)]
    answers = told[0] if told else Answers()
    paths = [*subject.configured_paths(), *answers.paths]
    later: list[Task] = [
        ("sysctl tcp buffers", partial(kernel.buffers, subject, paths)),
        ("agent", partial(links.agent, subject, answers)),
        ("coordinator", partial(links.daemons, subject, answers)),
        ("links", partial(links.measured, subject, answers)),
    ]
    later += paths_to_peers.tasks(subject, answers)
    return findings + run_bounded(later, subject.timeout_s)
