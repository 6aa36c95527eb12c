"""Safetensors: the logical tensors as a file that other programs read, and files of others as a model.

Comes in: a model or a checkpoint; or files. Goes out: a file; or a model. The format is written and read here, so no
package is needed: eight bytes with the length of a JSON header, the header with dtype, shape and place of each tensor,
and the tensors, row-major and little-endian. One tensor at a time is in memory.
"""

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vescale_jax._sharded import Sharded
from vescale_planner import Faults

from ._dtypes import as_stored, dtype_of
from ._errors import DamagedError
from ._exchange import Names, Tensor, check_folder, chosen, fill_model, logical
from ._files import sync_folder, writing

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MOST_HEADER = 10**8


def export_safetensors(
    source: Any, path: "str | os.PathLike[str]", *, names: Any = None, metadata: dict[str, str] | None = None
) -> Path:
    """Writes all logical tensors of a model to one safetensors file; it is there whole or not at all.

    Arguments:

    - `source`: a `Sharded` model, a `TrainState`, or the path of a checkpoint, which is then read tensor by tensor. If
      a model is cut over processes, all of them have to call; process 0 writes.
    - `path`: of the new file.
    - `names`: a mapping or function from the model's paths to names in the file; None keeps the paths.
    - `metadata`: strings for the file's header.

    Returns: the path.

    Raises: `ValueError` for a path that exists, for dtypes that the format lacks and for two tensors of one name.
    """
    final, faults = Path(path).absolute(), Faults("export_safetensors")
    tensors = list(logical(source, "export_safetensors"))
    header: dict[str, Any] = {"__metadata__": {"format": "flax", **(metadata or {})}}
    end = 0
    for name, tensor in tensors:
        called = chosen(names, name)
        if tensor.dtype.name not in _CODES:
            change = "convert the model; a checkpoint keeps it as it is"
            faults.add(name, got=f"dtype {tensor.dtype.name}", want=f"one of {sorted(_CODES)}", change=change)
            continue
        if called in header:
            faults.add(name, got=f"the name {called!r} a second time", want="unique names", change="mend names")
        size = int(np.prod(tensor.shape, dtype=np.int64)) * tensor.dtype.itemsize
        header[called] = {
            "dtype": _CODES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + size],
        }
        end += size
        if tensor.key:
            header["__metadata__"][f"key:{called}"] = tensor.key
    faults.raise_if_any()
    writes = jax.process_index() == 0
    if writes:
        check_folder(final, "export_safetensors")
    text = json.dumps(header).encode()
    # Data start at a multiple of 64 bytes, so that what is mapped can be used as it is.
    text += b" " * (-(8 + len(text)) % 64)
    unfinished = final.with_name(f".partial-{final.name}")
    with writing(unfinished), open(unfinished if writes else os.devnull, "wb") as file:  # noqa: PTH123
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in tensors:
            values = tensor.read()
            if writes:
                file.write(np.ascontiguousarray(as_stored(values)).reshape(-1).view(np.uint8).data)
            del values
        file.flush()
        if writes:
            os.fsync(file.fileno())
    if writes:
        unfinished.rename(final)
        sync_folder(final.parent)
    return final


def import_safetensors(
    path: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]",
    model: Sharded,
    *,
    names: Names = None,
    ignore: Sequence[str] = (),
    cast: bool = False,
) -> Sharded:
    """A model with the values of safetensors files; each process maps the files and reads what its devices hold.

        names = {"embed/embedding": "model.embed_tokens.weight"}
        names["layers/0/query/kernel"] = vs.checkpoint.Take("model.layers.0.q_proj.weight", permute=(1, 0))
        model = vs.fully_shard(build, mesh, abstract=True)
        model = vs.checkpoint.import_safetensors("model.safetensors", model, names=names)

    Arguments:

    - `path`: a file, several, or a folder of `*.safetensors`.
    - `model`: what `fully_shard` returned; abstract, or one whose values are replaced.
    - `names`: from paths of the model to tensors of the file; see `Names`.
    - `ignore`: patterns of tensors in the file that may go unused.
    - `cast`: whether floating dtypes are converted to those of the model.

    Returns: the model. What is no parameter keeps the model's values where the file has none.

    Raises: `ValueError` that lists every tensor which is missing, unused, or of another shape or dtype; `DamagedError`
    for a file that is cut short.
    """
    tensors: dict[str, Tensor] = {}
    for file in _files(path):
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise ValueError(f"import_safetensors: {file}: got {name!r} in two files; want it in one; pass fewer")
            tensors[name] = tensor
    return fill_model(model, tensors, names, ignore, cast, "import_safetensors")


def _files(path: Any) -> list[Path]:
    if isinstance(path, str | os.PathLike):
        folder = Path(path)
        found = sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]
    else:
        found = [Path(file) for file in path]
    if not found or not all(file.is_file() for file in found):
        raise ValueError(
            f"import_safetensors: {path}: got no such file; want a file, several, or a folder of *.safetensors; check "
            "the path"
        )
    return found


@dataclass(frozen=True, slots=True)
class Mapped:
    """A tensor in a safetensors file.

    Attributes:

    - `path`, `start`: the file, and the first byte.
    - `shape`, `dtype`: of the tensor.
    """

    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self) -> np.ndarray:
        """The values, mapped: bytes are read when they are used."""
        if not np.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        size = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        raw = np.memmap(self.path, np.uint8, "r", self.start, (size,))
        return np.asarray(raw).view(self.dtype).reshape(self.shape)


def read_header(path: Path) -> dict[str, Mapped]:
    """The tensors of a safetensors file, by name; their values are not read.

    Raises: `DamagedError` for what is no such file or cut short, `ValueError` for a dtype that NumPy cannot hold.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 <= length <= min(size - 8, _MOST_HEADER):
            raise DamagedError.file(path, f"{size} bytes without a header", "a safetensors file")
        try:
            header = json.loads(file.read(length))
            found = {name: _mapped(path, 8 + length, item) for name, item in header.items() if name != "__metadata__"}
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, TypeError, KeyError) as error:
            raise DamagedError.file(path, f"a header that cannot be read ({error!r})", "a safetensors file") from error
    end = max((item["data_offsets"][1] for name, item in header.items() if name != "__metadata__"), default=0)
    if 8 + length + end != size:
        raise DamagedError.file(path, f"{size} bytes", f"{8 + length + end}, as its header says")
    return found


def _mapped(path: Path, data: int, item: dict[str, Any]) -> Mapped:
    if item["dtype"] not in _DTYPES:
        raise ValueError(
            f"import_safetensors: {path}: got dtype {item['dtype']}; want one of {sorted(_DTYPES)}; convert the file"
        )
    dtype, shape = dtype_of(_DTYPES[item["dtype"]]), tuple(item["shape"])
    start, stop = item["data_offsets"]
    wanted = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if stop - start != wanted:
        raise DamagedError.file(path, f"{stop - start} bytes for a tensor of shape {shape}", f"{wanted}")
    return Mapped(path, data + start, shape, dtype)
