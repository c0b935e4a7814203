"""What the two halves of `quire bench kernels` tell each other. Loads no torch."""

from __future__ import annotations

import msgspec

OPS = ("linear", "attention", "rotate", "dense", "sampling", "encoder")


class KernelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `seconds`: of a row, torch's column included. `device` None: CUDA if there is one."""

    ops: list[str]
    seconds: float
    device: str | None = None


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Measured rates of the device, each the best of some rounds."""

    device: str
    read_bytes_per_s: float  # from memory
    copy_bytes_per_s: float  # from memory to memory, both counted
    cache_bytes_per_s: float
    bf16_flops_per_s: float
    f32_flops_per_s: float

    def take_better(self, other: Ceilings) -> Ceilings:
        """The best of both: a ceiling is what the device can do, and a shared machine cannot always."""
        return Ceilings(
            device=self.device,
            read_bytes_per_s=max(self.read_bytes_per_s, other.read_bytes_per_s),
            copy_bytes_per_s=max(self.copy_bytes_per_s, other.copy_bytes_per_s),
            cache_bytes_per_s=max(self.cache_bytes_per_s, other.cache_bytes_per_s),
            bf16_flops_per_s=max(self.bf16_flops_per_s, other.bf16_flops_per_s),
            f32_flops_per_s=max(self.f32_flops_per_s, other.f32_flops_per_s),
        )


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operation in one shape. Seconds are of one call."""

    op: str
    shape: str
    dtype: str
    seconds: float
    torch_seconds: float
    num_bytes: int  # that must be moved
    num_flops: int
    is_resident: bool  # its data stay in a cache between calls

    def bytes_floor_s(self, ceilings: Ceilings) -> float:
        """Least seconds for its bytes."""
        return self.num_bytes / (
            ceilings.cache_bytes_per_s if self.is_resident else ceilings.read_bytes_per_s
        )

    def flops_floor_s(self, ceilings: Ceilings) -> float:
        """Least seconds for its operations; narrow weights are multiplied as bfloat16."""
        return self.num_flops / (
            ceilings.f32_flops_per_s if self.dtype == "float32" else ceilings.bf16_flops_per_s
        )


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the child."""

    ceilings: Ceilings | None = None
    row: KernelRow | None = None
