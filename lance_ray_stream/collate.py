"""Arrow batches to torch tensors: the default collate of ``StreamIterator.iter_torch_batches``.

What a column becomes depends on its Arrow type alone, never on its values, so that every rank and every
step sees the same dtypes and shapes. Values are copied once, from Arrow's buffers into memory that torch
owns: blocks lie in the object store's shared memory, which other processes read and nobody may write.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from ray.data.collate_fn import ArrowBatchCollateFn
from ray.data.extensions import ArrowTensorType, ArrowTensorTypeV2, ArrowVariableShapedTensorType

from lance_ray_stream.errors import InvalidArgumentError, UnsupportedColumnError

_TORCH_DTYPES: dict[pa.DataType, torch.dtype] = {
    pa.bool_(): torch.bool,
    pa.int8(): torch.int8,
    pa.int16(): torch.int16,
    pa.int32(): torch.int32,
    pa.int64(): torch.int64,
    pa.uint8(): torch.uint8,
    pa.uint16(): torch.uint16,
    pa.uint32(): torch.uint32,
    pa.uint64(): torch.uint64,
    pa.float16(): torch.float16,
    pa.float32(): torch.float32,
    pa.float64(): torch.float64,
}

_WAYS_OUT = (
    "Ways out: leave the column out, read_stream(columns=[...]) without it; or make it numeric in "
    "ds.map_batches(...); or pass your own collate_fn to iter_torch_batches (a "
    "ray.data.collate_fn.ArrowBatchCollateFn receives the Arrow table); or use iter_batches."
)


class TensorCollate(ArrowBatchCollateFn):
    """Converts an Arrow batch of B rows to one tensor per column, on the CPU, in the batch's column order.

    ===================================================  ==================================================
    Arrow type of the column                             tensor
    ===================================================  ==================================================
    bool, (u)int8 to (u)int64, float16 to float64        ``(B,)``, the dtype of the same name
    fixed_size_list[n], also nested                      ``(B, n, ...)``
    fixed_shape_tensor, not permuted; Ray's tensor       ``(B, *shape)``
    types (what ``map_batches`` makes of ndarrays)
    list, large_list of the above numbers or             ``(B, j, ...)``, a nested tensor of layout
    fixed_size_lists; Ray's variable-shaped tensors      ``torch.jagged``: ``x.values()``, ``x.offsets()``
    of one dimension                                     (int64), ``x.unbind()``, ``x.to_padded_tensor(0)``
    anything else                                        :class:`UnsupportedColumnError`
    ===================================================  ==================================================

    All tensors are contiguous and writable, and share no memory with the batch. A batch of 0 rows keeps
    dtypes and shapes.

    - **Nulls.** A null in a float column, or inside a list or tensor of floats, becomes NaN. A null
      integer, bool, list or tensor is an :class:`UnsupportedColumnError` that counts them.
    - **Unsigned integers** keep their dtype and every value, but torch has few operations for uint16,
      uint32 and uint64: ask for another with ``dtypes`` to calculate with them.
    - **Ragged columns.** A jagged tensor is a single object that Ray pins and moves to a device like any
      other tensor. Ray types a column of ndarrays block by block: dense where all rows of a block happen
      to have one length, ragged elsewhere. Return lists (or an Arrow list column) from ``map_batches``
      where lengths vary, and the form is always ragged.

    Args:
        dtypes: one torch dtype for all columns, or a dtype by column name; columns that are not named keep
            their own. Converted while copying. For a ragged column, the dtype of its values.

    Raises:
        InvalidArgumentError: ``dtypes`` holds something other than a torch dtype.
    """

    def __init__(self, dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None) -> None:
        super().__init__()
        self._default = None if isinstance(dtypes, Mapping) else dtypes
        self._dtypes = dict(dtypes) if isinstance(dtypes, Mapping) else {}
        given = self._dtypes.values() if isinstance(dtypes, Mapping) or dtypes is None else [dtypes]
        for dtype in given:
            if not isinstance(dtype, torch.dtype):
                raise InvalidArgumentError(
                    f"dtypes={dtypes!r}: {dtype!r} is not a torch dtype. Pass a torch.dtype such as "
                    "torch.float32, or a dict of column name to torch.dtype."
                )

    def check(self, schema: pa.Schema) -> None:
        """Refuses a schema that calling this would refuse; reads nothing.

        Raises:
            InvalidArgumentError: ``dtypes`` names a column that the schema does not have.
            UnsupportedColumnError: see :func:`check_columns`.
        """
        unknown = [name for name in self._dtypes if name not in schema.names]
        if unknown:
            raise InvalidArgumentError(
                f"dtypes names the columns {unknown}, which the batches do not have. Their columns are {schema.names}."
            )
        check_columns(schema)

    def __call__(self, batch: pa.Table) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Converts ``batch``; see the class for the forms.

        Raises:
            InvalidArgumentError: ``dtypes`` names a column that the batch does not have.
            UnsupportedColumnError: a column's type has no tensor form, or it holds nulls that have none.
        """
        self.check(batch.schema)
        return {name: self._tensor(name, batch.column(name)) for name in batch.column_names}

    def _tensor(self, name: str, column: pa.ChunkedArray) -> torch.Tensor:
        form = _form_of(column.type)
        assert form is not None  # check() has passed
        dtype = self._dtypes.get(name, self._default) or form.dtype
        chunks = column.chunks
        _check_nulls(name, column, nan=form.dtype.is_floating_point, dtype=dtype)
        return _jagged(chunks, form, dtype) if form.ragged else _dense(chunks, form, dtype)


