"""Declarative rules from checkpoint tensors to parameters, and the loader that follows them.

A family's rules name, for each parameter it may have, the checkpoint tensors it is made of and how. `bind_rules` turns them into one
recipe a parameter of a concrete model; `load_params` reads the checkpoint by the recipes, one parameter at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from jaxllm.errors import ModelLoadError
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.transforms import COPY, CheckpointDims, Transform

# Where a message lists names, this many are enough.
_LISTED = 12


@dataclass(frozen=True)
class Source:
    """One checkpoint tensor [out, in], or the `part`-th of `parts` equal pieces of it along the outputs.

    `transposed` says that the checkpoint keeps it as [in, out].
    """

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the checkpoint must have for this source to be of `shape`."""
        whole = (shape[0] * self.parts, *shape[1:]) if self.parts > 1 else shape
        return whole[::-1] if self.transposed else whole

    def take(self, tensor: np.ndarray) -> np.ndarray:
        if self.transposed:
            tensor = tensor.T
        if self.parts == 1:
            return tensor
        size = tensor.shape[0] // self.parts
        return tensor[self.part * size : (self.part + 1) * size]


@dataclass(frozen=True)
class Rule:
    """Parameter `param` is `transform` of `sources`; `{i}` in the names stands for the layer, `{j}` in a source for 0, 1, ... as many as
    the transform wants.
    """

    param: str
    sources: tuple[Source, ...]
    transform: Transform = COPY


def rule(param: str, *sources: str | Source, transform: Transform = COPY) -> Rule:
    """A `Rule`, with plain names for sources that are taken as they are."""
    return Rule(param, tuple(s if isinstance(s, Source) else Source(s) for s in sources), transform)


@dataclass(frozen=True)
class Recipe:
    """A rule made concrete: the tensors to read, with the shapes that this transform needs them to have."""

    sources: tuple[Source, ...]
    source_shapes: tuple[tuple[int, ...], ...]
    transform: Transform
    dims: CheckpointDims


@dataclass(frozen=True)
class LoadPlan:
    """How a concrete model is loaded.

    Attributes:
        recipes: one for each parameter.
        prefix: what names begin with in a complete checkpoint; one saved from the bare decoder lacks it.
        ignored: patterns (full match) of tensors that carry nothing to load.
        aliases: tensors that a tied model may carry a second time, with the name of the first.
        renamed: (pattern, replacement) of beginnings of checkpoint names that have several spellings.
    """

    recipes: Mapping[str, Recipe]
    prefix: str
    ignored: tuple[str, ...]
    aliases: Mapping[str, str]
    renamed: tuple[tuple[str, str], ...] = ()


class Loadable(Protocol):
    """The part of a `ModelDef` that loading needs."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def shapes(self) -> Mapping[str, Any]: ...

    @property
    def rules(self) -> LoadPlan: ...


def bind_rules(
    rules: Sequence[Rule],
    shapes: Mapping[str, Any],
    dims: Sequence[CheckpointDims],
    *,
    prefix: str,
    ignored: Sequence[str] = (),
    renamed: Sequence[tuple[str, str]] = (),
) -> LoadPlan:
    """One recipe for each parameter in `shapes` (name -> something with `.shape`), with the `dims` of its layer.

    Raises:
        KeyError: a parameter without a rule, which is a mistake in the family file.
    """
    by_param = {rule.param: rule for rule in rules}
    recipes = {}
    for name, abstract in shapes.items():
        template, layer = _template(name)
        rule, layer_dims = by_param[template], dims[int(layer or 0)]
        source_shapes = rule.transform.source_shapes(abstract.shape, layer_dims)
        names = [replace(source, name=source.name.replace("{i}", layer)) for source in rule.sources]
        if "{j}" in names[0].name:
            names = [replace(s, name=s.name.replace("{j}", str(j))) for j in range(len(source_shapes) // len(names)) for s in names]
        recipes[name] = Recipe(tuple(names), source_shapes, rule.transform, layer_dims)
    aliases = {}
    if "head.weight" not in shapes and "head.weight" in by_param:
        aliases[by_param["head.weight"].sources[0].name] = by_param["embed.weight"].sources[0].name
    return LoadPlan(recipes, prefix, tuple(ignored), aliases, tuple(renamed))


def _template(name: str) -> tuple[str, str]:
    """`layers.3.mlp.down` -> (`layers.{i}.mlp.down`, `3`)."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return (f"layers.{{i}}.{match[2]}", match[1]) if match else (name, "")


