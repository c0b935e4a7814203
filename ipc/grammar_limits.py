"""What one grammar may cost, wherever llguidance compiles it or computes its masks: fields of LLParserLimits.

The frontend compiles with the limits of the worker, so that what it lets through compiles there.
"""

from __future__ import annotations

GRAMMAR_LIMITS = {
    "initial_lexer_fuel": 1_000_000,  # of a compile; 20 ms
    "max_grammar_size": 500_000,  # symbols
    "step_lexer_fuel": 200_000,  # of a mask; 15 ms
    "step_max_items": 50_000,  # of a mask; 3 ms
    "max_items_in_row": 2000,  # of the parser, at one byte of the output
    "max_lexer_states": 25_000,  # of a row; 1 to 2 KB each
}
