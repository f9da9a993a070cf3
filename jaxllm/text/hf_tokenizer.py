"""Tokenizer of a directory in the Hugging Face layout.

tokenizer.json is taken as it is, as transformers does since version 5 (add_bos_token and add_eos_token of tokenizer_config.json do not
count then). transformers is imported only for older layouts without one.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ModelLoadError
from jaxllm.model_files import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from jaxllm.text.tokenizer import TokenizerParts

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def parts_from_directory(path: Path) -> TokenizerParts:
    """Read the tokenizer in `path`. Raises ModelLoadError where there is none that can be read."""
    from jaxllm.text.tokenizer import TokenizerParts

    config = read_json(path / "tokenizer_config.json") or {}
    special = {
        role: text
        for role in _ROLES
        if (text := _token_text(config.get(role) or (read_json(path / "special_tokens_map.json") or {}).get(role)))
    }
    if (path / "tokenizer.json").is_file():
        backend = _from_json(path / "tokenizer.json")
        _add_configured_tokens(backend, config, special)
    else:
        backend, special = _through_transformers(path)
    return TokenizerParts(
        backend=backend,
        special_tokens=special,
        chat_templates=_chat_templates(path, config),
        clean_up_tokenization_spaces=bool(config.get("clean_up_tokenization_spaces", False)),
    )


def _from_json(path: Path) -> Backend:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelLoadError(f"{path} cannot be read as a tokenizer: {error}") from error


def _add_configured_tokens(backend: Backend, config: dict[str, Any], special: dict[str, str]) -> None:
    """Tokens that tokenizer_config.json knows and tokenizer.json does not, at the ids that it names; and mark those of special roles."""
    from tokenizers import AddedToken

    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, spec in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        content = spec["content"]
        if content in present:
            continue
        flags = {name: spec.get(name, False) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        token = AddedToken(content, special=spec.get("special", False), **flags)
        (backend.add_special_tokens if spec.get("special") else backend.add_tokens)([token])
        if backend.token_to_id(content) != int(token_id):
            raise ModelLoadError(
                f"tokenizer_config.json places {content!r} at id {token_id}, tokenizer.json at {backend.token_to_id(content)}; "
                "the two files belong to different models"
            )
        present.add(content)
    named = [*special.values(), *_token_list(config.get("additional_special_tokens")), *_token_list(config.get("extra_special_tokens"))]
    unmarked = [text for text in named if text not in present and backend.token_to_id(text) is not None]
    backend.add_special_tokens(list(dict.fromkeys(unmarked)))


def _through_transformers(path: Path) -> tuple[Backend, dict[str, str]]:
    """The fast tokenizer that transformers makes of older files (vocab.json and merges.txt, tokenizer.model)."""
    known = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "tekken.json", "sentencepiece.bpe.model")
    if not any((path / name).exists() for name in known):
        raise ModelLoadError(
            f"{path} holds no tokenizer.json (nor {', '.join(known)}); name a tokenizer directory with the option tokenizer"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        backend = tokenizer.backend_tokenizer
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        missing = [name for name in ("sentencepiece", "tiktoken") if importlib.util.find_spec(name) is None]
        advice = f"installing {' or '.join(missing)} may help, " if missing else ""
        raise ModelLoadError(
            f"the tokenizer in {path} has no tokenizer.json, and transformers cannot convert its files ({reason}); "
            f"{advice}a tokenizer.json in that directory does"
        ) from error
    special = {role: str(text) for role in _ROLES if (text := getattr(tokenizer, role, None))}
    return backend, special


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """All templates by name. Files of their own win over tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, list):
        templates |= {entry["name"]: entry["template"] for entry in inline}
    legacy = (read_json(path / "chat_template.json") or {}).get("chat_template")
    if isinstance(legacy, str):
        templates["default"] = legacy
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if (path / "chat_template.jinja").is_file():
        templates["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    return templates


def _token_list(value: Any) -> list[str]:
    """Tokens given as a list, or as an object from names to tokens."""
    entries = value.values() if isinstance(value, dict) else value or ()
    return [text for entry in entries if isinstance(text := _token_text(entry), str)]


def _token_text(value: Any) -> str | None:
    """A token is given as its text or as an object with its text."""
    return value.get("content") if isinstance(value, dict) else value
