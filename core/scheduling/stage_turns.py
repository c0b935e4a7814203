"""Whose decodes a step has where the worker has several stages, each of which computes another step.

A request's next step begins at the first stage with the token that the last one has sampled, so requests take
turns: as many groups of about equal size as there are stages, whose steps follow each other. A group's next
step is scheduled before its last one is done, as it is with one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from .request import Request
from .step import Step


def take_turn(
    requests: Sequence[Request], in_flight: Sequence[Step], num_stages: int, max_tokens: int
) -> list[Request]:
    """Those of `requests` whose turn the next step of at most `max_tokens` is, in their order, and all that
    do not decode.

    Nobody's is that is part of the newest steps in flight, one less than there are stages.
    """
    newest = [step.sampled for step in islice(reversed(in_flight), num_stages - 1) if step.sampled]
    busy = set[Request]().union(*newest)
    decodes = [request for request in requests if _decodes(request)]
    ready = [request for request in decodes if request not in busy]
    most = min(-(-len(ready) // (num_stages - len(newest))), -(-len(decodes) // num_stages), max_tokens)
    chosen = set(_choose_longest_waiting(ready, most))
    return [request for request in requests if request in chosen or not _decodes(request)]


def take_next_turn(
    requests: Sequence[Request], num_stages: int, run_ahead: int, max_tokens: int
) -> list[Request]:
    """The decodes of a step that would be empty, though their tokens before are still computed.

    A share rounded down, or those that have begun in one step would stay in fewer groups than there may be.
    """
    decodes = [request for request in requests if _decodes(request)]
    ready = [request for request in decodes if request.num_placeholders < run_ahead]
    chosen = set(_choose_longest_waiting(ready, min(max(1, len(decodes) // num_stages), max_tokens)))
    return [request for request in decodes if request in chosen]


def _decodes(request: Request) -> bool:
    """Whether it lacks one token, and another one is to follow that."""
    known = request.num_tokens + request.num_placeholders
    is_next = known - request.num_computed_tokens == 1 and known < request.max_total_tokens
    return is_next and request.pooling_params is None


def _choose_longest_waiting(requests: Sequence[Request], count: int) -> list[Request]:
    """So many; who has no token on its way waits for a step, who has one only for that."""
    return sorted(requests, key=lambda request: request.num_placeholders)[:count]
