"""Kept responses over two HTTP processes: each finds what the other has, until that one is killed."""

from __future__ import annotations

from typing import Any

import openai
import psutil
import pytest
from served import Served

ASKED = "What is 12 plus 30?"
ENDLESS = {"ignore_eos": True}


def follow_from_every_process(group: Served) -> None:
    """A response that runs in one process is followed, without loss, and ended through either."""
    asked: dict[str, Any] = {"model": "pocket", "input": "Tell me a story.", "temperature": 1}
    more: dict[str, Any] = {"max_output_tokens": 1500, "background": True, "stream": True}
    with group.client() as client, client.responses.create(**asked, **more, extra_body=ENDLESS) as stream:
        begun = [next(stream) for _ in range(5)]
        response_id = begun[0].response.id  # type: ignore[union-attr]
        others: list[list[Any]] = []
        for _ in range(6):
            with group.client() as other:
                follower = other.responses.retrieve(response_id, stream=True, starting_after=4)
                others.append([next(follower) for _ in range(20)])
                follower.close()
        with group.client() as other:
            assert other.responses.cancel(response_id).status == "cancelled"
            other.responses.delete(response_id)  # at once: it has ended
        own = begun + list(stream)
    assert own[-1].response.status == "cancelled"  # type: ignore[union-attr]
    assert all(one == own[5:25] for one in others)


def cancel_at_any_time(group: Served) -> None:
    """What cancel answers is final, however far the response has come."""
    asked: dict[str, Any] = {"model": "pocket", "input": "Tell me a story.", "background": True}
    asked |= {"max_output_tokens": 1500, "extra_body": ENDLESS}
    with group.client() as client:
        for num_events in range(10):
            if num_events:
                with client.responses.create(**asked, stream=True) as stream:
                    begun = [next(stream) for _ in range(num_events)]
                response_id = begun[0].response.id  # type: ignore[union-attr]
            else:
                response_id = client.responses.create(**asked).id
            cancelled = client.responses.cancel(response_id)
            assert cancelled.status == "cancelled"
            assert client.responses.retrieve(response_id) == cancelled
            client.responses.delete(response_id)


def test_every_process_continues_a_response_until_the_one_that_has_it_is_killed(
    shared_server: Served,
) -> None:
    group = Served("--attach", f"serve-{shared_server.port}", "--api-server-count", "2")
    try:
        children = sorted(psutil.Process(group.process.pid).children(), key=lambda child: child.pid)
        http = [child for child in children if child.cmdline()[-1] == "http"]
        assert len(http) == 2
        asked: dict[str, Any] = {"model": "pocket", "input": ASKED, "temperature": 0}
        with group.client() as client, client.responses.stream(**asked) as stream:
            events = [event.type for event in stream]
            first = stream.get_final_response()
        assert events[-1] == "response.completed"
        for _ in range(8):  # connections, which the kernel gives to one process or the other
            with group.client() as client:
                assert client.responses.retrieve(first.id).output_text == first.output_text
                more = client.responses.create(
                    model="pocket", input="And 1 more?", previous_response_id=first.id, temperature=0
                )
                assert more.usage is not None
                assert first.usage is not None
                assert more.usage.input_tokens > first.usage.total_tokens
        follow_from_every_process(group)
        cancel_at_any_time(group)
        victim = http[int(first.id[-2:], 16)]
        victim.kill()
        victim.wait(10)
        client = openai.OpenAI(base_url=f"{group.url}/v1", api_key="none", max_retries=8)
        why = "in the memory of the process that made it"
        with client, pytest.raises(openai.NotFoundError, match=why):
            client.responses.retrieve(first.id)
    finally:
        assert group.stop() == 0
