"""Workers on the nodes of a real Ray, three of which this machine plays: whatever is killed costs no token.

The first node has no processors to give, so that the engines are on the other two.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from daemons import wait_for_end, wait_until
from generated import find_tokens
from quire import LLM, SamplingParams
from quire.ipc.errors import EngineStartError
from quire.tools.stress.ray_nodes import link_package

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]
ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

NUM_REQUESTS = 24
STORE_BYTES = 80 * 2**20
PROMPTS = [{"prompt_token_ids": [100 + i, 200, 300 + i]} for i in range(NUM_REQUESTS)]
PARAMS = [
    SamplingParams(temperature=float(i % 2), seed=i, max_tokens=80, ignore_eos=True)
    for i in range(NUM_REQUESTS)
]
OWNER = """
import sys
from quire import LLM
if __name__ == "__main__":
    llm = LLM(max_model_len=256, distributed_executor_backend="ray", num_threads=1, log_level="ERROR")
    print("ready", flush=True)
    sys.stdin.read()
"""


class Nodes:
    """The cluster, as one who kills needs it."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        self.cluster: Any = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.raylets: list[int] = []
        for _ in range(2):
            self.add()

    def add(self) -> None:
        """One more node, of two processors."""
        node = self.cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
        self.raylets.append(node.all_processes["raylet"][0].process.pid)

    def replace(self, raylet: int) -> None:
        """The node is dead: another comes."""
        self.raylets.remove(raylet)
        self.add()

    @property
    def actors(self) -> list[psutil.Process]:
        """Those of Quire, on all nodes."""
        return [one for raylet in self.raylets for one in list_children(raylet, "ray::NodeGroup")]

    @property
    def workers(self) -> list[psutil.Process]:
        """The worker processes below them."""
        return [one for actor in self.actors for one in list_children(actor.pid, "quire.worker")]

    def is_free(self) -> bool:
        """Whether Ray has nothing of Quire's any more."""
        return not self.actors and ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]


def list_children(pid: int, name: str) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [one for one in psutil.Process(pid).children() if name in " ".join(one.cmdline())]
    return []


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch, link_package() as folder:
        patch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        nodes = Nodes()
        patch.setenv("RAY_ADDRESS", nodes.cluster.address)
        ray.init(address=nodes.cluster.address, log_to_driver=False, logging_level="ERROR")
        yield nodes
        ray.shutdown()
        nodes.cluster.shutdown()


def test_a_killed_owner_leaves_nothing(nodes: Nodes) -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        (worker,) = nodes.workers
        owner.kill()
    wait_for_end(worker.pid, 20.0)
    assert wait_until(nodes.is_free, 20.0)


@pytest.mark.parametrize("field", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_on_one_node_compute_what_they_compute_here(nodes: Nodes, field: str) -> None:
    sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, field: 2}
    with LLM(**sizes) as here:
        expected = find_tokens(here.generate(PROMPTS, PARAMS, use_tqdm=False))
    with LLM(**sizes, distributed_executor_backend="ray") as llm:
        assert find_tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
        assert [len(list_children(one.pid, "quire.worker")) for one in nodes.actors] == [2]
    assert wait_until(nodes.is_free, 20.0)


def test_what_no_node_has_is_said_with_what_there_is(nodes: Nodes) -> None:
    del nodes
    with pytest.raises(EngineStartError, match=r"no Ray node had CPU 3 within 30 s; .* has CPU 2") as caught:
        LLM(max_model_len=256, num_threads=3, distributed_executor_backend="ray", log_level="ERROR")
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def llm(nodes: Nodes) -> Iterator[LLM]:
    with LLM(
        max_model_len=256,
        max_num_seqs=8,
        data_parallel_size=2,
        num_threads=2,
        distributed_executor_backend="ray",
        max_worker_restarts=100,
        max_core_restarts=100,
    ) as llm:
        yield llm
    assert wait_until(nodes.is_free, 20.0), "actors or bundles are left"


@pytest.fixture(scope="module")
def golden(llm: LLM) -> list[list[int]]:
    return find_tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.usefixtures("llm")
def test_each_engine_has_a_node_of_its_own(nodes: Nodes) -> None:
    assert [len(list_children(raylet, "ray::NodeGroup")) for raylet in nodes.raylets] == [1, 1]
    assert len(nodes.workers) == 2


@pytest.mark.parametrize("victim", ["worker", "actor", "launcher", "core", "node"])
def test_whoever_is_killed_costs_no_token(
    nodes: Nodes, llm: LLM, golden: list[list[int]], victim: str
) -> None:
    assert wait_until(lambda: len(nodes.workers) == 2, 60.0), "an engine is not back"
    worker = nodes.workers[-1]
    actor = worker.ppid()
    cores = list_children(os.getpid(), "quire.core")
    pid = {
        "worker": worker.pid,
        "actor": actor,
        "launcher": list_children(cores[-1].pid, "launcher")[0].pid,
        "core": cores[-1].pid,
        "node": psutil.Process(actor).ppid(),
    }[victim]
    striker = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
    striker.start()
    for _ in range(3):
        assert find_tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == golden
    striker.join()
    if victim == "node":
        nodes.replace(pid)
    assert wait_until(lambda: len(nodes.workers) == 2, 90.0), "the engine has no worker again"
    assert find_tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == golden
    assert llm.llm_engine.check_integrity() is None
