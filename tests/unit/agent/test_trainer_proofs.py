"""Who may attach with which token: the table at the top of the module, each cell."""

from __future__ import annotations

import pytest

from proxyd.agent.trainer_proofs import TrainerProofs
from proxyd.wire.client import Hello, hello_mac

SITE, LLAMA, OTHER = b"site" * 8, b"llama" * 8, b"other" * 8
CHALLENGE, NONCE = bytes(32), b"n" * 32
JOBS = {"llama": LLAMA}


def hello(job: str, token: bytes, *, claimed: str | None = None, challenge: bytes = CHALLENGE) -> Hello:
    """Of a trainer that holds ``token``; ``claimed``: the job that its proof is for, if not the one it names."""
    mac = hello_mac(token, challenge, NONCE, claimed or job, 3, 7)
    return Hello(version=1, job=job, rank=3, incarnation=7, pid=1, nonce=NONCE, mac=mac, shared_memory=True)


@pytest.mark.parametrize(
    ("job", "token", "local", "only_proven", "proven"),
    [
        ("llama", LLAMA, True, False, LLAMA),
        ("llama", LLAMA, False, False, LLAMA),
        ("llama", LLAMA, False, True, LLAMA),
        ("free", b"", True, False, b""),
        ("free", OTHER, True, False, b""),
        ("free", SITE, True, False, b""),
        ("free", SITE, False, False, SITE),
    ],
)
def test_who_may_attach_and_what_the_welcome_proves(
    job: str, token: bytes, local: bool, only_proven: bool, proven: bytes
) -> None:
    verdict = TrainerProofs(SITE, JOBS, only_proven).judge(hello(job, token), CHALLENGE, local=local)
    assert (verdict.refusal, verdict.proof, verdict.token) == ("", "", proven)


@pytest.mark.parametrize(
    ("job", "token", "local", "only_proven", "proof", "words"),
    [
        ("llama", b"", True, False, "job_token", "job llama needs its own token at this agent, and yours is missing"),
        ("llama", OTHER, True, False, "job_token", "yours is another one: set PROXYD_TOKEN_FILE"),
        ("llama", SITE, False, False, "job_token", "yours is another one"),
        ("free", b"", False, False, "token", "token is missing or another one"),
        ("free", LLAMA, False, False, "token", "token is missing or another one"),
        ("free", SITE, False, True, "job_token", "job free has no token at this agent"),
        ("free", b"", True, True, "job_token", "[[job]] with token_file in the agent's file"),
    ],
)
def test_who_may_not_and_what_to_do(
    job: str, token: bytes, local: bool, only_proven: bool, proof: str, words: str
) -> None:
    proofs = TrainerProofs(SITE, JOBS, only_proven)
    verdict = proofs.judge(hello(job, token), CHALLENGE, local=local)
    assert words in verdict.refusal
    assert verdict.proof == proof
    for secret in (SITE, LLAMA, OTHER):
        assert secret.decode() not in f"{verdict!r} {proofs!r}"


def test_a_proof_is_good_for_its_own_job_and_its_own_challenge() -> None:
    both = TrainerProofs(b"", {"llama": LLAMA, "other": LLAMA})
    assert both.judge(hello("other", LLAMA, claimed="llama"), CHALLENGE, local=True).refusal
    assert both.judge(hello("llama", LLAMA, challenge=b"x" * 32), CHALLENGE, local=True).refusal
    assert not both.judge(hello("llama", LLAMA), CHALLENGE, local=True).refusal
