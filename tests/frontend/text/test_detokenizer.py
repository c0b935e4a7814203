"""Text grows with tokens: whole characters only, right spaces, and stop strings wherever tokens end."""

from __future__ import annotations

from typing import Any

import pytest
from quire.frontend.text.detokenizer import Detokenizer
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.params.sampling_params import RequestOutputKind, SamplingParams

TEXT = "the quick 😀 fox, naïve café 你好 over the lazy dog"


@pytest.fixture(params=["byte_level", "metaspace"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    """What a reader sees after each token, and at the end."""
    seen: list[str] = []
    for token_id in ids:
        detokenizer.add([token_id])
        if detokenizer.stop_string is not None:
            break
        seen.append(detokenizer.take_delta(False))
    detokenizer.finish()
    seen.append(detokenizer.take_delta(True))
    return seen


def make(tokenizer: Tokenizer, prompt: str = "", **params: Any) -> Detokenizer:
    return Detokenizer(tokenizer, tokenizer.encode(prompt) if prompt else [], SamplingParams(**params))


def test_half_a_character_at_the_prompts_end_is_completed_by_the_output(tokenizer: Tokenizer):
    ids = tokenizer.encode("fox 😀 the", add_special_tokens=False)
    expected = tokenizer.decode(ids, True)
    for cut in range(1, len(ids)):
        text = "".join(stream(Detokenizer(tokenizer, ids[:cut], SamplingParams()), ids[cut:]))
        whole_characters = tokenizer.decode(ids[:cut], True).rstrip("\N{REPLACEMENT CHARACTER}")
        assert text == expected[len(whole_characters) :]
        at_once = Detokenizer(tokenizer, ids[:cut], SamplingParams())
        at_once.add_all(ids[cut:])
        assert at_once.text == text


def test_an_unfinished_character_is_shown_at_the_end(byte_level: Tokenizer):
    ids = byte_level.encode("a😀")[:-1]
    pieces = stream(make(byte_level), ids)
    assert pieces[0] == "a"
    assert pieces[1:-1] == [""] * (len(pieces) - 2)
    assert pieces[-1] == "\N{REPLACEMENT CHARACTER}"


def test_spaces_between_special_tokens_can_be_left_out():
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    backend = Backend(models.WordLevel({"[A]": 0, "[B]": 1, "word": 2}, unk_token="[A]"))
    backend.add_special_tokens(["[A]", "[B]"])
    tokenizer = Tokenizer(backend, {}, None)  # without a decoder, tokens are joined by spaces
    ids = [2, 0, 1, 0, 2]
    spaced = "".join(stream(make(tokenizer, skip_special_tokens=False), ids))
    tight = make(tokenizer, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert spaced == "word [A] [B] [A] word"
    assert "".join(stream(tight, ids)) == "word [A][B][A] word"
    at_once = make(tokenizer, skip_special_tokens=False, spaces_between_special_tokens=False)
    at_once.add_all(ids)
    assert at_once.text == "word [A][B][A] word"


@pytest.mark.parametrize("group", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("stop", "expected", "found"),
    [
        ("fox", "the quick 😀 ", "fox"),
        ("k 😀 f", "the quic", "k 😀 f"),
        (["lazy", "naïve"], "the quick 😀 fox, ", "naïve"),
        (["quick 😀 fox", "ck"], "the qui", "ck"),
        (["x, n", "x"], "the quick 😀 fo", "x"),
        (["x", "fo"], "the quick 😀 ", "fo"),
        (["x", "fox"], "the quick 😀 ", "fox"),
        ("t", "", "t"),
        ("absent", TEXT, None),
        ("dog!", TEXT, None),
    ],
    ids=str,
)
def test_stop_strings_are_found_across_tokens_however_they_arrive(
    byte_level: Tokenizer, group: int, stop: Any, expected: str, found: str | None
):
    ids = byte_level.encode(TEXT)
    assert byte_level.encode(" fox") == [byte_level.backend.token_to_id("Ġfox")]  # several stops in one token
    detokenizer = make(byte_level, stop=stop)
    shown = ""
    num_taken = 0
    for start in range(0, len(ids), group):
        num_taken += detokenizer.add(ids[start : start + group])
        if detokenizer.stop_string is not None:
            break
        shown += detokenizer.take_delta(False)
        assert expected.startswith(shown), "text was shown that a stop string then cut off"
    detokenizer.finish()
    shown += detokenizer.take_delta(True)
    assert (shown, detokenizer.text, detokenizer.stop_string) == (expected, expected, found)
    if found is not None:
        assert found in byte_level.decode(ids[:num_taken])
        assert found not in byte_level.decode(ids[: num_taken - 1])


def test_the_stop_string_can_stay_in_the_text(byte_level: Tokenizer):
    detokenizer = make(byte_level, stop=["fox"], include_stop_str_in_output=True)
    assert "".join(stream(detokenizer, byte_level.encode(TEXT))) == "the quick 😀 fox"


def test_stop_strings_are_not_looked_for_before_min_tokens(byte_level: Tokenizer):
    ids = byte_level.encode("fox fox fox")
    first = make(byte_level, stop="fox", min_tokens=0)
    later = make(byte_level, stop="fox", min_tokens=len(byte_level.encode("fox")))
    assert "".join(stream(first, ids)) == ""
    assert "".join(stream(later, ids)) == "fox "


def test_byte_tokens_that_turn_out_invalid_do_not_end_the_stream(metaspace: Tokenizer):
    vocab = metaspace.backend.get_vocab()
    euro = [vocab[f"<0x{byte:02X}>"] for byte in (0xE2, 0x82, 0xAC)]
    fox = metaspace.encode("fox", add_special_tokens=False)
    pieces = stream(make(metaspace), [*euro, euro[0], *fox])
    assert pieces[2] == "€"
    assert "".join(pieces).endswith("fox")


def test_no_run_of_tokens_makes_a_character_wait_or_get_lost(byte_level: Tokenizer):
    char = byte_level.encode("漢", add_special_tokens=False)
    for lead, expected in (([2] * 15, ""), ([2] * 1000, ""), (char[:1] * 15, "\ufffd" * 15)):
        detokenizer = make(byte_level)
        for token_id in [*lead, *char, *byte_level.encode(" fox")]:
            detokenizer.add([token_id])
            assert len(detokenizer._pending) < 4
        detokenizer.finish()
        assert detokenizer.text == expected + "漢 fox"


def test_all_at_once_is_possible_only_when_nobody_waits_for_text():
    final = RequestOutputKind.FINAL_ONLY
    assert Detokenizer.can_wait(SamplingParams(output_kind=final))
    assert not Detokenizer.can_wait(SamplingParams(output_kind=final, stop="x"))
    assert not Detokenizer.can_wait(SamplingParams(output_kind=RequestOutputKind.DELTA))
