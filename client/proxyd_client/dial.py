"""Finding the agent and shaking hands with it.

An address is a Unix socket path (shared memory) or ``tcp://host:port`` (gateway use: another host of the site, payload
over the connection). An agent that isn't there yet is waited for, up to the caller's timeout; what only a person can
put right (a path too long, no permission, a token file that can't be read) is refused at once.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from typing import NamedTuple

from proxyd.wire.auth import NONCE_BYTES, macs_are_equal
from proxyd.wire.client import (
    MAX_BODY_BYTES,
    PROTOCOL_VERSION,
    Challenge,
    Decoder,
    Hello,
    Refused,
    Welcome,
    encode,
    hello_mac,
    welcome_mac,
)
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import ErrorCode
from proxyd_client.errors import (
    AgentUnavailable,
    ArgumentError,
    ConfigError,
    ProxydError,
    TransferFailed,
    class_of_code,
    next_step_of_code,
)

DEFAULT_SOCKET = "/run/proxyd/agent.sock"
SOCKET_ENV = "PROXYD_SOCKET"
TOKEN_FILE_ENV = "PROXYD_TOKEN_FILE"
MAX_UNIX_PATH_BYTES = 107  # sun_path is 108 bytes with its final NUL
MAX_PASSED_FDS = 16
_TCP_PREFIX = "tcp://"
_RETRY_EVERY_S = 0.05
_SAY_SO_AFTER_S = 2.0
_RETRIED = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN, errno.ECONNRESET, errno.EPIPE, errno.EINTR})


class Address(NamedTuple):
    """Where an agent listens."""

    path: str
    """Unix socket path; empty for TCP."""
    host: str = ""
    port: int = 0

    @property
    def shared_memory(self) -> bool:
        """Whether arenas can be passed."""
        return bool(self.path)

    def __str__(self) -> str:
        if self.path:
            return self.path
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{_TCP_PREFIX}{host}:{self.port}"


class Identity(NamedTuple):
    """Who this endpoint is."""

    job: str
    rank: int
    incarnation: int
    token: bytes = b""
    """What it proves to the agent; empty: what the file of PROXYD_TOKEN_FILE holds, read at each connection."""

    def __repr__(self) -> str:
        return f"<Identity {self.job}/{self.rank} {self.incarnation:016x}>"  # never the token


class Session(NamedTuple):
    """An established session; the decoder may hold frames, and ``fds`` descriptors, that came behind the welcome."""

    sock: socket.socket
    welcome: Welcome
    decoder: Decoder
    fds: list[int]


class Return(NamedTuple):
    """What an endpoint says of itself that was attached to an earlier life of the agent."""

    resumes: int = 0
    """That life's incarnation; 0: it comes for the first time."""
    age_ns: int = 0
    """How long ago it attached for the first time."""


FIRST_TIME = Return()


def parse_address(text: str | None) -> Address:
    """``None`` -> PROXYD_SOCKET -> the default path. Raises ConfigError naming where the value came from."""
    origin = "socket="
    if text is None:
        text, origin = os.environ.get(SOCKET_ENV), SOCKET_ENV
        if text is None:
            return Address(DEFAULT_SOCKET)
    text = os.fspath(text)
    if text.startswith(_TCP_PREFIX):
        host, _, port = text[len(_TCP_PREFIX) :].rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"{origin} {text!r} is no TCP address", next_step="Write tcp://host:port or tcp://[::1]:port"
            )
        return Address("", host.strip("[]"), int(port))
    if not text:
        raise ConfigError(f"{origin} is empty", next_step="Give the agent's socket path, or unset it")
    length = len(os.fsencode(text))
    if length > MAX_UNIX_PATH_BYTES:
        raise ConfigError(
            f"{origin} {text!r} has {length} bytes, but a Unix socket path holds {MAX_UNIX_PATH_BYTES}",
            next_step="Use a shorter path in the agent's configuration and here",
        )
    return Address(text)


