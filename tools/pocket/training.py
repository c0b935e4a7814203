"""How both pocket models are trained: optimizers, the average that is kept, the loop, and its options."""

import argparse
import ctypes
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

WARM_UP_STEPS = 60
_EMA_DECAY = 0.99
_MALLOC_TRIM_THRESHOLD, _MALLOC_TOP_PAD, _MALLOC_MMAP_MAX = -1, -2, -4  # of malloc.h
_Model = TypeVar("_Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Options:
    """`steps` sets the length of the whole recipe, whose parts are shares of it."""

    out: Path
    steps: int
    seed: int
    threads: int
    export_every: int


def parse_options(module: str, description: str | None, out: Path, steps: int) -> Options:
    """The options of the command line. `out`, `steps`: their defaults."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--out", type=Path, default=out, help="the folder to write")
    parser.add_argument("--steps", type=int, default=steps, help="the length of the whole recipe")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--export-every", type=int, default=250, help="steps between two exports")
    return Options(**vars(parser.parse_args()))


class Averaged(Generic[_Model]):
    """A model in training, its optimizers and the running average of its weights, which is what is kept."""

    def __init__(self, model: _Model, inside: str, matrix_rate: float, other_rate: float) -> None:
        """inside: in the names of the network's own parameters. The rates are those at factor 1."""
        self.model = model
        self._average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(_EMA_DECAY))
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and inside in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or inside not in name]
        # Muon needs fewer steps than AdamW, but is made for the matrices inside the network only.
        self._optimizers = {
            torch.optim.Muon(matrices, lr=matrix_rate, momentum=0.95, weight_decay=0.02): matrix_rate,
            torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.98), weight_decay=0.0): other_rate,
        }

    def update(self, loss: Tensor, factor: float) -> float:
        """One update at `factor` times the learning rates; returns the loss before it."""
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rate in self._optimizers.items():
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()
        self._average.update_parameters(self.model)
        return loss.item()

    @property
    def averaged_model(self) -> _Model:
        """The moving average of the weights, which is exported."""
        return cast(_Model, self._average.module)


def prepare(options: Options) -> None:
    """Seed and threads; and have malloc reuse large blocks.

    Otherwise each step maps hundreds of megabytes anew, page by page: on a shared virtual machine that made a
    step three times as long. Only glibc has the setting.
    """
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting in (_MALLOC_TRIM_THRESHOLD, _MALLOC_TOP_PAD):
            mallopt(setting, 1 << 30)
        mallopt(_MALLOC_MMAP_MAX, 0)


def train_steps(
    options: Options,
    trainer: Averaged[_Model],
    take_step: Callable[[int], float],
    export: Callable[[_Model], None],
) -> None:
    """Take the steps, each of which returns its loss; export at the end, and every `export_every` steps."""
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"{num_parameters:,} parameters, seed {options.seed}", flush=True)
    start, recent = time.monotonic(), 0.0
    for step in range(1, options.steps + 1):
        loss = take_step(step)
        recent = loss if step == 1 else 0.95 * recent + 0.05 * loss
        if step % 25 == 0:
            print(f"step {step:5d}  loss {recent:.4f}  {(time.monotonic() - start) / 60:.1f} min", flush=True)
        if step % options.export_every == 0:
            export(trainer.averaged_model)
    export(trainer.averaged_model)


def copy_files(source: Path, out: Path, *names: str) -> None:
    """What every model of this shape has beside its tensors and its tokenizer."""
    for name in names if out.resolve() != source.resolve() else ():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, out / name)


def save_tensors(tensors: dict[str, Tensor], out: Path) -> None:
    """Write them as model.safetensors, which others may read."""
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors makes it private
