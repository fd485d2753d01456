"""The mesh secret and certificates: what proves that a peer, a ticket or a stored block is ours.

One secret is shared by all services of a mesh. Every use derives its own key, so that a MAC made for one purpose never
passes for another. On loopback without a configured secret, a random one in a file only this user can read serves all
services of the host.

With mutual TLS the secret may be left out. Then who belongs to the mesh is said by certificates alone, and what MACs would
protect rests on having come over such a connection; nothing that lies about, as blocks in Valkey do, can be trusted so.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from pdmesh.certificates import CertificateFiles
from pdmesh.config import ServiceConfig
from pdmesh.errors import ConfigError

MIN_SECRET_CHARS = 16
AUTH_METADATA_KEY = "pdmesh-auth"


class MeshSecret:
    """Derives keys and MACs (HMAC-SHA256) from the shared secret."""

    def __init__(self, secret: str, certificates: CertificateFiles | None = None) -> None:
        self.certificates = certificates
        """Files for mutual TLS; None: gRPC is plain."""
        self.is_secret = bool(secret)
        """Whether nobody else can make our MACs; not so with certificates alone."""
        self._root = hashlib.sha256(b"pdmesh-secret-v1\0" + secret.encode()).digest()

    @classmethod
    def load(cls, config: ServiceConfig) -> MeshSecret:
        """Take the secret from `secret_file`, `secret`, or, on loopback, the per-user file, and read the certificates that are
        configured; with them there need be no secret. Raises ConfigError."""
        certificates = CertificateFiles.of(config)
        if config.secret_file:
            try:
                secret = _text_of(Path(config.secret_file), f"secret-file {config.secret_file}")
            except OSError as exc:
                raise ConfigError(f"secret-file {config.secret_file} cannot be read: {exc.strerror}") from exc
        else:
            secret = config.secret
            if certificates is not None and not secret:
                return cls("", certificates)
        if not secret and not config.on_loopback:
            raise ConfigError(
                f"host {config.host} is reachable from other machines, so the mesh secret is required: "
                f"set --secret-file or PDMESH_SECRET (at least {MIN_SECRET_CHARS} characters, the same on every service), "
                "or --tls-cert, --tls-key and --tls-ca for mutual TLS"
            )
        secret = secret or _per_user_secret()
        if len(secret) < MIN_SECRET_CHARS:
            raise ConfigError(f"the mesh secret has {len(secret)} characters; at least {MIN_SECRET_CHARS} are needed")
        if not is_utf8(secret):
            raise ConfigError("the mesh secret is not UTF-8 text; hexadecimal digits will do")
        return cls(secret, certificates)

    def mac(self, purpose: str, data: bytes) -> bytes:
        """32 bytes over `data` under the key for `purpose`."""
        key = hmac.digest(self._root, purpose.encode(), "sha256")
        return hmac.digest(key, data, "sha256")

    def check(self, purpose: str, data: bytes, mac: bytes) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(self.mac(purpose, data), mac)

    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """gRPC metadata that authenticates a call to another service of the mesh."""
        return ((AUTH_METADATA_KEY, self.mac("grpc", b"").hex()),)


def is_utf8(value: str) -> bool:
    """Whether a setting was UTF-8 where it came from: what was not has surrogates, which nothing can encode."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _per_user_secret() -> str:
    """Read or make the secret that all services of this user on this host share."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pdmesh"
    path = folder / "mesh-secret"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            # Write aside and link: two services starting together both end up with the file that won.
            draft = folder / f".mesh-secret-{os.getpid()}-{secrets.token_hex(4)}"
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            try:
                os.link(draft, path)
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        if path.stat().st_mode & 0o077 or path.stat().st_uid != os.getuid():
            raise ConfigError(
                f"{path} must belong to this user and be readable by no one else: chmod 600 it or remove it"
            )
        return _text_of(path, str(path))
    except OSError as exc:
        raise ConfigError(
            f"the mesh secret cannot be kept in {folder}: {exc.strerror}; set PDMESH_SECRET instead"
        ) from exc


def _text_of(path: Path, name: str) -> str:
    """Contents of a secret's file, without the space around them. Raises OSError, ConfigError."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{name} is not UTF-8 text") from exc
