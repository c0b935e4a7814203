"""What one grammar may cost, wherever llguidance compiles it or computes its masks: fields of LLParserLimits.

The frontend compiles with the limits of the worker, so that what it lets through compiles there.
"""

from __future__ import annotations

# With 151,936 tokens on a 2-core Xeon: a compile of at most 60 ms, a mask of 15 ms, 50 MB a row.
MAX_ITEMS_IN_ROW = 2000  # of the parser, at one byte of the output
INITIAL_LEXER_FUEL = 1_000_000  # of a compile
MAX_GRAMMAR_SIZE = 500_000  # symbols
STEP_LEXER_FUEL = 200_000  # of a mask
STEP_MAX_ITEMS = 50_000  # of a mask
MAX_LEXER_STATES = 25_000  # of a row; 1 to 2 KB each