def load_params(model_def: Loadable, checkpoint: Checkpoint, place: Callable[[str, np.ndarray], Any]) -> list[Any]:
    """Read every parameter, in the order of `model_def.names`.

    Args:
        model_def: names, abstract parameters and load plan.
        checkpoint: where the tensors come from.
        place: brings one finished parameter (the right shape and dtype) to the devices.

    Returns:
        What `place` returned, a parameter each. At most one parameter is held on the host at a time.

    Raises:
        ModelLoadError: missing or unknown tensors, wrong shapes, values that the dtype cannot hold. Names are checked before reading.
    """
    plan = model_def.rules
    stored = stored_names(plan, checkpoint)
    _check_tensors(plan, checkpoint, stored)
    return [place(name, _build(name, plan.recipes[name], model_def.shapes[name], checkpoint, stored)) for name in model_def.names]


def stored_names(plan: LoadPlan, checkpoint: Checkpoint) -> dict[str, str]:
    """Full name -> the name in the checkpoint, which may spell it another way, or lack the prefix where the bare decoder was saved."""
    names = {name: name for name in checkpoint.names()}
    for pattern, replacement in plan.renamed:
        names = {re.sub(rf"^{pattern}", replacement, full): name for full, name in names.items()}
    if any(full.startswith(plan.prefix) for full in names):
        return names
    known = {source.name for recipe in plan.recipes.values() for source in recipe.sources}
    return {(full if full in known or full in plan.aliases else plan.prefix + full): name for full, name in names.items()}


def _check_tensors(plan: LoadPlan, checkpoint: Checkpoint, stored: Mapping[str, str]) -> None:
    wanted = {source.name for recipe in plan.recipes.values() for source in recipe.sources}
    missing = sorted(wanted - stored.keys())
    if missing:
        hint = ""
        head = plan.recipes.get("head.weight")
        if head is not None and head.sources[0].name in missing:
            hint = (
                f"; {head.sources[0].name} is the output head of a model whose config says tie_word_embeddings=false: if it shares"
                " the input embeddings, set tie_word_embeddings to true (hf_overrides)"
            )
        raise ModelLoadError(f"{checkpoint.location} lacks {len(missing)} tensors of this model: {_listing(missing)}{hint}")
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in plan.ignored)) if plan.ignored else None
    unknown = sorted(name for name in stored.keys() - wanted - plan.aliases.keys() if ignored is None or not ignored.fullmatch(name))
    if unknown:
        raise ModelLoadError(
            f"{checkpoint.location} has {len(unknown)} tensors that this model does not use: {_listing(unknown)};"
            " the config and the weights do not belong together, or the model has parts that are not supported"
        )
    wrong = [
        f"{source.name} is {list(checkpoint.shape(stored[source.name]))}, the config needs {list(source.stored_shape(shape))}"
        for recipe in plan.recipes.values()
        for source, shape in zip(recipe.sources, recipe.source_shapes, strict=True)
        if tuple(checkpoint.shape(stored[source.name])) != source.stored_shape(shape)
    ]
    if wrong:
        raise ModelLoadError(f"{checkpoint.location} has {len(wrong)} tensors of another shape: {_listing(wrong)}")
    for name in sorted(wanted):
        if not _is_float(checkpoint.dtype(stored[name])):
            raise ModelLoadError(
                f"{checkpoint.location}: {name} is stored as {checkpoint.dtype(stored[name])}; quantized checkpoints are not supported"
            )
    for alias, name in plan.aliases.items():
        if alias in stored and not _equal(checkpoint.read(stored[alias]), checkpoint.read(stored[name])):
            raise ModelLoadError(
                f"{checkpoint.location}: the config says tie_word_embeddings=true, but {alias} differs from {name};"
                " set tie_word_embeddings to false (hf_overrides) to use it"
            )


def _build(name: str, recipe: Recipe, abstract: Any, checkpoint: Checkpoint, stored: Mapping[str, str]) -> np.ndarray:
    """The parameter in its final shape and dtype; a view of the checkpoint where nothing has to change."""
    sources = [source.take(checkpoint.read(stored[source.name])) for source in recipe.sources]
    array = recipe.transform.build(sources, tuple(abstract.shape), np.dtype(abstract.dtype), recipe.dims)
    if array.dtype == np.float16 and any(source.dtype != np.float16 for source in sources) and not np.isfinite(array).all():
        raise ModelLoadError(
            f"{checkpoint.location}: {name} holds values that float16 cannot hold (beyond 65504); use dtype bfloat16 or float32"
        )
    return array


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    step = max(1, 2**24 // max(1, a[:1].size))
    return all(np.array_equal(a[start : start + step], b[start : start + step]) for start in range(0, a.shape[0], step))


def _is_float(dtype: np.dtype) -> bool:
    # ml_dtypes' types (bfloat16, fp8) are of kind "V" or "f" depending on the type and version.
    return dtype.kind == "f" or "float" in dtype.name


def _listing(names: Iterable[str]) -> str:
    names = list(names)
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