def check_columns(schema: pa.Schema) -> None:
    """Refuses a schema with columns that cannot become tensors; reads nothing.

    Raises:
        UnsupportedColumnError: names every such column with its type, and the ways out.
    """
    unsupported = [field for field in schema if _form_of(field.type) is None]
    if unsupported:
        lines = [
            f"  {field.name!r} ({textwrap.shorten(str(field.type), 200)}): {_hint(field.type)}" for field in unsupported
        ]
        raise UnsupportedColumnError(
            "These columns cannot become torch tensors:\n" + "\n".join(lines) + "\n" + _WAYS_OUT
        )


@dataclass(frozen=True, kw_only=True)
class _Form:
    """What the rows of a column become: told by its Arrow type alone."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()  # of one row, or of one item of a ragged row
    ragged: bool = False


def _form_of(arrow: pa.DataType) -> _Form | None:
    """The form of a column of this type; None where it has none."""
    if isinstance(arrow, (ArrowTensorType, ArrowTensorTypeV2, pa.FixedShapeTensorType)):
        dtype = _TORCH_DTYPES.get(arrow.value_type)
        if dtype is None or _is_permuted(arrow):
            return None
        return _Form(dtype=dtype, shape=tuple(arrow.shape))
    if isinstance(arrow, ArrowVariableShapedTensorType):
        dtype = _TORCH_DTYPES.get(arrow.value_type)
        return _Form(dtype=dtype, ragged=True) if dtype and arrow.ndim == 1 else None
    ragged = _is_list(arrow) and not pa.types.is_fixed_size_list(arrow)
    item = arrow.value_type if ragged else arrow
    shape: tuple[int, ...] = ()
    while pa.types.is_fixed_size_list(item):
        shape += (item.list_size,)
        item = item.value_type
    dtype = _TORCH_DTYPES.get(item)
    return _Form(dtype=dtype, shape=shape, ragged=ragged) if dtype else None


def _is_permuted(arrow: pa.DataType) -> bool:
    """Whether the dimensions are stored in another order than row-major.

    Refused: of three dimensions or more, pyarrow's own writer and reader disagree about what a permutation
    means, so that the values would come silently transposed for some of the writers.
    """
    permutation = getattr(arrow, "permutation", None)
    return permutation is not None and list(permutation) != sorted(permutation)


def _dense(arrays: list[pa.Array], form: _Form, dtype: torch.dtype) -> torch.Tensor:
    """The rows of ``arrays``, one after the other: a new tensor (rows, *shape)."""
    tensor = torch.empty((sum(len(array) for array in arrays), *form.shape), dtype=dtype)
    end = 0
    for array in arrays:
        start, end = end, end + len(array)
        rows = tensor[start:end].view(-1)
        values, _ = _leaf(array)
        _copy(_borrow(values), rows)
        if values.null_count:
            rows.masked_fill_(_borrow(values.is_null()), torch.nan)
    return tensor


def _jagged(arrays: list[pa.Array], form: _Form, dtype: torch.dtype) -> torch.Tensor:
    """The lists of ``arrays``, one after the other: a new jagged tensor (rows, j, *shape)."""
    arrays = [_list_array(array) for array in arrays]
    values = _dense([array.flatten() for array in arrays], form, dtype)
    offsets = torch.zeros(1 + sum(len(array) for array in arrays), dtype=torch.int64)
    end = 0
    for array in arrays:
        start, end = end, end + len(array)
        if len(array):  # an empty array may have no offsets at all
            ends = _borrow(array.offsets)  # (rows + 1,), of the child array, which a slice leaves whole
            offsets[start + 1 : end + 1].copy_(ends[1:]).add_(offsets[start] - ends[0])
    if not end:
        return torch.nested.nested_tensor_from_jagged(values, offsets)
    # The extreme lengths are cheap here; asked for later, on an accelerator, they would stall it.
    shortest, longest = offsets.diff().aminmax()
    return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=int(shortest), max_seqlen=int(longest))


def _borrow(values: pa.Array) -> torch.Tensor:
    """A tensor (n,) on the memory of numbers or bools, to copy from and never to hand out.

    DLPack, because torch warns of read-only memory that comes by numpy or by the buffer protocol. Values
    under a null are whatever the buffer holds.
    """
    if pa.types.is_boolean(values.type):  # bits to bytes
        return _borrow(values.cast(pa.uint8())).view(torch.bool)
    if values.null_count:
        values = pa.Array.from_buffers(values.type, len(values), [None, values.buffers()[1]], offset=values.offset)
    return torch.utils.dlpack.from_dlpack(values)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies (n,) to (n,), converting the dtype where they differ."""
    if source.dtype == target.dtype:
        # One memcpy. By torch it would wake torch's whole thread team, whose threads cost many times
        # the copy itself while the training has the cores busy.
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def _list_array(array: pa.Array) -> pa.Array:
    """The list array inside a ragged column: Ray's variable-shaped tensors are structs (data, shape)."""
    return array.storage.field("data") if isinstance(array, pa.ExtensionArray) else array


