"""Arrow batches to tensors: every type in every memory layout, against ``to_pylist()``."""

import datetime
import decimal
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.data._internal.utils.torch_utils import DefaultFinalizeFn
from ray.data.collate_fn import is_tensor_batch_type
from ray.data.extensions import (
    ArrowPythonObjectArray,
    ArrowTensorType,
    ArrowTensorTypeV2,
    ArrowVariableShapedTensorArray,
    ArrowVariableShapedTensorType,
)
from ray.data.util.torch_utils import pin_tensors_to_memory

from lance_ray_stream.collate import TensorCollate, check_columns
from lance_ray_stream.errors import InvalidArgumentError, UnsupportedColumnError

ROWS = 19

SCALARS = {
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
UNSIGNED_LIMITS = {pa.uint16(): 2**16 - 1, pa.uint32(): 2**32 - 1, pa.uint64(): 2**64 - 1}


def numbers(arrow: pa.DataType, count: int) -> pa.Array:
    """``count`` different-looking values, the largest of the type among them."""
    if arrow == pa.bool_():
        return pa.array([i % 3 == 0 or i % 7 == 2 for i in range(count)], arrow)
    if pa.types.is_floating(arrow):
        return pa.array(np.array([i / 4 - 5 for i in range(count)]).astype(arrow.to_pandas_dtype()))
    largest = np.iinfo(arrow.to_pandas_dtype()).max
    return pa.array([largest if i == 4 else i % 100 for i in range(count)], arrow)


def fixed_size_list(arrow: pa.DataType, rows: int, *sizes: int) -> pa.Array:
    values = numbers(arrow, rows * math.prod(sizes))
    for size in reversed(sizes):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values


def wrapped(tensor_type: Any, rows: int) -> pa.Array:
    """An extension array of fixed-shape tensors."""
    size = math.prod(tensor_type.shape)
    values = numbers(tensor_type.value_type, rows * size)
    storage = tensor_type.storage_type
    if pa.types.is_fixed_size_list(storage):
        return tensor_type.wrap_array(pa.FixedSizeListArray.from_arrays(values, size))
    cls = pa.LargeListArray if pa.types.is_large_list(storage) else pa.ListArray
    offset_type = pa.int64() if pa.types.is_large_list(storage) else pa.int32()
    offsets = pa.array([size * i for i in range(rows + 1)], offset_type)
    return tensor_type.wrap_array(cls.from_arrays(offsets, values))


def ragged(arrow: pa.DataType, rows: int, *, large: bool, sizes: tuple[int, ...] = ()) -> pa.Array:
    offsets = np.cumsum([0] + [(5 * i) % 4 for i in range(rows)])
    values = fixed_size_list(arrow, int(offsets[-1]), *sizes)
    cls, offset_type = (pa.LargeListArray, pa.int64()) if large else (pa.ListArray, pa.int32())
    return cls.from_arrays(pa.array(offsets, offset_type), values)


DENSE: dict[str, tuple[pa.Array, torch.dtype, tuple[int, ...]]] = {
    **{str(arrow): (numbers(arrow, ROWS), dtype, ()) for arrow, dtype in SCALARS.items()},
    **{
        f"fixed_size_list<{arrow}>[5]": (fixed_size_list(arrow, ROWS, 5), dtype, (5,))
        for arrow, dtype in SCALARS.items()
    },
    "fixed_size_list<float>[16]": (fixed_size_list(pa.float32(), ROWS, 16), torch.float32, (16,)),
    "nested float16": (fixed_size_list(pa.float16(), ROWS, 3, 5), torch.float16, (3, 5)),
    "nested bool": (fixed_size_list(pa.bool_(), ROWS, 3, 2, 3), torch.bool, (3, 2, 3)),
    "size 0": (pa.array([[]] * ROWS, pa.list_(pa.int8(), 0)), torch.int8, (0,)),
    "row-major permutation": (
        wrapped(pa.fixed_shape_tensor(pa.int8(), [2, 3], permutation=[0, 1]), ROWS),
        torch.int8,
        (2, 3),
    ),
    "arrow tensor": (wrapped(pa.fixed_shape_tensor(pa.int32(), [2, 3]), ROWS), torch.int32, (2, 3)),
    **{
        f"{cls.__name__} {arrow}": (wrapped(cls((2, 3), arrow), ROWS), dtype, (2, 3))
        for cls in (ArrowTensorType, ArrowTensorTypeV2)
        for arrow, dtype in SCALARS.items()
    },
}

RAGGED: dict[str, tuple[pa.Array, torch.dtype]] = {
    **{f"list<{arrow}>": (ragged(arrow, ROWS, large=False), dtype) for arrow, dtype in SCALARS.items()},
    "large_list<int64>": (ragged(pa.int64(), ROWS, large=True), torch.int64),
    "list<fixed_size_list<float16>[3]>": (
        ragged(pa.float16(), ROWS, large=False, sizes=(3,)),
        torch.float16,
    ),
    "variable-shaped int64": (
        ArrowVariableShapedTensorArray.from_numpy([np.arange((5 * i) % 4) + i for i in range(ROWS)]),
        torch.int64,
    ),
}


def read_only(array: pa.Array) -> pa.Table:
    """The array in one read-only buffer, as Ray's object store delivers it."""
    sink = pa.BufferOutputStream()
    table = pa.table({"x": array})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(pa.py_buffer(sink.getvalue().to_pybytes())).read_all()


LAYOUTS: dict[str, Callable[[pa.Array], pa.Table]] = {
    "contiguous": lambda array: pa.table({"x": array}),
    "sliced": lambda array: pa.table({"x": array}).slice(3, 11),
    "slice of a slice": lambda array: pa.table({"x": array[2:]}).slice(1, 9),
    "multi-chunk": lambda array: pa.table({"x": pa.chunked_array([array[1:6], array[9:9], array[7:], array])}),
    "read-only": read_only,
    "read-only, sliced": lambda array: read_only(array).slice(5, 9),
    "0 rows": lambda array: pa.table({"x": array}).slice(4, 0),
    "0 chunks": lambda array: pa.table({"x": pa.chunked_array([], array.type)}),
}

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def collate(batch: pa.Table, dtypes: Any = None) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of read-only memory
        return TensorCollate(dtypes)(batch)


def rows_of(batch: pa.Table) -> list[Any]:
    return [row.tolist() if isinstance(row, np.ndarray) else row for row in batch["x"].to_pylist()]


def expected_tensor(rows: list[Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    as_numpy = str(dtype).removeprefix("torch.")
    return torch.from_numpy(np.array(rows, as_numpy).reshape(len(rows), *shape))


def assert_owned(tensor: torch.Tensor, batch: pa.Table) -> None:
    """Overwriting the tensor leaves the batch as it was."""
    before = str(rows_of(batch))
    tensor.view(torch.uint8).bitwise_not_()
    assert str(rows_of(batch)) == before


@layouts
@pytest.mark.parametrize("kind", DENSE)
def test_dense_columns(kind: str, layout: str) -> None:
    """C61: shape, dtype and values of the column, in memory of the tensor's own."""
    array, dtype, shape = DENSE[kind]
    batch = LAYOUTS[layout](array)
    tensor = collate(batch)["x"]
    assert (tensor.shape, tensor.dtype) == ((batch.num_rows, *shape), dtype)
    assert tensor.is_contiguous()
    assert torch.equal(tensor, expected_tensor(rows_of(batch), dtype, shape))
    assert_owned(tensor, batch)


@layouts
@pytest.mark.parametrize("kind", RAGGED)
def test_ragged_columns(kind: str, layout: str) -> None:
    """C61: lists of varying length become one jagged tensor."""
    array, dtype = RAGGED[kind]
    batch = LAYOUTS[layout](array)
    tensor = collate(batch)["x"]
    rows = batch["x"].to_pylist()
    assert tensor.layout == torch.jagged
    assert (tensor.size(0), tensor.dtype, tensor.offsets().dtype) == (len(rows), dtype, torch.int64)
    assert [row.tolist() for row in tensor.unbind()] == rows_of(batch)
    assert tensor.offsets().tolist() == [0, *np.cumsum([len(row) for row in rows], dtype=int).tolist()]
    assert_owned(tensor.values(), batch)


def test_unsigned_limits_survive() -> None:
    for arrow, limit in UNSIGNED_LIMITS.items():
        tensor = collate(pa.table({"x": pa.array([0, limit], arrow)}))["x"]
        assert tensor.tolist() == [0, limit]


def test_column_order_and_zero_columns() -> None:
    batch = pa.table({"b": [1], "a": [2.0], "c": [[True, False]]})
    assert list(collate(batch)) == ["b", "a", "c"]
    assert collate(pa.table({})) == {}


# -- nulls -------------------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("arrow", [pa.float16(), pa.float32(), pa.float64()], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
def test_null_floats_become_nan(arrow: pa.DataType, shape: tuple[int, ...], layout: str) -> None:
    count = ROWS * math.prod(shape)
    present = numbers(arrow, count)
    array = pa.array([None if i % 4 == 1 else present[i].as_py() for i in range(count)], arrow)
    for size in reversed(shape):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    batch = LAYOUTS[layout](array)
    tensor = collate(batch)["x"]
    assert tensor.dtype == SCALARS[arrow]
    expected = np.array(batch["x"].to_pylist(), np.float64).reshape(tensor.shape)  # None is NaN
    assert np.array_equal(tensor.double().numpy(), expected, equal_nan=True)


def test_null_floats_in_ragged_and_ray_tensors() -> None:
    lists = pa.array([[1.0, None], [], [None, 2.5, 3.0]])
    assert str(collate(pa.table({"x": lists}))["x"].values().tolist()) == "[1.0, nan, nan, 2.5, 3.0]"
    tensors = ArrowTensorTypeV2((2,), pa.float32()).wrap_array(
        pa.array([[1.0, 2.0], [None, 4.0]], pa.large_list(pa.float32()))
    )
    assert str(collate(pa.table({"x": tensors}))["x"].tolist()) == "[[1.0, 2.0], [nan, 4.0]]"


NULLS: dict[str, pa.Array] = {
    "int64": pa.array([1, None, 3, None]),
    "bool": pa.array([True, None, False, None]),
    "list row": pa.array([[1], None, [], None], pa.list_(pa.float32())),
    "list item": pa.array([[1, None], [2], [], [None]]),
    "fixed_size_list row": pa.array([[1.0, 2.0], None, [3.0, 4.0], None], pa.list_(pa.float32(), 2)),
    "fixed_size_list item": pa.array([[1, 2], [None, 3], [4, 5], [6, None]], pa.list_(pa.int8(), 2)),
    "nested row": pa.array([[[1.0]], [None], [[2.0]], [None]], pa.list_(pa.list_(pa.float32(), 1), 1)),
    "arrow tensor row": pa.fixed_shape_tensor(pa.float32(), [2]).wrap_array(
        pa.array([[1.0, 2.0], None, [3.0, 4.0], None], pa.list_(pa.float32(), 2))
    ),
    "ray tensor row": ArrowTensorType((2,), pa.float32()).wrap_array(
        pa.array([[1.0, 2.0], None, [3.0, 4.0], None], pa.list_(pa.float32()))
    ),
    "ray variable row": ArrowVariableShapedTensorType(pa.int64(), 1).wrap_array(
        pa.array(
            [{"data": [1], "shape": [1]}, None, {"data": [], "shape": [0]}, None],
            ArrowVariableShapedTensorType(pa.int64(), 1).storage_type,
        )
    ),
}


@pytest.mark.parametrize("split", [False, True], ids=["one chunk", "two chunks"])
@pytest.mark.parametrize("kind", NULLS)
def test_other_nulls_are_refused(kind: str, split: bool) -> None:
    array = NULLS[kind]
    column = pa.chunked_array([array[:2], array[2:]] if split else [array])
    with pytest.raises(UnsupportedColumnError, match=r"'x' .* has 2 nulls in a batch of 4 rows") as caught:
        collate(pa.table({"x": column}))
    assert all(way in str(caught.value) for way in ("map_batches", "x IS NOT NULL"))
    # a stretch without its nulls is as good as any other
    assert len(collate(pa.table({"x": column}).slice(2, 1))["x"]) == 1


def test_null_floats_are_not_converted_to_integers() -> None:
    batch = pa.table({"x": [1.0, None]})
    assert str(collate(batch, torch.bfloat16)["x"].tolist()) == "[1.0, nan]"
    with pytest.raises(UnsupportedColumnError, match=r"1 nulls .* torch.int64"):
        collate(batch, torch.int64)


# -- refusals ----------------------------------------------------------------------------------------------

NOW = datetime.datetime(2024, 1, 2, 3, 4, 5)
UNSUPPORTED: dict[str, pa.Array] = {
    "string": pa.array(["a"]),
    "large_string": pa.array(["a"], pa.large_string()),
    "string_view": pa.array(["a"], pa.string_view()),
    "binary": pa.array([b"a"]),
    "large_binary": pa.array([b"a"], pa.large_binary()),
    "fixed_size_binary": pa.array([b"a"], pa.binary(1)),
    "timestamp": pa.array([NOW]),
    "timestamp with zone": pa.array([NOW], pa.timestamp("us", tz="UTC")),
    "date32": pa.array([NOW.date()]),
    "time64": pa.array([NOW.time()]),
    "duration": pa.array([datetime.timedelta(seconds=1)]),
    "decimal128": pa.array([decimal.Decimal("1.5")]),
    "struct": pa.array([{"a": 1}]),
    "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
    "dictionary": pa.array(["a"]).dictionary_encode(),
    "dictionary of numbers": pa.array([1]).dictionary_encode(),
    "null": pa.nulls(1),
    "list of strings": pa.array([["a"]]),
    "list of lists": pa.array([[[1]]]),
    "fixed_size_list of strings": pa.array([["a"]], pa.list_(pa.string(), 1)),
    "fixed_size_list of lists": pa.array([[[1]]], pa.list_(pa.list_(pa.int8()), 1)),
    "list_view": pa.array([[1]], pa.list_view(pa.int64())),
    "permuted": wrapped(pa.fixed_shape_tensor(pa.int64(), [2, 3, 4], permutation=[2, 0, 1]), 1),
    "arrow tensor of strings": pa.fixed_shape_tensor(pa.string(), [1]).wrap_array(
        pa.array([["a"]], pa.list_(pa.string(), 1))
    ),
    "python objects": ArrowPythonObjectArray.from_objects([object]),
    "variable-shaped images": ArrowVariableShapedTensorArray.from_numpy([np.ones((1, 2)), np.ones((2, 2))]),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_types_without_a_tensor_form_are_refused(kind: str) -> None:
    """C60: the error names the column, its type and the ways out, from the schema alone and in a batch."""
    array = UNSUPPORTED[kind]
    batch = pa.table({"good": pa.nulls(len(array), pa.int64()), "col": array})
    for refuse in (lambda: check_columns(batch.schema), lambda: collate(batch)):
        with pytest.raises(UnsupportedColumnError) as caught:
            refuse()
        text = str(caught.value)
        assert f"'col' ({array.type}): " in text
        assert "'good'" not in text
        assert all(way in text for way in ("columns=[...]", "ds.map_batches", "collate_fn", "iter_batches"))


def test_all_unsupported_columns_are_named_at_once() -> None:
    schema = pa.schema({"id": pa.int64(), "caption": pa.string(), "jpeg": pa.binary(), "at": pa.timestamp("us")})
    with pytest.raises(UnsupportedColumnError) as caught:
        check_columns(schema)
    text = str(caught.value)
    assert all(part in text for part in ("'caption' (string)", "'jpeg' (binary)", "'at' (timestamp[us])"))


def test_supported_schema_passes() -> None:
    arrays = [column[0] for columns in (DENSE, RAGGED) for column in columns.values()]
    check_columns(pa.schema([(f"c{i}", array.type) for i, array in enumerate(arrays)]))
    check_columns(pa.schema([]))


# -- dtypes ------------------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("kind", ["int8", "uint16", "bool", "float", "fixed_size_list<uint8>[5]", "nested bool"])
def test_one_dtype_for_all_columns(kind: str, dtype: torch.dtype, layout: str) -> None:
    array, own, shape = DENSE[kind]
    batch = LAYOUTS[layout](array)
    tensor = collate(batch, dtype)["x"]
    assert tensor.dtype == dtype
    assert torch.equal(tensor, expected_tensor(rows_of(batch), own, shape).to(dtype))
    assert_owned(tensor, batch)


def test_dtypes_by_column() -> None:
    batch = pa.table({"a": pa.array([1, 2], pa.uint16()), "b": pa.array([1, 2], pa.int8()), "c": [[1], [2, 3]]})
    tensors = collate(batch, {"a": torch.int64, "c": torch.int32})
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "a": torch.int64,
        "b": torch.int8,
        "c": torch.int32,
    }
    assert tensors["c"].offsets().dtype == torch.int64


def test_dtypes_for_an_unknown_column() -> None:
    collate_fn = TensorCollate({"label": torch.int64, "a": torch.int64})
    batch = pa.table({"a": [1], "labels": [2]})
    for refuse in (lambda: collate_fn(batch), lambda: collate_fn.check(batch.schema)):
        with pytest.raises(InvalidArgumentError, match=r"\['label'\].*\['a', 'labels'\]"):
            refuse()


@pytest.mark.parametrize("dtypes", ["float32", np.float32, {"a": "int64"}, {"a": None}, [torch.int8]], ids=str)
def test_dtypes_that_are_none(dtypes: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"torch\.float32"):
        TensorCollate(dtypes)


# -- what Ray does with the tensors ------------------------------------------------------------------------

MIXED = pa.table({"image": fixed_size_list(pa.uint8(), 4, 3), "tokens": [[1, 2], [], [3], [4, 5, 6]]})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ray_moves_the_tensors(device: str) -> None:
    """Ray's finalize step takes the batch for tensors and moves the dense and the ragged ones."""
    tensors = collate(MIXED)
    assert is_tensor_batch_type(tensors)
    moved: Any = DefaultFinalizeFn(torch.device(device))(tensors).data
    assert {name: tensor.device.type for name, tensor in moved.items()} == {"image": device, "tokens": device}
    assert moved["tokens"].offsets().device.type == device
    assert moved["tokens"].to_padded_tensor(0).shape == (4, 3)  # the lengths moved along: no value is read


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory can only be pinned for an accelerator")
def test_ray_pins_the_tensors() -> None:
    pinned: Any = pin_tensors_to_memory(collate(MIXED))
    assert [tensor.is_pinned() for tensor in pinned.values()] == [True, True]
    moved: Any = DefaultFinalizeFn(torch.device("cuda", 0))(pinned).data
    assert moved["image"].cpu().tolist() == MIXED["image"].to_pylist()
    assert [row.tolist() for row in moved["tokens"].cpu().unbind()] == MIXED["tokens"].to_pylist()


def test_the_collate_travels() -> None:
    collate_fn = pickle.loads(pickle.dumps(TensorCollate({"x": torch.float32})))
    assert collate_fn(pa.table({"x": [1]}))["x"].dtype == torch.float32


# -- any cut of any rows -----------------------------------------------------------------------------------


@st.composite
def chunked_columns(draw: st.DrawFn, item: st.SearchStrategy[Any], arrow: pa.DataType) -> pa.ChunkedArray:
    """Chunks that are slices, at any offset, of arrays of any rows."""
    chunks = []
    for rows in draw(st.lists(st.lists(item, max_size=20), max_size=4)):
        cuts = sorted(draw(st.tuples(st.integers(0, len(rows)), st.integers(0, len(rows)))))
        chunks.append(pa.array(rows, arrow)[cuts[0] : cuts[1]])
    return pa.chunked_array(chunks, arrow)


MAYBE_FLOAT = st.none() | st.floats(width=16)
HYPOTHESIS = settings(max_examples=150, deadline=None)


@HYPOTHESIS
@given(chunked_columns(st.lists(st.booleans(), min_size=3, max_size=3), pa.list_(pa.bool_(), 3)))
def test_any_cut_of_bits(column: pa.ChunkedArray) -> None:
    tensor = collate(pa.table({"x": column}))["x"]
    assert tensor.shape == (len(column), 3)
    assert tensor.tolist() == column.to_pylist()


@HYPOTHESIS
@given(chunked_columns(st.lists(MAYBE_FLOAT, min_size=2, max_size=2), pa.list_(pa.float16(), 2)))
def test_any_cut_of_floats_with_nulls(column: pa.ChunkedArray) -> None:
    tensor = collate(pa.table({"x": column}))["x"]
    expected = np.array(column.to_pylist(), np.float64).reshape(-1, 2)
    assert np.array_equal(tensor.double().numpy(), expected, equal_nan=True)


@HYPOTHESIS
@given(chunked_columns(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), pa.list_(pa.int64())))
def test_any_cut_of_ragged_lists(column: pa.ChunkedArray) -> None:
    tensor = collate(pa.table({"x": column}))["x"]
    assert [row.tolist() for row in tensor.unbind()] == column.to_pylist()
