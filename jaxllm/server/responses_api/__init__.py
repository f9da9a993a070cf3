"""OpenAI's Responses API, as a translation to and from the answering of conversations."""