def token_of(given: str | bytes) -> bytes:
    """A token that the caller holds, as the agent reads it from its file: without surrounding white space."""
    if not isinstance(given, str | bytes):
        raise ArgumentError(f"token must be text or bytes, not {type(given).__name__}")
    token = (given.encode() if isinstance(given, str) else given).strip()
    if not token:
        raise ArgumentError("token is empty", next_step=f"Leave it out to use {TOKEN_FILE_ENV}, or none at all")
    return token


def read_token() -> bytes:
    """The trainer's token, from the file that PROXYD_TOKEN_FILE names; empty when it names none. Never logged."""
    path = os.environ.get(TOKEN_FILE_ENV)
    if not path:
        return b""
    try:
        with open(path, "rb") as file:
            token = file.read(64 << 10).strip()
    except OSError as error:
        raise ConfigError(f"token file {path!r} ({TOKEN_FILE_ENV}) can't be read", why=str(error.strerror)) from error
    if not token:
        raise ConfigError(f"token file {path!r} ({TOKEN_FILE_ENV}) is empty", next_step="Write the job's token into it")
    return token


def establish(address: Address, identity: Identity, timeout_s: float) -> Session:
    """Connect and shake hands, retrying until ``timeout_s`` while nobody listens.

    :raises ConfigError: what retrying can't mend.
    :raises AgentUnavailable: nobody answered in time; the text says what was waited for.
    """
    if timeout_s < 0:
        raise ArgumentError(f"timeout_s {timeout_s} is negative")
    token = identity.token or read_token()
    started = time.monotonic()
    deadline = started + timeout_s
    said_so = False
    while True:
        try:
            return attempt(address, identity, token, deadline)
        except OSError as error:
            problem = problem_of(address, error)
            if isinstance(problem, ConfigError):
                raise problem from error
            now = time.monotonic()
            if now + _RETRY_EVERY_S > deadline:
                raise problem.__class__(
                    f"no agent answered at {address} within {timeout_s:g} s",
                    why=problem.what,
                    next_step=f"Start `proxyd agent` on this host, or set socket= or {SOCKET_ENV} to where it listens",
                    phase="connecting to the agent",
                ) from error
            if not said_so and now - started > _SAY_SO_AFTER_S:
                said_so = True
                import logging  # here, because few trainers ever wait and all of them import this

                logging.getLogger("proxyd_client").warning(
                    "waiting for the agent at %s (%s), up to %g s", address, problem.what, timeout_s
                )
            time.sleep(_RETRY_EVERY_S)


def attempt(
    address: Address, identity: Identity, token: bytes, deadline: float, come_back: Return = FIRST_TIME
) -> Session:
    """Connect and shake hands, once.

    :param deadline: on the clock of ``time.monotonic``.
    :raises OSError: what may be otherwise the next time; :func:`problem_of` says what it is.
    :raises ProxydError: what won't.
    """
    sock = _connect(address, max(0.1, deadline - time.monotonic()))
    try:
        return _shake_hands(sock, address, identity, token, deadline, come_back)
    except BaseException:
        sock.close()
        raise


