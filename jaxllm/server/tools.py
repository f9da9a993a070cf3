"""What a request says about tools: which there are, which may be called, and whether one must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxllm.errors import InvalidRequestError
from jaxllm.server.parsers.functions import Function
from jaxllm.server.protocol import ChatCompletionRequest
from jaxllm.text.grammar import checked_schema

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolChoice:
    """Of the tools of a request, those that may be called. `named`: the client chose the function itself."""

    mode: Literal["none", "auto", "required"]
    tools: tuple[Mapping[str, Any], ...]
    several: bool
    named: bool = False
    # Other tools are there, and may not be called.
    narrowed: bool = False

    @property
    def wants_grammar(self) -> bool:
        """Whether calls have a form that only a grammar can see to."""
        return self.mode == "required" or (
            self.mode == "auto" and (self.narrowed or any(tool["function"].get("strict") for tool in self.tools))
        )

    def functions(self) -> list[Function]:
        """Raises InvalidRequestError for parameters that are no schema."""
        found = []
        for tool in self.tools:
            function = tool["function"]
            parameters = function.get("parameters")
            schema = checked_schema("json", _NO_ARGUMENTS if parameters is None else parameters)
            found.append(Function(function["name"], schema, strict=bool(function.get("strict"))))
        return found


def tool_choice(body: ChatCompletionRequest) -> ToolChoice:
    """The choice of a request that was checked.

    Raises:
        InvalidRequestError: it is none, or names a function that is not there.
    """
    tools, several = tuple(body.tools or ()), body.parallel_tool_calls is not False
    given = body.tool_choice if body.tool_choice is not None else "auto"
    if not tools or given == "none":
        return ToolChoice("none", (), several)
    if given in ("auto", "required"):
        return ToolChoice("auto" if given == "auto" else "required", tools, several)
    if isinstance(given, Mapping):
        if given.get("type") == "function":
            return ToolChoice("required", _named(tools, [given]), False, named=True)
        allowed = given.get("allowed_tools")
        if given.get("type") == "allowed_tools" and isinstance(allowed, Mapping):
            mode, names = allowed.get("mode"), allowed.get("tools")
            if mode in ("auto", "required") and isinstance(names, list) and names:
                return ToolChoice(mode, _named(tools, names), several, narrowed=True)
    raise InvalidRequestError(
        'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}; '
        f"got {given!r:.200}",
        param="tool_choice",
    )


def _named(tools: tuple[Mapping[str, Any], ...], choices: list[Any]) -> tuple[Mapping[str, Any], ...]:
    by_name = {tool["function"]["name"]: tool for tool in tools}
    names = []
    for choice in choices:
        function = choice.get("function") if isinstance(choice, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in by_name:
            raise InvalidRequestError(
                f"tool_choice names the function {name!r:.100}; tools has {', '.join(by_name)[:400]}", param="tool_choice"
            )
        names.append(name)
    return tuple(by_name[name] for name in dict.fromkeys(names))
