"""Opens many streams at the same time and reads each to its end: `python many_streams.py PORT NUM API_KEY`.

Plain sockets: with a client library they would be most of the work. Prints one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any

MAX_TOKENS = 32
DEADLINE_S = 300.0
NUM_SEEDS = 50  # streams with the same seed must say the same


async def read_stream(port: int, api_key: str, seed: int) -> tuple[float, str]:
    """Seconds to the first chunk, and the text. Raises AssertionError when the stream is not whole."""
    fields = {"prompt": "Once upon a time", "max_tokens": MAX_TOKENS, "seed": seed, "temperature": 1.0}
    body = json.dumps(fields | {"stream": True, "ignore_eos": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {api_key}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    first_s = 0.0
    data: list[bytes] = []
    status = await reader.readline()
    assert b" 200 " in status, status + await reader.read(2000)
    async for line in reader:
        if line.startswith(b"data: "):
            first_s = first_s or time.monotonic() - began
            data.append(line[6:].strip())
    writer.close()
    await writer.wait_closed()
    assert data, "no chunk came"
    assert data[-1] == b"[DONE]", data[-2:]
    choices = [json.loads(chunk)["choices"][0] for chunk in data[:-1]]
    assert choices[-1]["finish_reason"] == "length", choices[-1]
    return first_s, "".join(choice["text"] for choice in choices)


async def run(port: int, num_streams: int, api_key: str) -> dict[str, Any]:
    """The result: how many ended well, the errors with their counts, and seconds."""
    began = time.monotonic()
    tasks = [read_stream(port, api_key, place % NUM_SEEDS) for place in range(num_streams)]
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), DEADLINE_S)
    good = [result for result in results if not isinstance(result, BaseException)]
    errors = Counter(repr(result)[:200] for result in results if isinstance(result, BaseException))
    first_s = sorted(seconds for seconds, _ in good) or [0.0]
    return {
        "streams": num_streams,
        "good": len(good),
        "errors": dict(errors),
        "texts": len({text for _, text in good}),
        "seconds": round(time.monotonic() - began, 2),
        "ttft_p50_s": round(first_s[len(first_s) // 2], 3),
        "ttft_max_s": round(first_s[-1], 3),
    }


if __name__ == "__main__":
    port, num_streams, api_key = sys.argv[1:]
    line = asyncio.run(run(int(port), int(num_streams), api_key))
    print(json.dumps(line))
    sys.exit(line["good"] != line["streams"])
