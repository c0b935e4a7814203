"""Every format's transcripts are read as the messages that they are, however they are cut."""

from __future__ import annotations

import random

import pytest
from quire.frontend.events import ToolCallEnd
from quire.frontend.formats.known_formats import FORMATS
from transcripts import ALL, Read, Transcript, encode, list_deltas, random_cuts, read, read_deltas


@pytest.fixture(params=ALL)
def transcript(request: pytest.FixtureRequest) -> Transcript:
    return ALL[request.param]


def check(transcript: Transcript, found: Read) -> None:
    assert found.parts == (transcript.content, transcript.reasoning, list(transcript.calls))
    assert found.num_errors == transcript.num_errors
    if transcript.num_reasoning_tokens is not None:
        assert found.num_reasoning_tokens == transcript.num_reasoning_tokens


def test_every_format_has_a_transcript() -> None:
    assert {transcript.format for transcript in ALL.values()} == set(FORMATS)


def test_a_transcript_is_read_whole_and_token_by_token(transcript: Transcript) -> None:
    check(transcript, read(transcript))
    check(transcript, read(transcript, range(1, len(encode(transcript.tokenizer, transcript.text)))))


@pytest.mark.parametrize("num_cuts", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_transcript_is_read_alike_however_it_is_cut(transcript: Transcript, num_cuts: int) -> None:
    chance = random.Random(num_cuts)
    length = len(encode(transcript.tokenizer, transcript.text))
    for _ in range(num_cuts):
        stop = "\t" * chance.choice([0, 0, 3, 30])  # a stop string that never comes holds text back
        check(transcript, read(transcript, random_cuts(chance, length), stop))


def test_a_transcript_that_is_cut_off_is_no_error_and_a_call_in_it_that_ends_is_whole(
    transcript: Transcript,
) -> None:
    tokenizer, output_format = transcript.tokenizer, transcript.output_format
    prompt, ids = encode(tokenizer, transcript.prompt), encode(tokenizer, transcript.text)
    for end in range(1, len(ids)):
        deltas = list_deltas(tokenizer, prompt, ids[:end], ())
        found = read_deltas(output_format, tokenizer, prompt, deltas, transcript.tools)
        assert found.num_errors == 0 or transcript.num_errors
        assert 0 <= found.num_reasoning_tokens <= end
        num_ended = sum(isinstance(event, ToolCallEnd) for event in found.events)
        assert found.parts[2][:num_ended] == list(transcript.calls[:num_ended])
        names = [name for name, _ in found.parts[2]]
        assert names == [name for name, _ in transcript.calls][: len(names)]
