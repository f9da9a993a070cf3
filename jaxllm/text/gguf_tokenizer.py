"""The tokenizer inside a GGUF file: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`), built with `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ModelLoadError
from jaxllm.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from jaxllm.text.tokenizer import TokenizerParts

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# tokenizer.ggml.token_type
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "seperator": "sep_token"}
_UNDERLINE = "▁"


def parts_from_gguf(metadata: Mapping[str, Any], *, source: str) -> TokenizerParts:
    """Build the tokenizer that `metadata` describes; `source` names the file in errors.

    Raises:
        ModelLoadError: no vocabulary, or a kind of tokenizer or pre-tokenizer that is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind is None or not tokens:
        raise ModelLoadError(f"{source} holds no tokenizer; name one with the option tokenizer")
    tokens = _valid_text(tokens)
    if kind == "gpt2":
        pre = _pre_tokenizer(metadata, source)
        backend = _byte_level(metadata, tokens, pre, source)
        add_bos = pre.add_bos
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens, source)
        add_bos = True
    else:
        raise ModelLoadError(
            f"{source} has a tokenizer of kind {kind!r}; gpt2 and llama are supported. Name another one with the option tokenizer"
        )
    _add_special_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type"))
    special = {}
    for name, role in _ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and token_id < len(tokens):
            special[role] = tokens[token_id]
    _set_template(
        backend,
        special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None,
        special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return TokenizerParts(backend=backend, special_tokens=special, chat_templates=_chat_templates(metadata))


def _pre_tokenizer(metadata: Mapping[str, Any], source: str) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ModelLoadError(
            f"{source}: pre-tokenizer {name!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}. "
            "Name the tokenizer of the original model with the option tokenizer"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], pre: PreTokenizer, source: str) -> Backend:
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    merges = _split_merges(metadata.get("tokenizer.ggml.merges"), source)
    backend = Tokenizer(_bpe(tokens, merges, source, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], source: str) -> Backend:
    from tokenizers import Tokenizer, decoders, normalizers

    merges = metadata.get("tokenizer.ggml.merges")
    pairs = _split_merges(merges, source) if merges else list(_merges_by_score(metadata, tokens, source))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    backend = Tokenizer(
        _bpe(tokens, pairs, source, byte_fallback=True, fuse_unk=True, unk_token=tokens[unknown] if unknown is not None else None)
    )
    escape = normalizers.Replace(" ", _UNDERLINE)
    unescape = [decoders.Replace(_UNDERLINE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_UNDERLINE), escape])
        backend.decoder = decoders.Sequence([*unescape, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = escape
        backend.decoder = decoders.Sequence(unescape)
    return backend


def _bpe(tokens: list[str], merges: list[tuple[str, str]], source: str, **options: Any) -> Any:
    from tokenizers.models import BPE

    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return BPE(vocabulary, merges, **options)
    except Exception as error:
        raise ModelLoadError(f"{source}: the tokenizer's merges do not fit its vocabulary: {error}") from error


def _split_merges(merges: Sequence[str] | None, source: str) -> list[tuple[str, str]]:
    """Pairs of "left right"; either side may itself begin with a space."""
    if merges is None:
        raise ModelLoadError(f"{source} has a byte-level tokenizer without merges; name one with the option tokenizer")
    pairs = []
    for merge in _valid_text(merges):
        cut = merge.find(" ", 1)
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs


def _merges_by_score(metadata: Mapping[str, Any], tokens: list[str], source: str) -> Iterator[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: every way to cut a piece in two pieces, best-scored pieces first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise ModelLoadError(f"{source} has a SentencePiece tokenizer without scores; name one with the option tokenizer")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    order = sorted(range(len(tokens)), key=lambda token_id: -scores[token_id])
    for token_id in order:
        token = tokens[token_id]
        if types[token_id] != _NORMAL or len(token) < 2:
            continue
        for cut in range(1, len(token)):
            if token[:cut] in pieces and token[cut:] in pieces:
                yield token[:cut], token[cut:]


def _add_special_tokens(backend: Backend, tokens: list[str], types: Sequence[int] | None) -> None:
    """Control and user-defined tokens are found in the text before anything else."""
    from tokenizers import AddedToken

    added = []
    for token, kind in zip(tokens, types or (), strict=False):
        if kind in (_CONTROL, _USER_DEFINED) and token:
            added.append(AddedToken(token, special=kind == _CONTROL, normalized=False))
    backend.add_tokens(added)


def _set_template(backend: Backend, bos: str | None, eos: str | None) -> None:
    from tokenizers.processors import TemplateProcessing

    ends = [token for token in (bos, eos) if token is not None]
    if ends:
        template = ([f"{bos}:0"] if bos is not None else []) + ["$A:0"] + ([f"{eos}:0"] if eos is not None else [])
        backend.post_processor = TemplateProcessing(
            single=template, special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(ends)]
        )


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {}
    if "tokenizer.chat_template" in metadata:
        templates["default"] = metadata["tokenizer.chat_template"]
    for name in metadata.get("tokenizer.chat_templates", ()):
        templates[name] = metadata[f"tokenizer.chat_template.{name}"]
    return templates


def _valid_text(tokens: Sequence[str]) -> list[str]:
    """Bytes that were no UTF-8 (they came as lone surrogates) become characters that `tokenizers` accepts and no text matches."""
    try:
        "".join(tokens).encode()
        return list(tokens)
    except UnicodeEncodeError:
        # U+DC80..U+DCFF -> a private-use plane, so that different tokens stay different.
        table = {0xDC00 + byte: chr(0xF0000 + byte) for byte in range(256)}
        return [token.translate(table) for token in tokens]
