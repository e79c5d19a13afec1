"""What a trainer must prove before it may take a name, and what it is told when it can't.

One token is proven in a hello, and the same one in the welcome. (Whoever has proven nothing gets no proof: a process of
this host could pass it on to a trainer elsewhere, and so pose as the agent.)

========================================  ==================  =====================
the trainer's job                         on this host        over TCP
========================================  ==================  =====================
has a ``[[job]] token_file`` here         the job's token     the job's token
has none, ``[agent] jobs = "any"``        nothing (its uid)   the site's token
has none, ``[agent] jobs = "proven"``     refused             refused
========================================  ==================  =====================

The job's token stands in for the site's instead of being asked for beside it: hosts that only train need not hold the
secret by which agents and coordinators know each other. Whoever holds the site's token, on the other hand, may not
speak for a job that has its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from proxyd.wire.auth import macs_are_equal
from proxyd.wire.client import Hello, hello_mac

_HOW = "set PROXYD_TOKEN_FILE to the file that holds it, or say connect(token=...)"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """On one hello."""

    token: bytes = dataclasses.field(repr=False)
    """What the welcome proves in turn; empty: nothing."""
    refusal: str = ""
    """Why it may not attach, with what to do; "": it may."""
    proof: str = ""
    """What was wrong, as a label of ``proxyd_failed_proofs_total``."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainerProofs:
    """The tokens in force. A reload takes another one; who is attached stays so."""

    site_token: bytes = dataclasses.field(default=b"", repr=False)
    """Empty: none."""
    job_tokens: Mapping[str, bytes] = dataclasses.field(default_factory=dict, repr=False)
    only_proven: bool = False
    """Jobs without a token of their own may not attach."""

    def judge(self, hello: Hello, challenge: bytes, *, local: bool) -> Verdict:
        """Whether this hello may have the name that it asks for.

        :param challenge: the nonce that it was sent.
        :param local: over the Unix socket.
        """
        own = self.job_tokens.get(hello.job)
        if own is None and self.only_proven:
            # Without a comparison: nothing that it could have sent would be right.
            return Verdict(
                b"",
                f"job {hello.job} has no token at this agent, and trainers must prove one here ([agent] jobs ="
                " \"proven\"): correct the job's name, or give it a [[job]] with token_file in the agent's file",
                "job_token",
            )
        token = own or (b"" if local else self.site_token)
        if not token:
            return Verdict(b"")
        expected = hello_mac(token, challenge, hello.nonce, hello.job, hello.rank, hello.incarnation)
        if macs_are_equal(expected, hello.mac):
            return Verdict(token)
        if own is None:
            return Verdict(b"", f"the client's token is missing or another one; {_HOW}", "token")
        what = "another one" if hello.mac else "missing"
        return Verdict(
            b"", f"job {hello.job} needs its own token at this agent, and yours is {what}: {_HOW}", "job_token"
        )
