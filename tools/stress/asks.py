"""What a stress run asks: a pool of requests, and when each client sends which of them and how it behaves.

Everything is drawn from the run's seed, so the same options make the same load. Pure.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from ...frontend.client.remote_daemon import Attachment
from ...frontend.requests.prompts import Prompt
from ...ipc.params.beam_search import BeamSearchParams
from ...ipc.params.pooling_params import PoolingParams
from ...ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ...ipc.params.structured_outputs import StructuredOutputsParams
from .chats import QUESTIONS, Chat

ClientKind = Literal["http", "async", "llm", "grpc", "background"]
CLIENT_KINDS: tuple[ClientKind, ...] = ("http", "async", "llm", "grpc")  # to whom the load is dealt
_UNSTREAMED: frozenset[ClientKind] = frozenset({"llm", "grpc"})
Behaviour = Literal["reads", "leaves", "slow"]  # to the end, goes away in the middle, or reads with pauses

_BEGINNINGS = (
    "Once upon a time",
    "The little fox",
    "One day, a",
    "What is 3 plus 4?",
    "Lily went to the",
    "Tom had a red ball. He",
)
_FIRST_PLAIN_TOKEN, _LAST_PLAIN_TOKEN = 16, 1000  # every vocabulary has that many
_CONSTRAINED_SHARE = 0.3
# Fields of StructuredOutputsParams: outputs that go on for long, and one that ends soon.
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "is_kind": {"type": "boolean"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"json": {"type": "array", "items": _PERSON, "minItems": 20}},
    {"regex": "([a-z]{2,9} ){30}[0-9]+"},
    {"choice": ["a red ball", "a red fox and a little bear who lived in the woods"]},
)
_ODD_EVERY = 8  # one of so many is a beam search, and one has a logits processor, where there are such
_EMBED_EVERY = 6  # one of so many asks for a vector, where the engine embeds
_CHAT_EVERY = 5  # one of so many is a conversation, where the model knows tools or thoughts
_MAX_SEARCH_TOKENS = 48  # of each beam
_LONG_SHARE = 0.2  # of the prompts that are token ids: long enough to be prefilled in chunks beside others


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose tokens depend on nothing but itself: greedy or seeded, and of a length known before
    if nothing constrains it.
    """

    prompt: str | list[int]
    max_tokens: int
    seed: int | None  # None: greedy
    constraint: dict[str, Any] | None = None  # fields of StructuredOutputsParams
    beam_width: int | None = None  # of a beam search, whose prompt is a text
    extra_args: dict[str, Any] | None = None  # of NoRepeat
    chat: Chat | None = None  # then the prompt is a user's message
    embeds: bool = False  # asks for the prompt's vector
    dimensions: int | None = None  # of the vector, if it is to be cut

    @property
    def engine_prompt(self) -> Prompt:
        """As LLM and AsyncLLM take it."""
        return self.prompt if isinstance(self.prompt, str) else {"prompt_token_ids": self.prompt}

    def make_params(self, output_kind: RequestOutputKind) -> SamplingParams:
        """As LLM and AsyncLLM take them."""
        return SamplingParams(
            temperature=0.0 if self.seed is None else 1.0,
            seed=self.seed,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            output_kind=output_kind,
            structured_outputs=StructuredOutputsParams(**self.constraint) if self.constraint else None,
            extra_args=self.extra_args,
        )

    def make_search(self) -> BeamSearchParams:
        """As `beam_search` takes them."""
        assert self.beam_width is not None
        return BeamSearchParams(beam_width=self.beam_width, max_tokens=self.max_tokens, ignore_eos=True)

    @property
    def pooling_params(self) -> PoolingParams:
        """As `embed` and `encode` take them."""
        return PoolingParams(task="embed", dimensions=self.dimensions)

    @property
    def is_plain(self) -> bool:
        """Whether it goes to `generate`, many in a call."""
        return self.beam_width is None and self.chat is None and not self.embeds

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in pieces, where a client takes it so."""
        return self.beam_width is None and not self.embeds

    @property
    def path(self) -> str:
        """Where `make_body` goes."""
        if self.embeds:
            return "/v1/embeddings"
        return "/v1/completions" if self.chat is None else "/v1/chat/completions"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Of a chat."""
        return [{"role": "user", "content": self.prompt}]

    def make_response_body(self, model: str) -> dict[str, Any]:
        """Of a chat without tools, as /v1/responses takes it: streamed, and in the background."""
        assert self.chat is not None
        fields = {"input": self.prompt, "max_output_tokens": self.max_tokens, "background": True}
        return {"model": model, **fields, **self.chat.fields, **self._sampling_fields}

    def make_body(self, model: str) -> dict[str, Any]:
        """As a server takes it at `path`, streamed if it can be."""
        if self.embeds:
            fields = {} if self.dimensions is None else {"dimensions": self.dimensions}
            return {"model": model, "input": self.prompt, "encoding_format": "base64", **fields}
        length = {"model": model, "max_tokens": self.max_tokens}
        if self.beam_width is not None:
            search = {"ignore_eos": True, "n": self.beam_width, "use_beam_search": True}
            return {**length, "prompt": self.prompt, **search}
        asked = (
            {"prompt": self.prompt} if self.chat is None else {"messages": self.messages, **self.chat.fields}
        )
        return {
            **length,
            **asked,
            **self._sampling_fields,
            "structured_outputs": self.constraint,
            "vllm_xargs": self.extra_args,
            "stream_options": {"include_usage": True},
        }

    @property
    def _sampling_fields(self) -> dict[str, Any]:
        temperature = 0.0 if self.seed is None else 1.0
        fields = {"temperature": temperature, "seed": self.seed, "top_p": 1.0}
        return {**fields, "ignore_eos": True, "stream": True}


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine may be asked for besides plain text."""

    has_processor: bool = False  # NoRepeat
    dimensions: list[int | None] = []  # of its vectors, whole (None) and cut
    chats: list[Chat] = []
    can_chat: bool = False
    has_thoughts: bool = False


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the load: `number` names it in this run, `ask` is its place in the pool."""

    number: int
    due_s: float  # from the start of the load
    ask: int
    behaviour: Behaviour = "reads"


class ClientPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that one client process is to do. Written to its standard input as one line of JSON."""

    kind: ClientKind
    daemon: Attachment
    url: str  # of the server, for http
    grpc_address: str = ""  # likewise, for grpc
    api_key: str | None = None  # likewise
    ca_path: str | None = None  # who signed its certificate, for https
    model: str
    pool: list[Ask]
    arrivals: list[Arrival]
    max_concurrency: int | None = None  # then the next one is sent when there is room, and not when it is due
    # Then the arrivals come again and again, with new numbers, until standard input ends.
    is_endless: bool = False
    timeout_s: float  # of one request, from when it is sent

    def list_arrivals(self) -> Iterator[Arrival]:
        """In their order."""
        if not self.is_endless:
            yield from self.arrivals
            return
        for number in itertools.count():
            yield msgspec.structs.replace(self.arrivals[number % len(self.arrivals)], number=number)


def draw_pool(seed: int, size: int, max_tokens: int, abilities: Abilities | None = None) -> list[Ask]:
    """Distinct requests: texts and ids, short and long, half of them greedy, some of them constrained; and in
    places of some of them whatever else an engine with these abilities does.
    """
    rng = random.Random(f"pool/{seed}")
    asks = [
        Ask(
            prompt=_draw_prompt(rng),
            max_tokens=rng.randint(max(1, max_tokens // 4), max_tokens),
            seed=None if index % 2 else rng.randrange(1 << 31),
            constraint=rng.choice(_CONSTRAINTS) if rng.random() < _CONSTRAINED_SHARE else None,
        )
        for index in range(size)
    ]
    if abilities is not None:
        _add_kinds(asks, random.Random(f"kinds/{seed}"), abilities)
    return asks


def _add_kinds(asks: list[Ask], rng: random.Random, abilities: Abilities) -> None:
    places = iter(rng.sample(range(len(asks)), len(asks)))

    def take(every: int) -> Iterator[tuple[int, int]]:
        """(number, place) of one of so many."""
        return enumerate(itertools.islice(places, len(asks) // every))

    for _, place in take(_ODD_EVERY):
        length, width = min(asks[place].max_tokens, _MAX_SEARCH_TOKENS), rng.randint(2, 4)
        asks[place] = Ask(prompt=_draw_text(rng), max_tokens=length, seed=None, beam_width=width)
    for _, place in take(_ODD_EVERY) if abilities.has_processor else ():
        asks[place] = msgspec.structs.replace(asks[place], extra_args={"no_repeat": True})
    for number, place in take(_CHAT_EVERY) if abilities.chats else ():
        question, chat = rng.choice(QUESTIONS), abilities.chats[number % len(abilities.chats)]
        asks[place] = msgspec.structs.replace(asks[place], prompt=question, constraint=None, chat=chat)
    for number, place in take(_EMBED_EVERY) if abilities.dimensions else ():
        size = abilities.dimensions[number % len(abilities.dimensions)]
        asks[place] = Ask(prompt=asks[place].prompt, max_tokens=1, seed=None, embeds=True, dimensions=size)


def _draw_text(rng: random.Random) -> str:
    return " ".join(rng.choice(_BEGINNINGS) for _ in range(rng.randint(1, 3)))


def _draw_prompt(rng: random.Random) -> str | list[int]:
    if rng.random() < 0.5:
        return _draw_text(rng)
    length = rng.randint(100, 200) if rng.random() < _LONG_SHARE else rng.randint(1, 40)
    return [rng.randrange(_FIRST_PLAIN_TOKEN, _LAST_PLAIN_TOKEN) for _ in range(length)]


def draw_arrivals(
    seed: int, rate: float, duration_s: float, pool_size: int, odd_share: float
) -> list[Arrival]:
    """A Poisson process of `rate` requests/s; `odd_share` of them leave early or read slowly."""
    rng, due_s = random.Random(f"arrivals/{seed}"), 0.0
    arrivals: list[Arrival] = []
    while (due_s := due_s + rng.expovariate(rate)) < duration_s:
        behaviour: Behaviour = "reads"
        if rng.random() < odd_share:
            behaviour = rng.choice(("leaves", "slow"))
        number, ask = len(arrivals), rng.randrange(pool_size)
        arrivals.append(Arrival(number=number, due_s=due_s, ask=ask, behaviour=behaviour))
    return arrivals


def draw_conversations(seed: int, count: int, max_tokens: int, abilities: Abilities) -> list[Ask]:
    """Chats without tools, which are asked for in the background."""
    rng = random.Random(f"conversations/{seed}")
    return [
        Ask(
            prompt=rng.choice(QUESTIONS),
            max_tokens=rng.randint(max(1, max_tokens // 4), max_tokens),
            seed=rng.randrange(2**32) if number % 2 else None,
            chat=Chat(is_thinking=abilities.has_thoughts and number % 4 > 1),
        )
        for number in range(count if abilities.can_chat else 0)
    ]


def list_all(pool: Sequence[Ask], num_requests: int | None = None) -> list[Arrival]:
    """The pool in its order, again and again up to `num_requests` (None: once), all due at once."""
    count = len(pool) if num_requests is None else num_requests
    return [Arrival(number=number, due_s=0.0, ask=number % len(pool)) for number in range(count)]


def deal(arrivals: list[Arrival], kinds: tuple[ClientKind, ...]) -> dict[ClientKind, list[Arrival]]:
    """The load in turn to each kind of client; answers that come whole are always read to the end."""
    shares: dict[ClientKind, list[Arrival]] = {
        kind: arrivals[i :: len(kinds)] for i, kind in enumerate(kinds)
    }
    for kind in _UNSTREAMED & shares.keys():
        shares[kind] = [msgspec.structs.replace(one, behaviour="reads") for one in shares[kind]]
    return shares
