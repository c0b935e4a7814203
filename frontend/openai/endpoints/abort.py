"""POST /abort_requests: end requests by the ids of their answers, whichever HTTP process has them."""

from __future__ import annotations

from starlette.responses import Response

from ..bodies.schema import AbortRequest, StatusResponse
from ..engines.served_models import ServedModels
from ..errors import unavailable
from ..serving import Caller
from ..stream import respond


async def create_abort(models: ServedModels, request: AbortRequest, caller: Caller) -> Response:
    """End requests of this API key: each answer ends with what it has and finish_reason "abort".

    Ids that are unknown, finished or another key's are ignored: nobody learns what another has asked.
    """
    engines = [serving.llm for serving in models.servings if serving.llm.is_running]
    for llm in engines:  # an id does not tell whose it is
        if not llm.is_recovering:
            llm.abort_named(request.request_ids, caller.tenant if caller.key_hash else "")
    if any(llm.is_recovering for llm in engines):
        raise unavailable("an engine is being restarted: try again", "recovering")
    return respond(StatusResponse("ok"))
