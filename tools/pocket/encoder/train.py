"""Trains the pocket encoder from scratch on the CPU: `python -m quire.tools.pocket.encoder.train`.

The loss is InfoNCE: of all answers and wrong texts of a batch, a query's own answer is to be the nearest, and
of all queries an answer's own. Texts of the query's topic are left out of the comparison.
Legend: B pairs, T positions, H hidden size.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import BertConfig, BertModel

from ..tokenizer import write_json
from ..train import keep_freed_memory
from . import ENCODER_DIR
from .corpus import draw_pairs, draw_story_pairs, draw_texts
from .pairs import Pair
from .tokenizer import PAD_ID, save_tokenizer, train_tokenizer

MAX_LENGTH = 256
TOKENIZER_PAIRS = 10_000
NUM_STEPS = 1000  # some 15 minutes on one core
NUM_PAIRS, NUM_STORY_PAIRS = 160, 32  # of a step
STORY_EVERY = 10  # steps
NUM_BUCKETS = 4  # of a step's texts by length, to pad little
TEMPERATURE = 0.05
WARM_UP_STEPS = 60
EMA_DECAY = 0.99
MATRIX_RATE, OTHER_RATE = 0.01, 0.004  # learning rates of Muon and AdamW at factor 1


@dataclass(frozen=True, slots=True)
class Options:
    """`steps` sets the length of the whole recipe, whose parts are shares of it."""

    out: Path
    steps: int
    seed: int
    threads: int
    export_every: int


def make_config(vocab_size: int) -> BertConfig:
    """The shape of the pocket encoder."""
    return BertConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=MAX_LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.05,
        pad_token_id=PAD_ID,
    )


class Trainer:
    """An encoder in training, its optimizers and the running average of its weights, which is kept."""

    def __init__(self, model: BertModel, tokenizer: Tokenizer, num_steps: int) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._num_steps = num_steps
        self._average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "encoder." in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "encoder." not in name]
        self._optimizers = {
            torch.optim.Muon(matrices, lr=MATRIX_RATE, momentum=0.95, weight_decay=0.02): MATRIX_RATE,
            torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0): OTHER_RATE,
        }

    def step(self, pairs: list[Pair], step: int) -> float:
        """One update; returns the loss before it. The learning rate falls in a line to zero."""
        loss = self._compute_loss(pairs)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        factor = min(step / WARM_UP_STEPS, 1.0 - step / self._num_steps)
        for optimizer, rate in self._optimizers.items():
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()
        self._average.update_parameters(self.model)
        return loss.item()

    @property
    def averaged_model(self) -> BertModel:
        """The moving average of the weights, which is exported."""
        return cast(BertModel, self._average.module)

    def _compute_loss(self, pairs: list[Pair]) -> Tensor:
        texts = [pair.query for pair in pairs] + [pair.answer.text for pair in pairs]
        vectors = self._embed(texts + [pair.wrong.text for pair in pairs])  # [3 B, H]
        queries, passages = vectors[: len(pairs)], vectors[len(pairs) :]
        scores = queries @ passages.T / TEMPERATURE  # [B, 2 B]
        scores = scores.masked_fill(find_same_topics(pairs), float("-inf"))
        own = torch.arange(len(pairs))
        to_passages = functional.cross_entropy(scores, own)
        return to_passages + 0.5 * functional.cross_entropy(scores[:, : len(pairs)].T, own)

    def _embed(self, texts: list[str]) -> Tensor:
        """Normalised vectors of `texts`; they run in buckets of like length."""
        encodings = [encoding.ids[:MAX_LENGTH] for encoding in self._tokenizer.encode_batch(texts)]
        order = sorted(range(len(texts)), key=lambda index: len(encodings[index]))
        size = -(-len(texts) // NUM_BUCKETS)
        buckets = [
            self._embed_bucket([encodings[index] for index in order[low : low + size]])
            for low in range(0, len(order), size)
        ]
        return torch.cat(buckets)[torch.tensor(order).argsort()]

    def _embed_bucket(self, rows: list[list[int]]) -> Tensor:
        """Half begin at a position drawn at random, so that all are trained though most texts are short."""
        length = -(-max(map(len, rows)) // 8) * 8
        ids = torch.tensor([row + [PAD_ID] * (length - len(row)) for row in rows])  # [B, T]
        start = int(torch.randint(MAX_LENGTH - length + 1, ())) if torch.rand(()) < 0.5 else 0
        positions = torch.arange(start, start + length)[None]
        mask = ids != PAD_ID
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
        return functional.normalize(average(hidden, mask), dim=-1)


def average(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean over each row's tokens, in float32. hidden [B, T, H], mask [B, T] -> [B, H]"""
    weights = mask[..., None].float()
    return (hidden.float() * weights).sum(1) / weights.sum(1)


