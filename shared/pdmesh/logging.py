"""Logging set-up: one line per record, with the request id that the code around it is serving."""

import contextvars
import json
import logging
import sys
import time

request_id_var: contextvars.ContextVar[str] = contextvars.ContextVar("pdmesh_request_id", default="")
"""Set by whoever owns a request; shown in every record logged under it."""


def setup_logging(service: str, level: str, style: str) -> None:
    """Send all records of this process to stderr as text or JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_add_request_id)
    handler.setFormatter(_JsonFormatter(service) if style == "json" else _TextFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # These report every call at INFO.
    for noisy in ("httpx", "httpcore", "uvicorn.access", "grpc._cython"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _add_request_id(record: logging.LogRecord) -> bool:
    record.request_id = request_id_var.get()
    return True


class _TextFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {service} %(name)s%(shown_id)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", "")
        record.shown_id = f" [{request_id}]" if request_id else ""
        return super().format(record)


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", ""):
            entry["request_id"] = request_id
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)
