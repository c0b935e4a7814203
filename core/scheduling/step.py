"""Step: what the scheduler puts together for the worker, kept until the worker's answer is in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...ipc.protocol.step import NewRequestData
from ..kv.state_slots import Snapshot
from .request import Request


@dataclass(slots=True, eq=False)
class Step:
    """One step. Parallel lists: `rows`, `num_tokens` and `requests`; `sampled` and `sampled_rows`;
    `pooled` and `pooled_rows`.
    """

    step_id: int
    token_budget: int  # what is left of it
    long_prefill_budget: int  # likewise
    rows: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    sampled: list[Request] = field(default_factory=list)  # those that sample, in the order of `rows`
    sampled_rows: list[int] = field(default_factory=list)
    new_requests: list[NewRequestData] = field(default_factory=list)
    new_bytes: int = 0  # the price of those
    new_block_ids: list[tuple[int, int, list[int]]] = field(default_factory=list)
    block_copies: list[tuple[int, int, int]] = field(default_factory=list)
    indexed_blocks: list[int] = field(default_factory=list)  # findable, though only this step fills them
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    state_saves: list[tuple[int, int, int]] = field(default_factory=list)
    saved_states: list[Snapshot] = field(default_factory=list)  # likewise
    # row -> the first token that is computed of the prompt, of requests that are answered by position:
    # those with prompt_logprobs, and of token-wise tasks
    prompt_starts: dict[int, int] = field(default_factory=dict)
    pooled: list[Request] = field(default_factory=list)  # whose prompt is complete, in the order of `rows`
    pooled_rows: list[int] = field(default_factory=list)
    answer_bytes: int = 0  # of the token-wise answers to what it computes
    work_prices: dict[Request, int] = field(
        default_factory=dict
    )  # us, of the dear rows in it (work_turns.py)
    held: list[Request] = field(default_factory=list)  # dear ones that could have decoded in it
    has_begun_dear: bool = False  # one of the dear rows is new
    launched_at: float = 0.0  # monotonic clock
    duration_s: float = 0.0  # once its result is there
    # (tokens of its request before it, tokens; more where each costs more) of each part of a prompt
    chunks: list[tuple[int, int]] = field(default_factory=list)
    prompt_s: float | None = None  # what is left for long prompts to take; None: anything
    policy_data: Any = None  # what the scheduling policy notes of it; nobody else's business

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.num_tokens)
