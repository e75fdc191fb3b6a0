"""Checkpoints, beside the safetensors library and under transformers' own models."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

why = os.environ.get("KVHOIST_TRANSFORMERS_WHY", "python/test sees to transformers")
if os.environ.get("KVHOIST_TRANSFORMERS") != "ready":
    pytest.skip(why, allow_module_level=True)

import safetensors.torch  # noqa: E402
import sharded  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402

from kvhoist import ArgumentError, ForkError, IoError, files  # noqa: E402
from kvhoist.safetensors import checkpoint, windows  # noqa: E402
from kvhoist.safetensors import iterate, load_file, load_files, safe_open, save_file  # noqa: E402

TYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip

#: Every type of the format, with the bits of an element.
FORMAT = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


def some(seed, count=40, most=5000):
    """Tensors of every type, some empty, some of one element."""
    draw = random.Random(seed)
    found = {}
    for n in range(count):
        shape = draw.choice([(), (0,), (draw.randrange(1, most),), (3, draw.randrange(1, 500)), (2, 3, 5)])
        nbytes = torch.Size(shape).numel() * (dtype := TYPES[n % len(TYPES)]).itemsize
        raw = torch.frombuffer(bytearray(draw.randbytes(nbytes) or b"\0"), dtype=torch.uint8)[:nbytes]
        raw = raw % 2 if dtype is torch.bool else raw
        found[f"layer.{n}"] = raw.view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)
    return found


def same(one, other):
    """Bit by bit."""
    flat = [tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and (not one.numel() or torch.equal(*flat))


def same_all(found, wanted):
    return found.keys() == wanted.keys() and all(same(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("seed", range(5))
def test_files_of_the_library_are_loaded_and_its_own_are_loaded_by_it(tmp_path, seed):
    wanted = some(seed)
    safetensors.torch.save_file(wanted, tmp_path / "theirs", metadata={"format": "pt"})
    save_file(wanted, tmp_path / "ours", metadata={"format": "pt"})
    for name in ("theirs", "ours"):
        assert same_all(load_file(tmp_path / name), wanted)
        assert same_all(load_file(tmp_path / name, page_cache=False, piece_bytes=4096), wanted)
        assert same_all(safetensors.torch.load_file(tmp_path / name), wanted)
        for window in (1, 10_000, 1 << 30):
            assert same_all(dict(iterate(tmp_path / name, window_bytes=window)), wanted)
        with safe_open(tmp_path / name) as file:
            assert file.metadata() == {"format": "pt"} and set(file.keys()) == wanted.keys()
            assert same_all({key: file.get_tensor(key) for key in file.keys()}, wanted)


def test_slices_read_what_torch_would_slice(tmp_path):
    wanted = torch.arange(7 * 5 * 3).view(7, 5, 3)
    save_file({"one": wanted}, tmp_path / "file")
    part = safe_open(tmp_path / "file").get_slice("one")
    assert part.get_shape() == [7, 5, 3] and part.get_dtype() == torch.int64
    for index in [0, -1, slice(None), slice(2, 5), slice(1, 7, 3), slice(5, 2), slice(-3, None), ..., (slice(1, 4), 2),
                  (3, slice(None), 1), (slice(None), slice(1, 3)), torch.tensor([1, 4]), ()]:  # fmt: skip
        assert torch.equal(part[index], wanted[index]), index
    with pytest.raises(IndexError):
        part[7]
    for index in [True, (False, 1)]:
        with pytest.raises(ArgumentError, match="index: found"):
            part[index]


def test_a_checkpoint_is_a_folder_an_index_or_files(tmp_path):
    wanted = some(3)
    names = list(wanted)
    halves = {"model-1.safetensors": names[:20], "model-2.safetensors": names[20:]}
    for file, keys in halves.items():
        save_file({key: wanted[key] for key in keys}, tmp_path / file)
    paths = [tmp_path / file for file in halves]
    assert same_all(load_files(paths), wanted) and same_all(load_files(tmp_path), wanted)
    assert load_files([]) == {} and list(iterate([])) == []
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {key: file for file, keys in halves.items() for key in keys}}))
    save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert same_all(load_files(index), wanted) and same_all(load_files(tmp_path), wanted)
    assert same_all(dict(iterate(tmp_path, wanted=lambda name: name in names[5:30])), {n: wanted[n] for n in names[5:30]})
    maps = [{}, {"a": "../elsewhere"}, {"a": "b\0"}, {"a": "\ud800"}, {"a": 1}, ["a"]]
    texts = [json.dumps({"weight_map": one}) for one in maps]
    for text in ["", "{}", "[]", "no json", "[" * 100_000, *texts]:
        index.write_text(text)
        with pytest.raises(ArgumentError, match="index.json"):
            load_files(tmp_path)


@pytest.mark.parametrize("again", [lambda path: path, lambda path: str(path), lambda path: path.with_name("link")])
def test_a_tensor_that_two_files_have_is_an_error(tmp_path, again):
    save_file({"one": torch.arange(10)}, tmp_path / "first")
    os.link(tmp_path / "first", tmp_path / "link")
    path = str(tmp_path / "first")
    for load in (load_files, lambda paths: list(iterate(paths))):
        with pytest.raises(ArgumentError, match="tensor one in .*first and .*, expected it once"):
            load([path, again(tmp_path / "first")])
        with pytest.raises(ArgumentError, match="tensor one in .*first and .*, expected it once"):
            load([path, path])


def test_an_index_and_its_files_are_of_one_checkpoint(tmp_path):
    save_file({"a": torch.zeros(3), "b": torch.ones(3)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    loads = (load_files, lambda paths: list(iterate(paths)), lambda paths: next(iterate(paths)))
    for wrong, words in [
        ({"a": 1, "b": 1, "c": 2, "d": 2}, r"model-2.safetensors: found no tensor d, .*1 of 2 are missing"),
        ({"a": 1, "b": 2, "c": 1}, r"model-1.safetensors: found no tensor c"),  # The file of another one.
        ({"a": 1, "e": 3}, r"model-3.safetensors"),
    ]:
        names = {name: f"model-{n}.safetensors" for name, n in wrong.items()}
        index.write_text(json.dumps({"weight_map": names}))
        for load in loads:
            with pytest.raises((ArgumentError, IoError), match=words):
                load(tmp_path)
    # A file may have more than an index names, as the library's own readers take it.
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "c": "model-2.safetensors"}}))
    assert load_files(tmp_path).keys() == {"a", "b", "c"}


@pytest.mark.parametrize("code, bits", FORMAT.items())
def test_every_type_of_the_format_is_loaded_and_saved_or_refused_by_its_name(tmp_path, code, bits):
    data = random.Random(code).randbytes(bits) if code != "BOOL" else b"\0\1" * 4  # Eight elements.
    header = json.dumps({"one": {"dtype": code, "shape": [2, 4], "data_offsets": [0, len(data)]}}).encode()
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + data)
    if code.startswith("F6_"):  # torch has none.
        for load in (load_file, safe_open, lambda path: next(iterate(path))):
            with pytest.raises(ArgumentError, match=f"tensor one of type {code}, expected a type that torch .* has"):
                load(tmp_path / "file")
        return
    found = load_file(tmp_path / "file")["one"]
    assert found.contiguous().view(torch.uint8).numpy().tobytes() == data
    assert found.shape == ((2, 2) if code == "F4" else (2, 4)) and found.dtype.itemsize == max(bits // 8, 1)
    assert found.dtype == load_by_library(tmp_path / "file")["one"].dtype
    save_file({"one": found}, tmp_path / "again")
    assert (tmp_path / "again").read_bytes()[-len(data) :] == data
    with safe_open(tmp_path / "again") as again:
        assert same(again.get_tensor("one"), found)
    head = json.loads((tmp_path / "again").read_bytes()[8 : -len(data)])
    assert head == {"one": {"dtype": code, "shape": [2, 4], "data_offsets": [0, len(data)]}}


def load_by_library(path):
    return safetensors.torch.load_file(path)


def test_an_index_that_is_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(ArgumentError, match="found a pipe"):
        load_files(tmp_path)


def test_half_bytes_that_end_in_the_middle_of_one_are_refused(tmp_path):
    header = json.dumps({"half": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + b"123")
    with pytest.raises(ArgumentError, match="half of type F4"):
        load_file(tmp_path / "file")


def test_a_damaged_or_growing_file_gives_no_tensor(tmp_path):
    save_file({"one": torch.arange(1000)}, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    damaged = tmp_path / "damaged"
    for content in [b"", whole[:5], whole[:200], whole[:-1], whole + b"\0", b"\xff" * 100, b"PK\x03\x04" + whole[4:]]:
        damaged.write_bytes(content)
        for load in (load_file, safe_open, lambda path: next(iterate(path))):
            with pytest.raises(ArgumentError, match=r"damaged: found"):
                load(damaged)
    save_file({"one": torch.arange(1000)}, damaged)
    file = safe_open(damaged)
    damaged.write_bytes(whole + b"\0")
    with pytest.raises(IoError, match="changed"):
        file.get_tensor("one")
    with pytest.raises(KeyError, match="no tensor 'two'"):
        file.get_tensor("two")


def test_what_cannot_be_written_is_refused_and_leaves_no_file(tmp_path):
    shared = torch.zeros(4, 4)
    for tensors, words in [
        ({"a": shared, "b": shared}, "same memory"),
        ({"__metadata__": shared}, "another name"),
        ({"a\ud800": shared}, "UTF-8"),
        ({"a": shared, "b": shared[1:]}, "same memory"),
        ({"a": shared.t()[1:]}, "contiguous"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "complex128"),
        ({"a": torch.zeros(2, dtype=torch.complex64).conj()}, r"a: found .* conjugated .*resolve_conj\(\) first"),
        ({"a": torch._neg_view(shared)}, r"a: found .* negated .*resolve_neg\(\) first"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            save_file(tensors, tmp_path / "file")
    for value in [1, "\udc00"]:
        with pytest.raises(ArgumentError, match="metadata"):
            save_file({"a": shared}, tmp_path / "file", metadata={"step": value})
    assert not list(tmp_path.iterdir())
    save_file({"a": shared}, tmp_path / "file")
    with pytest.raises(ArgumentError, match="expected it once"):
        load_files([tmp_path / "file", tmp_path / "file"])
    with pytest.raises(ArgumentError, match="device"):
        load_file(tmp_path / "file", "meta")


def test_tensors_that_are_conjugated_or_negated_when_they_are_read_are_neither_written_nor_filled(tmp_path):
    values = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    files.write(tmp_path / "file", [values])
    # The imaginary part of a conjugate is negated; of one element it is contiguous.
    for lazy, words in [(values.conj(), r"resolve_conj\(\)"), (values[:1].conj().imag, r"resolve_neg\(\)")]:
        assert lazy.is_contiguous()
        with pytest.raises(ArgumentError, match=f"memory: found a tensor .* expected .*; {words} first"):
            files.write(tmp_path / "other", [lazy])
        with pytest.raises(ArgumentError, match=words):
            files.open(tmp_path / "file").read_into(lazy)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    save_file({"values": values.conj().resolve_conj()}, tmp_path / "file")
    assert torch.equal(load_file(tmp_path / "file")["values"], values.conj())


class Wrapper(torch.Tensor):
    """A tensor whose values are those of another, as a DTensor's."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, call, types, args=(), kwargs=None):
        return call(*[one.inner if isinstance(one, Wrapper) else one for one in args], **(kwargs or {}))


