"""Launches Triton's kernels without Triton's Python: a compiled variant is found by its arguments, and run.

Triton binds, specializes and looks up every launch anew, and a step of 28 layers has some 170 of them. What a
launch's variant depends on (types, alignment, constants, integers) is one key here, which the compiled kernel
is kept under. What is new or unusual goes Triton's way. What layers launch alike can be recorded in the first
and run again.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from torch import Tensor

# A kernel has a few variants, but integers that Triton specializes on are kept by value.
_MAX_KEPT = 4096
_ALIGNMENT = 16  # bytes: what Triton may tell the compiler of a pointer
_INT32 = range(-(1 << 31), 1 << 31)

_find_dtype = attrgetter("dtype")
_find_address = Tensor.data_ptr
_find_offset = (_ALIGNMENT - 1).__and__


@dataclass(frozen=True, slots=True)
class _Layout:
    """What stands where in a kernel's arguments, as its first launch has shown."""

    types: tuple[type, ...]
    tensors: Callable[[typing.Any], tuple[Tensor, ...]]
    numbers: Callable[[typing.Any], tuple[float, ...]]  # whose values count
    others: tuple[int, ...]  # integers of which only the width counts


@dataclass(frozen=True, slots=True)
class _Variant:
    run: Callable[..., None]  # of a grid, a stream, `head`, a call's arguments, `constants`
    head: tuple[typing.Any, ...]  # the function, its metadata, and no hooks
    constants: tuple[typing.Any, ...]


class Launch:
    """A variant on a grid, without its arguments."""

    __slots__ = ("_device", "_find_stream", "_grid", "_variant")

    def __init__(
        self,
        variant: _Variant,
        grid: tuple[int, ...],
        find_stream: Callable[[int], int],
        device: int,
    ) -> None:
        self._variant, self._grid, self._find_stream, self._device = variant, grid, find_stream, device

    def run(self, args: typing.Sequence[typing.Any]) -> None:
        """Queue it on the present stream."""
        variant, stream = self._variant, self._find_stream(self._device)
        variant.run(*self._grid, stream, *variant.head, *args, *variant.constants)


class LaunchTape:
    """The direct launches of a call, to be run again with other tensors in the place of `inputs`.

    What the call has allocated is used again: only where launches follow each other on one stream.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.is_whole = True  # False: some launch went Triton's way, and nothing can be run again
        self._inputs = inputs
        self._launches: list[tuple[Launch, list[typing.Any], list[tuple[int, int]]]] = []

    @property
    def num_launches(self) -> int:
        """How many launches are recorded."""
        return len(self._launches)

    def add(self, launch: Launch, args: tuple[typing.Any, ...]) -> None:
        """The call has launched this."""
        places = [
            (place, number)
            for place, arg in enumerate(args)
            for number, tensor in enumerate(self._inputs)
            if arg is tensor
        ]
        self._launches.append((launch, list(args), places))

    def run(self, inputs: Sequence[Tensor]) -> bool:
        """Launch all of it with other inputs of the same types; False: they are aligned otherwise."""
        if any(map(_find_offset, map(_find_address, inputs))):
            return False
        for launch, args, places in self._launches:
            for place, number in places:
                args[place] = inputs[number]
            launch.run(args)
        return True


_tapes: list[LaunchTape] = []  # the last is being recorded


@contextmanager
def recorded_launches(inputs: Sequence[Tensor]) -> Generator[LaunchTape]:
    """Gives a tape of what is launched until the end; it is not whole where launches are Triton's own."""
    tape = LaunchTape(inputs)
    _tapes.append(tape)
    try:
        yield tape
    finally:
        _tapes.pop()
    tape.is_whole &= tape.num_launches > 0


