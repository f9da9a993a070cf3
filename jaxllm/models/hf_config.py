"""Reading a Hugging Face config so that nothing in it is ignored by accident.

A family reads the keys it understands through `HFConfig`; whatever it did not read, that is set and not listed here as harmless, may
change the mathematics and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxllm.errors import ModelLoadError

# Keys that never change what a trained decoder computes: provenance, token ids, training, generation defaults, output options.
_HARMLESS = frozenset(
    """
    architectures model_type transformers_version torch_dtype dtype auto_map name_or_path use_cache license
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id begin_suppress_tokens suppress_tokens bad_words_ids tokenizer_class prefix
    initializer_range initializer_factor attention_dropout hidden_dropout embd_pdrop attn_pdrop resid_pdrop attention_probs_dropout_prob
    hidden_dropout_prob classifier_dropout gradient_checkpointing pretraining_tp torchscript use_bfloat16 tf_legacy_loss
    pruned_heads is_decoder chunk_size_feed_forward return_dict output_hidden_states output_attentions output_past return_dict_in_generate
    output_scores id2label label2id num_labels problem_type finetuning_task task_specific_params
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
    exponential_decay_length_penalty remove_invalid_values max_new_tokens
    unsloth_version unsloth_fixed quantization_aware_training cache_implementation use_flash_attn attn_implementation
    is_llama_config transformers.js_config model_max_length seq_length custom_pipelines
    """.split()  # noqa: SIM905
)

_REQUIRED = object()


class HFConfig:
    """The values of a config.json; remembers which keys were read."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = dict(values)
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where the key is absent or null."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def given(self, key: str) -> bool:
        """Whether the key is present, be it as null."""
        self._read.add(key)
        return key in self._values

    def size(self, key: str, default: Any = _REQUIRED) -> int:
        """A positive integer.

        Raises:
            ModelLoadError: absent without a default, or not a positive integer.
        """
        value = self.get(key, default)
        if value is _REQUIRED:
            raise ModelLoadError(f"config.json lacks {key!r}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelLoadError(f"config.json: {key} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A number.

        Raises:
            ModelLoadError: absent without a default, or something else.
        """
        value = self.get(key, default)
        if value is _REQUIRED:
            raise ModelLoadError(f"config.json lacks {key!r}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"config.json: {key} must be a number, got {value!r}")
        return float(value)

    def optional_number(self, key: str, default: float | None) -> float | None:
        """A number, `default` where the key is absent, None where it is null.

        Raises:
            ModelLoadError: something else.
        """
        if self.get(key) is None and (default is None or self.given(key)):
            return None
        return self.number(key, default or 0.0)

    def flag(self, key: str, default: bool) -> bool:
        """True or false.

        Raises:
            ModelLoadError: something else.
        """
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelLoadError(f"config.json: {key} must be true or false, got {value!r}")
        return value

    def choice(self, key: str, choices: Mapping[str, Any], default: str) -> Any:
        """What `choices` has for the value.

        Raises:
            ModelLoadError: not one of the choices.
        """
        value = self.get(key, default)
        if value not in choices:
            raise ModelLoadError(f"config.json: {key}={value!r} is not supported; supported: {', '.join(sorted(choices))}")
        return choices[value]

    def need(self, key: str) -> Any:
        """The value.

        Raises:
            ModelLoadError: absent or null.
        """
        if (value := self.get(key)) is None:
            raise ModelLoadError(f"config.json lacks {key!r}")
        return value

    def expect(self, key: str, *values: Any) -> None:
        """Check that the key is absent, null, or has one of `values`: the only ones that this family is implemented for.

        Raises:
            ModelLoadError: another value.
        """
        value = self.get(key)
        if value is not None and value not in values:
            raise ModelLoadError(f"config.json: {key}={value!r} is not supported for this architecture; supported: {values}")

    def refuse_unread(self, architecture: str, harmless: Collection[str] = ()) -> None:
        """Raise for keys that are set, were not read and are harmless neither for every decoder nor for this architecture.

        Raises:
            ModelLoadError: such keys, with their values.
        """
        quantization = self._values.get("quantization_config") or self._values.get("compression_config")
        if quantization and not _dequantized_on_load(quantization):
            raise ModelLoadError(
                "config.json has a quantization_config: quantized checkpoints other than MXFP4 and FP8 in blocks of 128 are not supported"
                " yet; use the unquantized model"
            )
        known = self._read | _HARMLESS | set(harmless) | {"quantization_config"}
        unknown = {
            key: value
            for key, value in self._values.items()
            if key not in known and not key.startswith("_") and value is not None and value is not False
        }
        if unknown:
            listing = ", ".join(f"{key}={_short(value)}" for key, value in sorted(unknown.items()))
            raise ModelLoadError(
                f"config.json has keys that are not understood for {architecture} and may change what the model computes: {listing};"
                " if they do not matter, set them to null (hf_overrides)"
            )


def _dequantized_on_load(quantization: Mapping[str, Any]) -> bool:
    """Whether `weights.dequantize` reads what this describes."""
    method = quantization.get("quant_method")
    return method == "mxfp4" or (method == "fp8" and quantization.get("weight_block_size") == [128, 128])


def _short(value: Any) -> str:
    text = re.sub(r"\s+", " ", repr(value))
    return text if len(text) <= 60 else text[:57] + "..."
