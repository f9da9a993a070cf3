"""Declarative rules from checkpoint tensors to parameters, and the loader that follows them.

A family's rules name, for each parameter it may have, the checkpoint tensors it is made of and how. `bind_rules` turns them into
recipes for the parameters of a concrete model; `load_params` reads the checkpoint by the recipes, a few parameters at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from jaxllm.errors import ModelLoadError
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.transforms import COPY, CheckpointDims, Transform, empty

# Where a message lists names, this many are enough.
_LISTED = 12
# Parameters that are read at a time: some wait for the disk while others copy, and fresh pages come faster to several.
_AT_ONCE = 4


@dataclass(frozen=True)
class Source:
    """One checkpoint tensor [out, in], or the `part`-th of `parts` equal pieces of it along the outputs.

    `transposed` says that the checkpoint keeps it as [in, out], `strided` that the pieces take turns, `stacked` that the tensor has an
    axis of experts before these.
    """

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1
    strided: bool = False
    stacked: bool = False

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the checkpoint must have for this source to be of `shape`."""
        whole = (shape[0] * self.parts, *shape[1:]) if self.parts > 1 else shape
        return whole[::-1] if self.transposed else whole

    def take(self, tensor: np.ndarray) -> np.ndarray:
        if self.transposed:
            tensor = tensor.T
        if self.parts == 1:
            return tensor
        if self.strided:
            return tensor[self.part :: self.parts]
        size = tensor.shape[0] // self.parts
        return tensor[self.part * size : (self.part + 1) * size]


@dataclass(frozen=True)
class Rule:
    """Parameter `param` is `transform` of `sources`; `{i}` in the names stands for the layer, `{j}` in a source for 0, 1, ... as many as
    the transform wants.

    With `{e}` in a source, or a stacked one, the parameter is a stack of experts, and the rule describes one of them. Several rules for a
    parameter are layouts that a checkpoint may have.
    """

    param: str
    sources: tuple[Source, ...]
    transform: Transform = COPY

    @property
    def is_stack(self) -> bool:
        return any(source.stacked or "{e}" in source.name for source in self.sources)


def rule(param: str, *sources: str | Source, transform: Transform = COPY) -> Rule:
    """A `Rule`, with plain names for sources that are taken as they are."""
    return Rule(param, tuple(s if isinstance(s, Source) else Source(s) for s in sources), transform)


@dataclass(frozen=True)
class Recipe:
    """A rule made concrete: the tensors to read, with the shapes that this transform needs them to have.

    Of a stack of `num_experts`, this is the recipe of one.
    """

    sources: tuple[Source, ...]
    source_shapes: tuple[tuple[int, ...], ...]
    transform: Transform
    dims: CheckpointDims
    num_experts: int | None = None

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and stored shapes of the checkpoint tensors."""
        for source, shape in zip(self.sources, self.source_shapes, strict=True):
            stored = source.stored_shape(shape)
            if source.stacked and self.num_experts is not None:
                yield source.name, (self.num_experts, *stored)
            else:
                yield from ((source.name.replace("{e}", str(e)), stored) for e in range(self.num_experts or 1))

    def build(self, read: Callable[[str], Any], shape: tuple[int, ...], dtype: np.dtype, expert: int = 0) -> np.ndarray:
        """The parameter of `shape`, or one expert of it; a view of the checkpoint where nothing has to change."""
        tensors = [read(source.name.replace("{e}", str(expert))) for source in self.sources]
        parts = [s.take(tensor[expert] if s.stacked else tensor) for s, tensor in zip(self.sources, tensors, strict=True)]
        array = self.transform.build(parts, shape, dtype, self.dims)
        if dtype == np.float16 and any(part.dtype != np.float16 for part in parts) and not np.isfinite(array).all():
            raise ModelLoadError("values that float16 cannot hold (beyond 65504); use dtype bfloat16 or float32")
        return array


@dataclass(frozen=True, eq=False)
class Stack:
    """A parameter [E, ...] of experts. What is asked for is read then, one expert at a time, so that the whole never lies on the host."""

    recipe: Recipe
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[str], Any]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        experts = range(*index[0].indices(self.shape[0]))
        stack: np.ndarray | None = None
        for place, expert in enumerate(experts):
            part = self.recipe.build(self.read, self.shape[1:], self.dtype, expert)[index[1:]]
            stack = empty((len(experts), *part.shape), self.dtype) if stack is None else stack
            stack[place] = part
        assert stack is not None
        return stack

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[(slice(None),)], dtype)


@dataclass(frozen=True)
class LoadPlan:
    """How a concrete model is loaded.

    Attributes:
        recipes: for each parameter, one for each layout that a checkpoint may have.
        prefix: what names begin with in a complete checkpoint; one saved from the bare decoder lacks it.
        ignored: patterns (full match) of tensors that carry nothing to load.
        aliases: tensors that a tied model may carry a second time, with the name of the first.
        renamed: (pattern, replacement) of beginnings of checkpoint names that have several spellings.
    """

    recipes: Mapping[str, tuple[Recipe, ...]]
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
    """The recipes of each parameter in `shapes` (name -> something with `.shape`), with the `dims` of its layer.

    Raises:
        KeyError: a parameter without a rule, which is a mistake in the family file.
    """
    by_param: dict[str, list[Rule]] = {}
    for rule in rules:
        by_param.setdefault(rule.param, []).append(rule)
    recipes = {}
    for name, abstract in shapes.items():
        template, layer = _template(name)
        recipes[name] = tuple(_bind(rule, layer, abstract.shape, dims[int(layer or 0)]) for rule in by_param[template])
    aliases = {}
    if "head.weight" not in shapes and "head.weight" in by_param:
        aliases[by_param["head.weight"][0].sources[0].name] = by_param["embed.weight"][0].sources[0].name
    return LoadPlan(recipes, prefix, tuple(ignored), aliases, tuple(renamed))


def _bind(rule: Rule, layer: str, shape: tuple[int, ...], dims: CheckpointDims) -> Recipe:
    source_shapes = rule.transform.source_shapes(shape[1:] if rule.is_stack else shape, dims)
    sources = [replace(source, name=source.name.replace("{i}", layer)) for source in rule.sources]
    if "{j}" in sources[0].name:
        count = len(source_shapes) // len(sources)
        sources = [replace(source, name=source.name.replace("{j}", str(j))) for j in range(count) for source in sources]
    return Recipe(tuple(sources), source_shapes, rule.transform, dims, shape[0] if rule.is_stack else None)


def _template(name: str) -> tuple[str, str]:
    """`layers.3.mlp.down` -> (`layers.{i}.mlp.down`, `3`)."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return (f"layers.{{i}}.{match[2]}", match[1]) if match else (name, "")


