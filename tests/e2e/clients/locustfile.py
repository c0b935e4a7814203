"""Load from locust: whole answers, streams, and clients that leave in the middle. A failure: exit code 1."""

from __future__ import annotations

import json

from locust import HttpUser, between, task

STREAM = {
    "model": "pocket",
    "prompt": "Once upon a time",
    "max_tokens": 48,
    "ignore_eos": True,
    "stream": True,
}
PLAIN = {
    "model": "pocket",
    "messages": [{"role": "user", "content": "What is 12 plus 30?"}],
    "max_completion_tokens": 32,
}
TIMEOUT_S = 60


class Reader(HttpUser):
    """A client that asks, waits a little and asks again."""

    wait_time = between(0.1, 1.0)

    @task(3)
    def stream(self) -> None:
        """Read a stream to its end, which must be [DONE]."""
        self._read("stream", leaves_after=None)

    @task(1)
    def leave(self) -> None:
        """Close the connection after the second chunk."""
        self._read("leave", leaves_after=2)

    @task(2)
    def ask(self) -> None:
        """A whole chat answer."""
        with self.client.post(
            "/v1/chat/completions", json=PLAIN, name="plain", timeout=TIMEOUT_S, catch_response=True
        ) as answer:
            if answer.status_code != 200 or not answer.json()["choices"][0]["message"]["content"]:
                answer.failure(f"{answer.status_code}: {answer.text[:200]}")

    def _read(self, name: str, leaves_after: int | None) -> None:
        with self.client.post(
            "/v1/completions", json=STREAM, stream=True, name=name, timeout=TIMEOUT_S, catch_response=True
        ) as answer:
            if answer.status_code != 200:
                answer.failure(f"{answer.status_code}: {answer.text[:200]}")
                return
            lines = [b""]
            for line in answer.iter_lines():
                if not line.startswith(b"data: "):
                    continue
                lines.append(line[6:])
                if leaves_after is not None and len(lines) > leaves_after:
                    answer.close()
                    answer.success()
                    return
            if lines[-1] != b"[DONE]" or json.loads(lines[-2])["choices"][0]["finish_reason"] != "length":
                answer.failure(f"ended with {lines[-2:]}")
            else:
                answer.success()
