"""LLM and LLMEngine over an engine that answers with scripted tokens."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from frontend_fakes import FakeClient, prompt_ids, use_client
from quire.frontend import engine_start
from quire.frontend.client.loop_thread import LoopThread
from quire.frontend.llm import LLM
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.options.engine_args import EngineArgs
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.errors import ConfigError, EngineDeadError, InputError, ModelError, PromptError
from quire.ipc.params.request_options import RequestOptions
from quire.ipc.params.sampling_params import RequestOutputKind, SamplingParams
from quire.ipc.protocol.messages import EngineCoreOutput, EngineCoreRequest


def countdown(request: EngineCoreRequest) -> list[int]:
    """Prompt [..., k] generates k, k-1, ..., 3 and then end-of-sequence; ends after k-2 tokens."""
    return list(range(prompt_ids(request)[-1], 1, -1))


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(countdown)


@pytest.fixture
def llm(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> LLM:
    use_client(monkeypatch, client)
    return LLM()


def test_outputs_come_in_the_prompts_order_however_they_end(llm: LLM):
    outputs = llm.generate([[9], [4], [6]], SamplingParams(max_tokens=100), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[9], [4], [6]]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 3, 5]
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)


@pytest.mark.parametrize(
    ("prompts", "count"),
    [("hi", 1), (["hi", "you"], 2), ([5, 6], 1), ([[5], [6]], 2), ([], 0), ({"prompt": "hi"}, 1),
     (["hi", [5], {"prompt_token_ids": [6]}], 3)],
    ids=str,
)  # fmt: skip
def test_one_prompt_or_many_of_any_kind_are_told_apart(llm: LLM, prompts: Any, count: int):
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    assert len(llm.generate(prompts, params, use_tqdm=False)) == count


def test_with_a_seed_of_the_llm_its_requests_have_the_same_ones_in_every_run(monkeypatch: pytest.MonkeyPatch):
    def collect_seeds(make_llm: Callable[[], LLM]) -> list[int | None]:
        """What a few requests without a seed are sent with."""
        client = FakeClient(countdown)
        use_client(monkeypatch, client)
        with make_llm() as llm:
            llm.generate([[9], [4]], use_tqdm=False)
            llm.chat([{"role": "user", "content": "the fox"}], SamplingParams(max_tokens=1), use_tqdm=False)
        return [request.sampling_params.seed for request in client.engine.added]

    first = collect_seeds(lambda: LLM(seed=5))
    assert len(set(first)) == 3
    assert collect_seeds(lambda: LLM.from_engine_args(EngineArgs(seed=5))) == first
    assert collect_seeds(LLM) != first


def test_sampling_params_may_be_one_a_prompt(llm: LLM):
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)]
    outputs = llm.generate([[9], [9]], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3]
    with pytest.raises(InputError, match="sampling_params='2 of them'"):
        llm.generate([[9]], params, use_tqdm=False)


def test_what_is_enqueued_is_waited_for_once_in_order(llm: LLM):
    params = SamplingParams(max_tokens=100)
    first = llm.enqueue([[9], [4]], params)
    (second,) = llm.enqueue([30], params)
    assert len({*first, second}) == 3
    assert [len(one.outputs[0].token_ids) for one in llm.generate([[6]], params, use_tqdm=False)] == [5]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == [*first, second]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 3, 29]
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_ctrl_c_while_enqueued_requests_are_waited_for_ends_them(llm: LLM, client: FakeClient):
    client.is_paused = True
    llm.enqueue([[60], [50]], SamplingParams(max_tokens=100))
    llm.enqueue([[40]], SamplingParams(max_tokens=100))
    client.interrupt_after = 2
    with pytest.raises(KeyboardInterrupt):
        llm.wait_for_completion(use_tqdm=lambda **_: setattr(client, "is_paused", False))
    assert sorted(client.engine.aborted) == sorted(request.request_id for request in client.engine.added)
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_each_prompt_is_cut_as_its_own_params_say(llm: LLM):
    params = [
        SamplingParams(truncate_prompt_tokens=2),
        SamplingParams(),
        SamplingParams(truncate_prompt_tokens=1),
    ]
    outputs = llm.generate([[3, 4, 5], [3, 4, 5], "the fox"], params, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    kept = [output.prompt_token_ids for output in outputs]
    assert kept == [[4, 5], [3, 4, 5], tokenizer.encode("the fox")[-1:]]
    assert outputs[2].prompt == "the fox"
    messages = [{"role": "user", "content": "word " * 9}]
    (output,) = llm.chat(messages, SamplingParams(truncate_prompt_tokens=3), use_tqdm=False)
    assert len(output.prompt_token_ids) == 3


def test_priorities_reach_the_engine(llm: LLM, client: FakeClient):
    llm.generate([[9], [8]], SamplingParams(max_tokens=1), use_tqdm=False, priority=[5, -1])
    assert [request.options.priority for request in client.engine.added] == [5, -1]
    with pytest.raises(InputError, match="priority"):
        llm.generate([[9], [8]], use_tqdm=False, priority=[5])


def test_a_bad_prompt_among_many_is_refused_before_any_is_added(llm: LLM, client: FakeClient):
    with pytest.raises(PromptError, match=r"prompts\[1\]"):
        llm.generate([[9], [99999]], use_tqdm=False)
    with pytest.raises(ValueError, match="stop_token_ids"):
        llm.generate([[9], [8]], [SamplingParams(), SamplingParams(stop_token_ids=[99999])], use_tqdm=False)
    assert client.engine.added == []


def test_ctrl_c_ends_the_calls_requests_and_leaves_the_engine_usable(llm: LLM, client: FakeClient):
    client.interrupt_after = 2
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[9], [8]], SamplingParams(max_tokens=100), use_tqdm=False)
    assert sorted(client.engine.aborted) == sorted(request.request_id for request in client.engine.added)
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    client.is_paused = False
    (output,) = llm.generate([[5]], SamplingParams(max_tokens=100), use_tqdm=False)
    assert output.outputs[0].token_ids == [5, 4, 3, 2]


def test_a_dead_engine_raises_and_leaves_no_request_behind(llm: LLM, client: FakeClient):
    client.dead = "worker gone"
    with pytest.raises(EngineDeadError, match="worker gone"):
        llm.generate([[5]], use_tqdm=False)
    assert llm.llm_engine.get_num_unfinished_requests() == 0


def test_a_request_that_the_engine_fails_comes_back_with_its_cause(llm: LLM, client: FakeClient):
    added = client.engine.add

    def add(request: EngineCoreRequest) -> None:
        added(request)
        if prompt_ids(request) == [7]:
            client.engine.failing[request.request_id] = "out of luck"

    client.engine.add = add
    good, bad = llm.generate([[9], [7]], SamplingParams(max_tokens=100), use_tqdm=False)
    assert (good.error, good.outputs[0].finish_reason) == (None, "stop")
    assert (bad.error, bad.outputs[0].finish_reason) == ("out of luck", "error")


def test_progress_counts_finished_requests(llm: LLM):
    class Bar:
        made: ClassVar[list[Bar]] = []

        def __init__(self, **kwargs: Any) -> None:
            self.total, self.done, self.is_closed = kwargs["total"], 0, False
            Bar.made.append(self)

        def update(self, count: int) -> None:
            self.done += count

        def close(self) -> None:
            self.is_closed = True

    llm.generate([[9], [4]], SamplingParams(max_tokens=2), use_tqdm=Bar)
    (bar,) = Bar.made
    assert (bar.total, bar.done, bar.is_closed) == (2, 2, True)


def test_chat_renders_the_models_template(llm: LLM, client: FakeClient):
    messages = [{"role": "user", "content": "What is 2 plus 3?"}]
    client.engine._script = lambda _request: [50, 51, 2]
    (one,) = llm.chat(messages, use_tqdm=False)
    both = llm.chat([messages, messages], use_tqdm=False, add_generation_prompt=False)
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    assert one.prompt == tokenizer.render_chat(messages)
    assert one.prompt_token_ids == tokenizer.encode(one.prompt, add_special_tokens=False)
    assert [output.prompt for output in both] == [tokenizer.render_chat(messages, None, False)] * 2
    (own,) = llm.chat(messages, use_tqdm=False, chat_template="{{ messages[0].content }}{{ mood }}",
                      chat_template_kwargs={"mood": "!"})  # fmt: skip
    assert own.prompt == "What is 2 plus 3?!"
    with pytest.raises(PromptError, match=r"messages\[0\]\.role"):
        llm.chat([{"content": "x"}], use_tqdm=False)


def test_default_sampling_is_the_models_own(client: FakeClient, tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "max_new_tokens": 2}')
    client = FakeClient(countdown, vocab_size=2048, model=str(tmp_path))
    engine = LLMEngine(LoopThread(), client, None)
    params = engine.get_default_sampling_params()
    assert (params.temperature, params.max_tokens, params.top_p) == (0.25, 2, 1.0)
    client.facts = msgspec.structs.replace(client.facts, generation_config="vllm")
    assert engine.get_default_sampling_params() == SamplingParams()


def test_leaving_the_block_closes_the_engine(llm: LLM, client: FakeClient):
    with llm as same:
        assert same is llm
        assert llm.reset_prefix_cache()
        assert llm.stats().num_running == 0
    assert client.num_closed == 1


def test_dropping_the_last_reference_closes_the_engine(client: FakeClient, monkeypatch: Any):
    use_client(monkeypatch, client)
    llm = LLM(model="pocket")
    del llm
    assert client.num_closed == 1


def test_bad_arguments_are_refused_before_an_engine_is_started(monkeypatch: Any, tmp_path: Path):
    async def never(*_args: Any) -> Any:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(engine_start, "make_async_client", never)
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        LLM(max_model_length=5)
    with pytest.raises(ModelError, match=r"config\.json"):
        LLM(str(tmp_path))


def test_a_tokenizer_that_cannot_be_read_closes_the_engine(client: FakeClient, monkeypatch: Any):
    def fail(_folder: str, _chat_template: str | None) -> Tokenizer:
        raise ModelError("tokenizer", "x", "y")

    use_client(monkeypatch, client)
    monkeypatch.setattr(engine_start, "load_tokenizer", fail)
    with pytest.raises(ModelError):
        LLM()
    assert client.num_closed == 1


def run_all(engine: LLMEngine) -> dict[str, Any]:
    finished: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in finished, "a request ended twice"
                finished[output.request_id] = output
    return finished


def test_the_engine_is_driven_step_by_step(llm: LLM):
    engine = llm.llm_engine
    engine.add_request("a", [5], SamplingParams(max_tokens=100))
    engine.add_request("b", [4], SamplingParams(max_tokens=100))
    with pytest.raises(InputError, match="request_id='a'"):
        engine.add_request("a", [5], SamplingParams())
    assert engine.get_num_unfinished_requests() == 2
    finished = run_all(engine)
    assert [finished[name].outputs[0].token_ids for name in "ab"] == [[5, 4, 3, 2], [4, 3, 2]]
    assert engine.step() == []
    engine.add_request("a", [5], SamplingParams(max_tokens=1))
    assert run_all(engine)["a"].outputs[0].token_ids == [5]


def test_add_request_takes_a_tenant_and_timeouts(llm: LLM, client: FakeClient):
    terms: dict[str, Any] = {"tenant": "t", "timeout_s": 9.0, "queue_timeout_s": 2.0}
    llm.llm_engine.add_request("a", [9], SamplingParams(max_tokens=1), **terms)
    (added,) = client.engine.added
    assert added.options == RequestOptions(**terms)
    with pytest.raises(InputError, match="tenant"):
        llm.llm_engine.add_request("b", [9], tenant="x" * 200)


def test_an_aborted_request_gets_its_final_output_from_step(llm: LLM, client: FakeClient):
    engine = llm.llm_engine
    client.is_paused = True
    engine.add_request("a", [60], SamplingParams(max_tokens=100))
    engine.add_request("b", [5], SamplingParams(max_tokens=100))
    engine.abort_request("a")
    engine.abort_request(["a", "unknown"])
    client.is_paused = False
    finished = run_all(engine)
    assert finished["a"].outputs[0].finish_reason == "abort"
    assert finished["a"].outputs[0].token_ids == []
    assert finished["b"].outputs[0].finish_reason == "stop"


def test_outputs_that_no_step_takes_are_merged_to_one_a_request(llm: LLM, client: FakeClient):
    engine = llm.llm_engine
    for name, kind in (("a", RequestOutputKind.DELTA), ("b", RequestOutputKind.CUMULATIVE)):
        engine.add_request(name, [9], SamplingParams(max_tokens=100, output_kind=kind))
    while client.engine.is_busy:
        engine.abort_request([])  # a turn of the loop
    assert engine.get_num_unfinished_requests() == 2
    with pytest.raises(InputError, match="request_id='a'"):
        engine.add_request("a", [5])
    outputs = {output.request_id: output for output in engine.step()}
    assert not engine.has_unfinished_requests()
    for name in "ab":
        assert outputs[name].finished
        assert outputs[name].outputs[0].token_ids == [9, 8, 7, 6, 5, 4, 3, 2]


def test_ctrl_c_while_outputs_are_taken_in_loses_none_of_them(llm: LLM, client: FakeClient):
    engine, waits, has_come = llm.llm_engine, asyncio.Event(), asyncio.Event()
    get_outputs = client.get_outputs

    async def interrupt_and_get_outputs() -> list[EngineCoreOutput]:
        outputs = await get_outputs()
        await waits.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await has_come.wait()
        waits.clear()
        has_come.clear()
        return outputs

    async def set_event(event: asyncio.Event) -> None:
        event.set()

    engine.stats()  # the engine is read
    client.get_outputs = interrupt_and_get_outputs
    engine.add_inputs(
        [
            engine.input_processor.process(name, [last], SamplingParams(max_tokens=100))
            for name, last in (("a", 20), ("b", 9))
        ]
    )
    tokens: dict[str, list[int]] = {}
    engine.step()
    num_interrupts = 0
    while engine.has_unfinished_requests():
        try:
            engine.call_client(lambda _: set_event(waits))
            engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
        engine.call_client(lambda _: set_event(has_come))
        for output in engine.step():
            tokens[output.request_id] = output.outputs[0].token_ids
    assert num_interrupts > 10
    assert tokens == {"a": list(range(20, 1, -1)), "b": list(range(9, 1, -1))}


@pytest.mark.parametrize("call", ["generate", "chat", "enqueue", "beam_search"])
def test_vllms_arguments_of_calls_may_ask_for_nothing(call: str, llm: LLM):
    prompt: Any = [{"role": "user", "content": "x"}] if call == "chat" else "x"
    ask: Any = getattr(llm, call)
    for name, value, said in (
        ("lora_request", "a", "lora_request='a': expected None: Quire has no LoRA adapters yet"),
        ("promt", 1, "promt=1: no such argument"),
    ):
        with pytest.raises(InputError) as caught:
            ask(
                prompt,
                SamplingParams(),
                **{name: value, "mm_processor_kwargs": None, "tokenization_kwargs": {}},
            )
        assert str(caught.value).startswith(said)
    if call in ("generate", "chat"):
        assert ask(
            prompt, SamplingParams(max_tokens=1), lora_request=None, mm_processor_kwargs=None, use_tqdm=False
        )


def test_chat_takes_histories_as_http_does(llm: LLM):
    dumped: dict[str, Any] = {"tool_calls": [], "function_call": None, "refusal": None, "annotations": []}
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    parts: list[Any] = [{"type": "input_text", "text": "x"}]
    odd = [{"role": "user", "content": parts, "name": None}, {"role": "assistant", "content": "y", **dumped}]
    plain, same = llm.chat([history, odd], SamplingParams(max_tokens=1), use_tqdm=False)
    assert plain.prompt == same.prompt
    refuses = "{% if 'tool_calls' in m %}{{ raise_exception('calls') }}{% endif %}"
    template = "{% for m in messages %}" + refuses + "{% endfor %}x"
    assert llm.chat(odd, SamplingParams(max_tokens=1), use_tqdm=False, chat_template=template)
