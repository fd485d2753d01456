"""Whose request it is and what it is called: tenants by API key, cache salts narrowed by tenant, request ids."""

import hashlib
import hmac
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.errors import ConfigError, InvalidRequest, Unauthorized
from pdmesh.security import is_utf8

MAX_SALT_CHARS = 128
FORBIDDEN_SALT_CHARS = "@/\\\0"
MAX_REQUEST_ID_CHARS = 128

SaltFunction = Callable[[str, str], str]
"""(API key or "", the client's salt or "") to the effective salt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request and under which id."""

    api_key: str
    """The key that was accepted; "" when none is needed."""
    request_id: str
    """The client's X-Request-Id, or one made here."""
    has_own_id: bool
    priority: int | None = None
    """From X-Vllm-Priority."""


class ApiKeys:
    """The accepted keys; comparison takes the same time wherever they differ."""

    def __init__(self, keys: list[str]) -> None:
        """Raises ConfigError."""
        for number, key in enumerate(keys, start=1):
            if not is_utf8(key):
                raise ConfigError(f"api-key number {number} is not UTF-8 text")
        self._keys = [key.encode() for key in keys]

    def check(self, authorization: str) -> str:
        """Return the key in a `Bearer` header. Raises Unauthorized."""
        if not self._keys:
            return ""
        scheme, _, given = authorization.partition(" ")
        offered = given.strip().encode()
        matches = [key for key in self._keys if hmac.compare_digest(hashlib.sha256(key).digest(), _digest(offered))]
        if scheme.lower() != "bearer" or not matches:
            raise Unauthorized("Incorrect or missing API key; send it as `Authorization: Bearer KEY`")
        return matches[0].decode()


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def narrow_salt(api_key: str, client_salt: str) -> str:
    """Give each tenant a prefix cache of its own, which the client can only cut into smaller ones."""
    if not api_key and not client_salt:
        return ""
    tenant = hashlib.sha256(b"pdmesh-tenant\0" + api_key.encode()).digest() if api_key else b""
    return hashlib.sha256(b"pdmesh-salt\0" + tenant + b"\0" + client_salt.encode()).hexdigest()


def check_salt(salt: str | None) -> str:
    """Check a client's `cache_salt`; None is no salt."""
    if salt is None:
        return ""
    if not salt or len(salt) > MAX_SALT_CHARS or any(char in FORBIDDEN_SALT_CHARS for char in salt):
        raise InvalidRequest(
            f"cache_salt must have 1 to {MAX_SALT_CHARS} characters and none of @ / \\ NUL", param="cache_salt"
        )
    return salt


def check_request_id(request_id: str | None) -> str | None:
    """Check a body's `request_id`."""
    if request_id and not _is_usable(request_id):
        raise InvalidRequest(
            f"request_id must have at most {MAX_REQUEST_ID_CHARS} printable ASCII characters", param="request_id"
        )
    return request_id


def choose_request_id(header: str) -> tuple[str, bool]:
    """Take the client's id if it can stand in a header and a log line, else make one. Returns (id, is the client's)."""
    return (header, True) if _is_usable(header) else (uuid.uuid4().hex, False)


def _is_usable(request_id: str) -> bool:
    return 0 < len(request_id) <= MAX_REQUEST_ID_CHARS and request_id.isascii() and request_id.isprintable()
