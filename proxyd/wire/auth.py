"""Shared-token authentication: an HMAC challenge in every hello.

Both sides prove that they hold the token without sending it (HMAC-SHA256, RFC 2104), bound to both nonces, the role and
the identity that the hello claims, so that neither a recorded hello nor one side's own answer can be played back.
Without a token both sides send an empty MAC; a side that has a token refuses that.
"""

from __future__ import annotations

NONCE_BYTES = 32
MAC_BYTES = 32


def token_mac(token: bytes, role: str, challenge: bytes, nonce: bytes, identity: str) -> bytes:
    """MAC of one side's hello. ``role`` is "dial" or "accept"; empty bytes when there is no ``token``."""
    if not token:
        return b""
    message = b"\0".join((b"proxyd hello 1", role.encode(), challenge, nonce, identity.encode()))
    # Imported here: a trainer without a token doesn't pay for loading OpenSSL (15 ms).
    import hashlib
    import hmac

    return hmac.new(token, message, hashlib.sha256).digest()


def macs_are_equal(left: bytes, right: bytes) -> bool:
    """Compare in constant time."""
    import hmac

    return hmac.compare_digest(left, right)


def mac_is_right(token: bytes, role: str, challenge: bytes, nonce: bytes, identity: str, mac: bytes) -> bool:
    """Constant-time check. With no token configured any MAC passes: the listener decides where that is allowed."""
    if not token:
        return True
    return macs_are_equal(token_mac(token, role, challenge, nonce, identity), mac)


def hello_mac(token: bytes, agent_nonce: bytes, client_nonce: bytes, job: str, rank: int, incarnation: int) -> bytes:
    """MAC of ``Hello``: the client proves that it holds the token, for this identity and these nonces."""
    return token_mac(token, "dial", agent_nonce, client_nonce, f"client {job}/{rank} {incarnation:016x}")


def welcome_mac(token: bytes, agent_nonce: bytes, client_nonce: bytes, site: str, agent_name: str) -> bytes:
    """MAC of ``Welcome``: the agent proves it too, so that nobody else can pose as it."""
    return token_mac(token, "accept", agent_nonce, client_nonce, f"agent {site}/{agent_name}")
