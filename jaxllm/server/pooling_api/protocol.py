"""What requests to pooling models may hold: OpenAI's fields, those of reranking services, and vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from jaxllm.errors import InvalidRequestError
from jaxllm.pooling_params import PoolingParams
from jaxllm.server.protocol import PROMPT_SCHEMA, ApiRequest, Int, Objects, TemplateRequest, refuse_fields

# Fields of other servers that would change the answer.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "instruction": ((), "is not offered: put it into the query"),
    "max_tokens_per_query": ((), "is not offered; use truncate_prompt_tokens"),
    "max_tokens_per_doc": ((), "is not offered; use truncate_prompt_tokens"),
    "late_chunking": ((), "is not offered"),
}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


class PoolingRequest(ApiRequest):
    """Fields of every request to a pooling model."""

    truncate_prompt_tokens: Int | None = Field(None, description="Cut inputs to this many tokens; -1: to what the model takes")
    truncation_side: Literal["left", "right"] | None = Field(None, description="Where that cuts; special tokens stay. Default: right")
    use_activation: bool | None = Field(None, description="false: embeddings as they are, scores as logits")
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's to texts. Default: true; messages: false")
    priority: Int | None = Field(None, description="Lower is served first, with the priority policy")
    request_id: str | None = Field(None, description="Name of this request in ids and logs; the header X-Request-Id goes before it")
    user: str | None = None

    def check(self) -> None:
        super().check()
        refuse_fields(self, _REFUSED)

    def params(self, task: str | None, **more: Any) -> PoolingParams:
        """Raises InvalidRequestError where a field is out of its range."""
        return PoolingParams(
            task=task,
            use_activation=self.use_activation,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "right",
            **more,
        )


class InputRequest(PoolingRequest, TemplateRequest):
    """A request about texts, token ids, or a conversation."""

    # Checked by hand: a union of lists would be tried item by item.
    input: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)] = Field(None, description="Text or token ids, or a list of either")
    messages: Objects | None = Field(None, description="A conversation to be rendered by the chat template, instead of input")
    add_generation_prompt: bool | None = Field(False, description="End the conversation with the start of an answer. Default: false")

    def check(self) -> None:
        super().check()
        if (self.input is None) == (self.messages is None):
            raise InvalidRequestError("give either input or messages", param="input")


class VectorRequest(InputRequest):
    """A request whose answer is numbers, in a format that it may choose."""

    encoding_format: Literal["float", "base64"] = Field("float", description="base64: the numbers' bytes")
    embed_dtype: Literal["float32", "float16"] = Field("float32", description="Of base64")
    endianness: Literal["native", "little", "big"] = Field("little", description="Of base64")
    dimensions: Int | None = Field(None, description="Leading dimensions to keep, of models made for that")


class EmbeddingRequest(VectorRequest):
    """Body of POST /v1/embeddings."""

    normalize: bool | None = Field(None, description="Another name of use_activation")

    def check(self) -> None:
        super().check()
        if self.normalize is not None:
            if self.use_activation not in (None, self.normalize):
                raise InvalidRequestError("normalize and use_activation contradict each other; send one", param="normalize")
            self.use_activation = self.normalize


class PoolRequest(VectorRequest):
    """Body of POST /pooling."""

    task: str | None = Field(None, description="embed, classify, token_embed or token_classify. Default: what the model is for")


class ClassifyRequest(InputRequest):
    """Body of POST /classify."""


class ScoreRequest(PoolingRequest):
    """Body of POST /score: one text with one, with each of several, or each with its counterpart, under any pair of names."""

    text_1: Annotated[Any, WithJsonSchema(_TEXTS)] = None
    text_2: Annotated[Any, WithJsonSchema(_TEXTS)] = None
    data_1: Annotated[Any, WithJsonSchema(_TEXTS)] = None
    data_2: Annotated[Any, WithJsonSchema(_TEXTS)] = None
    queries: Annotated[Any, WithJsonSchema(_TEXTS)] = None
    documents: Annotated[Any, WithJsonSchema(_TEXTS)] = None
    items: Annotated[Any, WithJsonSchema(_TEXTS)] = None

    def given(self) -> tuple[str, str]:
        """The names under which the texts came."""
        pairs = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
        known = dict.fromkeys(name for pair in pairs for name in pair)
        names = [name for name in known if getattr(self, name) is not None]
        for pair in pairs:
            if names == list(pair):
                return pair
        raise InvalidRequestError(
            f"give texts as one of {', '.join(map(' and '.join, pairs))}; got {', '.join(names) or 'none'}", param=(*names, "text_1")[0]
        )


class RerankRequest(PoolingRequest):
    """Body of POST /rerank."""

    query: str
    documents: list[Any] = Field(description="Texts, or objects with a text")
    top_n: Int | None = Field(None, ge=0, description="Most results; 0: all. Default: all")
    return_documents: bool | None = Field(None, description="Repeat the documents in the results. Default: true")

    def texts(self) -> Sequence[str]:
        texts = [document.get("text") if isinstance(document, dict) else document for document in self.documents]
        found = [text for text in texts if isinstance(text, str)]
        if not found or len(found) != len(texts):
            raise InvalidRequestError("documents must be a list of at least one text, or of objects with a text", param="documents")
        return found