def _connect(address: Address, timeout_s: float) -> socket.socket:
    if address.shared_memory:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(timeout_s)
            sock.connect(address.path)
        except BaseException:
            sock.close()
            raise
        return sock
    sock = socket.create_connection((address.host, address.port), timeout=timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock


def problem_of(address: Address, error: OSError) -> ProxydError:
    """What stands behind a failed attempt; a ConfigError when trying again is pointless."""
    phase = "connecting to the agent"
    if isinstance(error, socket.gaierror):
        return AgentUnavailable(f"host {address.host!r} can't be resolved ({error.strerror})", phase=phase)
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(
            f"no permission for the agent's socket {address}",
            next_step="Run as a user of the socket's group, or change `socket` mode in the agent's configuration",
            phase=phase,
        )
    if address.path and _is_something_else(address.path):
        return ConfigError(
            f"{address} is not a socket", next_step="Point it at the agent's socket, see `[agent] socket`", phase=phase
        )
    if error.errno == errno.ENOENT:
        return AgentUnavailable("there is no such socket", phase=phase)
    if error.errno == errno.ECONNREFUSED:
        return AgentUnavailable("nobody listens there", phase=phase)
    if isinstance(error, TimeoutError):
        return AgentUnavailable("it does not answer", phase=phase)
    if error.errno in _RETRIED or error.errno is None:
        return AgentUnavailable(error.strerror or str(error), phase=phase)
    if address.path:
        return ConfigError(f"{address} can't be connected to", why=error.strerror or str(error), phase=phase)
    return AgentUnavailable(error.strerror or str(error), phase=phase)


def _is_something_else(path: str) -> bool:
    """There is something at ``path``, and it is no socket."""
    try:
        return not stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def _shake_hands(
    sock: socket.socket, address: Address, identity: Identity, token: bytes, deadline: float, come_back: Return
) -> Session:
    reader = _HandshakeReader(sock, address, deadline)
    challenge = reader.next_frame()
    if not isinstance(challenge, Challenge):
        raise ConfigError(f"whoever listens at {address} is no proxyd agent", next_step="Check the address")
    if challenge.version != PROTOCOL_VERSION:
        raise ConfigError(
            f"the agent at {address} speaks protocol version {challenge.version}, this library {PROTOCOL_VERSION}",
            next_step="Install the same version of proxyd for agent and trainer",
        )
    token = identity.token or token
    nonce = os.urandom(NONCE_BYTES)
    hello = Hello(
        version=PROTOCOL_VERSION,
        job=identity.job,
        rank=identity.rank,
        incarnation=identity.incarnation,
        pid=os.getpid(),
        nonce=nonce,
        mac=hello_mac(token, challenge.nonce, nonce, identity.job, identity.rank, identity.incarnation),
        shared_memory=address.shared_memory,
        resumes=come_back.resumes,
        age_ns=come_back.age_ns,
    )
    sock.sendall(encode(hello))
    answer = reader.next_frame()
    if isinstance(answer, Refused):
        if answer.code == ErrorCode.RESOURCE and come_back.resumes:
            # All its trainers come back at once; some of them have to wait.
            raise BlockingIOError(errno.EAGAIN, answer.message)
        kind = class_of_code(answer.code)
        raise (AgentUnavailable if kind is TransferFailed else kind)(
            f"the agent at {address} refused {identity.job}/{identity.rank}",
            why=answer.message,
            next_step=next_step_of_code(answer.code),
            phase="connecting to the agent",
        )
    if not isinstance(answer, Welcome):
        raise ConfigError(f"the agent at {address} answered the hello with {type(answer).__name__}")
    # Over a Unix socket its owner and mode say who the agent is; over TCP only the token does.
    expected = welcome_mac(token, challenge.nonce, nonce, answer.site, answer.agent_name)
    if token and not address.shared_memory and not macs_are_equal(expected, answer.mac):
        raise ConfigError(
            f"whoever listens at {address} doesn't hold this trainer's token",
            next_step=f"Give agent and trainer the same token ({TOKEN_FILE_ENV}, or connect(token=...))",
        )
    sock.setblocking(False)
    return Session(sock, answer, reader.decoder, reader.fds)


class _HandshakeReader:
    """Reads the first frames, blocking; arena descriptors may already come with the welcome."""

    def __init__(self, sock: socket.socket, address: Address, deadline: float) -> None:
        self._sock = sock
        self._address = address
        self._deadline = deadline
        self.decoder = Decoder(allow_payload=not address.shared_memory)
        self.fds: list[int] = []

    def next_frame(self) -> object:
        while True:
            try:
                taken = self.decoder.next_frame()
            except WireError as error:
                raise ConfigError(f"whoever listens at {self._address} is no proxyd agent", why=str(error)) from error
            if taken is not None:
                return taken[0]
            remaining_s = self._deadline - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError("the agent did not finish the handshake")
            self._sock.settimeout(remaining_s)
            if self._address.shared_memory:
                data, fds, _, _ = socket.recv_fds(self._sock, MAX_BODY_BYTES, MAX_PASSED_FDS)
                self.fds.extend(fds)
            else:
                data = self._sock.recv(MAX_BODY_BYTES)
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "the agent closed the connection during the handshake")
            self.decoder.feed(data)
