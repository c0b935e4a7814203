"""The protocol between the engine core and a worker: one SchedulerOutput a step, one answer each, in order.

The core assigns every live request a row (0..max_num_seqs-1); the worker keeps one permanent row of state
per live request. A step carries differences only: a request whole and once, then new block ids and counts.
Messages are executed strictly in order, so a freed row or block may be given to another request in the very
next step. Frames are as in `messages.py`: a type byte and a msgpack body.
The first answers are those to WorkerArgs (child_args.py): WorkerProgress as phases begin, then WorkerReady or
WorkerFailed. There is no message to end a worker: its standard input is closed.
"""

from __future__ import annotations

import msgspec

from ..params.pooling_params import PoolingParams
from ..params.sampling_params import SamplingParams
from .messages import LogprobsBlock
from .token_lists import TokenLists


class GroupBlocks(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request's blocks of one KV group, one after the other; none below `first` is read any more."""

    block_ids: list[int]
    first: int = 0


class NewRequestData(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request that enters a row: new, or resumed after preemption, loss or a restart.

    `num_computed_tokens` of prompt + output are already in the KV cache (a prefix hit) through `blocks`, one
    entry for each KV group of the model. They cover everything up to the end of this step. The recurrent
    states after these tokens are in its state slot, once the step's `state_copies` are made; of 0 tokens they
    are zeros, whatever the slot holds.
    """

    row: int
    request_id: str
    prompt_token_ids: bytes
    output_token_ids: bytes
    sampling_params: SamplingParams
    eos_token_ids: list[int]
    token_lists: TokenLists
    blocks: list[GroupBlocks]
    num_computed_tokens: int
    grammar: str = ""  # as in EngineCoreRequest
    extra_args: str = ""  # likewise
    pooling_params: PoolingParams | None = None  # likewise; nothing is sampled in its row
    type_start: int | None = None  # likewise
    state_slot: int | None = None  # of a model with recurrent layers: its row's own


class SchedulerOutput(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One step: which rows compute how many tokens. Answered by ModelRunnerOutput or StepFailed.

    Order of effects in the worker: free `freed_rows`, then enter `new_requests`, then append
    `new_block_ids`, then make `block_copies` and `state_copies`, these one after the other, then compute.
    `rows` are distinct; `num_tokens[i]` >= 1 tokens of `rows[i]` are computed, from its computed count on.
    `sampled_rows`, in the order of `rows`, are those that then have all of prompt and output computed (the
    worker's own samples of earlier steps too); each samples one token, which is appended to its output. Only
    the core derives which rows sample. `pooled_rows`, in the order of `rows`, are none of those.
    """

    step_id: int
    rows: list[int]
    num_tokens: list[int]
    new_requests: list[NewRequestData] = []
    freed_rows: list[int] = []
    new_block_ids: list[tuple[int, int, list[int]]] = []  # (row, KV group, ids appended to its table)
    sampled_rows: list[int] | None = None  # None: all of `rows`
    # (KV group, source, destination): K and V of all its layers.
    block_copies: list[tuple[int, int, int]] = []
    pooled_rows: list[int] = []  # whose prompt is complete with this step, and which answer with a vector
    # (source, destination): the recurrent states of all layers.
    state_copies: list[tuple[int, int]] = []
    # (row, n, slot): the states after the first n tokens of the row's sequence, the n-th of which this step
    # computes, are also written to the slot. No row has it.
    state_saves: list[tuple[int, int, int]] = []


class RowLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Logprobs that a step produced for one row."""

    row: int
    sample: LogprobsBlock | None = None  # the sampled token's; num_positions is 1
    prompt: LogprobsBlock | None = None  # of the prompt tokens whose predecessor was computed in this step


class RowFailure(msgspec.Struct, array_like=True, frozen=True):
    """What a row's request asks for cannot be done; its token means nothing, the other rows are fine."""

    row: int
    reason: str
    is_poison: bool = False  # of a logits processor that raised; else of its grammar


class RowPooled(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What was pooled of a row: float32, little-endian.

    [width] of a row of `pooled_rows`. Of a token-wise task [positions, width] of what the step computed: such
    a row has one in each step that computes some of its prompt.
    """

    row: int
    data: bytes


class RowWork(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Processor time that one row's own work took in a step, beside the model's pass: grammar, processors of
    logits, penalties, logprobs. Rows with less than `MIN_ROW_WORK_US` are left out.
    """

    row: int
    work_us: int


MIN_ROW_WORK_US = 100  # what any row may cost without being asked


class ModelRunnerOutput(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a step sampled: `token_ids[i]` for `rows[i]`, in the order of SchedulerOutput.rows."""

    step_id: int
    rows: list[int]
    token_ids: list[int]
    logprobs: list[RowLogprobs] = []
    bad_rows: list[int] = []  # no usable logits (a NaN, or nothing left to sample): the token means nothing
    execute_s: float = 0.0
    failed_rows: list[RowFailure] = []  # of `rows` and of rows with pooling_params
    pooled: list[RowPooled] = []  # of rows that have not failed, in the order of SchedulerOutput.rows
    row_work: list[RowWork] = []  # of `rows` whose own work took long


class StepFailed(msgspec.Struct, array_like=True, frozen=True):
    """A step raised, or was sent after one that did and before ResetRows."""

    step_id: int
    error: str  # its cause, one line
    details: str = ""  # the traceback
    is_out_of_memory: bool = False  # the device had too little for this step; a smaller one may fit


class ResetRows(msgspec.Struct, array_like=True, frozen=True):
    """Forget every row; the KV cache stays allocated. Not answered."""


class WorkerProgress(msgspec.Struct, array_like=True, frozen=True):
    """A start-up phase has begun in the worker, at a time in seconds of the wall clock."""

    phase: str
    at: float


class WorkerReady(msgspec.Struct, array_like=True, frozen=True):
    """The worker can execute steps."""

    num_gpu_blocks: int
    device: str
    ledger: list[tuple[str, int]]  # (name, bytes) of the device's memory
    batch_variance_reason: str = ""  # why a request's bits may depend on its neighbours; '': they do not
    weights_id: str = ""  # of one rank of several: what it has loaded; all must have the same
    attention_backend: str = ""  # what computes attention: 'triton', 'flashinfer', 'native' or 'torch'
    num_state_slots: int = 0  # 0: the model has no recurrent layer


class WorkerFailed(msgspec.Struct, array_like=True, frozen=True):
    """The worker cannot start. `kind` is the error's class name in ipc/errors.py, `reason` its text."""

    reason: str
    kind: str
    details: str = ""


# The first byte of a message -> its type; from 0x11 on they are the worker's.
STEP_MESSAGE_TYPES: dict[bytes, type[msgspec.Struct]] = {
    b"\x02": SchedulerOutput,
    b"\x03": ResetRows,
    b"\x11": WorkerProgress,
    b"\x12": WorkerReady,
    b"\x13": WorkerFailed,
    b"\x14": ModelRunnerOutput,
    b"\x15": StepFailed,
}