def freed():
    tensor = torch.ones(100_000)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda: Wrapper(torch.arange(100_000)), freed, lambda: torch.eye(4).to_sparse(),
        lambda: torch._efficientzerotensor((1000,)),
        lambda: torch.nested.nested_tensor([torch.arange(3.0), torch.arange(5.0)]),
    ],
    ids=["wrapper", "freed", "sparse", "zero", "nested"],
)  # fmt: skip
def test_tensors_without_memory_of_their_own_are_neither_written_nor_filled(tmp_path, make):
    (tmp_path / "file").write_bytes(bytes(800_000))
    tensor = make()
    with pytest.raises(ArgumentError, match="one.weight: found .* expected"):
        save_file({"one.weight": tensor}, tmp_path / "other")
    with pytest.raises(ArgumentError, match="memory: found .* expected"):
        files.write(tmp_path / "other", [tensor])
    with pytest.raises(ArgumentError, match="memory: found .* expected"):
        files.open(tmp_path / "file").read_into(tensor)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_tensors_that_their_file_does_not_align_are_copied(tmp_path):
    """Other writers put a wide type behind a narrow one, and give the header any length."""
    header, content, wanted, at = {}, b"", {}, 0
    shapes = [("a", "U8", (3,)), ("b", "F32", (2, 2)), ("c", "F32", (5,)), ("d", "I64", ()), ("e", "BF16", (7,)), ("f", "F32", (0,))]
    for name, dtype, shape in shapes:
        known = {"U8": torch.uint8, "F32": torch.float32, "I64": torch.int64, "BF16": torch.bfloat16}[dtype]
        wanted[name] = (torch.arange(torch.Size(shape).numel()) + len(content)).to(known).view(shape)
        content += wanted[name].view(-1).view(torch.uint8).numpy().tobytes() if wanted[name].numel() else b""
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, len(content)]}
        at = len(content)
    for padding in range(9):
        text = json.dumps(header).encode() + b" " * padding
        (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + content)
        assert same_all(load_file(tmp_path / "file"), wanted)
        for window in (1, 30, 1 << 20):
            assert same_all(dict(iterate(tmp_path / "file", window_bytes=window)), wanted)


