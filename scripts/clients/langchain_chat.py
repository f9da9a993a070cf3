import os
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """Report the weather."""

    sky: Literal["sun", "rain"]


SENTENCE = os.environ["SENTENCE"]
for responses in (False, True):
    model = ChatOpenAI(model="scripted", base_url=os.environ["URL"] + "/v1", temperature=0, max_retries=0, use_responses_api=responses)
    assert model.invoke("hi").text == SENTENCE
    assert "".join(part.text for part in model.stream("hi")) == SENTENCE
    called = model.bind_tools([Weather], tool_choice="required", parallel_tool_calls=False).invoke("hi")
    assert called.tool_calls[0]["args"]["sky"] in ("sun", "rain")
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Weather, method=method).invoke("hi"), Weather), method
