"""What ranks find out before they compute: other weights or settings, devices that do not do."""

from __future__ import annotations

import ctypes
from pathlib import Path

import msgspec
import pytest
import torch
from fakes import make_config
from quire.ipc.errors import ConfigError
from quire.ipc.spec.config import EngineConfig, ParallelConfig
from quire.kernels.group.shared_group import SharedGroup
from quire.worker.rank import check_devices, check_num_ranks, compute_weights_id
from ranks import run_ranks


def configure(folder: Path) -> EngineConfig:
    config = make_config()
    model = msgspec.structs.replace(config.model, model=str(folder), weight_files=("model.safetensors",))
    return msgspec.structs.replace(config, model=model)


def test_another_file_or_setting_is_another_id_and_another_fault_is_not(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    content = bytearray(range(256)) * 8192
    file.write_bytes(content)
    config = configure(tmp_path)
    first = compute_weights_id(config)
    assert compute_weights_id(msgspec.structs.replace(config, fault_hooks="worker.execute:hang")) == first
    seen = {first, compute_weights_id(msgspec.structs.replace(config, exact=True))}
    for at in (5, len(content) // 2, len(content) - len(content) // 64):
        content[at] ^= 1
        file.write_bytes(content)
        seen.add(compute_weights_id(config))
    file.write_bytes(content[:-1])
    seen.add(compute_weights_id(config))
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("parallel", "error"),
    [
        (
            ParallelConfig(tensor_parallel_size=4),
            "tensor_parallel_size=4: expected at most 2: a rank has a GPU of its own",
        ),
        (ParallelConfig(pipeline_parallel_size=2), "pipeline_parallel_size=2: expected 1 on a GPU"),
    ],
)
def test_ranks_that_the_gpus_cannot_have_are_refused(
    parallel: ParallelConfig, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_num_ranks(parallel, torch.device("cpu"))
    check_num_ranks(ParallelConfig(tensor_parallel_size=2), torch.device("cuda"))
    with pytest.raises(ConfigError, match=error):
        check_num_ranks(parallel, torch.device("cuda"))


def test_ranks_that_find_devices_of_two_kinds_do_not_begin(library: ctypes.CDLL) -> None:
    del library
    config = make_config()

    def join(group: SharedGroup) -> str:
        with pytest.raises(ConfigError) as raised:
            check_devices(group, config, torch.device("cuda" if group.rank else "cpu"))
        return str(raised.value)

    texts = run_ranks(2, join)
    assert texts[0] == texts[1]
    assert "device='auto': expected one that all ranks find (rank 0 has cpu, rank 1 has cuda)" in texts[0]
