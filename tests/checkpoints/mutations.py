"""Everything that may go wrong in a checkpoint's folder, made systematically out of a good one.

Each mutation says what kind it is, what it spoils and which words a refusal may name it by. Which of them change nothing is not known here.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.places import Place, replaced

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DIGIT = "0123456789"


@dataclass(frozen=True)
class Mutation:
    """``subject``: a field's path, a tensor or a file. ``culprits``: a refusal names one of these at least."""

    kind: str
    subject: str
    apply: Callable[[Path], object]
    culprits: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.subject}: {self.kind}"


# Fields.


def field_mutations(folder: Path) -> Iterator[Mutation]:
    """Each place of config.json that holds a value, with everything that does not belong there."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    for path, value in _places(config):
        for kind, other in _other_values(value):
            yield _field(config, path, kind, other)


def _places(values: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    for name, value in values.items() if isinstance(values, dict) else ():
        if value is not None:
            yield (*path, name), value
            yield from _places(value, (*path, name))


def _other_values(value: Any) -> Iterator[tuple[str, Any]]:
    yield from (("dropped", ...), ("null", None), ("list", [value]), ("object", {"value": value}))
    if isinstance(value, bool):
        yield from (("flipped", not value), ("text", str(value).lower()), ("number", int(value)))
    elif isinstance(value, int | float):
        yield from (("plus one", value + 1), ("minus one", value - 1), ("half more", value + 0.5), ("negative", -value - 1))
        yield from (("flag", True), ("text", str(value)), ("huge", 10**30), ("not finite", float("nan")))
    elif isinstance(value, str):
        yield from (("misspelt", value + "x"), ("line break", value + "\n\x1b[31m"), ("empty", ""), ("number", 3), ("flag", True))
    elif isinstance(value, list):
        yield from (
            ("longer", [*value, *value[-1:]]),
            ("shorter", value[:-1]),
            ("empty", []),
            ("bad item", [*value[:-1], {}]),
            ("number", 3),
        )
    else:
        yield from (("empty", {}), ("text", "{}"), ("number", 3), ("flag", True), ("strange field", {**value, "strange": [1]}))


def _field(config: dict[str, Any], path: Place, kind: str, value: Any) -> Mutation:
    def apply(folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps(replaced(config, path, value)), encoding="utf-8")

    value_of_name = config[path[0]] if len(path) == 1 else None
    inner = tuple(value_of_name) if isinstance(value_of_name, dict) else ()
    # A size that is off contradicts the tensors, or the other checkpoint of the pair.
    words = (str(path[-1]), str(path[-1]).replace("_", " ").removesuffix("s"), "tensor '", "tensors '")
    paired = {"num_target_layers": "number of target layers", "vocab_size": "vocabulary size", "rope_type": "rope type"}
    return Mutation(kind, ".".join(map(str, path)), apply, (*words, *inner, "strange", paired.get(str(path[-1]), "tensor '")))


# Tensors.

TENSOR_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one row more": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "one row less": lambda tensor: tensor[:-1],
    "one column more": lambda tensor: torch.cat([tensor, tensor[..., :1]], dim=-1),
    "one column less": lambda tensor: tensor[..., :-1],
    "transposed": lambda tensor: tensor.T if tensor.dim() == 2 else tensor.flip(0)[None],
    "one axis more": lambda tensor: tensor[None],
    "flat": lambda tensor: tensor.reshape(-1) if tensor.dim() > 1 else tensor[0],
    "no rows": lambda tensor: tensor[:0],
    "int8": lambda tensor: tensor.to(torch.int8),
    "int64": lambda tensor: tensor.to(torch.int64),
    "float64": lambda tensor: tensor.double(),
    "float8": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "bool": lambda tensor: tensor > 0,
}
VALUES = {"a NaN": float("nan"), "an infinity": float("inf"), "a negative infinity": float("-inf")}


def tensor_mutations(folder: Path, seed: int) -> Iterator[Mutation]:
    """Each kind of tensor once, in a layer that ``seed`` draws.

    Only the numbers tell whether a square matrix was transposed, or two tensors of one shape swapped: no such mutation is made.
    """
    generator = random.Random(seed)
    held = load_file(folder / WEIGHTS)
    by_role: dict[str, list[str]] = {}
    for name in sorted(held):
        by_role.setdefault(name.translate(dict.fromkeys(map(ord, DIGIT))), []).append(name)
    for names in by_role.values():
        name = generator.choice(names)
        for kind, change in TENSOR_CHANGES.items():
            if kind == "transposed" and change(held[name]).shape == held[name].shape:
                continue
            yield _tensors(kind, name, lambda tensors, name=name, change=change: {**tensors, name: change(tensors[name])})
        yield _tensors("dropped", name, lambda tensors, name=name: _without(tensors, name))
        for kind, other in (("renamed", name + "_"), ("prefixed", "module." + name), ("line break", name + "\n")):
            renamed = lambda tensors, name=name, other=other: {**_without(tensors, name), other: tensors[name]}  # noqa: E731
            yield _tensors(kind, name, renamed)
        yield _tensors("doubled", name, lambda tensors, name=name: {**tensors, name + ".1": tensors[name].clone()})
        others = [other for other in sorted(held) if held[other].shape != held[name].shape]
        other = generator.choice(others)
        swap = lambda tensors, name=name, other=other: {**tensors, name: tensors[other], other: tensors[name]}  # noqa: E731
        yield _tensors("swapped", name, swap, other)
        for kind, value in VALUES.items():
            index = generator.randrange(held[name].numel())
            spoil = lambda tensors, name=name, index=index, value=value: {**tensors, name: _with(tensors[name], index, value)}  # noqa: E731
            yield _tensors(kind, name, spoil)


def _without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}


def _with(tensor: Tensor, index: int, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[index] = value
    return tensor


def _tensors(kind: str, name: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], *others: str) -> Mutation:
    def apply(folder: Path) -> None:
        held = change(load_file(folder / WEIGHTS))
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / WEIGHTS)

    return Mutation(kind, name, apply, (name, *others))


# Files.


def file_mutations(folder: Path, seed: int) -> Iterator[Mutation]:
    """Damage to the bytes of config.json and of the weights, whatever is in them."""
    generator = random.Random(seed)
    config, weights = (folder / CONFIG).read_bytes().strip(), (folder / WEIGHTS).read_bytes()
    for name, content in ((CONFIG, config), (WEIGHTS, weights)):
        yield Mutation("missing", name, lambda folder, name=name: (folder / name).unlink(), (name,))
        yield Mutation("a folder", name, lambda folder, name=name: _as_folder(folder / name), (name,))
        yield Mutation("a link to itself", name, lambda folder, name=name: _as_loop(folder / name), (name,))
        yield _bytes("empty", name, b"")
        yield _bytes("one byte", name, content[:1])
        yield _bytes("zeros", name, bytes(len(content)))
        yield _bytes("one byte less", name, content[:-1])
        for count in range(4):
            yield _bytes(f"cut {count}", name, content[: generator.randrange(2, len(content) - 1)])
        yield _bytes("random", name, generator.randbytes(len(content)))
        yield _bytes("twice", name, content * 2)
    text = config.decode()
    for kind, damaged in (
        ("UTF-16", text.encode("utf-16")),
        ("byte order mark", b"\xef\xbb\xbf" + config),
        ("Latin-1", text.replace("{", '{"name": "caf\xe9",', 1).encode("latin-1")),
        ("a list", b"[" + config + b"]"),
        ("a number", b"1e3"),
        ("single quotes", text.replace('"', "'").encode()),
        ("comment", b"// mine\n" + config),
        ("trailing comma", text.rstrip()[:-1].encode() + b",}"),
        ("deep", b'{"a":' * 20_000 + config + b"}" * 20_000),
        ("deep list", b"[" * 100_000 + b"]" * 100_000),
        ("endless number", text.replace("{", '{"hidden_size": ' + "9" * 10_000 + ", ", 1).encode()),
        ("infinite number", _repeated(text, "hidden_size", "1e999")),
        ("surrogate", _repeated(text, "model_type", '"\\ud800"')),
        ("duplicate key", _repeated(text, "hidden_size", "41")),
        ("duplicate key of another type", _repeated(text, "vocab_size", "null")),
    ):
        yield _bytes(kind, CONFIG, damaged, "hidden_size", "model_type", "vocab_size")
    yield from _header_mutations(weights)


def _repeated(text: str, name: str, value: str) -> bytes:
    """A key once more at the end, where it counts."""
    return (text.rstrip()[:-1] + f', "{name}": {value}}}').encode()


def _bytes(kind: str, name: str, content: bytes, *culprits: str) -> Mutation:
    return Mutation(kind, name, lambda folder: (folder / name).write_bytes(content), (name, *culprits))


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _as_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _header_mutations(weights: bytes) -> Iterator[Mutation]:
    """Headers of safetensors that contradict themselves or the data."""
    length = struct.unpack("<Q", weights[:8])[0]
    header, data = json.loads(weights[8 : 8 + length]), weights[8 + length :]
    name, other = [name for name in header if name != "__metadata__"][:2]
    begin, end = header[name]["data_offsets"]
    rows, *columns = header[name]["shape"]
    for kind, entry in {
        "offsets beyond the file": {"data_offsets": [begin, end + len(data)]},
        "offsets backwards": {"data_offsets": [end, begin]},
        "offsets of another": {"data_offsets": header[other]["data_offsets"]},
        "negative offset": {"data_offsets": [-1, end]},
        "shape larger than its data": {"shape": [rows + 1, *columns]},
        "negative shape": {"shape": [-rows, *columns]},
        "shape that overflows": {"shape": [2**62, 2**62]},
        "shape of text": {"shape": "all"},
        "no shape": {"shape": None},
        "dtype of another width": {"dtype": "F16"},
        "unknown dtype": {"dtype": "F31"},
        "no dtype": {"dtype": None},
    }.items():
        yield _bytes(kind, WEIGHTS, _safetensors({**header, name: header[name] | entry}, data), name)
    yield _bytes("entry that is a list", WEIGHTS, _safetensors({**header, name: [1]}, data))
    yield _bytes("header that is a list", WEIGHTS, _safetensors([header], data))
    yield _bytes("no tensors", WEIGHTS, _safetensors({}, b""), "tensor")
    for kind, claimed in (
        ("header length 0", 0),
        ("header one shorter", length - 1),
        ("header of terabytes", 2**40),
        ("header length -1", 2**64 - 1),
    ):
        yield _bytes(kind, WEIGHTS, struct.pack("<Q", claimed) + weights[8:])
    doubled = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[other])}}}"
    yield _bytes("duplicate tensor", WEIGHTS, struct.pack("<Q", len(doubled)) + doubled.encode() + data)


def _safetensors(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


# Shards.


def shard_mutations(folder: Path, seed: int) -> Iterator[Mutation]:
    """Shards and the index of a folder that has them."""
    generator = random.Random(seed)
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    for shard in shards:
        content = (folder / shard).read_bytes()
        yield Mutation("missing", shard, lambda folder, shard=shard: (folder / shard).unlink(), (shard,))
        yield Mutation("a folder", shard, lambda folder, shard=shard: _as_folder(folder / shard), (shard,))
        yield _bytes("cut", shard, content[: generator.randrange(len(content))])
        other = generator.choice([name for name in shards if name != shard])
        yield _bytes("copy of another", shard, (folder / other).read_bytes(), other)
        first, *_ = sorted(load_file(folder / other))
        second = load_file(folder / other)[first]
        both = lambda folder, shard=shard, first=first, second=second: save_file(  # noqa: E731
            load_file(folder / shard) | {first: second}, folder / shard
        )
        yield Mutation("has another's tensor", shard, both, (first,))
        yield Mutation("lost a tensor", shard, lambda folder, shard=shard: _lose(folder / shard), tuple(load_file(folder / shard)))
    for name in generator.sample(sorted(weight_map), 4):
        other = generator.choice([shard for shard in shards if shard != weight_map[name]])
        for kind, change in {
            "dropped": {name: ...},
            "renamed": {name: ..., name + "_": weight_map[name]},
            "in another shard": {name: other},
            "in no shard that is there": {name: "model-99999-of-99999.safetensors"},
            "outside the folder": {name: "../" + weight_map[name]},
            "in config.json": {name: CONFIG},
            "in a number": {name: 3},
            "in a list": {name: [weight_map[name]]},
            "null": {name: None},
            "beside a ghost": {"ghost.weight": weight_map[name]},
        }.items():
            yield _index(kind, name, weight_map, change)
    for kind, value in {"missing": ..., "null": None, "a list": list(weight_map.items()), "text": "all", "empty": {}}.items():
        yield Mutation(f"weight_map {kind}", INDEX, lambda folder, value=value: _write_index(folder, value), ("weight_map",))
    text = (folder / INDEX).read_bytes()
    for kind, damaged in {"cut": text[: len(text) // 2], "empty": b"", "a list": b"[]", "UTF-16": text.decode().encode("utf-16")}.items():
        yield _bytes(kind, INDEX, damaged)
    yield Mutation("missing", INDEX, lambda folder: (folder / INDEX).unlink(), (INDEX,))
    yield Mutation(
        "beside a single file", INDEX, lambda folder: (folder / WEIGHTS).write_bytes((folder / shards[0]).read_bytes()), (INDEX,)
    )


def _lose(path: Path) -> None:
    held = load_file(path)
    del held[sorted(held)[0]]
    save_file(held, path)


def _index(kind: str, name: str, weight_map: dict[str, str], change: dict[str, Any]) -> Mutation:
    changed = {key: value for key, value in (weight_map | change).items() if value is not ...}
    return Mutation(kind, name, lambda folder: _write_index(folder, changed), (name, "ghost.weight"))


def _write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({} if weight_map is ... else {"weight_map": weight_map}), encoding="utf-8")
