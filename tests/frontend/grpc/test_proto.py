"""The .proto: the code made of it is current, and it names what a request may say."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_client import PROTO
from grpc_tools import protoc
from quire.frontend.grpc import quire_engine_pb2 as pb
from quire.frontend.http.dialects.completions import CompletionRequest
from quire.ipc.params.sampling_params import SAMPLING_FIELDS
from quire.ipc.protocol.rights import CALLER_OPTIONS

# What follows from the call itself, as over HTTP it follows from the route.
NOT_REQUESTED = {"detokenize", "output_kind", "extra_args"}
BEAM_SEARCH = {"use_beam_search", "length_penalty", "early_stopping"}  # a request's, not SamplingParams'


def test_the_generated_code_is_that_of_the_proto(tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert protoc.main(["protoc", f"-I{PROTO.parent}", f"--descriptor_set_out={made}", PROTO.name]) == 0
    (wanted,) = FileDescriptorSet.FromString(made.read_bytes()).file
    for field in (field for message in wanted.message_type for field in message.field):
        field.ClearField("json_name")
    for field in (field for outer in wanted.message_type for one in outer.nested_type for field in one.field):
        field.ClearField("json_name")
    assert FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb) == wanted


def test_it_has_every_sampling_field_by_its_name() -> None:
    names = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert names - BEAM_SEARCH == SAMPLING_FIELDS.keys() - NOT_REQUESTED


def test_it_has_every_option_of_a_caller_and_nothing_that_a_completions_request_has_not() -> None:
    names = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields}
    assert set(CALLER_OPTIONS) <= names
    own = {"request_id", "text", "tokenized", "sampling_params"}
    assert names - own <= set(CompletionRequest.__struct_fields__)
