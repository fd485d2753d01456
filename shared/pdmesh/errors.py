"""The one error tree of pdmesh: whose fault it is, whether to retry, and which HTTP status says so.

    MeshError
    ├── ClientError            the request is wrong; never retried
    │   ├── InvalidRequest     400, names the field
    │   ├── Unauthorized       401
    │   ├── Forbidden          403
    │   ├── NotFound           404
    │   ├── TooSlow            408, its body did not come in time
    │   └── TooLarge           413
    ├── PeerError              another service failed or is gone; retried elsewhere
    │   ├── PeerUnavailable    503, cannot be reached or its stream broke
    │   ├── Draining           503, it is shutting down and takes nothing new
    │   ├── Preempted          503, it gave the request's KV blocks to others and asks for the KV to be computed elsewhere
    │   ├── TransferFailed     502, KV could not be fetched or failed its checks
    │   ├── HandshakeRefused   502, the two sides cannot exchange KV
    │   └── DamagedKV          502, tokens that were given out rest on KV that was damaged; never gone on with
    └── OwnError               this service cannot do it
        ├── Overloaded         503, a bound was hit; carries Retry-After
        ├── EngineFault        502, this engine failed in computing it; another may not
        ├── DeadlineExceeded   504
        ├── InternalError      500
        └── ConfigError        start-up only: names the thing and the remedy

Foreign exceptions become one of these once, at the edge where they enter. Errors cross the wire by class name.
"""

from typing import ClassVar

RETRY_AFTER_S = 1.0
"""When to try again, where nothing better is known; the `Retry-After` of a 503."""


class MeshError(Exception):
    """Base of every error that pdmesh raises on purpose."""

    status: ClassVar[int] = 500
    """HTTP status a client sees."""
    retryable: ClassVar[bool] = False
    """Whether the same request may succeed on another engine."""
    openai_type: ClassVar[str] = "InternalServerError"
    """`error.type` of the OpenAI envelope."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """The request field at fault, where there is one."""
        self.request_id = request_id
        self.retry_after_s = retry_after_s

    @property
    def code(self) -> str:
        """Name under which the error crosses the wire."""
        return type(self).__name__


class ClientError(MeshError):
    status = 400
    openai_type = "BadRequestError"


class InvalidRequest(ClientError):
    pass


class Unauthorized(ClientError):
    status = 401
    openai_type = "AuthenticationError"


class Forbidden(ClientError):
    status = 403
    openai_type = "PermissionDeniedError"


class NotFound(ClientError):
    status = 404
    openai_type = "NotFoundError"


class TooSlow(ClientError):
    status = 408


class TooLarge(ClientError):
    status = 413


class PeerError(MeshError):
    status = 502
    retryable = True
    openai_type = "ServiceUnavailableError"


class PeerUnavailable(PeerError):
    status = 503


class Draining(PeerError):
    status = 503


class Preempted(PeerError):
    status = 503


class TransferFailed(PeerError):
    @property
    def is_corrupt(self) -> bool:
        """Whether bytes came otherwise than their owner summed them, so that what it drew from them may be wrong."""
        return self.message.rpartition(": ")[2] == "corrupt"


class HandshakeRefused(PeerError):
    pass


class DamagedKV(PeerError):
    retryable = False


class OwnError(MeshError):
    pass


class Overloaded(OwnError):
    status = 503
    retryable = True
    openai_type = "Service Unavailable"


class EngineFault(OwnError):
    status = 502
    retryable = True


class DeadlineExceeded(OwnError):
    status = 504
    openai_type = "TimeoutError"


class InternalError(OwnError):
    pass


class ConfigError(OwnError):
    """Start-up failed for a reason the operator can mend; printed as one line, exit code 2."""


def _leaves(cls: type[MeshError]) -> list[type[MeshError]]:
    return [cls] + [leaf for sub in cls.__subclasses__() for leaf in _leaves(sub)]


BY_CODE: dict[str, type[MeshError]] = {cls.__name__: cls for cls in _leaves(MeshError)}
"""Every error class by its wire code."""


def from_code(code: str, message: str, param: str | None = None, request_id: str | None = None) -> MeshError:
    """Rebuild an error that another service sent; an unknown code becomes InternalError."""
    return BY_CODE.get(code, InternalError)(message, param=param, request_id=request_id)
