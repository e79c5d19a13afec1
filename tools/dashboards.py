"""Build the Grafana dashboards of deploy/grafana/dashboards, or check that what is committed is in step (``--check``).

Each expression is written once, here; tests/e2e/test_prometheus.py asks a real Prometheus for all of them. Variables of
a dashboard (``$link``, ``$agent``) are regular expressions to PromQL, so every use of them is ``=~``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from panels import FULL, THIRD, Query, Steps, choice, figure, graph, heat, sheet

ROOT = Path(__file__).resolve().parent.parent
DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"
RATE = "[$__rate_interval]"
LINK = '{link=~"$link"}'
AGENT = '{instance=~"$agent"}'
ONLY_AGENTS = '* on (job, instance, worker) group_left () proxyd_build_info{role="agent"}'
"""Names that both daemons export: each side counts the same bytes."""


LINKS = choice("link", "Link", "label_values(proxyd_link_estimate_bytes_per_second, link)")
AGENTS = choice("agent", "Agent", "label_values(proxyd_clients, instance)")
JOBS = choice("training_job", "Training job", "label_values(proxyd_job_clients, training_job)")
CLASSES = choice("class", "Class", "label_values(proxyd_transfer_seconds_count, traffic_class)")


def overview() -> dashboard.Dashboard:
    """Is the queue gone, and does every link carry what it can?"""
    made = sheet("overview", "overview", "Is the queue gone? Does each link carry what it can?", LINKS)
    figures = (
        figure(
            "Queue, in round trips",
            "none",
            "The worst link's. Pacing keeps about 0.02; plain TCP fills the buffer in front of the link.",
            Query(f"max(link:proxyd_queue:round_trips{LINK})"),
            Steps(0.1, 0.5),
        ),
        figure(
            "Queueing delay",
            "s",
            "The worst link's.",
            Query(f"max(proxyd_link_queue_seconds{LINK})"),
        ),
        figure(
            "Delivered", "Bps", "Under grants, over all links.", Query(f"sum(link:proxyd_delivered_bytes:rate1m{LINK})")
        ),
        figure(
            "Lost",
            "percentunit",
            "The worst link's; segments sent again.",
            Query(f"max(link:proxyd_lost:ratio_rate5m{LINK})"),
            Steps(0.0001, 0.001),
        ),
        figure(
            "Coordinators active",
            "none",
            "One for each name; a standby is not active.",
            Query("sum(proxyd_active)"),
            Steps(1, 0.5),
        ),
        figure("Agents connected", "none", "Sessions that stand.", Query("sum(proxyd_agent_sessions)")),
        figure(
            "Links on fallback",
            "none",
            "Agents that send without their coordinator.",
            Query("sum(proxyd_link_fallback)"),
            Steps(1, 1),
        ),
        figure(
            "Alerts firing",
            "none",
            "What to do about each: docs/runbook.md.",
            Query('count(ALERTS{alertname=~"Proxyd.*", alertstate="firing"}) or vector(0)'),
            Steps(1, 1),
        ),
    )
    made = made.with_row(dashboard.Row("Is the queue gone?"))
    for one in figures:
        made = made.with_panel(one)
    made = made.with_panel(
        graph(
            "Queueing delay beside the round trip",
            "s",
            "The queue in front of each link. It should lie flat near zero, far below the round trip.",
            Query(f"max by (link) (proxyd_link_queue_seconds{LINK})", "{{link}} queue"),
            Query(f"max by (link) (proxyd_link_rtt_seconds{LINK})", "{{link}} round trip"),
        )
    ).with_panel(
        graph(
            "Lost",
            "percentunit",
            "Segments sent again. Above 0.1 % something else than pacing is wrong.",
            Query(f"link:proxyd_lost:ratio_rate5m{LINK}", "{{link}}"),
        )
    )
    made = made.with_row(dashboard.Row("Does each link carry what it can?"))
    for what, how, meaning in (
        (
            "Estimate",
            f"max by (link) (proxyd_link_estimate_bytes_per_second{LINK})",
            "What the line is believed to carry.",
        ),
        ("Granted", f"max by (link) (proxyd_link_granted_rate_bytes_per_second{LINK})", "What may be sent now."),
        ("Delivered", f"sum by (link) (link:proxyd_delivered_bytes:rate1m{LINK})", "What arrived."),
    ):
        made = made.with_panel(graph(what, "Bps", meaning, Query(how, "{{link}}"), span=THIRD))
    made = made.with_panel(
        graph(
            "Utilisation",
            "percentunit",
            "Delivered, of the estimate. Below 1 with nobody waiting means that nobody wanted more.",
            Query(f"sum by (link) (link:proxyd_utilisation:ratio_rate1m{LINK})", "{{link}}"),
        )
    ).with_panel(
        graph(
            "Waiting for grants",
            "bytes",
            "Bytes in line at the coordinator.",
            Query(f"sum by (link) (proxyd_link_waiting_bytes{LINK})", "{{link}}"),
        )
    )
    made = made.with_row(dashboard.Row("How the coordinator sees it"))
    made = made.with_panel(
        graph(
            "Window and what is under way",
            "bytes",
            "Granted and not yet delivered never exceeds the window.",
            Query(f"max by (link) (proxyd_link_window_bytes{LINK})", "{{link}} window"),
            Query(f"max by (link) (proxyd_link_outstanding_bytes{LINK})", "{{link}} under way"),
        )
    ).with_panel(
        graph(
            "Age of the estimate",
            "s",
            "Grows while a link is idle; under load it stays below seconds. 0 for a configured one.",
            Query(f"max by (link) (proxyd_link_estimate_age_seconds{LINK})", "{{link}}"),
        )
    )
    made = made.with_panel(
        graph(
            "Where the estimate comes from",
            "none",
            "1 for the source in force.",
            Query('max by (link, source) (proxyd_link_source{link=~"$link"}) == 1', "{{link}} {{source}}"),
            span=THIRD,
        )
    ).with_panel(
        graph(
            "Senders at once",
            "none",
            "Agents that hold grants on a link, and how often it changes hands per second.",
            Query(f"max by (link) (proxyd_link_lanes{LINK})", "{{link}} senders"),
            Query(f"sum by (link) (rate(proxyd_handovers_total{LINK}{RATE}))", "{{link}} hand-overs/s"),
            span=THIRD,
        )
    )
    return made.with_panel(
        graph(
            "Lines that links share",
            "Bps",
            "What may be granted over all links of a [[bottleneck]], and what is.",
            Query("max by (bottleneck) (proxyd_bottleneck_rate_bytes_per_second)", "{{bottleneck}} may"),
            Query("max by (bottleneck) (proxyd_bottleneck_granted_rate_bytes_per_second)", "{{bottleneck}} granted"),
            span=THIRD,
        )
    )


def quantiles(family: str, labels: str, by: str) -> tuple[Query, ...]:
    """p50 and p99 of a histogram."""
    return tuple(
        Query(
            f"histogram_quantile({share}, sum by ({by}, le) (rate({family}_bucket{labels}{RATE})))",
            f"{{{{{by}}}}} p{share * 100:.0f}",
        )
        for share in (0.5, 0.99)
    )


def transfers() -> dashboard.Dashboard:
    """How long messages take, and what they wait for."""
    about = "Completion times, waits for grants, throughput and failures, by class."
    made = sheet("transfers", "transfers", about, LINKS, CLASSES)
    chosen = '{link=~"$link", traffic_class=~"$class"}'
    made = made.with_row(dashboard.Row("How long transfers take"))
    made = made.with_panel(
        graph(
            "Completion time (FCT)",
            "s",
            "From a trainer's send to the known delivery. p50 and p99 close together: no transfer pays for the others.",
            *quantiles("proxyd_transfer_seconds", chosen, "traffic_class"),
        )
    ).with_panel(
        heat(
            "Completion times",
            "Each column shows how many transfers took how long.",
            Query(f"sum by (le) (increase(proxyd_transfer_seconds_bucket{chosen}{RATE}))", "{{le}}"),
        )
    )
    made = made.with_panel(
        graph(
            "Wait for the first grant",
            "s",
            "Most of a burst's completion time is waiting here instead of in a queue.",
            *quantiles("proxyd_grant_wait_seconds", '{traffic_class=~"$class"}', "traffic_class"),
        )
    ).with_panel(
        heat(
            "Waits for the first grant",
            "Each column shows how many transfers waited how long.",
            Query(
                f'sum by (le) (increase(proxyd_grant_wait_seconds_bucket{{traffic_class=~"$class"}}{RATE}))', "{{le}}"
            ),
        )
    )
    made = made.with_row(dashboard.Row("How much"))
    agents = f"{chosen}{RATE}) {ONLY_AGENTS})"
    made = made.with_panel(
        graph(
            "Throughput by class",
            "Bps",
            "Payload acknowledged end to end.",
            Query(f"sum by (traffic_class) (rate(proxyd_transfer_bytes_total{agents}", "{{traffic_class}}"),
            stacked=True,
        )
    ).with_panel(
        graph(
            "Transfers that ended",
            "ops",
            "By outcome. Failed ones raised a typed error in their trainer.",
            Query(
                f"sum by (traffic_class, outcome) (rate(proxyd_transfers_total{agents}", "{{traffic_class}} {{outcome}}"
            ),
        )
    )
    made = made.with_panel(
        graph(
            "How bytes left",
            "Bps",
            "Under grants; small messages at once; at the fallback rate (only while a coordinator is silent).",
            Query(f"sum by (link) (rate(proxyd_granted_bytes_total{LINK}{RATE}) {ONLY_AGENTS})", "{{link}} granted"),
            Query(f"sum by (link) (rate(proxyd_unscheduled_bytes_total{LINK}{RATE}) {ONLY_AGENTS})", "{{link}} small"),
            Query(f"sum by (link) (rate(proxyd_fallback_bytes_total{LINK}{RATE}) {ONLY_AGENTS})", "{{link}} fallback"),
            stacked=True,
        )
    ).with_panel(
        graph(
            "In line",
            "none",
            "Transfers that wait for grants, at the coordinator.",
            Query(f"sum by (link) (proxyd_link_waiting_transfers{LINK})", "{{link}}"),
        )
    )
    made = made.with_row(dashboard.Row("By training job"))
    made = made.with_panel(
        graph(
            "Granted to each job",
            "Bps",
            "Shares follow [[job]] weights, floors and caps (docs/policy.md).",
            Query(f"sum by (training_job) (rate(proxyd_job_granted_bytes_total{LINK}{RATE}))", "{{training_job}}"),
            stacked=True,
        )
    ).with_panel(
        graph(
            "Jobs that wait",
            "bytes",
            "Bytes of each job in line.",
            Query(f"sum by (training_job) (proxyd_job_waiting_bytes{LINK})", "{{training_job}}"),
        )
    )
    return made.with_panel(
        graph(
            "Denied",
            "ops",
            "Requests that policy forbids; each is an error in a trainer.",
            Query(f"sum by (instance) (rate(proxyd_denied_total{RATE}))", "{{instance}}"),
        )
    ).with_panel(
        graph(
            "Announcements",
            "ops",
            "Those that were fulfilled have hidden the wait for their grant.",
            Query(f"sum by (outcome) (rate(proxyd_announcements_total{RATE}))", "{{outcome}}"),
        )
    )


def agents() -> dashboard.Dashboard:
    """Are the daemons well?"""
    made = sheet("agents", "daemons", "Sessions, fallback, connections, memory, certificates, configuration.", AGENTS)
    made = made.with_row(dashboard.Row("Agents"))
    made = made.with_panel(
        graph(
            "Sessions with coordinators",
            "none",
            "1 while a session stands. A standby takes none.",
            Query(f"min by (instance, coordinator) (proxyd_coordinator_up{AGENT})", "{{instance}} {{coordinator}}"),
            span=THIRD,
        )
    ).with_panel(
        graph(
            "On fallback",
            "none",
            "1 while a link's coordinator is silent and messages wait.",
            Query(f"max by (instance, link) (proxyd_link_fallback{AGENT})", "{{instance}} {{link}}"),
            span=THIRD,
        )
    )
    made = made.with_panel(
        graph(
            "Granted and not yet sent",
            "bytes",
            "A backlog that stays means that the host, not the link, is slow.",
            Query(f"sum by (instance, link) (proxyd_backlog_bytes{AGENT})", "{{instance}} {{link}}"),
            span=THIRD,
        )
    )
    made = made.with_panel(
        graph(
            "Connections",
            "none",
            "Data connections to and from peers; peers that are wanted and away; connections nobody knows yet.",
            Query(f"sum by (instance, direction) (proxyd_data_connections{AGENT})", "{{instance}} {{direction}}"),
            Query('sum by (instance) (proxyd_peers{instance=~"$agent", state="down"})', "{{instance}} peers away"),
            Query(f"sum by (instance) (proxyd_strangers{AGENT})", "{{instance}} strangers"),
            span=THIRD,
        )
    ).with_panel(
        graph(
            "Memory for messages",
            "bytes",
            "Promised to trainers, what of it holds messages, and the limit ([agent] memory).",
            Query('sum by (instance) (proxyd_arena_bytes{instance=~"$agent", kind="used"})', "{{instance}} promised"),
            Query(f"sum by (instance, direction) (proxyd_message_bytes{AGENT})", "{{instance}} {{direction}}"),
            Query('sum by (instance) (proxyd_arena_bytes{instance=~"$agent", kind="limit"})', "{{instance}} limit"),
            span=THIRD,
        )
    )
    made = made.with_panel(
        graph(
            "Messages under way",
            "none",
            "Not yet over at their sender; not yet released at their receiver.",
            Query(f"sum by (instance) (proxyd_outgoing_transfers{AGENT})", "{{instance}} out"),
            Query(f"sum by (instance) (proxyd_incoming_transfers{AGENT})", "{{instance}} in"),
            span=THIRD,
        )
    )
    made = made.with_panel(
        graph(
            "Mended on the way",
            "ops",
            "Messages that went on over another connection; checksums that failed; chunks sent again.",
            Query(f"sum by (instance) (rate(proxyd_resumed_transfers_total{AGENT}{RATE}))", "{{instance}} resumed"),
            Query(
                f"sum by (instance) (rate(proxyd_corrupt_chunks_total{AGENT}{RATE})"
                f" + rate(proxyd_corrupt_frames_total{AGENT}{RATE}))",
                "{{instance}} damaged",
            ),
            Query(f"sum by (instance) (rate(proxyd_resent_chunks_total{AGENT}{RATE}))", "{{instance}} sent again"),
        )
    ).with_panel(
        graph(
            "Turned away",
            "ops",
            "Connections refused at each door, and sends beyond [agent] sends.",
            Query(
                f"sum by (instance, door, reason) (rate(proxyd_refused_connections_total{AGENT}{RATE}))",
                "{{instance}} {{door}} {{reason}}",
            ),
            Query(f"sum by (instance) (rate(proxyd_refused_sends_total{AGENT}{RATE}))", "{{instance}} sends"),
        )
    )
    made = made.with_row(dashboard.Row("All daemons"))
    made = made.with_panel(
        graph(
            "Certificates: time left",
            "s",
            "Replaced without a restart (docs/security.md).",
            Query("min by (instance) (proxyd_tls_certificate_expires_in_seconds)", "{{instance}}"),
            span=THIRD,
        )
    ).with_panel(
        graph(
            "Proofs that failed",
            "ops",
            "Certificates and tokens, by port.",
            Query(
                f"sum by (instance, port, proof) (rate(proxyd_failed_proofs_total{RATE}))",
                "{{instance}} {{port}} {{proof}}",
            ),
            span=THIRD,
        )
    )
    made = made.with_panel(
        graph(
            "Configuration in force",
            "none",
            "1: what stands in the file is what runs, as far as a reload can change it.",
            Query("min by (instance) (proxyd_config_last_reload_successful)", "{{instance}}"),
            span=THIRD,
        )
    )
    ours = "* on (job, instance, worker) group_left (role) proxyd_build_info"
    for title, unit, why, expr in (
        (
            "CPU",
            "percentunit",
            "1: one core. The relay uses about one core per 1 to 2 GB/s.",
            f"rate(process_cpu_seconds_total{RATE}) {ours}",
        ),
        ("Memory", "bytes", "Resident, shared arenas included.", f"process_resident_memory_bytes {ours}"),
        ("Descriptors", "percentunit", "Open, of the limit.", f"process_open_fds / process_max_fds {ours}"),
    ):
        made = made.with_panel(graph(title, unit, why, Query(expr, "{{instance}} {{worker}}"), span=THIRD))
    made = made.with_panel(
        graph(
            "Coordinators",
            "none",
            "1: grants; 0: stands by. Agents and trainers that it knows.",
            Query("proxyd_active", "{{instance}} active"),
            Query("proxyd_agent_sessions", "{{instance}} agents"),
            Query("proxyd_endpoints", "{{instance}} trainers"),
            span=THIRD,
        )
    )
    made = made.with_panel(
        graph(
            "Drained",
            "none",
            "1 while no new transfer begins at a daemon, and what is held meanwhile.",
            Query("max by (instance) (proxyd_draining)", "{{instance}} drained"),
            Query("sum by (instance) (proxyd_held_transfers)", "{{instance}} held"),
            span=THIRD,
        )
    )
    made = made.with_panel(
        graph(
            "Lives of coordinators",
            "none",
            "Epochs begun within the last hour: each restart and each take-over is one.",
            Query("changes(proxyd_epoch[1h])", "{{instance}}"),
            span=THIRD,
        )
    )
    return made.with_panel(
        graph(
            "Versions",
            "none",
            "Daemons of each version.",
            Query("count by (version, role) (proxyd_build_info)", "{{role}} {{version}}"),
            span=THIRD,
        )
    )


def trainers() -> dashboard.Dashboard:
    """What the network costs the GPUs."""
    made = sheet("trainers", "trainers", "How long GPUs stand still for the network.", JOBS)
    job = '{training_job=~"$training_job"}'
    made = made.with_row(dashboard.Row("GPU wait"))
    made = made.with_panel(
        figure(
            "Waiting now",
            "percentunit",
            "Share of time in which ranks stand still for messages, over all chosen jobs.",
            Query(
                f"sum(rate(proxyd_job_wait_seconds_total{job}{RATE})) / sum(proxyd_job_clients{job})",
            ),
            Steps(0.2, 0.5),
        )
    ).with_panel(figure("Ranks", "none", "Trainers attached to agents.", Query(f"sum(proxyd_job_clients{job})")))
    made = made.with_panel(
        figure(
            "GPU hours lost today",
            "h",
            "Waited within the last 24 hours, over all ranks.",
            Query(f"sum(increase(proxyd_job_wait_seconds_total{job}[24h])) / 3600"),
        )
    )
    made = made.with_panel(
        graph(
            "Share of time spent waiting, by job",
            "percentunit",
            "0: the network costs nothing. Short peaks at each step's end are its barrier.",
            Query(
                f"sum by (training_job) (rate(proxyd_job_wait_seconds_total{job}{RATE}))"
                f" / sum by (training_job) (proxyd_job_clients{job})",
                "{{training_job}}",
            ),
            span=FULL,
        )
    )
    made = made.with_panel(
        graph(
            "By agent",
            "percentunit",
            "Where ranks wait: a site that waits more than the others is at the end of the slower link.",
            Query(
                f"sum by (training_job, instance) (rate(proxyd_job_wait_seconds_total{job}{RATE}))"
                f" / sum by (training_job, instance) (proxyd_job_clients{job})",
                "{{training_job}} at {{instance}}",
            ),
        )
    ).with_panel(
        graph(
            "Ranks attached",
            "none",
            "Trainers of each job, by agent.",
            Query(f"sum by (training_job, instance) (proxyd_job_clients{job})", "{{training_job}} at {{instance}}"),
        )
    )
    return made.with_panel(
        graph(
            "Granted to the job",
            "Bps",
            "Over all links.",
            Query(f"sum by (training_job) (rate(proxyd_job_granted_bytes_total{job}{RATE}))", "{{training_job}}"),
        )
    ).with_panel(
        graph(
            "Trainers that came back",
            "none",
            "Went on with a new life of their agent, within the last hour.",
            Query("sum by (instance) (increase(proxyd_client_reconnects_total[1h]))", "{{instance}}"),
        )
    )


SHEETS = {"overview": overview, "transfers": transfers, "agents": agents, "trainers": trainers}


def arrange(panels: list[dict[str, Any]]) -> None:
    """Numbers, and places from left to right, line by line."""
    left = top = line = 0
    for number, panel in enumerate(panels, 1):
        place = panel["gridPos"]
        if left + place["w"] > FULL:
            left, top, line = 0, top + line, 0
        place["x"], place["y"] = left, top
        left, line = left + place["w"], max(line, place["h"])
        panel["id"] = number


def generated() -> dict[str, str]:
    """File name -> content."""
    made = {}
    for name, build in SHEETS.items():
        content = json.loads(json.dumps(build().build(), cls=JSONEncoder))
        arrange(content["panels"])
        made[f"proxyd-{name}.json"] = json.dumps(content, indent=2, sort_keys=True) + "\n"
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; 1 when a file is out of step")
    args = parser.parse_args()
    wanted = generated()
    present = {path.name: path.read_text() for path in DASHBOARDS.glob("*.json")}
    if args.check:
        differ = sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))
        for name in differ:
            print(f"deploy/grafana/dashboards/{name} is not what tools/dashboards.py makes: run `make dashboards`")
        return 1 if differ else 0
    DASHBOARDS.mkdir(parents=True, exist_ok=True)
    for name in present.keys() - wanted.keys():
        (DASHBOARDS / name).unlink()
    for name, text in wanted.items():
        (DASHBOARDS / name).write_text(text)
        print(DASHBOARDS / name, file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
