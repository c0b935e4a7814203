"""Trains the pocket model from scratch on the CPU: `python -m quire.tools.pocket.train`.

The corpus never repeats, so nothing is seen twice. Text and sequences to copy are mixed: many of these at
first, few at the end.
"""

from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from . import MODEL_DIR
from .batches import (
    END_OF_TEXT_ID,
    LONG_SHAPE,
    SHORT_SHAPE,
    TURN_END_ID,
    Packer,
    encode_documents,
    render,
)
from .loss import NORM_EPS, ROPE_THETA, compute_loss
from .text import draw_documents
from .tokenizer import SPACE, VOCAB_SIZE, save_tokenizer, train_tokenizer, write_json
from .training import Averaged, Options, parse_options, prepare, save_tensors, train_steps
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


if __name__ == "__main__":
    train(parse_options("quire.tools.pocket.train", __doc__, MODEL_DIR, NUM_STEPS))
