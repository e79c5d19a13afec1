"""How every gRPC channel and server of proxyd is set up, and why each option is there."""

from __future__ import annotations

import os

MAX_MESSAGE_BYTES = 64 << 20
"""gRPC refuses more than 4 MiB by default; the directory of a large job is more than that."""

MAX_REQUEST_BYTES = 1 << 20
"""What a coordinator takes in one message, from strangers too: gRPC collects a message before it hands it over, so this
is what each of them may cost. Agents send what is more in several (a report on 1,000 links has 150 KB)."""
MAX_STREAMS_PER_CONNECTION = 32
"""An agent needs one, a person's command another."""
STRANGER_NS = 10_000_000_000
"""A connection without a preface, or without a stream, lives no longer. Agents always have a stream."""

KEEPALIVE_NS = 5_000_000_000
KEEPALIVE_TIMEOUT_NS = 2_000_000_000
"""A cut link stays unnoticed for minutes without pings; with these it is noticed within 7 s."""

RECONNECT_INITIAL_NS = 100_000_000
RECONNECT_MIN_NS = 1_000_000_000
RECONNECT_MAX_NS = 2_000_000_000
"""How an agent backs off between its sessions: a restarted coordinator is wanted back at once."""
REDIAL_MAX_NS = 500_000_000
"""The channel underneath dials on its own and fails every call meanwhile (in the end, by default, for two minutes). It
has to be faster than the sessions, or the two waits would add up."""

Options = list[tuple[str, int]]

_BOTH: Options = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_NS // 1_000_000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_NS // 1_000_000),
    # The time-out above is the kernel's, for bytes that nobody acknowledges. A stopped process has a kernel that does;
    # only the missing answer to the ping tells, and gRPC waits a minute for it by default.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_NS // 1_000_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def only_tls_1_3() -> None:
    """Have gRPC speak TLS 1.3 or nothing. To be called before grpc is imported: it looks only once.

    gRPC's Python interface can't set the version. It takes the suites for older versions from the environment, though;
    the one that is named here needs a pre-shared key, and nobody has one. The suites of TLS 1.3 are not a matter of it.
    """
    os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-PSK-AES128-CBC-SHA"


def channel_options() -> Options:
    """For whoever dials a coordinator."""
    return [
        *_BOTH,
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_INITIAL_NS // 1_000_000),
        ("grpc.min_reconnect_backoff_ms", RECONNECT_MIN_NS // 1_000_000),
        ("grpc.max_reconnect_backoff_ms", REDIAL_MAX_NS // 1_000_000),
        # An http_proxy in the environment would swallow even 127.0.0.1.
        ("grpc.enable_http_proxy", 0),
        # Two sessions of one process must not share, and lose, one connection.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options() -> Options:
    """For the coordinator's server."""
    return [
        *_BOTH,
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
        ("grpc.server_handshake_timeout_ms", STRANGER_NS // 1_000_000),
        ("grpc.max_connection_idle_ms", STRANGER_NS // 1_000_000),
        # Two servers on one port would bind silently and each get half of the agents.
        ("grpc.so_reuseport", 0),
        # The server would end a connection whose pings come more often than every five minutes ("too many pings").
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]
