"""A step as one array: the host packs it, the compiled step takes it apart again.

Everything is int32 and lies in one buffer, so that a step costs one transfer. The order of the fields is written once, in `_fields`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.core_types import CacheKind, CacheSpec, NewRow, ScheduledRow
from jaxllm.ops.attention import AttentionMetadata
from jaxllm.ops.recurrent import StateRows
from jaxllm.runner.buckets import Bucket

# In the packed tokens: "the token that this slot sampled last", whose id only the device knows.
LAST_SAMPLED = -1


@dataclass(frozen=True)
class BatchLayout:
    """Where the fields of a step lie in the packed array.

    `pages_per_row[g]` is the width of the page table of cache group g. That of the recurrent group, `state_group`, has two columns: the
    page to read and the page to write. The last group may be that of an encoder.
    """

    bucket: Bucket
    pages_per_row: tuple[int, ...]
    state_group: int | None = None
    has_encoder: bool = False

    @classmethod
    def of(cls, bucket: Bucket, spec: CacheSpec, max_model_len: int) -> BatchLayout:
        """The layout of an engine's steps."""
        recurrent = [group.kind is CacheKind.RECURRENT for group in spec.groups]
        widths = [2 if r else spec.table_width(group, max_model_len) for r, group in zip(recurrent, spec.groups, strict=True)]
        state_group = recurrent.index(True) if any(recurrent) else None
        return cls(bucket, tuple(widths), state_group, spec.encoder_group is not None)

    def _fields(self) -> dict[str, tuple[int, ...]]:
        tokens, rows = self.bucket.num_tokens, self.bucket.num_rows
        shapes = {
            "num_decodes": (1,),
            "tokens": (tokens,),
            "slots": (rows,),
            "kv_lens": (rows,),
            "q_starts": (rows + 1,),
            "samples": (rows,),
            "encoder_lens": (rows if self.has_encoder else 0,),
        }
        return shapes | {f"page_table_{g}": (rows, width) for g, width in enumerate(self.pages_per_row)}

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self._fields().values())

    def views(self, packed: Any) -> dict[str, Any]:
        """The fields of a packed array: views to write to of a numpy array, slices of a traced one."""
        out: dict[str, Any] = {}
        at = 0
        for name, shape in self._fields().items():
            size = math.prod(shape)
            out[name] = packed[at : at + size].reshape(shape)
            at += size
        return out


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepBatch:
    """The unpacked step, on the device.

    tokens: [T] int32, LAST_SAMPLED where the id is only known on the device.
    slots: [R] int32, the sink slot for padding rows.
    samples: [R] bool, rows whose last token predicts a new one.
    last_tokens: [R] int32, index of each row's last token of this step.
    metadata: attention metadata of each cache group; all but the page table are shared, and the lengths but for an encoder's.
    states: rows and pages of recurrent layers, where there are any.
    """

    tokens: jax.Array
    slots: jax.Array
    samples: jax.Array
    last_tokens: jax.Array
    metadata: tuple[AttentionMetadata, ...]
    states: StateRows | None

    @property
    def token_rows(self) -> jax.Array:
        return self.metadata[0].token_rows

    @property
    def positions(self) -> jax.Array:
        return self.metadata[0].positions

    @property
    def next_positions(self) -> jax.Array:
        """[R] position of the token that each row predicts."""
        return self.metadata[0].kv_lens


def unpack(packed: jax.Array, layout: BatchLayout) -> StepBatch:
    """Take a packed step [layout.size] int32 apart (traced)."""
    fields = layout.views(packed)
    q_starts, kv_lens = fields["q_starts"], fields["kv_lens"]
    num_rows = layout.bucket.num_rows
    token = jnp.arange(layout.bucket.num_tokens)
    token_rows = jnp.sum(q_starts[None, 1:] <= token[:, None], axis=1).astype(jnp.int32)
    row = jnp.minimum(token_rows, num_rows - 1)
    positions = kv_lens[row] - (q_starts[row + 1] - token)
    positions = jnp.where(token_rows < num_rows, positions, 0)
    metadata = tuple(
        AttentionMetadata(
            page_table=fields[f"page_table_{g}"],
            q_starts=q_starts,
            kv_lens=fields["encoder_lens"] if layout.has_encoder and g == len(layout.pages_per_row) - 1 else kv_lens,
            positions=positions,
            token_rows=token_rows,
            num_decodes=fields["num_decodes"][0],
        )
        for g in range(len(layout.pages_per_row))
    )
    states = None
    if layout.state_group is not None:
        read, write = fields[f"page_table_{layout.state_group}"].T
        fresh = kv_lens == q_starts[1:] - q_starts[:-1]
        states = StateRows(q_starts, token_rows, fields["num_decodes"][0], fresh, read, write)
    return StepBatch(
        tokens=fields["tokens"],
        slots=fields["slots"],
        samples=fields["samples"] != 0,
        last_tokens=jnp.maximum(q_starts[1:] - 1, 0),
        metadata=metadata,
        states=states,
    )


