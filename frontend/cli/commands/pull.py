"""`quire pull`: download a model, so that later starts find it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...models.gguf.files import find_gguf_files
from ...models.model_folder import find_model_folder
from ..parser import ExitCode, Parser

_EPILOG = """\
Prints where the model is. What was interrupted goes on where it stopped, and what is there is not loaded
again. Files go to the Hugging Face cache (HF_HOME), those of addresses to ~/.cache/quire/models; HF_TOKEN
opens what is not public on the hub, and a store's own configuration what is in the store.
"""


def run(argv: Sequence[str]) -> int:
    """Run `quire pull`."""
    parser = Parser("quire pull", "Download a model from the Hugging Face hub or a store.", _EPILOG, " NAME")
    text = "a hub name, such as Qwen/Qwen3-0.6B, or with a tag the GGUF file of it: owner/name:Q4_K_M; or s3://..."
    parser.add_argument("name", metavar="NAME", help=text)
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit")
    parser.add_argument("--download-dir", metavar="DIR", help="in place of these caches")
    options = parser.parse(argv)
    for path in _find(options.name, options.revision, options.download_dir):
        print(path)
    return ExitCode.OK


def _find(name: str, revision: str | None, download_dir: str | None) -> tuple[Path, ...]:
    """A model's GGUF files, or its folder; huggingface_hub shows its progress where a person looks on."""
    files = find_gguf_files(name, revision, download_dir=download_dir)
    return files or (find_model_folder(name, revision, download_dir=download_dir),)
