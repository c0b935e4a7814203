"""Makes the first call of each of torch's vector functions in one thread, before several threads call them.

On the CPU torch takes them from MKL, which looks up a function's kernel at its first call in a process. If
several threads make that call, one of them may get another kernel, which is off by 1e-4: in 1 of 400
processes (4 at a time on 2 cores), and in none of 29,455 after a call with one number (torch 2.13,
https://github.com/pytorch/pytorch/issues/188792, MKL before 2025.0). A rotary table that is computed so stays
wrong as long as the process lives.
"""

from __future__ import annotations

import functools

import torch

# All vector functions that workers call.
FUNCTIONS = (torch.cos, torch.sin, torch.exp, torch.log, torch.tanh)


@functools.cache
def make_first_calls() -> None:
    """Called when a model is loaded, before anything is computed. Runs once in a process."""
    for dtype in (torch.float32, torch.float64):
        for function in FUNCTIONS:
            function(torch.ones(1, dtype=dtype))