class BatchBuilder:
    """The host's mirror of the slots (their known tokens and their page tables), and the packing of steps.

    `sink_slot` is the slot of padding rows: one past the last real one.
    """

    def __init__(self, cache_spec: CacheSpec, num_slots: int, max_model_len: int):
        self._spec = cache_spec
        self._max_model_len = max_model_len
        self._page_counts = [group.num_pages for group in cache_spec.groups]
        self.sink_slot = num_slots
        widths = [cache_spec.table_width(group, max_model_len) for group in cache_spec.groups]
        self._tables = [np.zeros((num_slots, width), np.int32) for width in widths]
        self._table_lens = np.zeros((len(cache_spec.groups), num_slots), np.int64)
        self._tokens: list[list[int]] = [[] for _ in range(num_slots)]
        self._known_lens = np.zeros(num_slots, np.int32)
        self._encoder_lens = np.zeros(num_slots, np.int32)

    def layout(self, bucket: Bucket) -> BatchLayout:
        """The layout of the steps of a bucket."""
        return BatchLayout.of(bucket, self._spec, self._max_model_len)

    def encoder_layout(self, bucket: Bucket) -> BatchLayout:
        """The layout of whole encoder inputs: the rows and tokens of a step, with the encoder's page tables alone."""
        return BatchLayout(bucket, (self._tables[-1].shape[1],))

    def admit(self, row: NewRow) -> None:
        """Take over a slot: its known tokens, and its pages."""
        self._tokens[row.slot] = row.token_ids
        self._known_lens[row.slot] = len(row.token_ids)
        self._encoder_lens[row.slot] = len(row.encoder_token_ids)
        self._table_lens[:, row.slot] = 0
        self._append_pages(row.slot, row.page_ids)

    def _append_pages(self, slot: int, page_ids: Sequence[Sequence[int]]) -> None:
        for group, pages in enumerate(page_ids):
            if not pages:
                continue
            # XLA clips an index out of range silently: a wrong page would be somebody else's.
            if min(pages) < 0 or max(pages) >= self._page_counts[group]:
                raise IndexError(f"pages {list(pages)} of cache group {group}, which has {self._page_counts[group]}")
            start = self._table_lens[group, slot]
            self._tables[group][slot, start : start + len(pages)] = pages
            self._table_lens[group, slot] = start + len(pages)

    def known_tokens(self, slot: int) -> list[int]:
        """The tokens that came with the slot's request; later ones live on the device."""
        return self._tokens[slot]

    def pack(self, rows: Sequence[ScheduledRow], bucket: Bucket) -> np.ndarray:
        """Pack `rows` (those of one token first) for `bucket`: a fresh int32 array, since the device may read it in place."""
        layout = self.layout(bucket)
        packed = np.zeros(layout.size, np.int32)
        fields = layout.views(packed)
        count = len(rows)
        slots = np.fromiter((row.slot for row in rows), np.int32, count)
        lens = np.fromiter((row.num_tokens for row in rows), np.int32, count)
        starts = np.fromiter((row.start for row in rows), np.int32, count)
        ends = np.cumsum(lens, dtype=np.int32)

        for row in rows:
            if any(row.new_page_ids):
                self._append_pages(row.slot, row.new_page_ids)
        fields["num_decodes"][0] = np.count_nonzero(lens == 1)
        fields["slots"][:] = self.sink_slot
        fields["slots"][:count] = slots
        fields["kv_lens"][:count] = starts + lens
        fields["q_starts"][1 : count + 1] = ends
        fields["q_starts"][count + 1 :] = ends[-1] if count else 0
        if layout.has_encoder:
            fields["encoder_lens"][:count] = self._encoder_lens[slots]
        fields["samples"][:count] = np.fromiter((row.samples and not row.waits for row in rows), np.int32, count)
        for g, (group, table) in enumerate(zip(self._spec.groups, self._tables, strict=True)):
            if group.interval is None:
                fields[f"page_table_{g}"][:count] = table[slots]
            else:
                # The state before the step, which matters where something was computed before, and the one after it.
                entries = np.stack([np.maximum(starts - 1, 0), starts], axis=1) // group.interval
                fields[f"page_table_{g}"][:count] = table[slots[:, None], entries]
        tokens = fields["tokens"]
        on_device = (lens == 1) & (starts >= self._known_lens[slots])
        tokens[(ends - 1)[on_device]] = LAST_SAMPLED
        for i in np.flatnonzero(~on_device).tolist():
            row, end = rows[i], int(ends[i])
            tokens[end - row.num_tokens : end] = self._tokens[row.slot][row.start : row.start + row.num_tokens]
        return packed

    def pack_encoder(self, rows: Sequence[NewRow], bucket: Bucket) -> np.ndarray:
        """Pack the encoder inputs of rows that were admitted."""
        layout = self.encoder_layout(bucket)
        packed = np.zeros(layout.size, np.int32)
        fields = layout.views(packed)
        slots, count = [row.slot for row in rows], len(rows)
        lens = self._encoder_lens[slots]
        fields["kv_lens"][:count] = lens
        fields["q_starts"][1 : count + 1] = np.cumsum(lens)
        fields["q_starts"][count + 1 :] = lens.sum()
        fields["page_table_0"][:count] = self._tables[-1][slots]
        fields["tokens"][: lens.sum()] = np.concatenate([row.encoder_token_ids for row in rows])
        return packed


def decodes_first(rows: Sequence[ScheduledRow]) -> list[int]:
    """Indices of `rows` in the order of a batch: rows of one token before the others."""
    return sorted(range(len(rows)), key=lambda i: rows[i].num_tokens > 1)
