"""What ranks compare of what they have loaded: any other file or setting shows."""

from __future__ import annotations

from pathlib import Path

import msgspec
from fakes import make_config
from quire.ipc.config import EngineConfig
from quire.worker.rank import compute_weights_id


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
