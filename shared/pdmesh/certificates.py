"""The certificates of mutual TLS: this service's own and the authority that signs the mesh's, read from files that change.

Certificates live for hours where cert-manager renews them, so that nothing is read once and kept: whoever needs them asks
`current`, which reads again what has changed on disk. What speaks TLS with them is in `channels`.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdmesh.errors import ConfigError

if TYPE_CHECKING:
    from pdmesh.config import ServiceConfig

log = logging.getLogger(__name__)

# A renewal replaces three files; one read in between is read again.
NUM_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateSet:
    """What the three files held at one moment, PEM."""

    cert: bytes
    """This service's certificate and what leads from it to the authority."""
    key: bytes
    ca: bytes
    """Authorities that sign the mesh's certificates."""

    def __repr__(self) -> str:
        return "CertificateSet(...)"


@dataclass(frozen=True, slots=True)
class _Stamp:
    """Tells a file from what replaced it."""

    inode: int
    size: int
    changed_ns: int


class CertificateFiles:
    """The files behind `tls_cert`, `tls_key` and `tls_ca`. Any thread may ask."""

    def __init__(self, *, cert: str, key: str, ca: str, server_name: str) -> None:
        self.server_name = server_name
        """Name that every certificate of the mesh carries; empty: a server's carries the address that is dialled."""
        self._paths = {"tls-cert": cert, "tls-key": key, "tls-ca": ca}
        self._lock = threading.Lock()
        self._complaint = ""
        self._stamps, self._current = self._load()

    @classmethod
    def of(cls, config: ServiceConfig) -> CertificateFiles | None:
        """Read the files that the settings name; None where they name none. Raises ConfigError naming setting and path."""
        if not config.tls_cert:
            return None
        return cls(cert=config.tls_cert, key=config.tls_key, ca=config.tls_ca, server_name=config.tls_server_name)

    def current(self) -> CertificateSet:
        """What the files hold now; while they are not whole, what they held last."""
        with self._lock:
            try:
                if self._stamp() != self._stamps:
                    self._stamps, self._current = self._load()
                    log.info("certificate %s was read anew", self._paths["tls-cert"])
                self._complaint = ""
            except ConfigError as exc:
                if exc.message != self._complaint:
                    self._complaint = exc.message
                    log.warning("%s; the certificates read before stay in use", exc.message)
            return self._current

    def _load(self) -> tuple[dict[str, _Stamp], CertificateSet]:
        """Read and check all three. Raises ConfigError."""
        before: dict[str, _Stamp] = {}
        for _ in range(NUM_ATTEMPTS):
            before = self._stamp()
            contents = {setting: self._read(setting) for setting in self._paths}
            try:
                self._check()
            except ConfigError:
                if self._stamp() == before:
                    raise
                continue
            if self._stamp() == before:
                return before, CertificateSet(cert=contents["tls-cert"], key=contents["tls-key"], ca=contents["tls-ca"])
        raise ConfigError(f"tls-cert {self._paths['tls-cert']} was replaced again and again while it was read")

    def _stamp(self) -> dict[str, _Stamp]:
        stamps = {}
        for setting, path in self._paths.items():
            try:
                status = os.stat(path)
            except OSError as exc:
                raise self._unreadable(setting, exc) from exc
            stamps[setting] = _Stamp(status.st_ino, status.st_size, status.st_mtime_ns)
        return stamps

    def _read(self, setting: str) -> bytes:
        try:
            return Path(self._paths[setting]).read_bytes()
        except OSError as exc:
            raise self._unreadable(setting, exc) from exc

    def _unreadable(self, setting: str, error: OSError) -> ConfigError:
        return ConfigError(f"{setting} {self._paths[setting]} cannot be read: {error.strerror}")

    def _check(self) -> None:
        """Raise ConfigError unless the files are PEM and the key is the certificate's."""
        cert, key, ca = self._paths["tls-cert"], self._paths["tls-key"], self._paths["tls-ca"]
        try:
            ssl.create_default_context(cafile=ca)
        except (ssl.SSLError, OSError) as exc:
            raise ConfigError(f"tls-ca {ca} holds no certificate in PEM form ({_words(exc)})") from exc
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A key with a passphrase would be asked for on the terminal.
            context.load_cert_chain(cert, key, password=lambda: "")
        except ssl.SSLError as exc:
            if exc.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(f"tls-key {key} is not the key of tls-cert {cert}") from exc
            raise ConfigError(
                f"tls-cert {cert} and tls-key {key} are not a certificate and its key, without a passphrase, in PEM form "
                f"({_words(exc)})"
            ) from exc
        except OSError as exc:
            raise ConfigError(f"tls-cert {cert} or tls-key {key} cannot be read: {exc.strerror}") from exc


def _words(error: Exception) -> str:
    return (getattr(error, "reason", None) or str(error) or type(error).__name__).lower().replace("_", " ")
