import os
from typing import Literal

import instructor
import openai
from pydantic import BaseModel


class Weather(BaseModel):
    sky: Literal["sun", "rain"]


client = openai.OpenAI(base_url=os.environ["URL"] + "/v1", max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    asked = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "response_model": Weather, "max_retries": 0}
    found = instructor.from_openai(client, mode=mode).chat.completions.create(**asked, temperature=0)
    assert isinstance(found, Weather), mode
