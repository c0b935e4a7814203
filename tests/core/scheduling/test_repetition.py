"""RepetitionDetector against the definition, undisturbed and resumed anywhere."""

from __future__ import annotations

from array import array

from fakes import make_request
from hypothesis import given
from hypothesis import strategies as st
from quire.core.scheduling.repetition import RepetitionDetector
from quire.core.scheduling.request import Request
from quire.core.scheduling.tenant import TenantLedger
from quire.ipc.params.repetition_detection import RepetitionDetectionParams
from quire.ipc.protocol.messages import FinishReason

outputs = st.lists(st.integers(0, 2), max_size=40)


@st.composite
def detections(draw: st.DrawFn) -> RepetitionDetectionParams:
    largest = draw(st.integers(1, 6))
    smallest = draw(st.integers(1, largest))
    count = draw(st.integers(2, 5))
    return RepetitionDetectionParams(max_pattern_size=largest, min_pattern_size=smallest, min_count=count)


def repeats(output: list[int], params: RepetitionDetectionParams) -> bool:
    """The definition, word by word."""
    sizes = range(params.min_pattern_size, params.max_pattern_size + 1)
    count = params.min_count
    return any(
        len(output) >= size * count and output[-size * count :] == output[-size:] * count for size in sizes
    )


@given(outputs, detections(), st.integers(0, 40))
def test_a_detector_says_what_the_definition_says_also_after_a_resumption(
    output: list[int], params: RepetitionDetectionParams, num_before: int
) -> None:
    known = array("i", output[:num_before])
    detector = RepetitionDetector(params, known)
    assert detector.is_repeating == repeats(known.tolist(), params)
    for token in output[num_before:]:
        known.append(token)
        detector.append(known)
        assert detector.is_repeating == repeats(known.tolist(), params)


def make_live(output: list[int], **params: object) -> Request:
    detection = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    message = make_request("a", [1, 2], output=output, repetition_detection=detection, **params)
    tenant = TenantLedger().enter(b"client", 1.0, 0)
    return Request.from_message(message, b"client", tenant, (0, 0.0, 0), 128, 0.0)


def add_token(request: Request, token: int) -> None:
    request.output_token_ids.append(token)
    request.num_tokens += 1
    assert request.repetition is not None
    request.repetition.append(request.output_token_ids)


def test_a_request_ends_as_soon_as_it_repeats_itself_and_no_other_end_comes_first() -> None:
    request = make_live([7, 5, 6, 5, 6], max_tokens=50)
    assert request.find_finish() is None
    add_token(request, 5)
    assert request.find_finish() is None
    add_token(request, 6)
    assert request.find_finish() is FinishReason.REPETITION
    assert request.stop_reason is None
    assert make_live([5, 5, 5], max_tokens=50).find_finish() is FinishReason.REPETITION
    assert make_live([5, 5, 5], max_tokens=50, min_tokens=4).find_finish() is None
    assert make_live([5, 5, 5], max_tokens=3).find_finish() is FinishReason.LENGTH
    assert make_live([5, 5, 5], max_tokens=50, stop_token_ids=[5]).find_finish() is FinishReason.STOP
