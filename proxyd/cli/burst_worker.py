"""A trainer of the demo: one process that sends through its agent, or one that receives for several ranks.

Commands come as JSON lines on stdin, events leave as JSON lines on stdout; times are CLOCK_MONOTONIC, which all
processes of one machine share. Ranks 0..n-1 send, rank n+i receives from rank i; the tag of a message is its burst.

    send ARGS       {"op": "send", "number", "at_ns"}
                        -> {"event": "sent", "sender", "number", "start_ns", "returned_ns", "digest"}
                    {"op": "finish"} -> {"event": "finished", "sender"}, once all that was sent is acknowledged
    receive ARGS    -> {"event": "received", "sender", "number", "end_ns", "digest"}
    both            -> {"event": "ready"} at first, {"event": "failed", "error"} at last if anything goes wrong

ARGS is a JSON object: ``socket, job, traffic, senders, tensor_bytes`` and, to send, ``rank``. The content differs by
sender and burst; both sides compute its digest outside the measured time, and the one who directs them compares.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

import proxyd_client

ACKNOWLEDGE_TIMEOUT_S = 60.0
_SAY = threading.Lock()


def say(**event: Any) -> None:
    """One event in one write, so that events of several threads never interleave."""
    with _SAY:
        os.write(1, json.dumps(event).encode() + b"\n")


def content(base: npt.NDArray[np.uint32], out: npt.NDArray[np.uint32], sender: int, number: int) -> None:
    """Fill ``out`` with what this sender sends in this burst: different in every word from any other burst's."""
    np.add(base, np.uint32((sender << 24 ^ number * 0x9E3779B1) & 0xFFFFFFFF), out=out)


def digest(data: Any) -> str:
    """Of a message's bytes."""
    return xxhash.xxh3_64_hexdigest(data)


def send(args: dict[str, Any]) -> None:
    """Obey until stdin ends."""
    sender: int = args["rank"]
    words = max(1, args["tensor_bytes"] // 4)
    base = np.arange(words, dtype=np.uint32)
    tensor = np.empty_like(base)
    handles: list[tuple[int, proxyd_client.Handle[None]]] = []
    with proxyd_client.connect(args["job"], sender, socket=args["socket"]) as endpoint:
        say(event="ready")
        for line in sys.stdin:
            command = json.loads(line)
            if command["op"] == "finish":
                for _, handle in handles:
                    handle.wait(ACKNOWLEDGE_TIMEOUT_S)
                handles.clear()
                say(event="finished", sender=sender)
                continue
            number: int = command["number"]
            content(base, tensor, sender, number)
            checked = digest(tensor)
            wait_ns = command["at_ns"] - time.monotonic_ns()
            if wait_ns > 0:
                time.sleep(wait_ns / 1e9)
            start_ns = time.monotonic_ns()
            handle = endpoint.isend(tensor, dst=args["senders"] + sender, tag=number, traffic=args["traffic"])
            returned_ns = time.monotonic_ns()
            say(event="sent", sender=sender, number=number, start_ns=start_ns, returned_ns=returned_ns, digest=checked)
            handles.append((number, handle))
            # An error of an earlier message must not go unheard.
            while handles and handles[0][1].done():
                handles.pop(0)[1].wait(0)


def receive_one(args: dict[str, Any], endpoint: proxyd_client.Endpoint, sender: int) -> None:
    """All messages of one sender, in order, until the endpoint is closed."""
    number = 0
    try:
        while True:
            message = endpoint.recv(src=sender, tag=number)
            end_ns = time.monotonic_ns()
            say(event="received", sender=sender, number=number, end_ns=end_ns, digest=digest(message.data))
            # The last view gives the block back: not only when the next message has come.
            del message
            number += 1
    except proxyd_client.ClosedError:
        return
    except proxyd_client.ProxydError as error:
        say(event="failed", error=f"receiver of rank {sender}, message {number}: {error}")


def receive(args: dict[str, Any]) -> None:
    """Serve all senders until stdin ends."""
    endpoints = [
        proxyd_client.connect(args["job"], args["senders"] + sender, socket=args["socket"])
        for sender in range(args["senders"])
    ]
    threads = [
        threading.Thread(target=receive_one, args=(args, endpoint, sender), daemon=True)
        for sender, endpoint in enumerate(endpoints)
    ]
    for thread in threads:
        thread.start()
    say(event="ready")
    sys.stdin.read()
    for endpoint in endpoints:
        endpoint.close(0.0)
    for thread in threads:
        thread.join()


def main() -> int:
    """Entry point of ``python -m proxyd.cli.burst_worker send|receive ARGS``."""
    role, args = sys.argv[1], json.loads(sys.argv[2])
    try:
        if role == "send":
            send(args)
        else:
            receive(args)
    except proxyd_client.ProxydError as error:
        say(event="failed", error=f"{role}r {args.get('rank', '')}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
