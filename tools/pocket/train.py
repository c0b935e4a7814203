"""Trains the pocket model from scratch on the CPU: `python -m quire.tools.pocket.train`.

The corpus never repeats, so nothing is seen twice. Text and sequences to copy are mixed: many of these at
first, few at the end.
"""

import argparse
import ctypes
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import LlamaConfig, LlamaForCausalLM

from . import MODEL_DIR
from .batches import (
    END_OF_TEXT_ID,
    LONG_SHAPE,
    SHORT_SHAPE,
    TURN_END_ID,
    Batch,
    Packer,
    encode_documents,
    render,
)
from .loss import NORM_EPS, ROPE_THETA, compute_loss
from .text import draw_documents
from .tokenizer import SPACE, VOCAB_SIZE, save_tokenizer, train_tokenizer, write_json
from .wiring import wire

MAX_LENGTH = 2048
TOKENIZER_DOCUMENTS = 10_000
MALLOC_TRIM_THRESHOLD, MALLOC_TOP_PAD, MALLOC_MMAP_MAX = -1, -2, -4  # of malloc.h
NUM_STEPS = 5000  # some 50 minutes on two cores that do nothing else
WARM_UP_STEPS = 60
EMA_DECAY = 0.99
MATRIX_RATE, OTHER_RATE = 0.015, 0.003  # learning rates of Muon and AdamW at factor 1


@dataclass(frozen=True, slots=True)
class Options:
    """`steps` sets the length of the whole recipe, whose parts are shares of it."""

    out: Path
    steps: int
    seed: int
    threads: int
    export_every: int


def plan_step(step: int, num_steps: int) -> tuple[tuple[int, int], float, float]:
    """The shape of a step's batch, its share of rows to copy, and the factor of its learning rates.

    Rows to copy fade, the learning rate falls in a line to zero, and long rows come after a while.
    """
    progress = step / num_steps
    shape = LONG_SHAPE if progress > 0.25 and step % 4 == 0 else SHORT_SHAPE
    copy_share = 0.13 if progress < 0.2 else 0.07
    return shape, copy_share, min(step / WARM_UP_STEPS, 1.0 - progress)


def make_config() -> LlamaConfig:
    """The shape of the pocket model."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[END_OF_TEXT_ID, TURN_END_ID],
        pad_token_id=END_OF_TEXT_ID,
        initializer_range=0.05,
        use_cache=False,
    )


def init_spaced_words(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Lets the embedding of each word with a space in front begin near that of the word without.

    A value stands after a space in a sentence and after a quote in JSON; what learns to copy one of its two
    tokens so copies the other.
    """
    vocab = tokenizer.get_vocab()
    pairs = [(vocab[SPACE + word], index) for word, index in vocab.items() if SPACE + word in vocab]
    spaced, bare = torch.tensor(pairs).T
    with torch.no_grad():
        weight = model.model.embed_tokens.weight
        weight[spaced] = 0.8 * weight[bare] + 0.6 * weight[vocab[SPACE]]


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
        """The moving average of the weights, which is exported."""
        return cast(LlamaForCausalLM, self._average.module)


def train(options: Options) -> None:
    """Trains and writes the model folder to `options.out`, also every `export_every` steps."""
    keep_freed_memory()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    tokenizer = train_tokenizer(map(render, islice(draw_documents(options.seed), TOKENIZER_DOCUMENTS)))
    model = LlamaForCausalLM(make_config())
    init_spaced_words(model, tokenizer)
    wire(model, ROPE_THETA)
    trainer = Trainer(model)
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"{num_parameters:,} parameters, seed {options.seed}", flush=True)
    packer = Packer(encode_documents(tokenizer, draw_documents(options.seed + 1)), options.seed)

    start, recent = time.monotonic(), 0.0
    for step in range(1, options.steps + 1):
        shape, copy_share, factor = plan_step(step, options.steps)
        loss = trainer.step(packer.pack(shape, copy_share), factor)
        recent = loss if step == 1 else 0.95 * recent + 0.05 * loss
        if step % 25 == 0:
            minutes = (time.monotonic() - start) / 60
            print(f"step {step:5d}  loss {recent:.4f}  lr x{factor:.3f}  {minutes:.1f} min", flush=True)
        if step % options.export_every == 0:
            export(trainer.averaged_model, tokenizer, options.out)
    export(trainer.averaged_model, tokenizer, options.out)


def keep_freed_memory() -> None:
    """Has malloc reuse large blocks; otherwise each step maps hundreds of megabytes anew, page by page.

    On a shared virtual machine that made a step three times as long. Only glibc has the setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting in (MALLOC_TRIM_THRESHOLD, MALLOC_TOP_PAD):
            mallopt(setting, 1 << 30)
        mallopt(MALLOC_MMAP_MAX, 0)


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
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m quire.tools.pocket.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="the folder to write")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="the length of the whole recipe")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--export-every", type=int, default=250, help="steps between two exports")
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    train(parse_options())
