import os

import anthropic

SENTENCE = os.environ["SENTENCE"]
SCHEMA = {"type": "object", "properties": {"sky": {"type": "string", "enum": ["sun", "rain"]}}, "required": ["sky"]}
ASKED = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "extra_body": {"temperature": 0}}
client = anthropic.Anthropic(base_url=os.environ["URL"], max_retries=0)

message = client.messages.create(**ASKED)
assert (message.content[0].text, message.stop_reason) == (SENTENCE, "end_turn")
with client.messages.stream(**ASKED) as stream:
    assert "".join(stream.text_stream) == SENTENCE
    assert stream.get_final_message().usage.output_tokens == len(SENTENCE) + 1
tools = [{"name": "report", "input_schema": SCHEMA}]
for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "report"}):
    called = client.messages.create(**ASKED, tools=tools, tool_choice=choice)
    assert called.stop_reason == "tool_use"
    assert called.content[0].input["sky"] in ("sun", "rain")
    with client.messages.stream(**ASKED, tools=tools, tool_choice=choice) as stream:
        assert stream.get_final_message().content[0].input == called.content[0].input
history = [
    *ASKED["messages"],
    {"role": "assistant", "content": [block.model_dump() for block in called.content]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": called.content[0].id, "content": [{"type": "text", "text": "15C"}]}],
    },
]
assert client.messages.create(**{**ASKED, "messages": history}, tools=tools).content[0].text == SENTENCE
assert client.messages.count_tokens(model="scripted", messages=ASKED["messages"]).input_tokens > 0
