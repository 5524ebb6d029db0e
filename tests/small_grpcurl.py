"""As much of grpcurl as examples/grpcurl.sh uses, where the real one is not installed.

    grpcurl -plaintext [-d JSON] [-max-time SECONDS] ADDRESS list | METHOD

It knows a service only by what the server's reflection says, as grpcurl does, and refuses flags that it does not know.
"""

from __future__ import annotations

import argparse

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToJson, Parse
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


def main() -> None:
    parser = argparse.ArgumentParser(prog="grpcurl", allow_abbrev=False)
    parser.add_argument("-plaintext", action="store_true", required=True)
    parser.add_argument("-d", default="{}")
    parser.add_argument("-max-time", type=float)
    parser.add_argument("address")
    parser.add_argument("what")
    given = parser.parse_args()
    with grpc.insecure_channel(given.address) as channel:
        known = ProtoReflectionDescriptorDatabase(channel)
        if given.what == "list":
            print("\n".join(sorted(known.get_services())))  # noqa: T201
            return
        service, _, name = given.what.rpartition("/")
        method = DescriptorPool(known).FindServiceByName(service).FindMethodByName(name)
        kind = channel.unary_stream if method.server_streaming else channel.unary_unary
        call = kind(
            f"/{given.what}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        request = Parse(given.d, GetMessageClass(method.input_type)())
        answer = call(request, timeout=given.max_time)
        for message in answer if method.server_streaming else [answer]:
            print(MessageToJson(message, descriptor_pool=DescriptorPool(known)))  # noqa: T201


if __name__ == "__main__":
    main()
