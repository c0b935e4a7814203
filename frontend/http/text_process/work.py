"""Doing text jobs with a tokenizer. Knows no sockets; what bounds its time and memory is the process's."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec

from ....ipc.decoding import decode_json
from ....ipc.errors import InputError, PromptError, describe_refusal
from ....ipc.protocol.token_ids import decode_token_ids, encode_token_ids
from ...formats.offered_tools import list_unfollowed
from ...formats.schemas.json_schema import check_valid
from ...requests.prompts import describe_length, require_tokenizer
from ...requests.vectors.encoder import EncodedText, TextEncoder, TextPair
from ...text.bounded_jobs import MAX_TEXT_MEMORY_BYTES
from ...text.tokenizer import Tokenizer
from ..bodies import schema
from ..limits import MAX_TEXT_ANSWER_BYTES
from . import jobs

if TYPE_CHECKING:
    from ...formats.schemas.compiler import GrammarCompiler

_PANIC = "PanicException"  # of the tokenizers library's Rust: no Exception, and not to be imported
MEMORY_ALLOWED = f"what takes at most {MAX_TEXT_MEMORY_BYTES >> 20} MiB of memory to render and tokenize"
# What the tokenizer holds of a token is some hundred bytes.
_ENCODED_AT_ONCE = 1024  # texts, or with a query for all of them
_CHARACTERS_AT_ONCE = 1 << 20  # likewise, of that query


def prepare_job(tokenizer: Tokenizer, job: jobs.TextJob) -> None:
    """Load what the first job of its kind needs, which is not its own work."""
    if isinstance(job, jobs.GrammarJob):
        _make_compiler(tokenizer).load_vocabulary()


def do_job(tokenizer: Tokenizer, job: jobs.TextJob) -> jobs.TextAnswer:
    """The answer to a job; never raises for what is wrong with the request."""
    try:
        return _do(tokenizer, job)
    except InputError as error:
        if isinstance(error.__cause__, MemoryError):  # as the template's failure
            return _refuse(error.field, error.value, MEMORY_ALLOWED)
        code = "context_length_exceeded" if "max_model_len" in error.allowed else None
        return jobs.Refused(describe_refusal(error.field, error.value, error.allowed), error.field, code)
    except MemoryError:
        return _refuse(name_of(job), "a text", MEMORY_ALLOWED)
    except RecursionError:
        return _refuse(name_of(job), "a conversation", "JSON of less depth")
    except (UnicodeEncodeError, TypeError, OverflowError) as error:
        return _refuse(name_of(job), "a text", f"a text that can be tokenized ({error})")
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        return _refuse(name_of(job), "a text", f"a text that the model's tokenizer can take ({error})")


def name_of(job: jobs.TextJob) -> str:
    """The request's field that a job is about."""
    match job:
        case jobs.TokenizeJob():
            return name_of(job.source)
        case jobs.Conversation():
            return job.param
        case jobs.EncodeJob() | jobs.PoolingJob():
            return job.names[0] if len(job.names) == 1 else job.names[0].partition("[")[0]
        case jobs.DetokenizeJob():
            return "tokens"
        case jobs.DecodeJob():
            return "prompt"
        case jobs.GrammarJob():
            if job.params is None and job.rules is not None:
                return job.rules.tools_place
            return job.place or "structured_outputs"


def _refuse(field: str, value: object, allowed: str) -> jobs.Refused:
    return jobs.Refused(describe_refusal(field, value, allowed), field)


def _do(tokenizer: Tokenizer, job: jobs.TextJob) -> jobs.TextAnswer:
    match job:
        case jobs.Conversation() | jobs.EncodeJob():
            return jobs.TokenIds([encode_token_ids(ids) for ids in _encode(tokenizer, job)])
        case jobs.PoolingJob():
            return encode_for_pooling(tokenizer, job)
        case jobs.TokenizeJob():
            return _tokenize(tokenizer, job)
        case jobs.DetokenizeJob():
            return _detokenize(tokenizer, job)
        case jobs.DecodeJob():
            return jobs.Text(tokenizer.decode(decode_token_ids(job.token_ids), skip_special_tokens=False))
        case jobs.GrammarJob():
            made = _make_compiler(tokenizer).compile(job.params, job.place, job.is_strict, job.rules)
            return jobs.Text(made)


@functools.lru_cache(maxsize=1)
def _make_compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    from ...formats.schemas.compiler import GrammarCompiler

    return GrammarCompiler(tokenizer)


def _tokenize(tokenizer: Tokenizer, job: jobs.TokenizeJob) -> jobs.TextAnswer:
    (ids,) = _encode(tokenizer, job.source)
    if job.only_counts:
        return _make_body(name_of(job), {"input_tokens": len(ids)})
    # As the vocabulary has them, which is not always text.
    to_string = tokenizer.backend.id_to_token
    strings = [to_string(token_id) or "" for token_id in ids] if job.wants_strings else None
    body = {"count": len(ids), "max_model_len": job.max_model_len, "tokens": ids, "token_strs": strings}
    return _make_body(name_of(job), body)


