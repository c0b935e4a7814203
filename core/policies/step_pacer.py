"""StepPacer: keeps steps short while newcomers come, so that their first tokens come about as soon as alone.

A newcomer is a request with a prompt to compute whose tenant runs few requests beside another tenant that
runs many, or whose prompts fill steps, and that was served no less (a tenant "in excess"). A long step would
delay it, and so would a next step that was formed before it came. So, until WINDOW_S after the last newcomer,
tenants in excess get only so many tokens that a step takes about as long as a newcomer's first step does, as
learned from earlier steps. Until PROMPTS_WINDOW_S after it prompts, whoever's, make no step longer than
MAX_PASSES of decodes: a newcomer waits for the end of the running step, and longer ones would hardly compute
more. So long, too, the step after one that is limited in either way is formed SUBMIT_MARGIN_S before that is
expected to end. Where nothing decodes, as in an encoder, PROMPT_STEP_S stands for both times.

At all times the prompts of a tenant that was served more may lengthen a step for which others' decodes wait
by at most what the decodes take, or BESIDE_S.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import ceil, inf, log2

from ..scheduling.step import Step
from ..scheduling.step_times import StepTimes
from .fair_accounts import Account

WINDOW_S = 10.0  # how long the next newcomer of a tenant is expected
PROMPTS_WINDOW_S = 600.0  # likewise, where that costs others a tenth of their rate at most
SUBMIT_MARGIN_S = 0.002  # covers a poll's rounding (1 ms), scheduling and the way to the worker
EXCESS = 2.0  # the least ratio of shares between a tenant in excess and the newcomer's
PROMPT_TOKENS_A_ROW = 64  # of a prompt in a step, which weigh as much as a row: most of a step is many rows
MAX_TURNS = 8  # limited steps until each decode of tenants in excess had its turn; twice that beside prompts
# How long a step may take, in first steps of newcomers. Where a step's fixed cost dominates, a smaller factor
# would be within its noise, and would cut the tokens to a fraction for nothing.
STRETCH = 1.25
NUM_SEEN = 8  # the last steps of a size, from which the next one's time is estimated
MAX_PASSES = 10.0  # of decodes, as which a step with prompts may take: a tenth goes to the weights
PROMPT_STEP_S = 0.03  # for a step with prompts where nothing decodes, so that no pass is known
BESIDE_S = 0.005  # for a tenant's prompts, however short steps are without them
_MIN_BESIDE = 16  # prompt tokens, whatever they take
_MAX_CHANGE = 2.0  # bounds the change that one step suggests,
_SMOOTHING = 0.25  # of which this part is made


@dataclass(slots=True, eq=False)
class PacedStep:
    """`policy_data` of a step."""

    is_exclusive: bool = False  # it has a newcomer's prompt, and no decodes of tenants in excess
    limited: frozenset[Account] = frozenset()  # the tenants in excess
    limited_budget: int = 0  # tokens left for their prompts
    num_limited_tokens: int = 0  # their tokens in the step
    prompt_budget: int | None = None  # tokens left for all prompts; None: as many as fit
    decoding: frozenset[Account] = frozenset()  # the tenants whose decodes wait for the step
    least_decoding: float = 0.0  # their least counter
    num_prompt_tokens: dict[Account, int] = field(default_factory=dict)


class StepPacer:
    """Learns from steps' durations; the policy says what each step holds."""

    def __init__(self, clock: Callable[[], float], times: StepTimes) -> None:
        """`times` is told of each step before this."""
        self._clock = clock
        self._times = times
        self._newcomer: Account | None = None  # the last newcomer's tenant
        self._newcomer_tokens = 0  # of its prompt
        self._newcomer_at = -inf
        self._limit: float | None = None  # of the tokens of tenants in excess in a step
        self._first_steps: deque[float] = deque(maxlen=NUM_SEEN)  # durations of exclusive steps
        self._durations: dict[tuple[int, int], deque[float]] = {}  # by size of step; some 200 at most
        self._has_decoded = False
        self._lone_token_s: float | None = None  # a step of prompts over its tokens, where nothing decodes

    # -- who is in excess

    def note_newcomer(self, tenant: Account, num_prompt_tokens: int) -> None:
        """A prompt of this tenant is about to be computed beside tenants in excess."""
        self._newcomer, self._newcomer_tokens = tenant, num_prompt_tokens
        self._newcomer_at = self._clock()

    def find_in_excess(self, tenants: Iterable[Account]) -> frozenset[Account] | None:
        """Those that give way to the last newcomer, None if it came more than WINDOW_S ago."""
        if self._newcomer is not None and self._clock() - self._newcomer_at > WINDOW_S:
            self._newcomer = None
        newcomer = self._newcomer
        if newcomer is None:
            return None
        num_tokens = self._newcomer_tokens
        return frozenset(tenant for tenant in tenants if is_in_excess(tenant, newcomer, num_tokens))

    # -- what a step may hold

    def limit_tokens(self, num_decodes: int) -> int | None:
        """The most tokens that tenants in excess, with `num_decodes` decodes, get in a step; None: any."""
        if self._limit is None:
            return None
        return max(1, round(self._limit), ceil(num_decodes / MAX_TURNS))

    def limit_prompts(self) -> int | None:
        """The most tokens of prompts in a step that a newcomer may have to wait for; None: any."""
        if self._clock() - self._newcomer_at > PROMPTS_WINDOW_S:
            return None
        if not self._has_decoded and self._lone_token_s is not None:
            return max(_MIN_BESIDE, round(self._find_prompt_step_s() / self._lone_token_s))
        token_s, pass_s = self._times.find_token_s(0), self._times.pass_s
        if token_s is None or pass_s is None:
            return None
        return max(_MIN_BESIDE, round((MAX_PASSES - 1) * pass_s / token_s))

    def limit_beside(self, most: int) -> int:
        """The most tokens of a tenant's prompts in a step for which others' decodes wait; at most `most`."""
        token_s, pass_s = self._times.find_token_s(0), self._times.pass_s
        if token_s is None or pass_s is None:
            return most
        return min(most, max(_MIN_BESIDE, round(max(BESIDE_S, pass_s) / token_s)))

    def _find_prompt_step_s(self) -> float:
        """How long a step may take where nothing decodes."""
        return max(PROMPT_STEP_S, 2 * _expect(self._first_steps) if self._first_steps else 0.0)

    def find_submit_time(self, running: Step) -> float | None:
        """When to form the step after `running`; None: at once."""
        seen = self._durations.get(_size_of(running))
        return None if seen is None else self._times.find_begin(running) + _expect(seen) - SUBMIT_MARGIN_S

    # -- what steps were

    def note_end(self, step: Step) -> None:
        """The result of the oldest step has come."""
        paced: PacedStep = step.policy_data
        duration_s = step.duration_s
        seen = self._durations.setdefault(_size_of(step), deque(maxlen=NUM_SEEN))
        seen.append(duration_s)
        self._note_pace(step, duration_s)
        if paced.is_exclusive:
            self._first_steps.append(duration_s)
        elif paced.num_limited_tokens and self._first_steps:
            aim_s = STRETCH * _expect(self._first_steps)
            if not self._has_decoded:
                aim_s = max(aim_s, PROMPT_STEP_S)
            self._adapt_limit(paced.num_limited_tokens, aim_s / _expect(seen))

    def _note_pace(self, step: Step, duration_s: float) -> None:
        num_prompt_tokens = step.num_scheduled_tokens - len(step.sampled)
        self._has_decoded |= bool(step.sampled)
        if num_prompt_tokens > 0 and not self._has_decoded:
            now = duration_s / num_prompt_tokens
            before = self._lone_token_s or now
            # Where it is more the step had few tokens, and mostly shows what a step without any takes.
            self._lone_token_s = before + (now - before) * (_SMOOTHING if now < before else _SMOOTHING / 16)

    def _adapt_limit(self, num_tokens: int, change: float) -> None:
        """Aim at steps that take `change` times as long as one with `num_tokens` limited tokens did."""
        limit = num_tokens * min(_MAX_CHANGE, max(1 / _MAX_CHANGE, change))
        if self._limit is None:
            self._limit = limit if change < 1 else None
        elif change < 1 or num_tokens >= 0.9 * self._limit:  # else the limit was not what kept it short
            self._limit += _SMOOTHING * (limit - self._limit)


def is_in_excess(tenant: Account, newcomer: Account, num_prompt_tokens: int) -> bool:
    """Whether a tenant gives way to a prompt of so many tokens: its share is EXCESS times as great as the
    newcomer's with that prompt, and it was served no less.

    Without the second condition a tenant of few long prompts would stop the streams of all with more rows.
    """
    load = 1 + num_prompt_tokens / PROMPT_TOKENS_A_ROW
    has_more = tenant.share > EXCESS * (newcomer.share + load / newcomer.weight)
    return has_more and tenant.counter >= newcomer.counter


def _size_of(step: Step) -> tuple[int, int]:
    """A class of steps that take about as long: tokens computed and sampled, each within a factor of 1.2."""
    return round(2 * log2(step.num_scheduled_tokens)), round(2 * log2(1 + len(step.sampled)))


def _expect(seen: deque[float]) -> float:
    """The lower third of the durations. Rather low than high: a step that is formed too late leaves the
    worker idle, and a busy machine sometimes adds much. But not the lowest: of two results that come late
    and together, the second seems to have taken no time.
    """
    return sorted(seen)[len(seen) // 3]
