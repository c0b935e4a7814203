"""LLM and LLMEngine shared by threads, forked, closed, interrupted at any moment; a fake worker answers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.client import engines
from quire.frontend.llm import LLM
from quire.ipc.errors import EngineDeadError
from quire.ipc.params.sampling_params import SamplingParams

TIMEOUT_S = 20.0


def start(name: str = "quick") -> LLM:
    """An LLM whose core is real and whose worker is not; "paced" takes its time for a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        patch.setattr(engines, "CORE_MODULE", "fake_core")
        return LLM(skip_tokenizer_init=True, served_model_name=name, max_model_len=512)


@pytest.fixture(scope="module")
def paced() -> Iterator[LLM]:
    with start("paced") as llm:
        yield llm


@pytest.fixture
def own() -> Iterator[LLM]:
    with start("paced") as llm:
        yield llm


def params(max_tokens: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True)


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int = 40) -> list[list[int]]:
    outputs = llm.generate(prompts, params(max_tokens), use_tqdm=False)
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


class Beside:
    """Runs `work` in a thread; `result` is what it returned, or raises what it raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._value


def wait_until_running(llm: LLM, count: int = 1) -> None:
    while llm.llm_engine.stats().num_running < count:
        pass


def test_other_calls_are_answered_while_a_thread_generates(paced: LLM):
    alone = generate(paced, [[5, 6], [7]], 100)
    generating = Beside(lambda: generate(paced, [[5, 6], [7]], 100))
    wait_until_running(paced, 2)
    engine = paced.llm_engine
    assert paced.stats().num_running == engine.snapshot().stats.num_running == 2
    assert engine.metrics().stats.num_running == 2
    assert engine.check_integrity() is None
    assert not paced.reset_prefix_cache()  # requests hold it
    assert engine.get_num_unfinished_requests() == 2
    assert generating.is_running
    assert generating.result() == alone


def test_each_of_64_threads_gets_what_it_would_get_alone(paced: LLM):
    prompts = [[[thread + 2, 3 + index] for index in range(4)] for thread in range(64)]
    alone = generate(paced, [one for four in prompts for one in four], 12)
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda four: generate(paced, four, 12), prompts))
    assert [one for four in together for one in four] == alone


def test_threads_that_step_one_engine_lose_no_output_between_them(paced: LLM):
    engine = paced.llm_engine
    for index in range(16):
        engine.add_request(f"s-{index}", [index + 2], params(30 + index))

    def step() -> list[Any]:
        found: list[Any] = []
        while engine.has_unfinished_requests():
            found += [output for output in engine.step() if output.finished]
        return found

    steppers = [Beside(step) for _ in range(4)]
    finished = [output for stepper in steppers for output in stepper.result()]
    assert sorted(output.request_id for output in finished) == sorted(f"s-{index}" for index in range(16))
    assert sorted(len(output.outputs[0].token_ids) for output in finished) == list(range(30, 46))


def test_a_request_can_be_aborted_from_another_thread(paced: LLM):
    generating = Beside(lambda: paced.generate([[5], [6]], params(100), use_tqdm=False))
    wait_until_running(paced, 2)
    ids = [request.request_id for request in paced.llm_engine.snapshot().requests]
    paced.llm_engine.abort_request(ids[0].rpartition("-")[0])
    outputs = generating.result()
    assert sorted(output.outputs[0].finish_reason for output in outputs) == ["abort", "length"]


def test_what_a_callback_raises_is_raised_in_its_own_thread_only(paced: LLM):
    class Bar:
        def __init__(self, **_options: Any) -> None:
            self.thread = threading.get_ident()

        def update(self, _count: int) -> None:
            assert threading.get_ident() == self.thread
            raise SystemError("mine")

        def close(self) -> None: ...

    alone = generate(paced, [[8], [9]], 100)
    good = [Beside(lambda: generate(paced, [[8], [9]], 100)) for _ in range(2)]
    bad = [Beside(lambda: paced.generate([[8], [9]], params(9), use_tqdm=Bar)) for _ in range(2)]
    for one in bad:
        with pytest.raises(SystemError, match="mine"):
            one.result()
    assert [one.result() for one in good] == [alone] * 2
    assert paced.llm_engine.get_num_unfinished_requests() == 0


def test_close_from_another_thread_ends_every_waiting_call_and_all_later_ones(own: LLM):
    waiting = [Beside(lambda: own.generate([[5]], params(500), use_tqdm=False)) for _ in range(3)]
    wait_until_running(own, 3)
    closing = [Beside(own.close) for _ in range(2)]
    for one in waiting:
        with pytest.raises(EngineDeadError, match="closed"):
            one.result()
    for one in closing:
        one.result()
    own.close()
    for call in calls_of(own):
        with pytest.raises(EngineDeadError, match="closed"):
            call()


def calls_of(llm: LLM) -> list[Callable[[], Any]]:
    """Every call that needs the engine."""
    engine = llm.llm_engine
    return [
        lambda: llm.generate([[5]], use_tqdm=False),
        lambda: llm.generate("not even a tokenizer", use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        llm.stats,
        llm.reset_prefix_cache,
        lambda: engine.add_request("x", [5]),
        engine.step,
        lambda: engine.abort_request("x"),
        engine.snapshot,
        engine.metrics,
        engine.check_integrity,
    ]


def interrupt_after(num_tokens: int, llm: LLM) -> Beside:
    """Ctrl-C in the main thread once the engine has generated so many tokens more."""
    goal = llm.stats().generation_tokens_total + num_tokens

    def interrupt() -> None:
        while llm.stats().generation_tokens_total < goal:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    return Beside(interrupt)


def test_ctrl_c_ends_the_main_threads_requests_and_nobody_elses(paced: LLM):
    alone = generate(paced, [[5], [6]], 100)
    beside = [Beside(lambda: generate(paced, [[5], [6]], 100)) for _ in range(2)]
    wait_until_running(paced, 4)
    interrupting = interrupt_after(40, paced)
    with pytest.raises(KeyboardInterrupt):
        paced.generate([[7]] * 8, params(500), use_tqdm=False)
    interrupting.result()
    assert [one.result() for one in beside] == [alone] * 2
    assert paced.llm_engine.get_num_unfinished_requests() == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on, with threads
def test_a_fork_is_told_so_by_every_call_and_the_parent_goes_on(paced: LLM):
    alone = generate(paced, [[5], [6]], 100)
    generating = Beside(lambda: generate(paced, [[5], [6]], 100))  # may be in its turn as the fork begins
    wait_until_running(paced, 2)
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            os._exit(count_those_that_do_not_say_fork(paced))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert generating.result() == alone
    assert paced.stats().num_running == 0


def count_those_that_do_not_say_fork(llm: LLM) -> int:
    signal.alarm(10)  # rather than hang
    num_wrong = 0
    for call in calls_of(llm):
        try:
            call()
            num_wrong += 1
        except EngineDeadError as error:
            num_wrong += "fork" not in str(error)
        except BaseException:
            num_wrong += 1
    llm.close()  # leaves the parent's engine alone
    del llm
    return num_wrong
