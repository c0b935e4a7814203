"""PoolingJob: the texts and pairs of a request to token ids, many at once. Knows no sockets."""

from __future__ import annotations

from ....ipc.errors import PromptError
from ....ipc.token_ids import encode_token_ids
from ...pooling.encoder import EncodedText, TextEncoder, TextPair
from ...text.prompt_tokenizer import require_tokenizer
from ...text.prompts import describe_length
from ...text.tokenizer import Tokenizer
from .jobs import PoolingJob, TokenIds

_ENCODED_AT_ONCE = 1024  # texts: what the tokenizer holds of a token is some hundred bytes


def encode_for_pooling(tokenizer: Tokenizer, job: PoolingJob) -> TokenIds:
    """Token ids of all texts. Raises InputErrors."""
    packed: list[bytes] = []
    type_starts: list[int | None] = []
    for start in range(0, len(job.texts), _ENCODED_AT_ONCE):
        part = slice(start, start + _ENCODED_AT_ONCE)
        for name, (ids, type_start) in zip(job.names[part], _encode_part(tokenizer, job, part), strict=True):
            if len(ids) > job.max_tokens:
                raise PromptError(name, f"{len(ids)} tokens", describe_length(job.max_tokens, 0))
            packed.append(encode_token_ids(ids))
            type_starts.append(type_start)
    return TokenIds(packed, type_starts)


def _encode_part(tokenizer: Tokenizer, job: PoolingJob, part: slice) -> list[EncodedText]:
    encoder = TextEncoder(tokenizer, job.model)
    names, texts = job.names[part], job.texts[part]
    require_tokenizer(tokenizer, names, texts)
    if job.max_tokens_per_text is not None:
        texts = _cut_texts(tokenizer, texts, job.max_tokens_per_text)
    if job.queries is None:
        return encoder.encode_texts(
            names, [encoder.prepare(text, job.prompt) for text in texts], job.truncation
        )
    queries = job.queries * len(texts) if len(job.queries) == 1 else job.queries[part]
    return encoder.encode_pairs(names, list(map(TextPair, queries, texts)), job.truncation)


def _cut_texts(tokenizer: Tokenizer, texts: list[str], max_tokens: int) -> list[str]:
    """The texts as far as so many of their own tokens reach."""
    encodings = tokenizer.backend.encode_batch(texts, add_special_tokens=False)
    return [
        text if len(encoding) <= max_tokens else text[: encoding.offsets[max_tokens - 1][1]]
        for text, encoding in zip(texts, encodings, strict=True)
    ]
