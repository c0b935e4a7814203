"""The options of `python -m quire.tools.sim --engines N`."""

from __future__ import annotations

import argparse
import math
from typing import get_args

from .report import FleetOptions, play_fleet, print_header
from .step_costs import find_costs
from .traffic import Traffic

MAX_ENGINES = 10_000


def add_fleet_options(parser: argparse.ArgumentParser) -> None:
    """Add what a fleet's run takes, all of it optional."""
    group = parser.add_argument_group("a plan for many engines")
    add = group.add_argument
    add("--engines", type=int, metavar="N", help="engines of a fleet; with it the options below count")
    add("--traffic", choices=get_args(Traffic), help="conversations with shared prefixes, or random (both)")
    add("--routing", choices=("router", "round-robin"), help="how engines are chosen (both)")
    add("--load", type=float, default=0.7, metavar="F", help="of what they do without a cache (0.7)")
    add("--requests", type=int, default=64, metavar="N", help="an engine (64)")
    add("--frontends", type=int, default=4, metavar="N", help="that share the requests (4)")
    add("--losses", type=int, default=0, metavar="N", help="engines that are lost and come back (0)")
    add("--drains", type=int, default=0, metavar="N", help="engines that are drained and come back (0)")
    add("--model", default="tiny", help="whose steps: tiny, measured, or MODEL@CARD, estimated (tiny)")
    text = "how much longer steps take: 130 makes of tiny about what small takes on 2 cores (1)"
    add("--scale", type=float, default=1.0, metavar="F", help=text)
    add("--seed", type=int, default=0, metavar="N", help="of the traffic (0)")


def run_fleets(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Play each kind of traffic and routing that is asked for; exit code 1 when something is wrong."""
    for name, least, most in (
        ("engines", 1, MAX_ENGINES),
        ("requests", 1, math.inf),
        ("frontends", 1, math.inf),
        ("losses", 0, math.inf),
        ("drains", 0, math.inf),
    ):
        if not least <= getattr(args, name) <= most:
            parser.error(f"--{name} {getattr(args, name)}: from {least} to {most}")
    if args.losses + args.drains >= args.engines and args.losses + args.drains:
        parser.error(f"--losses {args.losses} --drains {args.drains}: fewer than --engines {args.engines}")
    for name in ("load", "scale"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} {getattr(args, name)}: above 0")
    try:
        find_costs(args.model)
    except ValueError as error:
        parser.error(f"--model {args.model}: {error}")
    wrong: list[str] = []
    print_header()
    for traffic in (args.traffic,) if args.traffic else get_args(Traffic):
        for routing in (args.routing,) if args.routing else ("round-robin", "router"):
            wrong += play_fleet(
                FleetOptions(
                    num_engines=args.engines,
                    traffic=traffic,
                    has_router=routing == "router",
                    load=args.load,
                    num_requests=args.requests,
                    num_frontends=args.frontends,
                    num_losses=args.losses,
                    num_drains=args.drains,
                    model=args.model,
                    scale=args.scale,
                    seed=args.seed,
                )
            )
    for line in wrong[:10]:
        print(f"wrong: {line}")
    return 1 if wrong else 0