def _leaf(array: pa.Array) -> tuple[pa.Array, int]:
    """The values inside an array of rows, in order, and how many nulls there are above them.

    The values are the array's own stretch of its buffers: ``flatten()`` respects the offset of a slice,
    ``.values`` does not. Without nulls above them they are as many as the form says.
    """
    nulls = 0
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_struct(array.type):  # Ray's variable-shaped tensors
        nulls += array.null_count
        array = array.field("data")
    while _is_list(array.type):
        nulls += array.null_count
        array = array.flatten()
    return array, nulls


def _is_list(arrow: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(arrow) or types.is_large_list(arrow) or types.is_fixed_size_list(arrow))


def _check_nulls(name: str, column: pa.ChunkedArray, *, nan: bool, dtype: torch.dtype) -> None:
    """Refuses nulls that have no tensor value: all but floats (``nan``) that stay floats."""
    leaves = [_leaf(array) for array in column.chunks]
    lists = sum(nulls for _, nulls in leaves)
    values = sum(array.null_count for array, _ in leaves)
    if lists:
        nulls, why = lists, "a list or tensor that is missing has no shape"
    elif values and not nan:
        nulls, why = values, "an integer or bool has no value that means missing"
    elif values and not (dtype.is_floating_point or dtype.is_complex):
        nulls, why = values, f"they become NaN, which dtypes asks to convert to {dtype}"
    else:
        return
    raise UnsupportedColumnError(
        f"Column {name!r} ({column.type}) has {nulls} nulls in a batch of {len(column)} rows: {why}. "
        f"Ways out: fill them in ds.map_batches(...), with pyarrow.compute.fill_null for instance; or leave "
        f'such rows out, read_stream(filter="{name} IS NOT NULL"); or leave the column out, '
        "read_stream(columns=[...]) without it; or pass your own collate_fn, or use iter_batches."
    )


_HINTS: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (lambda t: isinstance(t, ArrowVariableShapedTensorType), "tensors of varying shape; pad them to one"),
    (_is_permuted, "tensors with permuted dimensions; store them in row-major order"),
    (pa.types.is_string, "text; tokenize or encode it"),
    (pa.types.is_large_string, "text; tokenize or encode it"),
    (pa.types.is_string_view, "text; tokenize or encode it"),
    (pa.types.is_binary, "bytes; decode them"),
    (pa.types.is_large_binary, "bytes; decode them"),
    (pa.types.is_fixed_size_binary, "bytes; decode them"),
    (pa.types.is_temporal, "a time; cast it to int64"),
    (pa.types.is_decimal, "a decimal; cast it to float64"),
    (pa.types.is_dictionary, "a dictionary; take its indices, or decode it"),
    (pa.types.is_struct, "a struct; take its fields apart into columns"),
    (pa.types.is_null, "nothing but nulls; give it values of one type"),
)


def _hint(arrow: pa.DataType) -> str:
    """What to do with a column of an unsupported type, in a few words."""
    if _is_list(arrow):
        item = arrow.value_type
        return "ragged in a second dimension; pad it" if _is_list(item) else _hint(item)
    fitting = (hint for is_type, hint in _HINTS if is_type(arrow))
    return next(fitting, "no tensor holds this type; turn it into numbers")
