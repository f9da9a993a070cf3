"""Architectures that nobody mapped: read as plain Llama-like decoders, if their config and tensors leave nothing unexplained."""

from __future__ import annotations

import logging
from functools import cache

from jaxllm.errors import ModelLoadError
from jaxllm.models.family import Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.llama import LLAMA
from jaxllm.specs import DecoderSpec

logger = logging.getLogger(__name__)


def generic_family(architecture: str, refusal: str) -> Family:
    """Llama's family under another name. Its config is refused with `refusal` and what is not understood; the loader refuses tensors
    that Llama would not have.
    """

    def spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
        try:
            decoder = LLAMA.to_spec(config, max_model_len)
            config.refuse_unread(architecture)
        except ModelLoadError as error:
            raise ModelLoadError(f"{refusal}. Read as a plain Llama-like decoder: {error}") from None
        _warn(architecture)
        return decoder

    return Family(architecture, spec, LLAMA.rules, prefix=LLAMA.prefix, ignored=LLAMA.ignored)


@cache
def _warn(architecture: str) -> None:
    logger.warning(
        "architecture %s is not known. Its config has no key that Llama's has not, so it is read as a Llama-like decoder:"
        " compare its answers with those of a reference before you rely on them",
        architecture,
    )
