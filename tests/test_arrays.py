"""Arrays of NumPy, JAX and others in place of tensors."""

from typing import Any

import numpy as np
import pytest
import torch

from regard import Causal, ProblemError, TensorMask, attend


@pytest.fixture
def qkv() -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    shapes = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)


def expected(qkv: tuple[Any, ...], **options: Any) -> np.ndarray:
    return attend(*(torch.from_numpy(np.array(x)) for x in qkv), **options).numpy()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_numpy_in_numpy_out(dtype: Any, qkv: tuple[Any, ...]):
    arrays = tuple(x.astype(dtype) for x in qkv)
    out = attend(*arrays, mask=Causal())
    assert type(out) is np.ndarray
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, expected(arrays, mask=Causal()))


def test_any_strides_byte_orders_and_read_only_memory(qkv: tuple[Any, ...]):
    wanted = expected(qkv)
    q, k, v = qkv
    transposed = q.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)
    for x in (transposed, q.astype(">f4"), q[:, :, ::-1].copy()[:, :, ::-1], np.frombuffer(q.tobytes(), "f4")):
        np.testing.assert_array_equal(attend(x.reshape(q.shape), k, v), wanted)
    for x in qkv:
        x.flags.writeable = False
    np.testing.assert_array_equal(attend(*qkv), wanted)


def test_sinks_and_offsets_may_be_arrays(qkv: tuple[Any, ...]):
    sink, first = np.ones(4, np.float32), np.array([1, 2])
    out = attend(*qkv, mask=Causal(), sink=sink, offset=first)
    wanted = expected(qkv, mask=Causal(), sink=torch.from_numpy(sink), offset=torch.from_numpy(first))
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(attend(*qkv, offset=np.int64(2)), expected(qkv, offset=2))


def test_numbers_may_be_arrays_without_axes(qkv: tuple[Any, ...]):
    wanted = expected(qkv, scale=0.5, softcap=2.0)
    np.testing.assert_array_equal(attend(*qkv, scale=np.float32(0.5), softcap=np.array(2.0)), wanted)
    with pytest.raises(ProblemError, match="scale is array"):
        attend(*qkv, scale=np.array([0.5]))


def test_arrays_without_elements(qkv: tuple[Any, ...]):
    q, k, v = qkv
    assert attend(q[:, :, :0], k, v).shape == (2, 4, 0, 8)
    assert attend(q[:0], k[:0], v[:0]).shape == (0, 4, 5, 8)
    np.testing.assert_array_equal(attend(q, k[:, :, :0], v[:, :, :0]), np.zeros_like(q))


def test_bfloat16_of_ml_dtypes(qkv: tuple[Any, ...]):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="the package ml_dtypes is missing: pip install regard[jax]")
    arrays = tuple(x.astype(ml_dtypes.bfloat16) for x in qkv)
    out = attend(*arrays, mask=TensorMask(torch.rand(5, 7) > 0.3) & Causal())
    assert out.dtype == ml_dtypes.bfloat16
    plain: Any = attend(*arrays)
    wanted = attend(*(torch.from_numpy(x.astype(np.float32)).bfloat16() for x in arrays))
    np.testing.assert_array_equal(plain.astype(np.float32), wanted.float().numpy())


def test_an_object_with_an_array_gives_one_of_numpy(qkv: tuple[Any, ...]):
    class Table:
        def __init__(self, array: np.ndarray):
            self.array = array

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return self.array

    out: Any = attend(*map(Table, qkv))
    assert type(out) is np.ndarray


def test_elements_and_mixtures_that_make_no_sense_are_refused(qkv: tuple[Any, ...]):
    q, k, v = qkv
    with pytest.raises(ProblemError, match=r"q is torch\.int64: expected float64"):
        attend(q.astype(np.int64), k, v)
    with pytest.raises(ProblemError, match=r"q is ndarray: torch cannot read it .* dtype is object"):
        attend(q.astype(object), k, v)
    with pytest.raises(ProblemError, match="k is ndarray: expected a tensor"):
        attend(torch.from_numpy(q), k, v)
    with pytest.raises(ProblemError, match="q is ndarray: expected a tensor, as v is, or arrays for all"):
        attend(q, k, torch.from_numpy(v))


class TestJax:
    """Skipped where jax is missing."""

    @pytest.fixture
    def jax(self) -> Any:
        return pytest.importorskip("jax", reason="the package jax is missing: pip install regard[jax]")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_jax_in_jax_out(self, dtype: str, jax: Any, qkv: tuple[Any, ...]):
        arrays = tuple(jax.numpy.asarray(x, dtype) for x in qkv)
        out = attend(*arrays, mask=Causal())
        assert isinstance(out, jax.Array)
        assert out.dtype == dtype
        wanted = jax.nn.dot_product_attention(
            *(x.transpose(0, 2, 1, 3).astype("float32") for x in arrays),
            mask=jax.numpy.tril(jax.numpy.ones((5, 7), bool), 2)[None, None],
        )
        error = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
        np.testing.assert_allclose(
            np.asarray(out, "float32"), np.asarray(wanted.transpose(0, 2, 1, 3)), atol=error, rtol=error
        )

    def test_memory_is_shared(self, jax: Any, qkv: tuple[Any, ...]):
        from regard.arrays import as_array_like, as_tensor

        array = jax.numpy.asarray(qkv[0])
        tensor = as_tensor("q", array)
        assert tensor.data_ptr() == array.unsafe_buffer_pointer()
        assert as_array_like(array, tensor).unsafe_buffer_pointer() == tensor.data_ptr()

    def test_inside_jit_it_is_a_callback(self, jax: Any, qkv: tuple[Any, ...]):
        arrays = tuple(map(jax.numpy.asarray, qkv))
        with pytest.raises(ProblemError, match=r"jax is tracing.* jax\.pure_callback"):
            jax.jit(attend)(*arrays)

        @jax.jit
        def double(q: Any, k: Any, v: Any) -> Any:
            return 2 * jax.pure_callback(attend, jax.ShapeDtypeStruct(q.shape, q.dtype), q, k, v)

        np.testing.assert_allclose(np.asarray(double(*arrays)), 2 * expected(qkv), rtol=1e-6)


def test_a_masked_array_is_refused():
    q = np.ones((1, 2, 3, 4), dtype=np.float32)
    with pytest.raises(ProblemError, match="k is a masked array"):
        attend(q, np.ma.masked_array(q), q)


def test_an_offset_without_elements_is_refused():
    q = torch.ones(1, 2, 3, 4)
    with pytest.raises(ProblemError, match="offset is on the meta device and q on cpu"):
        attend(q, q, q, offset=torch.zeros(1, dtype=torch.int64, device="meta"))
