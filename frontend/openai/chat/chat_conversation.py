"""The body of a chat or of /tokenize -> Conversation."""

from __future__ import annotations

from ...output_formats.offered_tools import check_num_tools, read_tool_choice
from ...output_formats.tools import Tool
from ..bodies.schema import ChatCompletionRequest, TokenizeRequest, ToolParam
from ..endpoints.conversation import Conversation
from ..endpoints.formats import find_format
from ..errors import FieldError


def make_conversation(request: ChatCompletionRequest) -> Conversation:
    """What a chat asks for. Raises InputErrors."""
    conversation = make_prompt_conversation(request)
    conversation.choice = read_tool_choice(request.tool_choice)
    conversation.parallel = request.parallel_tool_calls is not False
    conversation.reasoning_effort = request.reasoning_effort
    conversation.thinking_token_budget = request.thinking_token_budget
    if conversation.thinking_token_budget == -1:  # vLLM's
        conversation.thinking_token_budget = None
    if request.documents is not None:
        conversation.variables = {"documents": request.documents, **(request.chat_template_kwargs or {})}
    conversation.shows_reasoning = request.include_reasoning is not False
    conversation.format = find_format(request)
    return conversation


def make_prompt_conversation(request: ChatCompletionRequest | TokenizeRequest) -> Conversation:
    """What of a body the prompt is made of. Raises InputErrors."""
    given = request.tools or ()
    check_num_tools(len(given))
    continues = bool(request.continue_final_message)
    adds = request.add_generation_prompt
    return Conversation(
        messages=request.messages or [],
        tools=[_make_tool(number, tool) for number, tool in enumerate(given)],
        variables=request.chat_template_kwargs,
        add_generation_prompt=not continues if adds is None else adds,
        continue_final_message=continues,
        add_special_tokens=bool(request.add_special_tokens),
    )


def _make_tool(number: int, given: ToolParam) -> Tool:
    if given.type != "function":
        raise FieldError(f"tools[{number}].type", given.type, "'function'")
    function = given.function
    return Tool(function.name, function.description, function.parameters, bool(function.strict))
