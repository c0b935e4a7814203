"""Whether one more request may wait. Reads what waits and what it costs; takes nothing on."""

from __future__ import annotations

from ...ipc.config import SchedulerConfig
from ...ipc.messages import EngineCoreRequest
from .scheduler import Scheduler
from .tenant import Tenant, TenantLedger


def find_overload(
    request: EngineCoreRequest,
    tenant: Tenant,
    held_bytes: int,
    config: SchedulerConfig,
    scheduler: Scheduler,
    tenants: TenantLedger,
) -> str | None:
    """Why this request may not wait, None if it may. The tenant's account has it and its bytes already.

    Under the fair policy a tenant has its share of both bounds. A resumed request was taken on before, so
    it finds a place; its bytes do while there are twice as many, which is as far as shares reach.
    """
    was_taken_on = request.is_resumed or bool(request.output_token_ids)
    part = tenant.weight / tenants.active_weight
    policy = scheduler.policy
    bound = config.max_num_queued_reqs
    if bound is not None and not was_taken_on:
        taken = scheduler.num_queued + max(0, len(policy.parked) - config.max_num_seqs)
        if not policy.admits(1, taken, tenant.num_live - 1 - tenant.num_rows, bound, part):
            return f"{taken} requests wait already, and max_num_queued_reqs={bound}: try again later"
    bound = config.max_queued_bytes
    if bound is not None:
        taken, own = tenants.held_bytes - held_bytes, tenant.held_bytes - held_bytes
        if not policy.admits(held_bytes, taken, own, 2 * bound if was_taken_on else bound, part):
            return (
                f"it takes {held_bytes} bytes, live requests hold {taken} ({own} of them this tenant's), "
                f"and max_queued_bytes={bound}: try again later"
            )
    return None
