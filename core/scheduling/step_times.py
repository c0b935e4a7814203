"""StepTimes: what steps take, learned from those that were, so that long prompts fit beside streams.

A step takes a pass of its decodes and more for each token of a prompt, the more the longer the context is
that the token attends to. So a token's time is learned for classes of contexts. One step changes an estimate
by a quarter at most, also one that the machine held up. It reads no clock but the one that it was given, so a
replay decides alike; tokens do not depend on what it decides.
"""

from __future__ import annotations

from collections.abc import Callable

from .step import Step

MIN_GAP_S = 0.09  # which nobody minds: 100 ms with a tenth for what comes late
GAP_PASSES = 2.0  # what a step may take by default, in passes of decodes, where that is more
MIN_CHUNK = 16  # prompt tokens, whatever they take: prompts get on
FIRST_CHUNK = 64  # likewise while nothing is known
_MANY_TOKENS = 256  # of prompts alone, which take longer than the pass with them
_CONTEXT_BITS = 9  # contexts up to 512 tokens are a class, then each doubling
_AIM = 0.95  # of a gap that was asked for, since contexts grow faster than what is known of them
_MAX_CHANGE = 1.5  # bounds the change that one step suggests,
_SMOOTHING = 0.5  # of which this part is made
_LOOK_STEPS = 32  # at least so many from one step that is kept free of long prompts to the next,
_FIRST_LOOK_STEPS = 3  # so many until one has shown a pass, or the same as before: short prompts may be in it
_MIN_S = 1e-4  # of a step: of two results that come together the second seems to have taken no time
_MIN_TOKEN_S = 1e-9
# Of a pass, for a token: a pass that was held up must not make tokens seem to take nothing, which one step
# after the other would have to put right.
_LEAST_SHARE = 1 / 512


class StepTimes:
    """How long steps take: `note_launch` and `note_end` tell of each, in order."""

    def __init__(self, clock: Callable[[], float], max_gap_s: float | None, num_stages: int) -> None:
        """`max_gap_s`: between two tokens of a stream beside a long prompt; None: by the passes, 0: any."""
        self._clock = clock
        self._max_gap_s = max_gap_s
        self._num_stages = num_stages
        self._ended_at = clock()  # when the last result came
        self.pass_s: float | None = None  # a step of decodes only
        self._pass_rows = 0  # their number in the last such step
        self._token_s: dict[int, float] = {}  # by class of context
        self._num_until_look = 0
        self._pass_age = 0  # steps beside prompts since a pass was seen: it changes with contexts and load

    # -- what a step may hold

    def find_prompt_s(self, num_decodes: int, num_tokens: int) -> float | None:
        """How long the long prompts of a step may take beside so many decodes; None: as long as they do.

        0 now and then: the step is to show what its decodes take alone. `num_tokens`: the most that prompts
        could have.
        """
        if self._max_gap_s == 0:
            return None
        self._num_until_look -= 1
        self._pass_age += 1
        longest_s = self._find_step_s()
        is_known = (
            self.pass_s is not None
            and self._pass_age <= _LOOK_STEPS
            and num_decodes <= 2 * self._pass_rows <= 4 * num_decodes
        )
        if (
            num_decodes
            and not is_known
            and self._num_until_look < 0
            and self._may_take(num_tokens) > longest_s
        ):
            self._num_until_look = _FIRST_LOOK_STEPS if self.pass_s is None else _LOOK_STEPS
            return 0.0
        return max(_MIN_TOKEN_S, longest_s - (self.pass_s or 0.0))

    def count_tokens(self, step: Step, context: int) -> int:
        """How many tokens of a prompt after so many others take what is left of `prompt_s`.

        The first prompt of a step has some at least, unless the step is kept free.
        """
        if not step.prompt_s:
            return 0
        token_s = self.find_token_s(context)
        if token_s is None:
            return max(0, FIRST_CHUNK - sum(num_tokens for _, num_tokens in step.chunks))
        return max(0 if step.chunks else MIN_CHUNK, int(step.prompt_s / token_s))

    def find_token_s(self, context: int) -> float | None:
        """What a token of a prompt after so many others adds to a step; None: nobody knows."""
        return self._find_class(_classify(context))

    def _find_class(self, size: int) -> float | None:
        """Of the nearest class that is known."""
        if not self._token_s:
            return None
        return self._token_s[min(self._token_s, key=lambda known: abs(known - size))]

    def _find_step_s(self) -> float:
        """How long a step may take that decodes, too: a stream's token comes once in `num_stages` steps."""
        if self._max_gap_s is not None:
            return _AIM * self._max_gap_s / self._num_stages
        return max(MIN_GAP_S / self._num_stages, GAP_PASSES * (self.pass_s or 0.0))

    def _may_take(self, num_tokens: int) -> float:
        return num_tokens * max(self._token_s.values(), default=0.0)

    # -- what steps were

    def note_launch(self, step: Step) -> None:
        """A step was formed and goes to the worker."""
        step.launched_at = self._clock()

    def find_begin(self, step: Step) -> float:
        """When the worker began the oldest step in flight: after the step before."""
        return max(step.launched_at, self._ended_at)

    def note_end(self, step: Step) -> None:
        """The result of the oldest step has come."""
        now = self._clock()
        duration_s = step.duration_s = max(_MIN_S, now - self.find_begin(step))
        self._ended_at = now
        if not step.chunks:
            self._note_pass(duration_s, len(step.sampled))
            return
        decodes = len(step.rows) > len(step.chunks)
        num_tokens = sum(count for _, count in step.chunks)
        if num_tokens < (MIN_CHUNK if decodes else _MANY_TOKENS):
            return  # it mostly shows what a step takes without any
        if decodes and self.pass_s is None:
            return  # which part is whose?
        # Where nothing decodes weights are read, too, but that need not take a whole pass.
        least_s = num_tokens * _LEAST_SHARE * (self.pass_s or 0.0) if decodes else duration_s / 2
        self._note_tokens(step, max(least_s, duration_s - (self.pass_s or 0.0)))

    def _note_pass(self, duration_s: float, num_rows: int) -> None:
        before_s = self.pass_s or duration_s
        self.pass_s, self._pass_rows, self._pass_age = _approach(before_s, duration_s), num_rows, 0
        if not before_s / _MAX_CHANGE <= duration_s <= before_s * _MAX_CHANGE:
            self._pass_age, self._num_until_look = _LOOK_STEPS, min(self._num_until_look, _FIRST_LOOK_STEPS)

    def _note_tokens(self, step: Step, prompt_s: float) -> None:
        """All prompt tokens of a step took so long: each class that is in it was off by the same ratio."""
        usual_s = prompt_s / sum(num_tokens for _, num_tokens in step.chunks)
        expected_s = sum(num_tokens * (self.find_token_s(at) or usual_s) for at, num_tokens in step.chunks)
        for size in {_classify(context) for context, _ in step.chunks}:
            token_s = self._find_class(size) or usual_s
            self._token_s[size] = max(_MIN_TOKEN_S, _approach(token_s, token_s * prompt_s / expected_s))


def _classify(context: int) -> int:
    return (context >> _CONTEXT_BITS).bit_length()


def _approach(before: float, now: float) -> float:
    change = min(_MAX_CHANGE * before, max(before / _MAX_CHANGE, now)) - before
    return before + _SMOOTHING * change