def test_a_load_of_many_tensors_searches_for_no_garbage(tmp_path):
    for n in range(2):
        save_file({f"{n}.{i}": torch.full((2, 2), i) for i in range(5000)}, tmp_path / f"{n}.safetensors")
    counted = []
    gc.callbacks.append(lambda phase, _: counted.append(phase))
    try:
        assert len(load_files(tmp_path)) == 10_000
        during_load = len(counted)
        assert len(dict(iterate(tmp_path))) == 10_000
        # One for each 700 new objects, as a rule.
        assert during_load < 10 < len(counted)
        (tmp_path / "1.safetensors").write_bytes(b"no header")
        for load in (load_files, lambda path: next(iterate(path))):
            with pytest.raises(ArgumentError):
                load(tmp_path)
            assert gc.isenabled()
    finally:
        gc.callbacks.pop()
    gc.disable()
    try:
        load_file(tmp_path / "0.safetensors")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_memory_of_other_packages_is_taken_by_dlpack(tmp_path):
    class Other:
        """An array without a buffer, as those of other packages."""

        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **more):
            return self.tensor.__dlpack__(**more)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    files.write(tmp_path / "file", [Other(torch.arange(10, dtype=torch.int16)), b"end"])
    assert (tmp_path / "file").read_bytes() == torch.arange(10, dtype=torch.int16).numpy().tobytes() + b"end"
    target = torch.zeros(5, dtype=torch.int16)
    files.open(tmp_path / "file").read_into(Other(target), 2)
    assert target.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(ArgumentError, match="strides"):
        files.open(tmp_path / "file").read_into(Other(torch.zeros(4, 2).t()), 2)
    # A buffer that is read-only stays so.
    frozen = target.numpy()
    frozen.flags.writeable = False
    with pytest.raises(ArgumentError, match="writable"):
        files.open(tmp_path / "file").read_into(frozen, 0)
    assert target.tolist() == [1, 2, 3, 4, 5]


