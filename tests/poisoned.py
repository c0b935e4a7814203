"""`python -m poisoned ROLE`: the real engine core and the real worker, which some prompts do harm to.

A step that computes a request whose prompt begins with RAISES raises; with RAISES_IN_OTHERS, in every rank
but the one that answers; with KILLS, it ends its worker by a segmentation fault; with NEVER_ENDS, it does not
end before its worker is given up. With HANGS_AGAIN and KILLS_LATE they do so from the fourth step on since it
has its row. A grammar with the text HANGS never compiles, one with PANICS makes the library panic.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it loads torch, which a fake worker does without
    from quire.worker.steps.model_runner import LaunchedStep

# Token ids that no test begins another prompt with.
RAISES, KILLS, RAISES_IN_OTHERS, NEVER_ENDS, HANGS_AGAIN, KILLS_LATE = 7, 8, 9, 10, 11, 12
_LATE_STEP = 4
HANGS, PANICS = "never compiled", "a panic"


class PanicException(BaseException):
    """As the one of llguidance's Rust, which it does not export."""


def run_core() -> None:
    """The engine core, whose workers are this module too."""
    from quire.core.engine import engine_process
    from quire.core.workers import local_place

    local_place.WORKER_MODULE = "poisoned"
    engine_process.main()


def poison_steps() -> None:
    """Watch what this process's workers are to compute."""
    from quire.ipc.protocol.step import SchedulerOutput
    from quire.ipc.protocol.token_ids import decode_token_ids
    from quire.worker.worker import Worker

    launch = Worker.launch
    harm: dict[int, int] = {}  # row -> the first token of its prompt
    num_steps: dict[int, int] = {}  # of a row

    def launch_poisoned(self: Worker, step: SchedulerOutput) -> LaunchedStep:
        for new in step.new_requests:
            harm[new.row] = decode_token_ids(new.prompt_token_ids)[0]
            num_steps[new.row] = 0
        for row in step.rows:
            num_steps[row] += 1
        firsts = {harm[row] for row in step.rows}
        late = {harm[row] for row in step.rows if num_steps[row] >= _LATE_STEP}
        if KILLS in firsts or KILLS_LATE in late:
            os.kill(os.getpid(), signal.SIGSEGV)
        if NEVER_ENDS in firsts or HANGS_AGAIN in late:
            signal.pause()
        is_other = self._rank != self._config.parallel.speaker
        if RAISES in firsts or (RAISES_IN_OTHERS in firsts and is_other):
            raise RuntimeError("a poisonous prompt")
        return launch(self, step)

    Worker.launch = launch_poisoned


def poison_grammars() -> None:
    """Watch what this process's worker compiles."""
    import llguidance

    make = llguidance.LLMatcher

    def make_poisoned(
        tokenizer: llguidance.LLTokenizer, grammar: str, **options: Any
    ) -> llguidance.LLMatcher:
        if HANGS in grammar:
            threading.Event().wait()
        if PANICS in grammar:
            raise PanicException("called `Option::unwrap()` on a `None` value")
        return make(tokenizer, grammar, **options)

    llguidance.LLMatcher = make_poisoned  # pyright: ignore[reportAttributeAccessIssue]


def run_worker() -> None:
    """The worker, watched."""
    from quire.worker import worker_process

    poison_steps()
    poison_grammars()
    worker_process.main()


if __name__ == "__main__":
    if "engine-core" in sys.argv[1:]:
        run_core()
    else:
        run_worker()
