"""The one rule by which many share a bound: places in a queue, bytes held, sequences of a server."""

from __future__ import annotations

MAX_CLIENT_WEIGHT = 1000.0


def has_room(wanted: float, taken: float, tenant_used: float, bound: float, share: float) -> bool:
    """Whether `asked` more may enter where `taken` are inside, `own` of them of who asks.

    Everybody may fill what is free. Whoever has less than its `share` (0 to 1) of the bound gets it also when
    others have filled everything, until twice the bound is taken. What is larger than the bound enters alone.
    """
    if taken + wanted <= bound or not taken or not wanted:
        return True
    return tenant_used + wanted <= bound * share and taken + wanted <= 2 * bound
