"""Trains the pocket model from scratch on the CPU: `python -m quire.tools.pocket.train`.

The recipe has three stages: text, then sequences to copy, then text again while the learning rate falls to
zero. The corpus never repeats, so a stage is a number of steps and nothing is seen twice.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import LlamaConfig, LlamaForCausalLM

from . import MODEL_DIR
from .batches import END_OF_TEXT_ID, TURN_END_ID, Batch, encode_documents, pack_copies, pack_texts
from .text import Document, draw_documents
from .tokenizer import VOCAB_SIZE, render_chat, save_tokenizer, train_tokenizer, write_json

MAX_LENGTH = 2048
ROPE_THETA = 10000.0
TOKENIZER_DOCUMENTS = 10_000
WARM_UP_STEPS = 60
EMA_DECAY = 0.98
MATRIX_RATE, OTHER_RATE = 0.02, 0.004  # learning rates of Muon and AdamW at factor 1


@dataclass(frozen=True, slots=True)
class Stage:
    """`num_steps` steps on one kind of batch; the learning rate's factor goes from `first` to `last`."""

    is_copying: bool
    num_steps: int
    first: float
    last: float

    def factor(self, step: int) -> float:
        """A cosine from `first` to `last`, the latter at `step` `num_steps`."""
        return self.last + (self.first - self.last) * 0.5 * (1 + math.cos(math.pi * step / self.num_steps))


STAGES = (
    Stage(is_copying=False, num_steps=1250, first=1.0, last=0.3),
    Stage(is_copying=True, num_steps=220, first=1.0, last=1.0),
    Stage(is_copying=False, num_steps=600, first=0.7, last=0.0),
)


@dataclass(frozen=True, slots=True)
class Options:
    """`scale` makes every stage longer or shorter, for a slow machine or a quick try."""

    out: Path
    scale: float
    seed: int
    threads: int
    export_every: int


def make_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[END_OF_TEXT_ID, TURN_END_ID],
        pad_token_id=END_OF_TEXT_ID,
        initializer_range=0.05,
        use_cache=False,
    )


def compute_loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Mean cross entropy of the target tokens; only their positions go through the output head."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=batch.ids).last_hidden_state  # [rows, length, hidden]
        chosen = hidden[:, :-1][batch.is_target[:, 1:]]  # [targets, hidden]
        logits = model.lm_head(chosen)  # [targets, vocab]
    return functional.cross_entropy(logits.float(), batch.ids[:, 1:][batch.is_target[:, 1:]])


class Trainer:
    """A model in training, its optimizers and the running average of its weights, which is what is kept."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self._average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers." in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers." not in name]
        # Muon needs fewer steps than AdamW, but is made for the matrices inside the network only.
        self._optimizers = {
            torch.optim.Muon(matrices, lr=MATRIX_RATE, momentum=0.95, weight_decay=0.02): MATRIX_RATE,
            torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0): OTHER_RATE,
        }

    def step(self, batch: Batch, factor: float) -> float:
        """One update at `factor` times the learning rates; returns the loss before it."""
        loss = compute_loss(self.model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rate in self._optimizers.items():
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()
        self._average.update_parameters(self.model)
        return loss.item()

    @property
    def averaged_model(self) -> LlamaForCausalLM:
        return cast(LlamaForCausalLM, self._average.module)


def train(options: Options) -> None:
    """Trains and writes the model folder to `options.out`, also every `export_every` steps."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    tokenizer = train_tokenizer(_render(draw_documents(options.seed)))
    trainer = Trainer(LlamaForCausalLM(make_config()))
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"{num_parameters:,} parameters, seed {options.seed}", flush=True)

    start, recent = time.monotonic(), 0.0
    for step, (batch, factor) in enumerate(_plan(tokenizer, options), start=1):
        loss = trainer.step(batch, factor * min(1.0, step / WARM_UP_STEPS))
        recent = loss if step == 1 else 0.95 * recent + 0.05 * loss
        if step % 25 == 0:
            minutes = (time.monotonic() - start) / 60
            print(f"step {step:5d}  loss {recent:.4f}  lr x{factor:.3f}  {minutes:.1f} min", flush=True)
        if step % options.export_every == 0:
            export(trainer.averaged_model, tokenizer, options.out)
    export(trainer.averaged_model, tokenizer, options.out)


def _plan(tokenizer: Tokenizer, options: Options) -> Iterator[tuple[Batch, float]]:
    """Every batch of the recipe with its learning rate's factor."""
    rows = encode_documents(tokenizer, draw_documents(options.seed + 1))
    texts, copies = pack_texts(rows), pack_copies(rows, options.seed)
    for stage in STAGES:
        scaled = replace(stage, num_steps=max(1, round(stage.num_steps * options.scale)))
        for step in range(scaled.num_steps):
            yield next(copies if stage.is_copying else texts), scaled.factor(step)


def _render(documents: Iterator[Document]) -> Iterator[str]:
    for document in islice(documents, TOKENIZER_DOCUMENTS):
        yield document if isinstance(document, str) else render_chat(document)


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes a folder that `transformers` loads: tensors in bfloat16, to be computed with in float32."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embeddings
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors makes it private
    save_tokenizer(tokenizer, out, MAX_LENGTH)
    write_json(out / "config.json", _describe(model.config))
    ends = {"eos_token_id": [END_OF_TEXT_ID, TURN_END_ID], "pad_token_id": END_OF_TEXT_ID}
    write_json(out / "generation_config.json", ends)


def _describe(config: LlamaConfig) -> dict[str, Any]:
    """config.json; `torch_dtype` and `rope_theta` repeat what older readers look for under those names."""
    drop = {
        "id2label",
        "label2id",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "problem_type",
    }
    drop |= {"chunk_size_feed_forward", "is_encoder_decoder", "bos_token_id", "transformers_version"}
    values = {key: value for key, value in config.to_dict().items() if key not in drop and key[0] != "_"}
    return values | {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "torch_dtype": "float32",
        "rope_theta": ROPE_THETA,
        "use_cache": True,
    }


def parse_options() -> Options:
    parser = argparse.ArgumentParser(prog="python -m quire.tools.pocket.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="the folder to write")
    parser.add_argument("--scale", type=float, default=1.0, help="makes all stages longer or shorter")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--export-every", type=int, default=250, help="steps between two exports")
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    train(parse_options())
