"""Certificates for benchmarks and tests: a private CA, and what it signs. Not for production: its key is not kept.

Needs the ``cryptography`` package, which is no dependency of the daemons.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import TYPE_CHECKING

from proxyd.core.errors import ConfigError
from proxyd.runtime.tls import COORDINATOR_NAME, TlsPaths, agent_uri

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

LIFE_S = 30 * 86_400


class Authority:
    """A CA with its certificate at ``path``.

    :raises ConfigError: the package is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise ConfigError(
                "certificates can't be made here",
                why="the package cryptography is not installed",
                next_step="pip install cryptography",
            ) from error
        self.path = path
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _common_name(f"proxyd scratch CA {os.urandom(4).hex()}")
        self._issue(path, self._name, self._key, (), (-3600, LIFE_S), is_ca=True)

    def agent(self, directory: Path, site: str, name: str = "*", *, life_s: int = LIFE_S) -> TlsPaths:
        """Files of an agent's certificate; ``life_s`` from now, negative for one that has expired."""
        return self.issue(directory, uris=[agent_uri(site, name)], life_s=life_s)

    def coordinator(self, directory: Path, *, life_s: int = LIFE_S) -> TlsPaths:
        """Files of a coordinator's certificate."""
        return self.issue(directory, dns_names=[COORDINATOR_NAME], life_s=life_s)

    def issue(
        self, directory: Path, *, uris: Sequence[str] = (), dns_names: Sequence[str] = (), life_s: int = LIFE_S
    ) -> TlsPaths:
        """``certificate.pem`` and ``key.pem`` in ``directory``, each replaced in one step. The key comes first: for a
        moment it belongs to no certificate, as with any tool that renews."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        directory.mkdir(parents=True, exist_ok=True)
        certificate, key_path = directory / "certificate.pem", directory / "key.pem"
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _replace(key_path, pem)
        names = [*map(x509.UniformResourceIdentifier, uris), *map(x509.DNSName, dns_names)]
        self._issue(certificate, _common_name("proxyd"), key, names, (-2 * 86_400, life_s), is_ca=False)
        return TlsPaths(str(certificate), str(key_path), str(self.path))

    def _issue(
        self,
        path: Path,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        names: Sequence[x509.GeneralName],
        life_s: tuple[int, int],
        *,
        is_ca: bool,
    ) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization

        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            self._name,
            subject,
            key.public_key(),
            x509.random_serial_number(),
            now + datetime.timedelta(seconds=life_s[0]),
            now + datetime.timedelta(seconds=life_s[1]),
        ).add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        _replace(path, signed.public_bytes(serialization.Encoding.PEM))


def _common_name(text: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _replace(path: Path, content: bytes) -> None:
    """All of it or none of it, for its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    fresh.rename(path)


def settings(paths: TlsPaths) -> dict[str, str]:
    """The keys of ``[agent]`` or ``[coordinator]`` that name the files."""
    return {"tls_certificate": paths.certificate, "tls_key": paths.key, "tls_ca": paths.ca}
