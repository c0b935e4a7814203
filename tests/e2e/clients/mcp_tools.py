"""The calculator of local_tools.py as an MCP server on standard input and output, for command lines.

It is the only tool: between names that begin with a server's the pocket model chooses badly.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from local_tools import DESCRIPTIONS, SCHEMAS, run_tool


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The result of a request of the Model Context Protocol."""
    match method:
        case "initialize":
            info = {"name": "tools", "version": "1"}
            version = params["protocolVersion"]
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            name = "calculator"
            tool = {"name": name, "description": DESCRIPTIONS[name], "inputSchema": SCHEMAS[name]}
            return {"tools": [tool]}
        case "tools/call":
            result = run_tool(params["name"], params["arguments"])
            print(f"called {params['name']}: {result}", file=sys.stderr, flush=True)
            return {"content": [{"type": "text", "text": result}]}
        case _:
            return {}


def main() -> None:
    """Answer one request a line, until the input ends."""
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            result = answer(message["method"], message.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()