class DirectLaunches:
    """Takes the place of one kernel's `run`, for launches on the present device.

    An argument is a tensor in all launches or in none.
    """

    def __init__(self, kernel: typing.Any) -> None:
        from triton import runtime

        active: typing.Any = runtime.driver.active
        self._kernel, self._run = kernel, kernel.run
        self._device: int = active.get_current_device()
        self._find_stream: Callable[[int], int] = active.get_current_stream
        self._layout: _Layout | None = None
        self._variants: dict[typing.Any, _Variant] = {}

    def run(self, *args: typing.Any, grid: typing.Any, warmup: bool, **options: typing.Any) -> typing.Any:
        """As JITFunction's, but the compiled kernel comes back only from a launch that went Triton's way."""
        layout = self._layout
        if layout is None or warmup:
            return self._run_as_triton(args, grid, warmup, options)
        for place in layout.others:
            if args[place] not in _INT32:
                return self._run_as_triton(args, grid, warmup, options)
        tensors = layout.tensors(args)
        key = (*map(_find_dtype, tensors), *layout.numbers(args), *options, *options.values())
        variant = self._variants.get(key)
        if variant is None or any(map(_find_offset, map(_find_address, tensors))):
            return self._run_as_triton(args, grid, warmup, options)
        whole_grid = (*grid, 1, 1)[:3]
        if _tapes:
            _tapes[-1].add(Launch(variant, whole_grid, self._find_stream, self._device), args)
        variant.run(*whole_grid, self._find_stream(self._device), *variant.head, *args, *variant.constants)
        return None

    def _run_as_triton(
        self, args: tuple[typing.Any, ...], grid: typing.Any, warmup: bool, options: dict[str, typing.Any]
    ) -> typing.Any:
        """And keep the kernel for the launches to come, where nothing but its arguments can change."""
        if _tapes:
            _tapes[-1].is_whole = False
        kernel = self._run(*args, grid=grid, warmup=warmup, **options)
        rest = self._kernel.params[len(args) :]
        is_usual = isinstance(grid, tuple) and all(p.is_constexpr and p.name in options for p in rest)
        if kernel is None or warmup or not is_usual or self._kernel.pre_run_hooks:
            return kernel
        if self._layout is None:
            self._layout = self._find_layout(args)
        layout = self._layout
        if layout is None or layout.types != tuple(map(type, args)) or len(self._variants) >= _MAX_KEPT:
            return kernel
        tensors = layout.tensors(args)
        if any(args[place] not in _INT32 for place in layout.others) or any(map(_is_offset, tensors)):
            return kernel
        key = (*map(_find_dtype, tensors), *layout.numbers(args), *options, *options.values())
        constants = tuple(options[param.name] for param in rest)
        head = kernel.function, kernel.packed_metadata, None, None, None
        self._variants[key] = _Variant(kernel.run, head, constants)
        return kernel

    def _find_layout(self, args: tuple[typing.Any, ...]) -> _Layout | None:
        """The layout of a direct launch; None if such launches go through Triton."""
        types, params = tuple(map(type, args)), self._kernel.params
        tensors = [place for place, type_ in enumerate(types) if type_ is Tensor]
        others = [i for i, type_ in enumerate(types) if type_ is int and params[i].do_not_specialize]
        numbers = [place for place in range(len(types)) if place not in tensors + others]
        is_usual = set(types) <= {Tensor, int, float} and not any(
            p.is_constexpr for p in params[: len(types)]
        )
        return _Layout(types, _pick(tensors), _pick(numbers), tuple(others)) if is_usual else None


def _pick(places: list[int]) -> Callable[[typing.Any], tuple[typing.Any, ...]]:
    """Takes what stands at these places."""
    if len(places) > 1:
        return itemgetter(*places)
    first = places[0] if places else 0  # of a slice, which is a tuple whatever its length
    return itemgetter(slice(first, first + len(places)))


def _is_offset(tensor: Tensor) -> bool:
    return tensor.data_ptr() % _ALIGNMENT != 0


def launch_directly() -> int:
    """Have all kernels of this package that are loaded launched directly from now on; returns how many.

    To be called in the thread, and with the device, that launches; a second call changes nothing.
    """
    from triton.runtime.jit import JITFunction

    package = __name__.partition(".triton.")[0] + "."
    modules = [module for name, module in sys.modules.items() if name.startswith(package)]
    kernels = {
        id(value): value
        for module in modules
        for value in vars(module).values()
        if type(value) is JITFunction
    }
    for kernel in kernels.values():
        if "run" not in vars(kernel):
            typing.cast(typing.Any, kernel).run = DirectLaunches(kernel).run
    return len(kernels)
