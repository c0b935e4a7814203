"""Random loads of tenants with dear rows, under every policy: the engine never sleeps while one can run."""

from __future__ import annotations

import random

import pytest
from fakes import FakeEngine, make_config, make_request
from quire.core.scheduling.tenant import ClientShare
from quire.ipc.protocol.messages import EngineCoreRequest
from quire.ipc.protocol.step import ModelRunnerOutput
from quire.ipc.spec.config import SchedulerConfig

CLIENTS = (b"one", b"two", b"three")
WORK_US = (0, 0, 50, 1000, 10_000, 30_000, 250_000)
MAX_TURNS = 60_000


class Load:
    """What a seed says."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        budget = draw.choice((1, 4, 16, 64, 256))
        config = SchedulerConfig(
            policy=draw.choice(("fcfs", "fair", "fair", "priority")),
            max_num_seqs=draw.choice((1, 2, 4, 16)),
            max_num_batched_tokens=budget,
            enable_chunked_prefill=budget < 200 or draw.random() < 0.7,
            run_ahead=draw.choice((1, 2)),
            num_stages=draw.choice((1, 1, 1, 2, 3)),
            long_prefill_token_threshold=draw.choice((0, 1, 9)),
        )
        num_blocks = draw.choice((20, 40, 400))
        config = make_config(max_model_len=200, block_size=16, scheduler=config)
        self.engine = FakeEngine(config, num_blocks=num_blocks, verify=False)
        self.engine.core.set_client(b"one", ClientShare(2.5))
        self.engine.worker.pass_s = draw.choice((1e-4, 1e-3, 5e-2))
        self.work_us = self.engine.worker.work_us
        self.grammars = [f"start: /{i}/" for i in range(draw.choice((1, 3, 40)))]

    def play(self, num_turns: int) -> None:
        for turn in range(num_turns):
            if turn < num_turns * 3 / 4 and self.draw.random() < 0.3:
                for _ in range(self.draw.choice((1, 1, 1, 5, 20))):
                    self.engine.add(self.draw_request(), self.draw.choice(CLIENTS))
            names = list(self.work_us)
            if names and self.draw.random() < 0.1:
                self.work_us[self.draw.choice(names)] = self.draw.choice(WORK_US)
            if names and self.draw.random() < 0.05:
                self.engine.core.abort_requests(self.draw.choice(CLIENTS), [self.draw.choice(names)])
                self.engine.deliver()
            if self.draw.random() < 0.01:
                self.engine.lose_worker()
            self.turn()
        for _ in range(MAX_TURNS):
            if not self.engine.core.num_unfinished:
                break
            self.turn()
        assert self.engine.core.num_unfinished == 0
        assert self.engine.core.check_integrity() == []

    def draw_request(self) -> EngineCoreRequest:
        draw, name = self.draw, f"r{len(self.work_us)}"
        grammar = "" if draw.random() < 0.4 else draw.choice((*self.grammars, f"start: /{name}/"))
        self.work_us[name] = draw.choice(WORK_US if grammar else (0, 0, 0, 3000))
        return make_request(
            name,
            [draw.randint(1, 3) for _ in range(draw.choice((1, 2, 17, 33, 100, 150)))],
            grammar=grammar,
            max_tokens=draw.choice((1, 2, 5, 40)),
            priority=draw.randint(0, 2),
        )

    def turn(self) -> None:
        """Launch what may be; take a step's result. Fails if requests wait and nothing would ever happen."""
        engine = self.engine
        while engine.launch() is not None:
            pass
        if not engine.executor.pending:
            due_at = engine.core.next_schedule_at()
            if due_at is None:
                assert engine.core.num_unfinished == 0, "it sleeps though requests wait"
                return
            engine.clock.advance(max(1e-4, due_at - engine.clock.now))
            return
        answer = engine.executor.collect()
        assert isinstance(answer, ModelRunnerOutput)
        engine.clock.advance(answer.execute_s)
        engine.core.update(answer)
        engine.deliver()


@pytest.mark.parametrize(
    ("seeds", "num_turns"),
    [(range(6, 10), 120), pytest.param(range(1000, 1500), 400, marks=pytest.mark.slow)],
)
def test_random_loads_end_and_no_step_is_missed(seeds: range, num_turns: int) -> None:
    for seed in seeds:
        Load(seed).play(num_turns)
