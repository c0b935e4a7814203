"""The codec: what decodes, and that nothing else escapes as anything but a ProtocolError."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.ipc.decoding import convert, decode_json
from quire.ipc.errors import ProtocolError
from quire.ipc.params.request_options import MAX_REQUEST_ID_LENGTH
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.codec import make_client_codec, make_step_codec
from quire.ipc.protocol.messages import (
    MAX_EOS_TOKEN_IDS,
    MESSAGE_TYPES,
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Hello,
    LogprobsBlock,
)
from quire.ipc.protocol.step import GroupBlocks, ModelRunnerOutput, NewRequestData, SchedulerOutput
from quire.ipc.protocol.token_ids import count_token_ids, decode_token_ids, encode_token_ids
from quire.ipc.protocol.token_lists import TokenLists

CLIENT = make_client_codec()
STEP = make_step_codec()

REQUEST = EngineCoreRequest("r-1", encode_token_ids([1, 2, 3]), SamplingParams(seed=7), 1.5, [2])
OUTPUTS = EngineCoreOutputs(
    [
        EngineCoreOutput("r-1", 0, [5], num_cached_tokens=16),
        EngineCoreOutput(
            "r-2", 3, [1, 2], FinishReason.STOP, 2, logprobs=LogprobsBlock(1, 1, b"abcd", b"efgh", b"ijkl")
        ),
    ],
    "epoch",
)


@pytest.mark.parametrize("message", [REQUEST, OUTPUTS, Hello(1, "test", 3), AbortRequests(["a", "b"])])
def test_a_message_survives_the_trip(message: msgspec.Struct) -> None:
    assert CLIENT.decode(CLIENT.encode(message)) == message


def test_a_step_survives_the_trip() -> None:
    new = NewRequestData(
        3, "r", b"", b"", SamplingParams(), [1], TokenLists(stop=b"abcd"), [GroupBlocks([0, 1], 2)], 16
    )
    step = SchedulerOutput(9, [3, 1], [5, 1], [new], [3], [(1, 0, [7])])
    assert STEP.decode(STEP.encode(step)) == step
    output = ModelRunnerOutput(9, [1], [42])
    assert STEP.decode(STEP.encode(output)) == output


@given(ids=st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_token_ids_survive_packing(ids: list[int]) -> None:
    packed = encode_token_ids(ids)
    assert decode_token_ids(packed) == ids
    assert count_token_ids(packed) == len(ids)


@pytest.mark.parametrize("frames", [[], [b""], [b"\x02"], [b"\xff"], [b"\x02", b""]])
def test_the_wrong_frames_are_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        CLIENT.decode(frames)


def test_a_field_over_its_cap_is_a_protocol_error() -> None:
    for message in (
        EngineCoreRequest("x" * (MAX_REQUEST_ID_LENGTH + 1), b"", SamplingParams(), 0.0),
        EngineCoreRequest("", b"", SamplingParams(), 0.0),
        EngineCoreRequest("x", b"", SamplingParams(), 0.0, list(range(MAX_EOS_TOKEN_IDS + 1))),
    ):
        with pytest.raises(ProtocolError):
            CLIENT.decode(CLIENT.encode(message))


def test_deep_nesting_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        CLIENT.decode([b"\x02" + b"\x91" * 100_000 + b"\xc0"])


def decode_outputs() -> None:
    assert make_client_codec().decode(CLIENT.encode(OUTPUTS)) == OUTPUTS


class Body(msgspec.Struct):
    """Of a request that no other test reads."""


class Fields(msgspec.Struct):
    """Likewise."""


@pytest.mark.parametrize(
    ("library", "decode"),
    [
        (msgspec.msgpack, decode_outputs),
        (msgspec.json, lambda: decode_json(b"{}", Body)),
        (msgspec.json, lambda: convert({}, Fields)),
    ],
)
def test_two_threads_have_types_read_one_after_the_other(
    library: Any, decode: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients hear their first outputs, two large bodies come at once: msgspec would end the process."""
    make, both_inside, met = library.Decoder, threading.Barrier(2), list[int]()

    def make_slowly(struct: type[msgspec.Struct]) -> object:
        with contextlib.suppress(threading.BrokenBarrierError):
            met.append(both_inside.wait(0.2))
        return make(struct)

    monkeypatch.setattr(library, "Decoder", make_slowly)
    with ThreadPoolExecutor(2) as threads:
        for decoded in [threads.submit(decode) for _ in range(2)]:
            decoded.result()
    assert both_inside.broken
    assert met == []


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(list(MESSAGE_TYPES)) | st.binary(max_size=3),
    body=st.binary(max_size=60)
    | st.tuples(st.sampled_from([REQUEST, OUTPUTS]), st.integers(0, 200), st.integers(0, 255)).map(
        lambda t: _corrupt(*t)
    ),
)
def test_junk_decodes_or_is_a_protocol_error(kind: bytes, body: bytes) -> None:
    try:
        message = CLIENT.decode([bytes(kind) + body])
    except ProtocolError:
        return
    assert isinstance(message, msgspec.Struct)


def _corrupt(message: msgspec.Struct, position: int, value: int) -> bytes:
    body = bytearray(CLIENT.encode(message)[0][1:])
    body[position % len(body)] = value
    return bytes(body)
