"""Certificates of clusters: temporary ones for embedded clusters, the user's for clusters that run already."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

from distributed import Worker
from distributed.security import Security

from ...jobs.options.values import TlsFiles

_NAME = "lorabatch"
_OPEN_FILES = Path("/proc/self/fd")
# The key is forgotten with its cluster, whose clocks may differ or be set while it runs.
_VALID_SINCE, _VALID_FOR = timedelta(days=7), timedelta(days=3650)


def temporary_security() -> Security:
    """A new key and its certificate, in memory only. Only processes that have both can connect to the cluster.

    `Security.temporary()` does this with an RSA key, which takes half a second. The key on an elliptic curve made here
    takes a millisecond.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID_SINCE)
        .not_valid_after(now + _VALID_FOR)
        .sign(key, hashes.SHA256())
    )
    key_text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return security_with(certificate.public_bytes(serialization.Encoding.PEM).decode(), key_text.decode())


class _OneKey(Security):
    """One certificate and its key for all roles, as PEM texts that are never written to a disk.

    `Security` writes both to temporary files for a moment, since OpenSSL reads files only. A process that is killed at
    that moment leaves them behind.
    """

    def __init__(self, certificate: str, key: str) -> None:
        super().__init__(tls_ca_file=certificate, require_encryption=True, **_of_all_roles(certificate, key))

    def get_connection_args(self, role: str) -> dict[str, Any]:
        """Arguments for opening a TLS connection in `role`, made from files in memory."""
        with self._in_memory_files() as security:
            return cast(dict[str, Any], security.get_connection_args(role))

    def get_listen_args(self, role: str) -> dict[str, Any]:
        """Arguments for accepting TLS connections in `role`, made from files in memory."""
        with self._in_memory_files() as security:
            return cast(dict[str, Any], security.get_listen_args(role))

    @contextmanager
    def _in_memory_files(self) -> Iterator[Security]:
        own: Any = self
        with _in_memory_file(own.tls_client_cert) as certificate, _in_memory_file(own.tls_client_key) as key:
            roles = _of_all_roles(certificate, key)
            yield Security(tls_ca_file=own.tls_ca_file, require_encryption=True, **roles)


@contextmanager
def _in_memory_file(text: str) -> Iterator[str]:
    """The name by which this process can open an in-memory file with this text; the text itself on systems without
    such files (other than Linux).
    """
    if not hasattr(os, "memfd_create") or not _OPEN_FILES.exists():
        yield text
        return
    with os.fdopen(os.memfd_create("lorabatch"), "w") as file:
        file.write(text)
        file.flush()
        yield str(_OPEN_FILES / str(file.fileno()))


def _of_all_roles(certificate: str, key: str) -> dict[str, Any]:
    roles = ("client", "scheduler", "worker")
    return {f"tls_{role}_cert": certificate for role in roles} | {f"tls_{role}_key": key for role in roles}


def security_with(certificate: str, key: str) -> Security:
    """One certificate and its key, as PEM texts, for all processes of a cluster."""
    return _OneKey(certificate, key)


def security_of(files: TlsFiles) -> Security | None:
    """Dask's own security object; None leaves it to Dask's configuration."""
    if files.tls_ca is None:
        return None
    return Security(
        tls_ca_file=files.tls_ca, tls_client_cert=files.tls_cert, tls_client_key=files.tls_key, require_encryption=True
    )


def client_security(worker: Worker) -> Security:
    """Security object for a client inside a worker: workers often have certificates for their own role only."""
    own: Any = worker.security
    if own.tls_ca_file is None or own.tls_client_cert is not None:
        return cast(Security, own)
    return Security(
        tls_ca_file=own.tls_ca_file,
        tls_client_cert=own.tls_worker_cert,
        tls_client_key=own.tls_worker_key,
        require_encryption=own.require_encryption,
    )
