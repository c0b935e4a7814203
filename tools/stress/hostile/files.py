"""An attack on files: a model's weights are replaced under an engine that reads them again.

The engine is the attacker's own, since it is to end; the ordinary streams share the machine with it.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import threading
from collections import Counter
from pathlib import Path

import psutil

from ....frontend.llm import LLM
from ....frontend.models.model_folder import pocket_folder
from ....ipc.errors import QuireError
from ....ipc.params.sampling_params import SamplingParams
from .attack import ATTACKS, Attack, Play, sleep_until
from .plan import Target

_WEIGHTS = "model.safetensors"
_PARAMS = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True, detokenize=False)
_PROMPT = "Once upon a time"
_WORKER_MODULE = "quire.worker"


def _replace_weights(_target: Target, rng: random.Random) -> Play:
    """By `mv` or in place, then the worker is killed in the middle of an answer. Once: the engine ends by it.

    'refused': the answer ends with an error that names the file. Other tokens, or no name, break a promise.
    """
    folder = tempfile.TemporaryDirectory()
    model = Path(shutil.copytree(pocket_folder(), Path(folder.name) / "model"))
    engines = [LLM(str(model), num_gpu_blocks_override=128, max_model_len=1024, log_level="ERROR")]
    golden = _generate(engines[0])

    def play(until: float) -> Counter[str]:
        if not engines:
            sleep_until(until)
            return Counter(over=1)
        llm, said = engines.pop(), list[str]()
        answer = threading.Thread(target=lambda: said.append(_answer(llm, golden)), daemon=True)
        answer.start()
        _replace(model / _WEIGHTS, is_in_place=rng.random() < 0.5)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if _WORKER_MODULE in child.cmdline():
                    child.kill()
        answer.join()
        with contextlib.suppress(QuireError):
            llm.llm_engine.close()
        folder.cleanup()
        return Counter(said)

    return play


ATTACKS["replaced-file"] = Attack({"refused", "over"}, _replace_weights)


def _answer(llm: LLM, golden: list[int]) -> str:
    try:
        tokens = _generate(llm)
    except QuireError as error:
        return "refused" if _WEIGHTS in str(error) else "unnamed"
    return "undisturbed" if tokens == golden else "other tokens"


def _generate(llm: LLM) -> list[int]:
    (output,) = llm.generate([_PROMPT], _PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def _replace(weights: Path, is_in_place: bool) -> None:
    """With weights of the same shapes, of which the second half stands from back to front."""
    content = weights.read_bytes()
    middle = len(content) // 2 // 4 * 4
    if is_in_place:
        with weights.open("r+b") as file:
            file.seek(middle)
            file.write(content[middle:][::-1])
    else:
        other = weights.with_suffix(".new")
        other.write_bytes(content[:middle] + content[middle:][::-1])
        other.replace(weights)
