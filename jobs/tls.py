"""The PEM files by which a client and a `tls://` cluster know each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TLS_FIELDS = ("tls_ca", "tls_cert", "tls_key")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths on this machine; all three or none. `tls_ca`: of the authority that signed the cluster's certificates."""

    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    def problems(self, cluster: str) -> list[str]:
        """What is wrong with them for this cluster's address, as plain sentences."""
        given = {name: value for name in TLS_FIELDS if (value := getattr(self, name)) is not None}
        problems = [
            f"{name}={path!r}: no such file. Name a PEM file on this machine with --{name.replace('_', '-')}."
            for name, path in given.items()
            if not Path(path).is_file()
        ]
        missing = [name for name in TLS_FIELDS if given and name not in given]
        if missing:
            problems.append(f"{', '.join(missing)}: required beside {', '.join(given)}. Give all three PEM files.")
        if given and not cluster.startswith("tls://"):
            problems.append(f"cluster={cluster!r}: TLS files are for an address such as tls://10.0.0.5:8786.")
        return problems
