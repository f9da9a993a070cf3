import asyncio
import os
from typing import Literal

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from pydantic import BaseModel


class Weather(BaseModel):
    sky: Literal["sun", "rain"]


seen = []


@function_tool
def report(sky: Literal["sun", "rain"]) -> str:
    """Report the weather."""
    seen.append(sky)
    return "noted"


async def main() -> None:
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=os.environ["URL"] + "/v1", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind("scripted", openai_client=client)
        free = Agent(name="a", instructions="Be kind.", model=model, model_settings=ModelSettings(temperature=0), tools=[report])
        assert (await Runner.run(free, "hi")).final_output == os.environ["SENTENCE"]
        # The first turn must call; what follows is free again.
        forced = free.clone(model_settings=ModelSettings(temperature=0, tool_choice="required", parallel_tool_calls=False))
        streamed = Runner.run_streamed(forced, "hi")
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == os.environ["SENTENCE"]
        assert set(seen) <= {"sun", "rain"}
        assert seen
        typed = Agent(name="b", model=model, model_settings=ModelSettings(temperature=0), output_type=Weather)
        assert isinstance((await Runner.run(typed, "hi")).final_output, Weather)


asyncio.run(main())
