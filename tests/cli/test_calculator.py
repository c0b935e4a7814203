"""The chat's calculator: right where it answers, and an error for a model to read where it does not."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.frontend.cli.chat.tools import MAX_LENGTH, CalculatorError, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 + 30", "42"),
        (" (1 + 2) * -3 ", "-9"),
        ("7 / 2", "3.5"),
        ("84 / 2", "42"),
        ("7 // 2 + 7 % 4", "6"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("0.1 + 0.2", "0.3"),
        ("1e3 * 1_000", "1000000"),
        ("2 ** 200", str(2**200)),
    ],
)
def test_arithmetic_is_right(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "is not an expression"),
        ("1 +", "is not an expression"),
        ("1; 2", "has more in it than numbers"),
        ("__import__('os')", "has more in it than numbers"),
        ("e", "'e' is not one of numbers"),
        ("2(3)", r"'2\(3\)' is not one of numbers"),
        ("()", "is not one of numbers"),
        ("1 / (2 - 2)", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("10 ** 200 * 10 ** 200", "too large"),
        ("1e200 * 1e200", "too large"),
        ("1e999", "too large"),
        ("2.0 ** 1e10", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("1" * (MAX_LENGTH + 1), f"at most {MAX_LENGTH} characters"),
        ("(" * (MAX_LENGTH // 2) + ")" * (MAX_LENGTH // 2), "is not"),
    ],
)
def test_what_has_no_value_says_why(expression: str, reason: str) -> None:
    with pytest.raises(CalculatorError, match=reason):
        calculate(expression)


@given(st.text(alphabet="0123456789.+-*/%()eE_ ", max_size=MAX_LENGTH))
def test_any_text_has_a_short_value_or_an_error(expression: str) -> None:
    with contextlib.suppress(CalculatorError):
        assert len(calculate(expression)) <= 310