def load_params(model_def: Loadable, checkpoint: Checkpoint, place: Callable[[str, np.ndarray], Any]) -> list[Any]:
    """Read every parameter, in the order of `model_def.names`.

    Args:
        model_def: names, abstract parameters and load plan.
        checkpoint: where the tensors come from.
        place: brings one finished parameter (the right shape and dtype) to the devices: an array, or a `Stack` of experts.

    Returns:
        What `place` returned, a parameter each. At most four are held on the host at a time; `place` is called in threads.

    Raises:
        ModelLoadError: missing or unknown tensors, wrong shapes, values that the dtype cannot hold. Names are checked before reading.
    """
    plan = model_def.rules
    stored = stored_names(plan, checkpoint)
    recipes = {name: _present(layouts, stored) for name, layouts in plan.recipes.items()}
    _check_tensors(plan, recipes, checkpoint, stored)

    def build(name: str) -> Any:
        recipe, abstract = recipes[name], model_def.shapes[name]
        shape, dtype = tuple(abstract.shape), np.dtype(abstract.dtype)

        def read(tensor: str) -> Any:
            return checkpoint.read(stored[tensor])

        return Stack(recipe, shape, dtype, read) if recipe.num_experts is not None else recipe.build(read, shape, dtype)

    def load(name: str) -> Any:
        try:
            return place(name, build(name))
        except ModelLoadError as error:
            raise ModelLoadError(f"{checkpoint.location}: {name} holds {error}") from None

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="load") as pool:
        return list(pool.map(load, model_def.names))


def _present(layouts: Sequence[Recipe], stored: Mapping[str, str]) -> Recipe:
    """The layout that the checkpoint has, or else the first."""
    return next((recipe for recipe in layouts if all(name in stored for name, _ in recipe.tensors())), layouts[0])


def stored_names(plan: LoadPlan, checkpoint: Checkpoint) -> dict[str, str]:
    """Full name -> the name in the checkpoint, which may spell it another way, or lack the prefix where the bare decoder was saved."""
    names = {name: name for name in checkpoint.names()}
    for pattern, replacement in plan.renamed:
        names = {re.sub(rf"^{pattern}", replacement, full): name for full, name in names.items()}
    if any(full.startswith(plan.prefix) for full in names):
        return names
    known = {name for layouts in plan.recipes.values() for recipe in layouts for name, _ in recipe.tensors()}
    return {(full if full in known or full in plan.aliases else plan.prefix + full): name for full, name in names.items()}


def _check_tensors(plan: LoadPlan, recipes: Mapping[str, Recipe], checkpoint: Checkpoint, stored: Mapping[str, str]) -> None:
    wanted = dict(tensor for recipe in recipes.values() for tensor in recipe.tensors())
    missing = sorted(wanted.keys() - stored.keys())
    if missing:
        hint = ""
        head = recipes.get("head.weight")
        if head is not None and head.sources[0].name in missing:
            hint = (
                f"; {head.sources[0].name} is the output head of a model whose config says tie_word_embeddings=false: if it shares"
                " the input embeddings, set tie_word_embeddings to true (hf_overrides)"
            )
        raise ModelLoadError(f"{checkpoint.location} lacks {len(missing)} tensors of this model: {_listing(missing)}{hint}")
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in plan.ignored)) if plan.ignored else None
    unknown = sorted(name for name in stored.keys() - wanted.keys() - plan.aliases.keys() if ignored is None or not ignored.fullmatch(name))
    if unknown:
        raise ModelLoadError(
            f"{checkpoint.location} has {len(unknown)} tensors that this model does not use: {_listing(unknown)};"
            " the config and the weights do not belong together, or the model has parts that are not supported"
        )
    wrong = [
        f"{name} is {list(checkpoint.shape(stored[name]))}, the config needs {list(shape)}"
        for name, shape in wanted.items()
        if tuple(checkpoint.shape(stored[name])) != shape
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
