import json
import os
from typing import Literal

import openai
from pydantic import BaseModel, Field


class Weather(BaseModel):
    sky: Literal["sun", "rain"]
    degrees: int = Field(ge=0, le=9)


SENTENCE = os.environ["SENTENCE"]
ASKED = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
client = openai.OpenAI(base_url=os.environ["URL"] + "/v1", max_retries=0)
assert client.models.list().data[0].id == "scripted"

assert client.chat.completions.create(**ASKED).choices[0].message.content == SENTENCE
parts = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == SENTENCE
assert parts[-1].usage.completion_tokens == len(SENTENCE) + 1
with client.chat.completions.stream(**ASKED) as stream:
    assert stream.get_final_completion().choices[0].message.content == SENTENCE

parsed = client.chat.completions.parse(**ASKED, response_format=Weather).choices[0].message.parsed
assert isinstance(parsed, Weather)
tool = openai.pydantic_function_tool(Weather, name="report")
for choice in ("required", {"type": "function", "function": {"name": "report"}}):
    message = client.chat.completions.parse(**ASKED, tools=[tool], tool_choice=choice, parallel_tool_calls=False).choices[0].message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Weather)
history = [
    *ASKED["messages"],
    message,
    {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": [{"type": "text", "text": "15C"}]},
]
assert client.chat.completions.create(**{**ASKED, "messages": history}, tools=[tool]).choices[0].message.content == SENTENCE

response = client.responses.create(model="scripted", input="hi", temperature=0)
assert response.output_text == SENTENCE
again = client.responses.create(model="scripted", input="and?", previous_response_id=response.id, temperature=0)
assert client.responses.retrieve(again.id).output_text == SENTENCE
with client.responses.stream(model="scripted", input="hi", temperature=0) as stream:
    kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert stream.get_final_response().output_text == SENTENCE
assert isinstance(client.responses.parse(model="scripted", input="hi", text_format=Weather, temperature=0).output_parsed, Weather)
flat = {"type": "function", "name": "report", "parameters": Weather.model_json_schema(), "strict": True}
call = client.responses.create(model="scripted", input="hi", tools=[flat], tool_choice="required", temperature=0).output[0]
assert isinstance(Weather(**json.loads(call.arguments)), Weather)
assert client.completions.create(model="scripted", prompt="Go\n", max_tokens=40, temperature=0).choices[0].text == SENTENCE
