"""Attack by what comes behind a good request on its connection, which may not cost that one its answer."""

from __future__ import annotations

from collections import Counter

import msgspec

from .attack import REFUSALS, Attack
from .wire import Exchange, converse, make_head, make_request

_PATH = "/v1/completions"
_PAUSE_S = 0.1  # the request is being answered by then
_CHUNKED = ("Content-Type: application/json", "Transfer-Encoding: chunked")


class JunkBehind(Attack):
    """Good requests, each with something behind it, at once or 0.1 s later. A 400 is another one's answer."""

    allowed = frozenset({"200", "open", "not accepted"}) | (REFUSALS - {"400", "413", "431"})

    def play(self, until: float) -> Counter[str]:
        body = {"model": self.target.model, "prompt": "Hello", "max_tokens": 40, "ignore_eos": True}
        request = make_request(self.target, _PATH, msgspec.json.encode(body))
        head = make_head(self.target, _PATH, _CHUNKED, self.target.api_key)
        behind = (
            b"junk\r\n\r\n",
            b"junk\r\n" * 2**18,
            head + b"Host: twice\r\n\r\n",
            head + b"X-H: " + b"a" * 2**17,
            head + b"\r\nzz\r\n",
            head + b"\r\n2\r\n{}\r\n0\r\nX-T: " + b"a" * 2**17,
            make_head(self.target, _PATH, _CHUNKED, "wrong") + b"\r\n0\r\n\r\n",
            head[:30],
        )
        crowd = [Exchange([request + data]) for data in behind]
        crowd += [Exchange([request, data], pause_s=_PAUSE_S) for data in behind]
        return converse(self.target, crowd, until)
