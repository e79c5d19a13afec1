"""TLS of both daemons: which files, whom a certificate names, and what happens when the files are replaced.

Whom a certificate names
------------------------
All certificates of an installation come from one private CA. What a certificate may be used for is in its subject
alternative names and nowhere else:

* ``URI:proxyd://SITE/NAME`` makes its holder the agent ``NAME`` of ``SITE``; ``URI:proxyd://SITE/*`` any agent of that
  site (hosts that come and go under generated names).
* ``DNS:coordinator.proxyd`` makes its holder a coordinator. A fixed name, since coordinators are reached by address, by
  service name and by Unix path, and a standby has to pass for the same; a DNS name, since that is what gRPC compares.

So an agent's certificate opens neither another site's agents nor the coordinator's place, whoever holds it.

Rotation
--------
A :class:`TlsKeeper` looks at the files (time, size, inode) whenever a connection is made, and once a minute. New ones
are proven before they are used: in memory, the new certificate shakes hands with itself under the new CA. Files that
don't pass (half replaced, a key that doesn't fit) change nothing but a line in the log. Connections that stand go on
with what they were made with. A configuration that is read again may name other files: :meth:`TlsKeeper.move`.

A certificate that has expired is used all the same, loudly: a clock that is wrong at boot looks the same from here, and
it is the other side that refuses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from proxyd.core.errors import ConfigError
from proxyd.runtime.logs import fields
from proxyd.runtime.metrics import MetricFamily, counter, gauge
from proxyd.runtime.refusals import Refusals
from proxyd.wire.routing import configured_name

COORDINATOR_NAME = "coordinator.proxyd"
DAY_S = 86_400
WARN_BEFORE_S = (14 * DAY_S, 3 * DAY_S, DAY_S)
"""How long before the end a warning is due: time for a person's queue, for a person, for nobody's sleep."""
CHECK_S = 60.0
RECORD_BYTES = 16_384
"""The most payload of one TLS record ..."""
RECORD_OVERHEAD_BYTES = 22
"""... and what TLS 1.3 adds to it: a header of 5, the inner type, a tag of 16 (RFC 8446, 5.2)."""

_NO_CHECK_TIME = 0x20_0000  # X509_V_FLAG_NO_CHECK_TIME: Python has no name for it
_MISSING_ISSUER = frozenset({2, 18, 19, 20, 21, 27})  # X509_V_ERR_*: no way to a CA that we know

_log = logging.getLogger("proxyd.tls")


class TlsPaths(NamedTuple):
    """The PEM files: this daemon's certificate with what leads to the CA, its key, and the CA."""

    certificate: str
    key: str
    ca: str


def agent_uri(site: str, name: str) -> str:
    """How a certificate names an agent; a worker by the agent that it is of."""
    return f"proxyd://{site}/{configured_name(name)}"


def names_agent(uris: Iterable[str], site: str, name: str) -> bool:
    """Whether a certificate with these URIs speaks for the agent. An agent's certificate is that of its workers."""
    return bool({agent_uri(site, name), agent_uri(site, "*")} & set(uris))


@dataclasses.dataclass(frozen=True, slots=True)
class TlsIdentity:
    """One set of files, proven to fit together."""

    server: ssl.SSLContext
    """For whoever accepts."""
    client: ssl.SSLContext
    """For whoever dials. It checks the chain; whom the certificate names is its user's to check."""
    chain_pem: bytes
    key_pem: bytes = dataclasses.field(repr=False)
    ca_pem: bytes
    uris: tuple[str, ...]
    dns_names: tuple[str, ...]
    not_after_s: int
    """End of the certificate, by the wall clock."""


def peer_uris(certificate: dict[str, Any] | None) -> tuple[str, ...]:
    """The URIs of a certificate as ``getpeercert()`` shows it."""
    return _alternative_names(certificate, "URI")


def _alternative_names(certificate: dict[str, Any] | None, kind: str) -> tuple[str, ...]:
    names = (certificate or {}).get("subjectAltName", ())
    return tuple(value for its_kind, value in names if its_kind == kind)


def load_identity(paths: TlsPaths, *, dials: bool) -> TlsIdentity:
    """Read the files and prove that they fit together.

    :param dials: whether the certificate must serve a client's side too, as an agent's does.
    :raises ConfigError: unreadable, no PEM, encrypted, writable by everybody, another key's, not of this CA. The
        message names the file and never holds its content.
    """
    chain_pem, key_pem, ca_pem = (read_pem(path, name) for path, name in zip(paths, _KEYS, strict=True))
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in contexts:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            # Without a password OpenSSL would ask for one on the terminal, and the daemon stand still.
            context.load_cert_chain(paths.certificate, paths.key, password="")
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"tls_certificate {paths.certificate} and tls_key {paths.key} can't be used together",
                why=tls_words(error),
                next_step="They must be PEM, the key without a password, and made for this certificate",
            ) from error
        try:
            context.load_verify_locations(paths.ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"tls_ca {paths.ca} can't be used", why=tls_words(error)) from error
    server, client = contexts
    # Nothing is resumed: every connection proves its certificate, and no ticket waits in a stream that nobody reads.
    server.num_tickets = 0
    try:
        certificate = _shake_hands_with_itself(server, client, dials=dials)
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_certificate {paths.certificate} is not good under tls_ca {paths.ca}",
            why=tls_words(error),
            next_step="Give the CA that signed it, with what stands between the two in tls_certificate; an agent's"
            " certificate serves both ends (extended key usage serverAuth and clientAuth, or none)",
        ) from error
    return TlsIdentity(
        server=server,
        client=client,
        chain_pem=chain_pem,
        key_pem=key_pem,
        ca_pem=ca_pem,
        uris=peer_uris(certificate),
        dns_names=_alternative_names(certificate, "DNS"),
        not_after_s=int(ssl.cert_time_to_seconds(certificate["notAfter"])),
    )


