"""What a decoder of transformers computes for some tokens, as a list of calls, seen by a run without memory.

Each call of torch is a node; norms and activation modules are one node each, and so is attention. Whatever
goes by a tensor's contents, or changes one in place, has no trace. Parts of the list can be computed again
with other numbers in place of some results, which shows what a part does, whatever code it is.
Legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .architecture import explain, make_empty, run_empty

IDS, POSITIONS = 0, 1  # the nodes of the inputs
NUM_TOKENS = 61  # no size of a model, so that it tells the tokens' dimension
NAME = "quire_trace"  # in transformers' register
_IN_PLACE = ("__iadd__", "add_", "__imul__", "mul_")


class NotTracedError(Exception):
    """What a model computes is no list of calls that are understood here."""


class Ref(NamedTuple):
    """A result of a node; `part` of several."""

    node: int
    part: int | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A call. `kind`: input, constant, call, norm, act or attend; `name`: the function's or tensor's."""

    kind: str
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    function: Callable[..., Any] | None = None

    @property
    def refs(self) -> list[Ref]:
        """The results that it was given."""
        refs, left = list[Ref](), [self.args, tuple((self.kwargs or {}).values())]
        while left:
            each: Any = left.pop()
            if isinstance(each, Ref):
                refs.append(each)
            elif isinstance(each, (tuple, list)):
                left += each
        return refs


class Trace(TorchFunctionMode):
    """The nodes of one run of T tokens, in their order. Refs stand where a call was given tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.shapes: dict[Ref, torch.Size] = {}
        self.dtypes: dict[Ref, torch.dtype] = {}
        self.moving: set[int] = set()  # nodes that are made of positions, among others
        self._refs: dict[int, Ref] = {}
        self._kept: list[Any] = []  # an id is of one tensor as long as that lives
        self._names = {id(each): name for name, each in [*model.named_buffers(), *model.named_parameters()]}
        self._is_off = False

    def add(self, node: Node, out: Any) -> None:
        """Note a node and the names of its results."""
        index = len(self.nodes)
        self.nodes.append(node)
        if index == POSITIONS or any(ref.node in self.moving for ref in node.refs):
            self.moving.add(index)
        outs = cast(tuple[Any, ...], out) if isinstance(out, (tuple, list)) else None
        refs = [(Ref(index), out)] if outs is None else [(Ref(index, i), x) for i, x in enumerate(outs)]
        for ref, each in refs:
            if isinstance(each, Tensor):
                self._refs[id(each)] = ref
                self.shapes[ref], self.dtypes[ref] = each.shape, each.dtype
        self._kept.append(out)

    def name(self, value: Any) -> Any:
        """`value` with Refs in place of its tensors."""
        if isinstance(value, Tensor):
            if id(value) not in self._refs:
                if id(value) not in self._names:
                    raise NotTracedError("a tensor of unknown origin")
                self.add(Node("constant", self._names[id(value)]), value)
            return self._refs[id(value)]
        if isinstance(value, (tuple, list)):
            parts = [self.name(each) for each in cast(list[Any], value)]
            return tuple(parts) if isinstance(value, tuple) else parts
        return value

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of each function; it computes it and notes it."""
        out = func(*args, **(kwargs or {}))
        parts = cast(tuple[Any, ...], out) if isinstance(out, (tuple, list)) else (out,)
        name = getattr(func, "__name__", "")
        if self._is_off or not any(isinstance(each, Tensor) for each in parts):
            if name == "__setitem__":
                raise NotTracedError(name)
            return out
        if any(out is each for each in args) and name.endswith("_"):
            if name not in _IN_PLACE:
                raise NotTracedError(name)
        elif any(id(each) in self._refs or id(each) in self._names for each in parts):
            return out  # what was there already
        named = {key: self.name(each) for key, each in (kwargs or {}).items()}
        self.add(Node("call", name, self.name(tuple(args)), named, func), out)
        return out

    def make_leaf(self, kind: str, name: str) -> Callable[[Tensor], Tensor]:
        """What stands in place of a module's code: one node, of the shape that it is given."""

        def run(x: Tensor) -> Tensor:
            ref = self.name(x)
            self._is_off = True
            out = torch.empty_like(x)
            self._is_off = False
            self.add(Node(kind, name, (ref,)), out)
            return out

        return run

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **others: Any
    ) -> tuple[Tensor, None]:
        """As transformers' attention interface."""
        del module
        args = tuple(self.name(each) for each in (query, key, value, others.get("s_aux")))
        self._is_off = True
        out = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))
        self._is_off = False
        self.add(Node("attend", "", args), out)
        return out, None

    def compute(
        self, ref: Ref, known: dict[Ref, Tensor], find_constant: Callable[[str], Tensor | None]
    ) -> Tensor:
        """A result in float32, with `known` ones as they are, which grows by all that was computed."""
        if ref in known:
            return known[ref]
        node = self.nodes[ref.node]
        if node.kind == "constant":
            constant = find_constant(node.name)
            if constant is None:
                raise NotTracedError(node.name)
            known[ref] = constant
            return constant
        if node.function is None:
            raise NotTracedError(node.kind)

        def fill(value: Any) -> Any:
            if isinstance(value, Ref):
                return self.compute(value, known, find_constant)
            if isinstance(value, (tuple, list)):
                parts = [fill(each) for each in cast(list[Any], value)]
                return tuple(parts) if isinstance(value, tuple) else parts
            if isinstance(value, torch.device) and value.type == "meta":
                return torch.device("cpu")
            return torch.float32 if value is torch.bfloat16 else value

        args, kwargs = fill(node.args), {key: fill(each) for key, each in (node.kwargs or {}).items()}
        if node.name in _IN_PLACE:
            args = (args[0].clone(), *args[1:])
        out = node.function(*args, **kwargs)
        if ref.part is None:
            known[ref] = out
        else:
            known.update({Ref(ref.node, part): each for part, each in enumerate(out)})
        return known[ref]


@torch.inference_mode()
def trace_model(cls: type[Any], config: Any, dtype: torch.dtype) -> tuple[Trace, Ref]:
    """The calls between T token ids and positions, nodes 0 and 1, and logits. Raises NotTracedError."""
    from transformers import AttentionInterface

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = make_empty(cls, config, "eager")
    finally:
        torch.set_default_dtype(before)
    trace = Trace(model)
    for name, module in model.named_modules():
        is_act = type(module).__module__ in ("transformers.activations", "torch.nn.modules.activation")
        if "RMSNorm" in type(module).__name__ or is_act:
            module.forward = trace.make_leaf("act" if is_act else "norm", name)
    AttentionInterface.register(NAME, trace.attend)
    config._attn_implementation = NAME
    model.config._attn_implementation = NAME
    ids = torch.zeros((1, NUM_TOKENS), dtype=torch.int64, device="meta")
    positions = torch.arange(NUM_TOKENS, device="meta")[None]
    trace.add(Node("input", "ids"), ids)
    trace.add(Node("input", "positions"), positions)
    try:
        with trace:
            return trace, trace.name(run_empty(model, ids, positions))
    except NotTracedError:
        raise
    except Exception as error:  # any code of transformers
        raise NotTracedError(explain(error)) from error
