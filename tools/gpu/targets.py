"""What the cost model wants of this GPU: floors that nothing can pass, estimates that a step is judged by."""

from __future__ import annotations

import torch

from ..bench.ceilings import MEMORY_READ_BYTES, measure_matrix_rate, measure_read_rate
from ..bench.cost_model import CARDS, Card, StepWork
from .rows import Row, Say

_COMPUTE_PARTS = {"h100-pcie": ("h100", "pcie"), "rtx4090": ("4090",)}  # of a name, where not the card's own


def find_card(say: Say, device: str) -> Card:
    """By its data sheet; of a device without one what is measured here."""
    card = None if device == "cpu" else find_known_card(torch.cuda.get_device_name())
    if card is None:
        read_rate, matrix_rate = (
            measure_read_rate(device, MEMORY_READ_BYTES),
            measure_matrix_rate(device, "bfloat16"),
        )
        card = Card(f"this {device}", read_rate / 1e9, matrix_rate / 1e12, 1.0)
        if device != "cpu":
            torch.cuda.empty_cache()  # the worker counts what is free
    say(Row("targets", f"{card.name}: {card.memory_gb_per_s:,.0f} GB/s, {card.tflops:,.1f} TFLOP/s"))
    return card


def find_known_card(name: str) -> Card | None:
    """The one with a data sheet that the driver's name says; of several the one with the longest name."""
    lower = name.lower()
    cards = [
        card for key, card in CARDS.items() if all(part in lower for part in _COMPUTE_PARTS.get(key, (key,)))
    ]
    return max(cards, key=lambda card: len(card.name), default=None)


def judge_step(name: str, step_s: float, work: StepWork, card: Card, most: float | None = None) -> Row:
    """A step beside its floor and the estimate; `most` times the estimate is what it may take."""
    floor_s, estimate_s = work.find_floor_s(card), work.estimate_s(card)
    value = (
        f"{step_s * 1e3:.2f} ms; floor {floor_s * 1e3:.2f} ({floor_s / step_s:.0%}), "
        f"estimate {estimate_s * 1e3:.2f} ({step_s / estimate_s:.2f}x)"
    )
    if most is None:
        return Row(name, value)
    return Row(name, value, f"at most {most:.2f}x the estimate", step_s <= most * estimate_s)
