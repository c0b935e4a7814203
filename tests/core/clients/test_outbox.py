"""Outbox: what a slow reader's outputs merge into is a message that can be sent."""

from __future__ import annotations

import msgspec
import pytest
from quire.core.clients import clients
from quire.core.clients.clients import Outbox
from quire.ipc.protocol.messages import EngineCoreOutput, EngineCoreOutputs, LogprobsBlock

BLOCK = LogprobsBlock(1, 4, bytes(16), bytes(16), bytes(4))


def test_outputs_with_logprobs_merge_up_to_a_size_and_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_MERGED_BYTES", 100)
    waiting, sent = Outbox(), list[EngineCoreOutputs]()
    for place in range(7):
        waiting.add_outputs([EngineCoreOutput("a", place, [place], logprobs=BLOCK)])
        waiting.add_outputs([EngineCoreOutput("b", place, [place])])

    def send(message: msgspec.Struct) -> bool:
        assert isinstance(message, EngineCoreOutputs)
        sent.append(message)
        return len(sent) != 2

    assert not waiting.flush(send, "epoch")
    assert waiting.num_unsent == 4
    sent.pop()
    assert waiting.flush(lambda message: send(message) or True, "epoch")
    assert not waiting
    sizes = [len(one.logprobs.logprobs) for message in sent for one in message.outputs if one.logprobs]
    assert sizes == [48, 48, 16]
    for name in "ab":
        merged = [one for message in sent for one in message.outputs if one.request_id == name]
        assert [token for one in merged for token in one.new_token_ids] == list(range(7))
