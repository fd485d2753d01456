"""A peer of protocol version 1: a service of today whose messages pass through the frozen schema, both ways.

What that schema does not have is lost, as it would be at a process that was built from it, and the version is its.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message
from grpc_tools import protoc

from pdmesh.protocol import mesh_pb2 as pb

FROZEN = Path(__file__).parents[1] / "protocol" / "frozen" / "mesh_v1.proto"
VERSION = 1


@functools.cache
def frozen() -> FileDescriptor:
    """The schema of version 1, in a pool of its own, as its names are today's."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        code = protoc.main(["protoc", f"-I{FROZEN.parent}", f"--descriptor_set_out={out}", str(FROZEN)])
        assert code == 0
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(files.file[0])
    return pool.FindFileByName(FROZEN.name)


def old_class(name: str) -> type[Message]:
    """The message class of that name in version 1."""
    return message_factory.GetMessageClass(frozen().message_types_by_name[name])


def through_old_wire(name: str, data: bytes) -> bytes:
    """What is left of a message after a process of version 1 has read it and said the same."""
    message: Any = old_class(name).FromString(data)
    message.DiscardUnknownFields()
    if "protocol_max" in message.DESCRIPTOR.fields_by_name:
        message.protocol_min = message.protocol_max = VERSION
    return bytes(message.SerializeToString())


class OldWireServer:
    """Give this to `add_…_to_server` in a server's place: what is registered so speaks version 1 to its callers."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same handlers come by `add_registered_method_handlers` too."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        methods = pb.DESCRIPTOR.services_by_name[service.rpartition(".")[2]].methods_by_name
        aged = {
            name: handler._replace(
                request_deserializer=_reading(methods[name].input_type.name, handler.request_deserializer),
                response_serializer=_writing(methods[name].output_type.name, handler.response_serializer),
            )
            for name, handler in handlers.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, aged),))


def _reading(name: str, decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    return lambda data: decode(through_old_wire(name, data))


def _writing(name: str, encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    return lambda message: through_old_wire(name, encode(message))