class OnDevice:
    """An array with `__cuda_array_interface__`, version 3: a stream of its producer's still writes to it."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape), "typestr": "<i2", "data": (tensor.data_ptr(), False), "version": 3, "stream": 7,
        }  # fmt: skip


def test_an_array_s_own_stream_is_waited_for(monkeypatch):
    """Host memory plays that of a device."""
    tensor, waited = torch.zeros(5, dtype=torch.int16), []
    array = OnDevice(tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    owners = {tensor.data_ptr(): 1}

    def attribute(ordinal, which, address):
        if which != 9 or address.value not in owners:
            return 1
        ordinal._obj.value = owners[address.value]
        return 0

    # The driver knows whose memory it is. A view by torch would make a context on each device that it is tried on.
    monkeypatch.setattr(files.ctypes, "CDLL", lambda name: SimpleNamespace(cuPointerGetAttribute=attribute))
    monkeypatch.setattr(torch, "as_tensor", lambda _, device: pytest.fail(f"a context on {device}"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    place = files.place_of(array, writable=True)
    assert (place.address, place.nbytes, place.device, waited) == (tensor.data_ptr(), 10, 1, [1])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    owners[tensor.data_ptr()] = -2
    assert files.place_of(array, writable=True).device == waited.pop() == 2
    del owners[tensor.data_ptr()]
    with pytest.raises(ArgumentError, match=r"the driver: 1\), expected one of a CUDA device"):
        files.place_of(array, writable=True)
    # By DLPack the producer does it.
    asked = []
    array.__class__ = type("Both", (OnDevice,), {"__dlpack__": lambda self, **more: asked.append(more) or tensor.__dlpack__()})
    monkeypatch.setattr(array.__class__, "__dlpack_device__", lambda self: tensor.__dlpack_device__(), raising=False)
    place = files.place_of(array, writable=True)
    assert asked and (place.address, place.nbytes, waited) == (tensor.data_ptr(), 10, [1])
    array.__cuda_array_interface__["data"] = tensor.data_ptr(), True
    with pytest.raises(ArgumentError, match="read-only"):
        files.place_of(array, writable=True)


def test_a_window_is_freed_with_its_tensors(tmp_path):
    save_file({f"t{n}": torch.full((1000,), n) for n in range(20)}, tmp_path / "file")
    found = iterate(tmp_path / "file", window_bytes=16_000)
    first = [next(found) for _ in range(2)]
    assert first[0][1].untyped_storage().data_ptr() == first[1][1].untyped_storage().data_ptr()
    rest = dict(found)
    assert same_all(dict(first) | rest, {f"t{n}": torch.full((1000,), n) for n in range(20)})
    ended = iterate(tmp_path / "file", window_bytes=16_000)
    next(ended)
    ended.close()


def test_files_on_several_drives_take_turns(tmp_path, monkeypatch):
    wanted = {}
    for n in range(3):
        part = {f"file{n}.t{i}": torch.full((1000,), 10 * n + i) for i in range(5)}
        save_file(part, tmp_path / f"model-{n}.safetensors")
        wanted.update(part)
    monkeypatch.setattr("kvhoist.safetensors.checkpoint._drive_of", lambda path: int("-2." in path))
    found = list(iterate(tmp_path, window_bytes=8000))
    assert same_all(dict(found), wanted)
    # Two files on one drive, one on the other, in windows of a tensor.
    assert [name for name, _ in found][:6] == [f"file{n}.t{i}" for i in range(3) for n in (0, 2)]


def test_a_block_device_is_a_drive_of_its_own(tmp_path):
    assert checkpoint._drive_of(tmp_path) == tmp_path.stat().st_dev
    devices = [path for path in Path("/dev").iterdir() if path.is_block_device()]
    if not devices:
        pytest.skip("no block device")
    assert [checkpoint._drive_of(path) for path in devices] == [path.stat().st_rdev for path in devices]


def test_the_first_tensor_waits_for_few_others_and_each_drive_is_read_soon(tmp_path, monkeypatch):
    for n in range(6):
        save_file({f"{n}.{i}": torch.full((2, 2), i) for i in range(500)}, tmp_path / f"{n}.safetensors")
    monkeypatch.setattr("kvhoist.safetensors.checkpoint._drive_of", lambda path: int(os.path.basename(path)[0]))
    made, started = [], []
    monkeypatch.setattr(windows, "views", lambda *given, do=windows.views: (made.append(one) or one for one in do(*given)))
    monkeypatch.setattr(windows, "_start", lambda *given, do=windows._start: started.append(given[0]) or do(*given))
    found = iterate(tmp_path)
    first = next(found)
    assert len(made) <= 64, "of 3000 tensors"
    some = [next(found) for _ in range(5)]
    assert len({one.file.path for one in started}) == 6, "one window is started with each tensor that came"
    assert len(dict([first, *some, *found])) == len(made) == 3000


def test_a_drive_has_two_windows_under_way(tmp_path, monkeypatch):
    wanted = {f"t{n}": torch.full((1000,), n) for n in range(12)}
    save_file(wanted, tmp_path / "file")
    started, most = [], 0
    monkeypatch.setattr(windows, "_start", lambda *given, do=windows._start: started.append(0) or do(*given))
    for number, _ in enumerate(iterate(tmp_path / "file", window_bytes=8000)):
        assert number < len(started) <= number + 2
        most = max(most, len(started) - number)
    assert (len(started), most) == (12, 2)


def test_neighbors_of_one_size_are_made_together(tmp_path):
    # A shape and its transpose, then five shapes of one size, then other sizes, a scalar and nothing.
    shapes = [(6, 4), (4, 6), (4, 6)] * 5 + [(24,), (2, 12), (12, 2), (3, 8), (1, 24)] + [(5,), (), (0, 3), (2, 0), (7,)]
    wanted = {f"t{n:02}": torch.arange(1000 * n, 1000 * n + math.prod(shape)).view(shape) for n, shape in enumerate(shapes)}
    save_file(wanted, tmp_path / "file")
    assert same_all(load_files(tmp_path / "file"), wanted)
    assert same_all(dict(iterate(tmp_path / "file")), wanted)
    assert same_all(dict(iterate(tmp_path / "file", window_bytes=500)), wanted)


def test_tensors_are_right_in_whatever_order_they_arrive(tmp_path):
    wanted = some(3, count=300, most=50)
    save_file(wanted, tmp_path / "file")
    one = checkpoint.Checkpoint(tmp_path / "file")
    window = windows._start(one, one.file, one.entries, torch.device("cpu"), {})
    window.transfer.wait()
    numbers = random.Random(3).sample(range(len(one.entries)), len(one.entries))
    assert same_all({one.entries[number].name: window.take(number) for number in numbers}, wanted)
    assert not window.made, "the consumer alone keeps them"


@contextlib.contextmanager
def ranks_of(world, do, *arguments):
    """Ranks in processes of their own, and what they answer."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=do, args=(n, world, arguments[0], answers, *arguments[1:])) for n in range(world)]
    for rank in ranks:
        rank.start()
    try:
        yield answers
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


