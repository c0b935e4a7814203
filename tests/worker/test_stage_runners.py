"""The first stage of a pipeline, on a toy model: it goes on without the last one's tokens while it can."""

from __future__ import annotations

from collections import deque

import torch
from msgspec.structs import replace
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.spec.model_spec import StageSpec
from quire.worker.steps.rank_runners import EarlierStageRunner
from row_driver import Driver, make_prompt, toy_config
from torch import Tensor


class FakeLink:
    """Keeps what is sent; has tokens when a test puts them there, and lets nobody wait."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.tokens: deque[list[int]] = deque()

    def send(self, data: Tensor) -> None:
        self.sent.append(data.clone())

    def receive(self, data: Tensor) -> None:
        data.copy_(torch.tensor(self.tokens.popleft()))


def make_driver(num_stages: int = 2) -> tuple[Driver, FakeLink]:
    config = toy_config()
    spec = replace(config.model.spec, stage=StageSpec(is_last=False))
    config = replace(
        config,
        model=replace(config.model, spec=spec),
        scheduler=replace(config.scheduler, num_stages=num_stages),
    )
    driver, link = Driver(config), FakeLink()
    runner, device = driver.runner, torch.device("cpu")
    driver.runner = EarlierStageRunner(config, driver.model, runner._kv_caches, device, link, sends=True)
    return driver, link


def test_a_token_is_waited_for_when_its_row_goes_on_and_not_before() -> None:
    driver, link = make_driver()
    driver.enter("a", 0, make_prompt(5))
    driver.enter("b", 1, make_prompt(7, seed=1))
    driver.launch({"a": 5})
    driver.launch({"b": 7})
    assert [len(hidden) for hidden in link.sent] == [5, 7]
    link.tokens.append([33])
    driver.launch({"a": 1})  # b's token is not there yet
    assert driver.model.calls[-1] == ([33], [5])
    link.tokens += [[44], [34]]
    driver.launch({"b": 1, "a": 1})
    assert driver.model.calls[-1] == ([44, 34], [7, 6])


def test_tokens_that_no_row_needs_are_taken_once_the_step_is_surely_done() -> None:
    driver, link = make_driver(num_stages=2)
    for turn in range(12):
        driver.enter(f"r{turn}", turn % 8, make_prompt(3, seed=turn))
        if turn >= driver.config.scheduler.max_steps_in_flight:
            link.tokens.append([7])  # of the oldest step in flight, whose answer let the core send this one
        driver.launch({f"r{turn}": 3})
        driver.free(f"r{turn}")
        assert not link.tokens


def test_a_token_of_a_request_that_has_left_does_not_reach_the_next_one_of_its_row() -> None:
    driver, link = make_driver()
    driver.enter("gone", 0, make_prompt(5))
    driver.launch({"gone": 5})
    driver.free("gone")
    prompt = make_prompt(9, seed=2)
    driver.enter("next", 0, prompt)
    driver.launch({"next": 4})
    link.tokens.append([60])
    driver.enter("other", 1, make_prompt(2))
    driver.launch({"other": 2, "next": 5})
    link.tokens.append([11, 12])
    driver.launch({"next": 1, "other": 1})
    assert driver.model.calls[-2][0] == make_prompt(2) + prompt[4:]
    assert driver.model.calls[-1][0] == [12, 11]


def test_what_only_sampling_reads_does_not_reach_an_earlier_stage() -> None:
    driver, link = make_driver()
    params = SamplingParams(temperature=1.0, seed=1, logprobs=3, prompt_logprobs=2, presence_penalty=1.0)
    driver.enter("a", 0, make_prompt(5), params)
    output = driver.step({"a": 5})
    assert (output.rows, output.logprobs) == ([], [])
    assert len(link.sent) == 1