def find_same_topics(pairs: list[Pair]) -> Tensor:
    """Which passages not to compare a query with: those of its topic but its own answer. [B, 2 B]"""
    passages = [pair.answer for pair in pairs] + [pair.wrong for pair in pairs]
    same = [
        [pair.answer.topic is not None and passage.topic == pair.answer.topic for passage in passages]
        for pair in pairs
    ]
    return torch.tensor(same) & ~torch.eye(len(pairs), len(passages), dtype=torch.bool)


def draw_batches(seed: int) -> Iterator[list[Pair]]:
    """The pairs of each step: short texts, or stories now and then."""
    short, long = draw_pairs(seed), draw_story_pairs(seed)
    while True:
        for _ in range(STORY_EVERY - 1):
            yield list(islice(short, NUM_PAIRS))
        yield list(islice(long, NUM_STORY_PAIRS))


def train(options: Options) -> None:
    """Trains and writes the model folder to `options.out`, also every `export_every` steps."""
    keep_freed_memory()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = train_tokenizer(draw_texts(options.seed, TOKENIZER_PAIRS))
    model = BertModel(make_config(tokenizer.get_vocab_size()), add_pooling_layer=False)
    model.set_attn_implementation("eager")  # faster on a CPU than torch's fused attention, by a half
    trainer = Trainer(model, tokenizer, options.steps)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, seed {options.seed}", flush=True)

    start, recent = time.monotonic(), 0.0
    for step, pairs in enumerate(islice(draw_batches(options.seed + 1), options.steps), 1):
        loss = trainer.step(pairs, step)
        recent = loss if step == 1 else 0.95 * recent + 0.05 * loss
        if step % 25 == 0:
            print(f"step {step:5d}  loss {recent:.4f}  {(time.monotonic() - start) / 60:.1f} min", flush=True)
        if step % options.export_every == 0:
            export(trainer.averaged_model, tokenizer, options.out)
    export(trainer.averaged_model, tokenizer, options.out)


def export(model: BertModel, tokenizer: Tokenizer, out: Path) -> None:
    """Writes a sentence-transformers folder: tensors in bfloat16, to be computed with in float32."""
    (out / "1_Pooling").mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors makes it private
    save_tokenizer(tokenizer, out, MAX_LENGTH)
    write_json(out / "config.json", _describe(model.config))
    write_json(out / "modules.json", [_describe_module(*module) for module in enumerate(MODULES)])
    write_json(
        out / "1_Pooling" / "config.json", {"word_embedding_dimension": model.config.hidden_size} | POOLING
    )
    write_json(out / "sentence_bert_config.json", {"max_seq_length": MAX_LENGTH, "do_lower_case": False})
    write_json(out / "config_sentence_transformers.json", SIMILARITY)


MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
POOLING = {
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
    "pooling_mode_weightedmean_tokens": False,
    "pooling_mode_lasttoken": False,
    "include_prompt": True,
}
SIMILARITY = {
    "prompts": {"query": "", "document": ""},
    "default_prompt_name": None,
    "similarity_fn_name": "cosine",
}


def _describe_module(index: int, module: tuple[str, str]) -> dict[str, str | int]:
    path, name = module
    return {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}


def _describe(config: BertConfig) -> dict[str, Any]:
    """config.json, with what says how to compute and nothing of how to generate or classify."""
    kept = (
        "model_type vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act"
        " hidden_dropout_prob attention_probs_dropout_prob max_position_embeddings type_vocab_size"
        " layer_norm_eps initializer_range pad_token_id"
    )
    values = config.to_dict()
    described = {"architectures": ["BertModel"], "dtype": "float32", "torch_dtype": "float32"}
    return described | {key: values[key] for key in kept.split()}


def parse_options() -> Options:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m quire.tools.pocket.encoder.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=ENCODER_DIR, help="the folder to write")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="the length of the whole recipe")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--export-every", type=int, default=250, help="steps between two exports")
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    train(parse_options())
