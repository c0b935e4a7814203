"""FlashInfer's paged wrapper by its documentation, computed by torch on the CPU; checks what it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quire.kernels.attention.paged_attention import paged_attention_reference
from torch import Tensor

INDEXES = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


class BatchPrefillWithPagedKVCacheWrapper:
    made: list[BatchPrefillWithPagedKVCacheWrapper] = []  # noqa: RUF012 (all of a test)

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        self.buffers = [qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf]
        self.use_cuda_graph, self.num_plans = use_cuda_graph, 0
        if use_cuda_graph:
            assert all(isinstance(buffer, Tensor) for buffer in self.buffers)
            assert qo_indptr_buf is not None
            self.batch_size, self.max_rows = len(qo_indptr_buf) - 1, 0
        self.made.append(self)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        given = [qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        assert all(one.dtype == torch.int32 and one.device.type == "cpu" for one in given)
        assert causal
        if self.use_cuda_graph:
            assert len(qo_indptr) - 1 == self.batch_size, "the batch of a graph is fixed"
            self.max_rows = self.max_rows or int(qo_indptr[-1])
            assert int(qo_indptr[-1]) <= self.max_rows
            for buffer, one in zip(self.buffers, given, strict=True):
                assert buffer is not None
                buffer[: len(one)] = one
        else:
            self.buffers = list(given)
        self.heads = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self.window_left, self.soft_cap, self.scale = window_left, logits_soft_cap, sm_scale
        self.dtype, self.num_plans = q_data_type, self.num_plans + 1
        assert kv_data_type == q_data_type

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        starts, first_pages, pages, last = (one for one in self.buffers if one is not None)
        k_cache, v_cache = paged_kv_cache
        assert q.shape[1:] == (self.heads[0], self.heads[2])
        assert k_cache.shape[1:] == (self.heads[1], self.heads[3], self.heads[2])
        assert q.dtype == k_cache.dtype == self.dtype
        out = torch.full_like(q, torch.nan)  # what it does not compute is unspecified
        for request in range(len(starts) - 1):
            begin, end = starts[request : request + 2].tolist()
            if begin == end:
                continue
            page, next_page = first_pages[request : request + 2].tolist()
            out[begin:end] = paged_attention_reference(
                q[begin:end],
                *(k_cache, v_cache, pages[None, page:next_page], [0, end - begin]),
                [(next_page - page - 1) * self.heads[3] + int(last[request])],
                None if self.window_left < 0 else self.window_left + 1,
                *(self.soft_cap, self.scale),
            )
        return out


def put_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nvcc be found in `folder`."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(folder))
