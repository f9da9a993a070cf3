import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    sky: Literal["sun", "rain"]


provider = OpenAIProvider(base_url=os.environ["URL"] + "/v1", api_key="none")
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind("scripted", provider=provider)
    assert Agent(model).run_sync("hi", model_settings={"temperature": 0}).output == os.environ["SENTENCE"]
    for output in (Weather, NativeOutput(Weather)):
        found = Agent(model, output_type=output).run_sync("hi", model_settings={"temperature": 0}).output
        assert isinstance(found, Weather), (kind, output)
