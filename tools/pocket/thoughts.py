"""Thinking: what the model thinks, between <think> and </think>, before an answer that was asked for with it.

Sums are thought digit by digit; of a text, the sentence that answers is said; of tools, which one to call.
"""

from ..words import join_and
from .sums import Sum

ANSWER_AT_ONCE = "I can answer this at once."


def think_about_sum(asked: Sum) -> str:
    """Ones, then tens, then both: "7 and 8 make 15. 1 and 4 and 3 make 8. So 85."."""
    tens_a, ones_a = divmod(asked.a, 10)
    tens_b, ones_b = divmod(asked.b, 10)
    if asked.is_minus:
        borrowed = int(ones_a < ones_b)
        ones = f"{ones_a + 10 * borrowed} without {ones_b} leaves {ones_a + 10 * borrowed - ones_b}."
        left = tens_a - borrowed - tens_b
        tens = f"{tens_a}{' without 1' * borrowed} without {tens_b} leaves {left}."
    else:
        carried = (ones_a + ones_b) // 10
        ones = f"{ones_a} and {ones_b} make {ones_a + ones_b}."
        tens = f"{'1 and ' * carried}{tens_a} and {tens_b} make {carried + tens_a + tens_b}."
    return f"{ones} {tens} So {asked.result}."


def think_about_text(sentence: str) -> str:
    """The thought before an answer that a given text states in `sentence`."""
    return f"The text says: {sentence}"


def think_about_calls(names: list[str]) -> str:
    """Before a turn that calls these tools."""
    unique = list(dict.fromkeys(names))
    return f"I call {join_and(unique)}."


def think_about_results(results: list[str]) -> str:
    """After the tools have answered."""
    return f"The result is {join_and(results)}."