_KEYS = ("tls_certificate", "tls_key", "tls_ca")


def read_pem(path: str, key: str) -> bytes:
    """What the file of a configuration's key holds. Raises ConfigError: unreadable, or writable by everybody."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(1 << 20)
    except OSError as error:
        raise ConfigError(f"cannot read {key} {path}", why=error.strerror or str(error)) from error
    if mode & 0o002:
        raise ConfigError(f"{key} {path} can be written by everybody", next_step=f"chmod o-w {path}")
    if key.endswith("_key") and mode & 0o004:
        # No refusal: secrets that Kubernetes mounts look like that, in a directory of the pod's own.
        _log.warning("%s %s can be read by every user of this host; chmod 600 it", key, path)
    return content


def _shake_hands_with_itself(server: ssl.SSLContext, client: ssl.SSLContext, *, dials: bool) -> dict[str, Any]:
    """The certificate as the other side will see it, time aside."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    with _without_time(server), _without_time(client):
        if not dials:
            server.verify_mode = ssl.CERT_NONE
        one = client.wrap_bio(to_client, to_server, server_side=False)
        other = server.wrap_bio(to_server, to_client, server_side=True)
        server.verify_mode = ssl.CERT_REQUIRED
    # The client is done once it has sent its certificate; the server judges that in its second turn.
    for side in (one, other, one, other):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    certificate = one.getpeercert()
    assert certificate is not None
    return certificate


@contextlib.contextmanager
def _without_time(context: ssl.SSLContext) -> Iterator[None]:
    before = context.verify_flags
    context.verify_flags |= _NO_CHECK_TIME
    try:
        yield
    finally:
        context.verify_flags = before