def _detokenize(tokenizer: Tokenizer, job: jobs.DetokenizeJob) -> jobs.TextAnswer:
    try:
        ids = decode_json(job.token_ids, list[schema.TokenId])
    except (msgspec.DecodeError, RecursionError) as error:
        what, _, place = str(error).partition(" - at `$")
        field = f"tokens{place.rstrip('`')}"
        return jobs.Refused(f"{field}: {what[:1].lower() + what[1:]}", field)
    return _make_body("tokens", {"prompt": tokenizer.decode(ids, skip_special_tokens=False)})


def _make_body(name: str, body: dict[str, Any]) -> jobs.TextAnswer:
    json = msgspec.json.encode(body)
    if len(json) > MAX_TEXT_ANSWER_BYTES:
        return _refuse(name, f"an answer of {len(json)} bytes", f"at most {MAX_TEXT_ANSWER_BYTES}")
    return jobs.Body(json)


def _encode(tokenizer: Tokenizer, job: jobs.Conversation | jobs.EncodeJob) -> list[list[int]]:
    if isinstance(job, jobs.EncodeJob):
        names, texts = job.names, job.texts
    else:
        names, texts = [job.param], [_render(tokenizer, job)]
    encoded = [encoding.ids for encoding in tokenizer.encode_texts(texts, job.add_special_tokens)]
    if job.truncation is not None:
        encoded = [job.truncation.apply(ids) for ids in encoded]
    limit = job.max_model_len
    num_generated = job.num_generated if isinstance(job, jobs.Conversation) else 1
    for name, ids in zip(names, encoded, strict=True):
        if limit is not None and len(ids) + num_generated > limit:
            raise PromptError(name, f"{len(ids)} tokens", describe_length(limit, num_generated))
    return encoded


def _render(tokenizer: Tokenizer, job: jobs.Conversation) -> str:
    template = tokenizer.chat_template
    if template is None:
        allowed = "/v1/completions: this model has no chat template"
        raise PromptError(job.param, "a conversation", allowed)
    for place, tool in zip(list_unfollowed(job.tools, job.choice, job.fields), job.tools, strict=True):
        if place and tool.parameters is not None:
            check_valid(place, tool.parameters)
    messages = [msgspec.to_builtins(message) for message in job.messages]
    return template.render(
        messages,
        job.add_generation_prompt,
        job.continue_final_message,
        job.template_variables,
        tools=job.tools,
        param=job.param,
    )


def encode_for_pooling(tokenizer: Tokenizer, job: jobs.PoolingJob) -> jobs.TokenIds:
    """Token ids of all texts. Raises InputErrors."""
    packed: list[bytes] = []
    type_starts: list[int | None] = []
    size = _ENCODED_AT_ONCE
    if job.queries is not None and len(job.queries) == 1:
        _check_query(tokenizer, job, job.queries[0])
        size = min(size, 1 + _CHARACTERS_AT_ONCE // (1 + len(job.queries[0])))
    for start in range(0, len(job.texts), size):
        part = slice(start, start + size)
        for name, (ids, type_start) in zip(job.names[part], _encode_part(tokenizer, job, part), strict=True):
            if len(ids) > job.max_tokens:
                raise PromptError(name, f"{len(ids)} tokens", describe_length(job.max_tokens, 0))
            packed.append(encode_token_ids(ids))
            type_starts.append(type_start)
    return jobs.TokenIds(packed, type_starts)


def _check_query(tokenizer: Tokenizer, job: jobs.PoolingJob, query: str) -> None:
    """Raise PromptError for a query that is too long by itself, before it is encoded with each text."""
    if len(query) > job.max_tokens:
        (encoding,) = tokenizer.encode_texts([query], add_special_tokens=False)
        if len(encoding) > job.max_tokens:
            length = f"more than {len(encoding)} tokens"
            allowed = f"at most {job.max_tokens} (max_model_len={job.max_tokens}): a query is not cut"
            raise PromptError(job.names[0], length, allowed)


def _encode_part(tokenizer: Tokenizer, job: jobs.PoolingJob, part: slice) -> list[EncodedText]:
    encoder = TextEncoder(tokenizer, job.model)
    names, texts = job.names[part], job.texts[part]
    require_tokenizer(tokenizer, names, texts)
    whole = max(0, job.num_whole - part.start)
    if job.max_tokens_per_text is not None:
        texts = texts[:whole] + _cut_texts(tokenizer, texts[whole:], job.max_tokens_per_text)
    if job.queries is None:
        texts = [encoder.prepare(text, job.prompt) for text in texts]
        encoded = encoder.encode_texts(names[:whole], texts[:whole], None)
        return encoded + encoder.encode_texts(names[whole:], texts[whole:], job.truncation)
    queries = job.queries * len(texts) if len(job.queries) == 1 else job.queries[part]
    return encoder.encode_pairs(names, list(map(TextPair, queries, texts)), job.truncation)


def _cut_texts(tokenizer: Tokenizer, texts: list[str], max_tokens: int) -> list[str]:
    """The texts as far as so many of their own tokens reach."""
    encodings = tokenizer.backend.encode_batch(texts, add_special_tokens=False)
    return [
        text if len(encoding) <= max_tokens else text[: encoding.offsets[max_tokens - 1][1]]
        for text, encoding in zip(texts, encodings, strict=True)
    ]