@pytest.mark.parametrize(("world", "seems_nccl"), [(2, True), (4, False)])
def test_ranks_read_a_part_each_and_get_all(tmp_path, world, seems_nccl):
    wanted = {}
    for n in range(2):
        tensors = {f"f{n}.t{i}": torch.arange(i * 30_000, dtype=torch.int32) + n for i in range(20)}
        tensors[f"f{n}.last"] = torch.arange(1001).to(torch.uint8)
        save_file(tensors, tmp_path / f"{n}.safetensors")
        wanted.update((name, tensor.numpy().tobytes()) for name, tensor in tensors.items())
    with ranks_of(world, sharded.load_part, os.fspath(tmp_path), seems_nccl) as answers:
        found = [answers.get(timeout=240) for _ in range(world)]
    assert sorted(rank for rank, *_ in found) == list(range(world))
    assert all(tensors == wanted for _, tensors, _ in found)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert 0.99 < sum(read for *_, read in found) / size < 1.02
    with pytest.raises(ArgumentError, match="shard"):
        load_files(tmp_path, shard=(3, 3))


@pytest.mark.parametrize(("step", "seems_nccl"), [("_read_part", True), ("share", False)])
def test_a_rank_that_dies_is_an_error_of_the_others_at_once(tmp_path, step, seems_nccl):
    save_file({"one": torch.arange(1_000_000)}, tmp_path / "file.safetensors")
    begun = time.monotonic()
    with ranks_of(2, sharded.die_in_one_rank, os.fspath(tmp_path), seems_nccl, step) as answers:
        rank, error = answers.get(timeout=180)
    # Not after the 200 s of their group.
    assert time.monotonic() - begun < 190
    assert rank == 0 and error.startswith("IoError: rank 0 of 2: another rank has ended"), error


