"""Trains the pocket model from scratch on the CPU: `python -m quire.tools.pocket.train`.

The corpus never repeats and ends nowhere, so a run is a number of steps. Rows are packed with whole documents
from position 0 on, without a separator in front, so that raw prompts start well without a BOS token.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import LlamaConfig, LlamaForCausalLM

from . import MODEL_DIR
from .text import Document, draw_documents
from .tokenizer import (
    END_OF_TEXT,
    SPECIAL_TOKENS,
    TURN_START,
    VOCAB_SIZE,
    render_chat,
    save_tokenizer,
    train_tokenizer,
    write_json,
)

MAX_LENGTH = 2048
TOKENIZER_DOCUMENTS = 10_000
# Rows x length of a step: 8,192 tokens each, short rows three times in four because attention costs less.
SHAPES = ((32, 256), (32, 256), (32, 256), (16, 512))
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = range(len(SPECIAL_TOKENS))
WARM_UP_STEPS = 60
EMA_DECAY = 0.99


@dataclass(frozen=True, slots=True)
class Options:
    """`minutes` is a limit: the schedule ends early on a machine too slow to take `steps` in that time."""

    out: Path
    steps: int
    minutes: float
    seed: int
    threads: int
    export_every: int
    matrix_lr: float
    other_lr: float
    use_compile: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids and, for each, whether predicting it counts. Both are [rows, length]."""

    ids: Tensor
    is_target: Tensor


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
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[END_OF_TEXT_ID, TURN_END_ID],
        pad_token_id=END_OF_TEXT_ID,
        initializer_range=0.05,
        use_cache=False,
    )


def encode_documents(
    tokenizer: Tokenizer, documents: Iterator[Document]
) -> Iterator[tuple[list[int], list[bool]]]:
    """Ids and targets of each document and the separator after it."""
    while chunk := list(islice(documents, 500)):
        texts = [text if isinstance(text, str) else render_chat(text) for text in chunk]
        encodings = tokenizer.encode_batch([text + END_OF_TEXT for text in texts])
        for document, encoding in zip(chunk, encodings, strict=True):
            ids = encoding.ids
            yield ids, [True] * len(ids) if isinstance(document, str) else find_answers(tokenizer, ids)


def find_answers(tokenizer: Tokenizer, ids: list[int]) -> list[bool]:
    """Which tokens of a chat the assistant writes: its text and the end of its turn."""
    assistant = tokenizer.encode(f"{TURN_START}assistant\n").ids
    targets, is_answer = [False] * len(ids), False
    for index, token in enumerate(ids):
        targets[index] = is_answer
        if token == TURN_END_ID:
            is_answer = False
        elif ids[max(0, index + 1 - len(assistant)) : index + 1] == assistant:
            is_answer = True
    return targets


def pack_batches(rows: Iterator[tuple[list[int], list[bool]]]) -> Iterator[Batch]:
    """Batches whose rows each begin with a document; the last document of a row is cut at its end."""
    step = 0
    while True:
        num_rows, length = SHAPES[step % len(SHAPES)]
        packed = [_pack_row(rows, length) for _ in range(num_rows)]
        ids, targets = zip(*packed, strict=True)
        yield Batch(torch.tensor(ids), torch.tensor(targets))
        step += 1


def _pack_row(rows: Iterator[tuple[list[int], list[bool]]], length: int) -> tuple[list[int], list[bool]]:
    ids: list[int] = []
    targets: list[bool] = []
    while len(ids) < length:
        more_ids, more_targets = next(rows)
        ids += more_ids
        targets += more_targets
    return ids[:length], targets[:length]


def compute_loss(model: LlamaForCausalLM, backbone: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of the target tokens; only their positions go through the output head."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = backbone(input_ids=batch.ids).last_hidden_state  # [rows, length, hidden]
        chosen = hidden[:, :-1][batch.is_target[:, 1:]]  # [targets, hidden]
        logits = model.lm_head(chosen)  # [targets, vocab]
    return functional.cross_entropy(logits.float(), batch.ids[:, 1:][batch.is_target[:, 1:]])


def make_optimizers(model: LlamaForCausalLM, options: Options) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices (it needs far fewer steps than AdamW here), AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers." in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers." not in name]
    return [
        torch.optim.Muon(matrices, lr=options.matrix_lr, momentum=0.95, weight_decay=0.02),
        torch.optim.AdamW(others, lr=options.other_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def schedule(step: int, progress: float) -> float:
    """The learning rate's factor: linear warm-up, then a cosine to zero at `progress` 1."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def train(options: Options) -> None:
    """Trains and writes the model folder to `options.out`, also every `export_every` steps."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    tokenizer = train_tokenizer(_render(draw_documents(options.seed)))
    model = LlamaForCausalLM(make_config())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
    backbone = torch.compile(model.model, dynamic=False) if options.use_compile else model.model
    optimizers = make_optimizers(model, options)
    base_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    batches = pack_batches(encode_documents(tokenizer, draw_documents(options.seed + 1)))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters:,} parameters, {options.steps} steps, seed {options.seed}", flush=True)

    start, progress, step, recent = time.monotonic(), 0.0, 0, 0.0
    while progress < 1.0:
        factor = schedule(step, progress)
        for optimizer, rate in zip(optimizers, base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        loss = compute_loss(model, backbone, next(batches))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        average.update_parameters(model)
        step += 1
        elapsed = time.monotonic() - start
        progress = max(step / options.steps, elapsed / (options.minutes * 60))
        recent = loss.item() if step == 1 else 0.95 * recent + 0.05 * loss.item()
        if step % 25 == 0 or progress >= 1.0:
            print(f"step {step:5d}  loss {recent:.4f}  lr x{factor:.3f}  {elapsed / 60:.1f} min", flush=True)
        if step % options.export_every == 0 or progress >= 1.0:
            export(average.module, tokenizer, options.out)


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


def _describe(config: LlamaConfig) -> dict[str, object]:
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
        "rope_theta": 10000.0,
        "use_cache": True,
    }


def parse_options() -> Options:
    parser = argparse.ArgumentParser(prog="python -m quire.tools.pocket.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="the folder to write")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps of 8,192 tokens")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="end the schedule after this time at most"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--export-every", type=int, default=250, help="steps between two exports")
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--other-lr", type=float, default=0.004)
    parser.add_argument(
        "--compile", action="store_true", dest="use_compile", help="use torch.compile (needs g++)"
    )
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    train(parse_options())
