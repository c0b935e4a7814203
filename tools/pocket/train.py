"""Trains the pocket model from scratch on the CPU: `python -m quire.tools.pocket.train`.

The corpus never repeats, so nothing is seen twice. Text and sequences to copy are mixed: many of these at
first, few at the end.
"""

from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from . import MODEL_DIR
from .batches import LONG_SHAPE, SHORT_SHAPE, Packer, encode_documents, render
from .loss import ROPE_THETA, compute_loss
from .text import draw_documents
from .tokenizer import SPACE, save_tokenizer, train_tokenizer
from .training import Averaged, Options, copy_files, parse_options, prepare, save_tensors, train_steps
from .wiring import wire

MAX_LENGTH = 2048
TOKENIZER_DOCUMENTS = 10_000
NUM_STEPS = 5000  # some 50 minutes on two cores that do nothing else
WARM_UP_STEPS = 60
MATRIX_RATE, OTHER_RATE = 0.015, 0.003  # learning rates of Muon and AdamW at factor 1


def plan_step(step: int, num_steps: int) -> tuple[tuple[int, int], float, float]:
    """The shape of a step's batch, its share of rows to copy, and the factor of its learning rates.

    Rows to copy fade, the learning rate falls in a line to zero, and long rows come after a while.
    """
    progress = step / num_steps
    shape = LONG_SHAPE if progress > 0.25 and step % 4 == 0 else SHORT_SHAPE
    copy_share = 0.13 if progress < 0.2 else 0.07
    return shape, copy_share, min(step / WARM_UP_STEPS, 1.0 - progress)


def make_config() -> LlamaConfig:
    """The shape of the pocket model, which its folder's config.json says."""
    return LlamaConfig.from_pretrained(MODEL_DIR)


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


def train(options: Options) -> None:
    """Train, and write the model folder to `options.out`."""
    prepare(options)
    tokenizer = train_tokenizer(map(render, islice(draw_documents(options.seed), TOKENIZER_DOCUMENTS)))
    model = LlamaForCausalLM(make_config())
    init_spaced_words(model, tokenizer)
    wire(model, ROPE_THETA)
    trainer = Averaged(model, "layers.", MATRIX_RATE, OTHER_RATE)
    packer = Packer(encode_documents(tokenizer, draw_documents(options.seed + 1)), options.seed)

    def take_step(step: int) -> float:
        shape, copy_share, factor = plan_step(step, options.steps)
        return trainer.update(compute_loss(model, packer.pack(shape, copy_share)), factor)

    train_steps(options, trainer, take_step, lambda averaged: export(averaged, tokenizer, options.out))


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes a folder that `transformers` loads: tensors in bfloat16, to be computed with in float32."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embeddings
    }
    save_tensors(tensors, out)
    save_tokenizer(tokenizer, out, MAX_LENGTH)
    copy_files(MODEL_DIR, out, "config.json", "generation_config.json")


if __name__ == "__main__":
    train(parse_options("quire.tools.pocket.train", __doc__, MODEL_DIR, NUM_STEPS))