def test_a_rank_that_is_interrupted_and_lives_on_is_an_error_of_the_others_at_once(tmp_path):
    save_file({"one": torch.arange(1_000_000)}, tmp_path / "file.safetensors")
    with ranks_of(2, sharded.interrupt_one_rank, os.fspath(tmp_path)) as answers:
        # Not after the 200 s of their group.
        found = dict(answers.get(timeout=180) for _ in range(2))
    (interrupted, device), others = found[1], found[0]
    assert interrupted == "KeyboardInterrupt: by hand" and device.startswith("ArgumentError: device: found 'meta'")
    assert others == [f"IoError: rank 1 of 2 has not read its part: {problem}" for problem in (interrupted, device)]


def test_a_rank_that_fails_is_an_error_of_all_that_names_it(tmp_path):
    save_file({"one": torch.arange(100_000)}, tmp_path / "file")
    save_file({"one": torch.arange(100_001)}, tmp_path / "other")
    (tmp_path / "later").mkdir()
    save_file({"one": torch.arange(100_000) + 1}, tmp_path / "later" / "file")
    (tmp_path / "damaged").write_bytes((tmp_path / "file").read_bytes()[:-1])
    with ranks_of(3, sharded.fail_in_one_rank, os.fspath(tmp_path)) as answers:
        found = dict(answers.get(timeout=120) for _ in range(3))
    for rank, (damaged, others, versions, numbers) in found.items():
        cut = "ArgumentError: " + os.fspath(tmp_path / "damaged") + ": found"
        wanted = cut if rank == 1 else "IoError: rank 1 of 3 has not read its part: " + cut
        assert damaged.startswith(wanted), damaged
        expected = "in rank 2 of 3 than in rank 0, expected the same in all"
        assert others == versions == f"ArgumentError: found other files, or versions of them, {expected}"
        assert numbers.startswith("IoError: rank 1 of 3" if rank == 0 else f"ArgumentError: shard: found (0, 3) in rank {rank}")


def test_a_forked_child_that_goes_on_with_its_parents_tensors_gets_an_error(tmp_path):
    save_file({f"t{n}": torch.zeros(1000) for n in range(20)}, tmp_path / "file")
    found = iterate(tmp_path / "file", window_bytes=8000)
    next(found)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            list(found)
        except ForkError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(found)) == 19


def test_a_model_answers_with_weights_that_were_loaded(tmp_path):
    model = tiny.model("llama")
    model.save_pretrained(tmp_path)
    other = type(model)(model.config)
    other.load_state_dict(load_files(tmp_path), strict=False)
    other.tie_weights()
    ids = tiny.prompt(40)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, other.eval()(ids).logits)
