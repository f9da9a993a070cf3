import json
import os

import litellm

SENTENCE = os.environ["SENTENCE"]
SCHEMA = {"type": "object", "properties": {"sky": {"type": "string", "enum": ["sun", "rain"]}}, "required": ["sky"]}
TOOLS = [{"type": "function", "function": {"name": "report", "parameters": SCHEMA}}]
ASKED = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "num_retries": 0}
for provider in ("openai", "hosted_vllm"):
    asked = {**ASKED, "model": f"{provider}/scripted", "api_base": os.environ["URL"] + "/v1"}
    assert litellm.completion(**asked).choices[0].message.content == SENTENCE
    assert "".join(part.choices[0].delta.content or "" for part in litellm.completion(**asked, stream=True)) == SENTENCE
    call = litellm.completion(**asked, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["sky"] in ("sun", "rain")