class TlsKeeper:
    """The files of one daemon, as they are now. May be asked from any thread.

    :param expect: checks an identity's names; raises ConfigError.
    :param dials: see :func:`load_identity`.
    :param wall: the wall clock, in seconds: certificates live by it.
    :raises ConfigError: the files at start are no good.
    """

    def __init__(
        self,
        paths: TlsPaths,
        expect: Callable[[TlsIdentity], None],
        *,
        dials: bool,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.paths = paths
        self._expect = expect
        self._dials = dials
        self._wall = wall
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._identity = self._load()
        self._warned_s: float | None = None
        self.reloads = 0
        self.refused_reloads = 0

    def _signature(self) -> tuple[tuple[int, int, int], ...]:
        """Changes with the files. A file that is away for a moment counts as zeros."""
        found = []
        for path in self.paths:
            try:
                status = os.stat(path)
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
            except OSError:
                found.append((0, 0, 0))
        return tuple(found)

    def _load(self) -> TlsIdentity:
        identity = load_identity(self.paths, dials=self._dials)
        self._expect(identity)
        return identity

    def current(self) -> TlsIdentity:
        """For the next connection: the newest files that were good."""
        with self._lock:
            signature = self._signature()
            if signature != self._seen:
                self._renew(signature)
            return self._identity

    def _renew(self, signature: tuple[tuple[int, int, int], ...]) -> None:
        self._seen = signature
        try:
            self._identity = self._load()
        except ConfigError as error:
            # Two files are never replaced in one instant. The last change of them is looked at again.
            self.refused_reloads += 1
            _log.error("the new TLS files are not used, the ones before stay in force: %s", error)
            return
        self.reloads += 1
        self._warned_s = None
        _log.info("TLS files were replaced", extra=fields(file=self.paths.certificate, expires=self.expires))

    def move(self, paths: TlsPaths) -> bool:
        """Use other files from the next connection on; answers whether they are others.

        :raises ConfigError: they are no good; those before stay in force.
        """
        with self._lock:
            if paths == self.paths:
                return False
            before = self.paths
            self.paths = paths
            signature = self._signature()
            try:
                self._identity = self._load()
            except ConfigError:
                self.paths = before
                self.refused_reloads += 1
                raise
            self._seen = signature
            self.reloads += 1
            self._warned_s = None
            _log.info("other TLS files are in use", extra=fields(file=paths.certificate, expires=self.expires))
            return True

    @property
    def seconds_left(self) -> float:
        """Until the certificate in use expires; negative: since it has."""
        return self._identity.not_after_s - self._wall()

    @property
    def expires(self) -> str:
        """When it does, for people."""
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._identity.not_after_s))

    @property
    def state(self) -> str:
        """Of the certificate, in words."""
        left_s = self.seconds_left
        if left_s <= 0:
            return f"expired on {self.expires}"
        return f"valid until {self.expires}"

    def check(self) -> None:
        """Look at the files, and warn when their end is near: once for each of :data:`WARN_BEFORE_S`, and daily after
        the end. To be called once a minute."""
        self.current()
        left_s = self.seconds_left
        due_s = [limit_s for limit_s in (*WARN_BEFORE_S, 0) if left_s <= limit_s]
        if not due_s:
            return
        step_s: float = min(due_s)
        if left_s <= 0:
            step_s = -(-left_s // DAY_S) * DAY_S  # a new one each day
        if step_s == self._warned_s:
            return
        self._warned_s = step_s
        level = logging.ERROR if left_s <= DAY_S else logging.WARNING
        what = "has expired: others refuse it" if left_s <= 0 else f"expires in {max(0.0, left_s) / DAY_S:.1f} days"
        _log.log(
            level,
            "the TLS certificate %s; replace %s and its key, no restart is needed",
            what,
            self.paths.certificate,
            extra=fields(expires=self.expires),
        )

    def families(self) -> list[MetricFamily]:
        """For a scrape."""
        return [
            gauge(
                "proxyd_tls_certificate_expires_in_seconds",
                "Until this daemon's certificate expires; negative: since it has.",
                [({}, self.seconds_left)],
            ),
            counter(
                "proxyd_tls_reloads_total",
                "How often new TLS files were found, and whether they were good.",
                [({"outcome": "used"}, self.reloads), ({"outcome": "refused"}, self.refused_reloads)],
            ),
        ]


def agent_tls(paths: TlsPaths | None, site: str, name: str) -> TlsKeeper | None:
    """For the agent of that name; None without files. Raises ConfigError."""

    def expect(identity: TlsIdentity) -> None:
        if not names_agent(identity.uris, site, name):
            named = ", ".join(identity.uris) or "no proxyd:// URI at all"
            raise ConfigError(
                f"the certificate is not of agent {site}/{name}",
                why=f"its subject alternative names have {named}",
                next_step=f"Issue one with URI:{agent_uri(site, name)} (or URI:{agent_uri(site, '*')}), or correct"
                " site and name in [agent]",
            )

    return None if paths is None else TlsKeeper(paths, expect, dials=True)


def coordinator_tls(paths: TlsPaths | None) -> TlsKeeper | None:
    """For a coordinator; None without files. Raises ConfigError."""

    def expect(identity: TlsIdentity) -> None:
        if COORDINATOR_NAME not in identity.dns_names:
            named = ", ".join((*identity.dns_names, *identity.uris)) or "no names at all"
            raise ConfigError(
                "the certificate is not of a coordinator",
                why=f"its subject alternative names have {named}",
                next_step=f"Issue one with DNS:{COORDINATOR_NAME}",
            )

    return None if paths is None else TlsKeeper(paths, expect, dials=False)


def security_families(refusals: Refusals, tls: TlsKeeper | None) -> list[MetricFamily]:
    """Of either daemon, for a scrape."""
    return [*refusals.families(), *(tls.families() if tls is not None else ())]


async def watch_certificate(keeper: TlsKeeper) -> None:
    """Once a minute, for ever: files that nobody has asked for, and warnings that are due."""
    while True:
        keeper.check()
        await asyncio.sleep(CHECK_S)


def tls_reason(error: BaseException) -> str:
    """What was wrong, as a metric's label: one of :data:`proxyd.runtime.refusals.PROOFS`."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == 10:
            return "certificate_expired"
        return "certificate_foreign" if error.verify_code in _MISSING_ISSUER else "certificate"
    reason = str(getattr(error, "reason", None) or "")
    if "CERTIFICATE_EXPIRED" in reason:
        return "certificate_expired"
    if "UNKNOWN_CA" in reason:
        return "certificate_foreign"
    if "DID_NOT_RETURN_A_CERTIFICATE" in reason or "CERTIFICATE_REQUIRED" in reason:
        return "certificate_missing"
    return "certificate" if "CERTIFICATE" in reason else "tls"


def tls_words(error: BaseException) -> str:
    """What was wrong, for people: ours to say, or what the other side's alert says of us."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate was refused: {error.verify_message}"
    reason = str(getattr(error, "reason", None) or "")
    if "ALERT" in reason:
        said = reason.partition("ALERT_")[2].replace("_", " ").lower()
        return f"the other side refused this side's TLS: {said}"
    known = {
        "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it showed no certificate",
        "WRONG_VERSION_NUMBER": "it does not speak TLS",
        "HTTP_REQUEST": "it does not speak TLS",
        "UNSUPPORTED_PROTOCOL": "it does not speak TLS 1.3",
        "KEY_VALUES_MISMATCH": "the key belongs to another certificate",
    }
    if reason in known:
        return known[reason]
    if isinstance(error, ssl.SSLError):
        return reason.replace("_", " ").lower() or "not a PEM file, or one with a password"
    return getattr(error, "strerror", None) or str(error)
