"""An authority for certificates that signs what a test needs, as files."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

import trustme

NAME = "pdmesh"


@dataclass(frozen=True)
class Files:
    """One service's three files."""

    cert: Path
    key: Path
    ca: Path

    @property
    def settings(self) -> dict[str, str]:
        return {"tls_cert": str(self.cert), "tls_key": str(self.key), "tls_ca": str(self.ca)}

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--tls-cert", str(self.cert), "--tls-key", str(self.key), "--tls-ca", str(self.ca))


class Authority:
    def __init__(self) -> None:
        self._ca = trustme.CA()

    def issue(self, folder: Path, name: str = NAME, *, expired: bool = False) -> Files:
        """Sign a certificate and put it into `folder`, in place of what was there, as Kubernetes does: file by file whole."""
        now = datetime.datetime.now(datetime.UTC)
        past = {"not_before": now - datetime.timedelta(days=2), "not_after": now - datetime.timedelta(days=1)}
        made = self._ca.issue_cert(name, **(past if expired else {}))
        folder.mkdir(exist_ok=True)
        files = Files(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
        chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
        for path, content in (
            (files.cert, chain),
            (files.key, made.private_key_pem.bytes()),
            (files.ca, self._ca.cert_pem.bytes()),
        ):
            draft = path.with_suffix(".new")
            draft.write_bytes(content)
            os.replace(draft, path)
        return files
