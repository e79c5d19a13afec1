"""How commands find the daemon that they ask, and what they say when it doesn't answer.

A coordinator is asked at its address, on its own host. An agent is asked at its admin socket, which stands beside the
socket that trainers connect to and is open to the agent's user and root alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from proxyd.core.errors import ConfigError, OperatorError, RemoteError

if TYPE_CHECKING:
    import grpc

T = TypeVar("T")
DEFAULT_COORDINATOR = "127.0.0.1:7600"
DEFAULT_SOCKET = "/run/proxyd/agent.sock"
ADMIN_SUFFIX = ".admin"
TIMEOUT_S = 5.0


def add_coordinator(parser: argparse.ArgumentParser | argparse._ActionsContainer) -> None:
    """The option ``--coordinator``."""
    parser.add_argument(
        "--coordinator",
        metavar="ADDRESS",
        default=None,
        help=f"host:port or unix:/path of the coordinator, on its own host (default {DEFAULT_COORDINATOR})",
    )


def add_agent(parser: argparse.ArgumentParser | argparse._ActionsContainer) -> None:
    """The option ``--agent``."""
    parser.add_argument(
        "--agent",
        metavar="SOCKET",
        nargs="?",
        const="",
        default=None,
        help="ask this host's agent; SOCKET: its socket (default: of $PROXYD_SOCKET, of $PROXYD_CONFIG, else "
        f"{DEFAULT_SOCKET})",
    )


def agent_socket(given: str | None) -> str:
    """The agent's admin socket, from what was given: the trainers' socket or the admin socket itself. Without either,
    as the environment says, where a daemon's has its configuration too."""
    path = given or os.environ.get("PROXYD_SOCKET") or _configured_socket() or DEFAULT_SOCKET
    path = path.removeprefix("unix:")
    return path if path.endswith(ADMIN_SUFFIX) else path + ADMIN_SUFFIX


def _configured_socket() -> str | None:
    """The admin socket of $PROXYD_CONFIG; None without that, or where it can't be read."""
    config = os.environ.get("PROXYD_CONFIG")
    if not config:
        return None
    from proxyd.runtime.config import load_config

    with contextlib.suppress(ConfigError):
        agent = load_config(config).agent
        return None if agent is None else agent.admin_path
    return None


def ask_agent(given: str | None, question: Callable[[Any], T]) -> T:
    """Put a question to an agent's AgentAdmin service.

    :raises OperatorError: there is no such socket, or it is not for this user.
    :raises RemoteError: nobody answers, or the answer is a refusal.
    """
    import grpc

    from proxyd.runtime.addresses import check_unix_path
    from proxyd.runtime.grpc_options import channel_options
    from proxyd.v1.admin_pb2_grpc import AgentAdminStub

    path = check_unix_path(os.path.abspath(agent_socket(given)))
    _look_at(path)
    with grpc.insecure_channel(f"unix:{path}", options=channel_options()) as channel:
        try:
            return question(AgentAdminStub(channel))
        except grpc.RpcError as error:
            raise _agent_error(path, cast("grpc.Call", error)) from error


def _look_at(path: str) -> None:
    """What gRPC would only call UNAVAILABLE."""
    trainers = path.removesuffix(ADMIN_SUFFIX)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError as error:
        if os.path.exists(trainers):
            raise OperatorError(
                f"the agent at {trainers} has no admin socket",
                why=f"{path} is not there: it is older than this command, or its configuration says admin",
                next_step="Restart it after an upgrade; or give the path of [agent] admin: --agent PATH",
            ) from error
        raise RemoteError(
            "no agent runs here",
            why=f"{path} is not there",
            next_step="Start it (sudo systemctl start proxyd-agent), or say which one: --agent SOCKET, $PROXYD_SOCKET",
        ) from error
    except OSError as error:
        raise _forbidden(path, error.strerror or str(error)) from error
    if not stat.S_ISSOCK(mode):
        raise OperatorError(f"{path} is no socket", next_step="Give the agent's own: --agent SOCKET")
    if not os.access(path, os.R_OK | os.W_OK):
        raise _forbidden(path, f"it is {stat.S_IMODE(mode):04o} of uid {os.stat(path).st_uid}")


def _forbidden(path: str, why: str) -> OperatorError:
    trainers = shlex.quote(path.removesuffix(ADMIN_SUFFIX))
    return OperatorError(
        f"the agent's admin socket {path} is not for uid {os.getuid()}",
        why=f"{why}: only the agent's user and root may ask an agent",
        next_step=f"Ask as that user: sudo -u proxyd proxyd ... --agent {trainers}",
    )


def _agent_error(path: str, call: grpc.Call) -> RemoteError:
    import grpc

    details = call.details() or "no details"
    if call.code() is grpc.StatusCode.UNIMPLEMENTED:
        return RemoteError(
            f"the agent at {path} doesn't know this question",
            why="it is older than this command",
            next_step="Restart it after an upgrade",
        )
    if call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return RemoteError(
            f"no agent answers at {path}",
            why=details,
            next_step="It may have been killed: sudo systemctl status proxyd-agent; proxyd doctor looks further",
        )
    return RemoteError("the agent refused", why=details)


def ask_coordinator(given: str | None, question: Callable[[Any], T]) -> T:
    """Put a question to a coordinator's Admin service. Raises RemoteError, ConfigError for a wrong address."""
    import grpc

    from proxyd.runtime.addresses import parse_address
    from proxyd.runtime.grpc_options import channel_options
    from proxyd.v1.admin_pb2_grpc import AdminStub

    address = str(parse_address(given or DEFAULT_COORDINATOR, unix_ok=True, port_zero_ok=False))
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        try:
            return question(AdminStub(channel))
        except grpc.RpcError as error:
            # What a stub raises is an RpcError and a Call at once, which the type stubs cannot say.
            raise _coordinator_error(address, cast("grpc.Call", error)) from error


def _coordinator_error(address: str, call: grpc.Call) -> RemoteError:
    import grpc

    details = call.details() or "no details"
    if call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return RemoteError(
            f"no coordinator answers at {address}",
            why=details,
            next_step="Is it running, and is this its address? Give another one with --coordinator; one that speaks TLS"
            " answers at its unix: address",
        )
    return RemoteError(f"the coordinator at {address} refused", why=details)
