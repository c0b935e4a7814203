"""ReplacedFile: a model's weights are replaced under an engine that reads them again.

The engine is the attacker's own, since it is to end; the ordinary streams share the machine with it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

from ....frontend.llm import LLM
from ....frontend.models.model_folder import pocket_folder
from ....ipc.errors import QuireError
from ....ipc.params.sampling_params import SamplingParams
from .attack import Attack

_WEIGHTS = "model.safetensors"
_PARAMS = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True, detokenize=False)
_PROMPT = "Once upon a time"
_WORKER_MODULE = "quire.worker"


class ReplacedFile(Attack):
    """By `mv` or in place, then the worker is killed in the middle of an answer. Once: the engine ends by it.

    'refused': the answer ends with an error that names the file. Other tokens, or no name, break a promise.
    """

    allowed = frozenset({"refused", "over"})

    def prepare(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        model = Path(shutil.copytree(pocket_folder(), Path(self._folder.name) / "model"))
        self._weights = model / _WEIGHTS
        self._llm: LLM | None = LLM(
            str(model), num_gpu_blocks_override=128, max_model_len=1024, log_level="ERROR"
        )
        self._golden = self._generate(self._llm)

    def play(self, until: float) -> Counter[str]:
        llm, self._llm = self._llm, None
        if llm is None:
            time.sleep(max(0.0, until - time.monotonic()))
            return Counter(over=1)
        said: list[str] = []
        answer = threading.Thread(target=lambda: said.append(self._answer(llm)), daemon=True)
        answer.start()
        self._replace()
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if _WORKER_MODULE in child.cmdline():
                    child.kill()
        answer.join()
        with contextlib.suppress(QuireError):
            llm.llm_engine.close()
        self._folder.cleanup()
        return Counter(said)

    def _answer(self, llm: LLM) -> str:
        try:
            tokens = self._generate(llm)
        except QuireError as error:
            return "refused" if _WEIGHTS in str(error) else "unnamed"
        return "undisturbed" if tokens == self._golden else "other tokens"

    def _generate(self, llm: LLM) -> list[int]:
        (output,) = llm.generate([_PROMPT], _PARAMS, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def _replace(self) -> None:
        """With weights of the same shapes, of which the second half stands from back to front."""
        content = self._weights.read_bytes()
        middle = len(content) // 2 // 4 * 4
        if self.rng.random() < 0.5:
            with self._weights.open("r+b") as file:
                file.seek(middle)
                file.write(content[middle:][::-1])
        else:
            other = self._weights.with_suffix(".new")
            other.write_bytes(content[:middle] + content[middle:][::-1])
            other.replace(self._weights)
