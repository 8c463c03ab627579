"""A GGUF file as it is read here, beside what the package `gguf` writes and reads."""

from pathlib import Path

import numpy as np
import pytest

from regard.errors import ProblemError
from regard.integrate.gguf_file import tensors_of, values_of

gguf = pytest.importorskip("gguf")
Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """One of every kind of value, and tensors of three codes, the last with an alignment of its own."""
    made, random = gguf.GGUFWriter(tmp_path / "made.gguf", "llama"), np.random.default_rng(3)
    made.add_custom_alignment(64)
    made.add_uint32("blocks", 30)
    made.add_int8("low", -3)
    made.add_float32("eps", 1e-5)
    made.add_float64("base", 1e5)
    made.add_bool("tied", True)
    made.add_uint64("many", 2**40)
    made.add_string("template", "{% ä %}\n")
    made.add_array("words", ["", "Ġthe", "ß"])
    made.add_array("types", [1, 3, 1])
    made.add_array("scores", [0.5, -1.25])
    made.add_tensor("norm", random.normal(size=7).astype(np.float32))
    for name, code in (("q", Q8_0), ("k", Q4_1)):
        packed = gguf.quantize(random.normal(size=(3, 64)).astype(np.float32), code)
        made.add_tensor(name, packed, raw_dtype=code)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return tmp_path / "made.gguf"


def test_values_are_those_that_the_package_reads(file: Path):
    fields = gguf.GGUFReader(file).fields.items()
    theirs = {name: field.contents() for name, field in fields if not name.startswith("GGUF.")}
    ours = values_of(file)
    assert ours == theirs
    assert (ours["words"], ours["many"], ours["tied"]) == (["", "Ġthe", "ß"], 2**40, True)


def test_tensors_are_those_that_the_package_reads_bit_for_bit(file: Path):
    theirs = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(file).tensors}
    ours = {name: tensor.numbers() for name, tensor in tensors_of(file).items()}
    assert list(ours) == list(theirs) == ["norm", "q", "k"]
    for name, numbers in ours.items():
        assert (numbers.dtype, numbers.shape) == (np.float32, theirs[name].shape)
        assert np.array_equal(numbers, theirs[name])
        numbers.fill(3)  # in memory of its own: the file is as it was
    assert np.array_equal(tensors_of(file)["norm"].numbers(), theirs["norm"])


@pytest.mark.parametrize("data", [b"GGUX" + bytes(60), b"GGUF" + bytes([1]) + bytes(60), b"GGUF\0\0\0\3" + bytes(60)])
def test_what_is_no_such_file_is_refused(tmp_path: Path, data: bytes):
    (tmp_path / "x.gguf").write_bytes(data)
    for read in (values_of, tensors_of):
        with pytest.raises(ProblemError, match="is no GGUF file of version 2 or 3"):
            read(tmp_path / "x.gguf")
