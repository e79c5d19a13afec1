"""TLS to etcd: its own CA, and a certificate where etcd asks for one (``--client-cert-auth``).

etcd is another installation than proxyd: usually another CA, and names in its members' certificates as clients reach
them. So this has nothing to do with ``tls_*``; a coordinator's certificate is no use there unless etcd's CA signed it.
"""

from __future__ import annotations

import ssl
from typing import NamedTuple

import aetcd
import grpc
import grpc.aio
from aetcd import rpc

from proxyd.core.errors import ConfigError
from proxyd.runtime.tls import read_pem, tls_words


class EtcdTls(NamedTuple):
    """The PEM files."""

    ca: str
    certificate: str | None = None
    """None: etcd doesn't ask for one."""
    key: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Of the files as they are now. Raises ConfigError for what can't be used, naming the file."""
        proof = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        ca = read_pem(self.ca, "lock_ca")
        try:
            proof.load_verify_locations(self.ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"lock_ca {self.ca} can't be used", why=tls_words(error)) from error
        if self.certificate is None or self.key is None:
            return grpc.ssl_channel_credentials(ca)
        chain, key = read_pem(self.certificate, "lock_certificate"), read_pem(self.key, "lock_key")
        try:
            # Without a password OpenSSL would ask for one on the terminal, and the daemon stand still.
            proof.load_cert_chain(self.certificate, self.key, password="")
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"lock_certificate {self.certificate} and lock_key {self.key} can't be used together",
                why=tls_words(error),
            ) from error
        return grpc.ssl_channel_credentials(ca, key, chain)


class SecureClient(aetcd.Client):  # type: ignore[misc] # the library has no types
    """The library's client over TLS, which it doesn't know: its ``connect`` with another channel."""

    def __init__(
        self, host: str, port: int, credentials: grpc.ChannelCredentials, *, timeout: int, options: dict[str, object]
    ) -> None:
        super().__init__(host, port, timeout=timeout, options=options)
        self._target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._credentials = credentials

    async def connect(self) -> None:
        """Make the channel; nothing is sent yet."""
        if self._connected.is_set():
            return
        self.channel = grpc.aio.secure_channel(self._target, self._credentials, options=list(self._options.items()))
        self.kvstub = rpc.KVStub(self.channel)
        self.leasestub = rpc.LeaseStub(self.channel)
        self._connected.set()
