"""Checksums of a checkpoint: one for each piece of each leaf, and one for each text beside them.

A piece is one chunk of a leaf: a range of bytes in one of the data files of OCDBT, TensorStore's database. Its index
and the small values in it have checksums of their own, which TensorStore checks; the pieces have none. So each process
reads back the pieces that it wrote, when the step is complete, and writes their CRC-32 to ``checksums/<process>.json``.
A step that lacks them, of an older version or of a program that was killed, is read without the check.
"""

import dataclasses
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from .._text import size_text

#: A folder as `etils.epath` gives it.
EPath = Any

FOLDER = "checksums"
#: The folder of the database, and texts that hold what the index does not.
ARRAYS = "arrays"
TEXTS = ("jaxzero/manifest.json", "arrays/_METADATA")
#: Bytes that are read at a time.
_BLOCK = 8 * 2**20
#: Threads that read pieces; CRC-32 runs without Python's lock.
_THREADS = 8
#: How many damaged pieces an error names.
_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Piece:
    """A range of bytes that holds one chunk of a leaf.

    Attributes:
      key: The name of the leaf, a slash, and the number of the chunk along each dimension.
      file: The data file, relative to the step.
      offset: Where the range begins.
      length: Bytes.
    """

    key: str
    file: str
    offset: int
    length: int

    @property
    def leaf(self) -> str:
        """The name of the leaf."""
        return self.key.rpartition("/")[0]


@dataclasses.dataclass(frozen=True)
class Checked:
    """What a check found.

    Attributes:
      problems: What is damaged, by leaf path and file.
      checked: Pieces that are as they were written.
      nbytes: Their bytes.
      unknown: Pieces that have no checksum.
    """

    problems: tuple[str, ...]
    checked: int
    nbytes: int
    unknown: int

    def __str__(self) -> str:
        done = f"{self.checked} pieces as written, {size_text(self.nbytes)}"
        if self.unknown and not self.checked:
            return "no checksums: an older version wrote it, or the program ended too early; its data is not checked"
        return done + (f"; {self.unknown} pieces without a checksum" if self.unknown else "")


# --- the pieces of a step -----------------------------------------------------------------------


def pieces(path: EPath) -> list[Piece]:
    """The pieces of a step, in the order of the index; small values are in the index itself."""
    if not (path / ARRAYS).exists():
        return []  # nothing but empty leaves
    import tensorstore as ts

    where = str(path / ARRAYS)
    base = ts.KvStore.open(f"{where}/" if "://" in where else {"driver": "file", "path": f"{where}/"}).result()
    return list(walk(lambda node=None: ts.ocdbt.dump(base, node).result()))


def walk(dump: Callable[..., Mapping[str, Any]]) -> Iterator[Piece]:
    """The values outside of the index, from the root of its newest version on."""
    versions = dump().get("versions") or []
    root = versions[-1]["root"].get("location") if versions else None
    if root is not None:
        yield from _below(dump, root, b"")


def _below(dump: Callable[..., Mapping[str, Any]], location: str, prefix: bytes) -> Iterator[Piece]:
    """Those below one node, whose keys lack a prefix that all of them share."""
    for entry in dump(location)["entries"]:
        key = prefix + entry["key"]
        if "location" in entry:
            yield from _below(dump, entry["location"], prefix + entry["subtree_common_prefix"])
        elif "indirect_value" in entry:
            _, folder, file, offset, length = _parts(entry["indirect_value"])
            yield Piece(key.decode(), f"{ARRAYS}/{folder}{file}", int(offset), int(length))


def _parts(value: str) -> tuple[str, str, str, str, str]:
    """Kind, folder, file, offset and length of ``value:ocdbt.process_0/:d/12ab:0:4096``."""
    kind, folder, rest = value.split(":", 2)
    file, offset, length = rest.rsplit(":", 2)
    return kind, folder, file.removeprefix(":"), offset, length


# --- writing ------------------------------------------------------------------------------------


def write(path: EPath) -> None:
    """Writes the checksums of what this process wrote, once the step is complete."""
    mine = [(i, piece) for i, piece in enumerate(pieces(path)) if _writer(i, piece) == jax.process_index()]
    found = {piece.key: [crc, piece.length] for (_, piece), crc in _crcs(path, mine)}
    texts = TEXTS if jax.process_index() == 0 else ()
    sums = {"pieces": found, "texts": {name: zlib.crc32(_text(path, name)) for name in texts}}
    folder = path / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{jax.process_index()}.unfinished"
    unfinished.write_text(json.dumps(sums))
    unfinished.rename(folder / f"{jax.process_index()}.json")


def _writer(number: int, piece: Piece) -> int:
    """The process that wrote a piece; Orbax names folders by it."""
    named = re.search(r"ocdbt\.process_(\d+)", piece.file)
    return (int(named[1]) if named else number) % jax.process_count()


def _crcs(path: EPath, numbered: Iterable[tuple[int, Piece]]) -> Iterator[tuple[tuple[int, Piece], int | str]]:
    """The CRC-32 of pieces, or what is wrong with their file."""
    numbered = list(numbered)
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from zip(numbered, pool.map(lambda x: _crc(path, x[1]), numbered), strict=True)


def _crc(path: EPath, piece: Piece) -> int | str:
    crc, left = 0, piece.length
    try:
        with (path / piece.file).open("rb") as file:
            file.seek(piece.offset)
            while left:
                block = file.read(min(left, _BLOCK))
                if not block:
                    return "the file is too short"
                crc, left = zlib.crc32(block, crc), left - len(block)
    except OSError as error:
        return error.strerror or str(error)
    return crc


def _text(path: EPath, name: str) -> bytes:
    return bytes((path / name).read_bytes()) if (path / name).exists() else b""


# --- checking -----------------------------------------------------------------------------------


def check(path: EPath, wanted: Callable[[str], bool] = lambda leaf: True) -> Checked:
    """Compares the wanted leaves of a step with their checksums; several processes share the pieces."""
    try:
        sums, texts = _read(path)
        mine = slice(jax.process_index(), None, jax.process_count())
        here = [(i, p) for i, p in list(enumerate(pieces(path)))[mine] if wanted(p.leaf)]
    except (OSError, ValueError) as error:
        return Checked((f"its index or its checksums are damaged ({' '.join(str(error).split())[:300]})",), 0, 0, 0)
    changed = [name for name, crc in texts.items() if crc != zlib.crc32(_text(path, name))]
    problems = [f"file {path / name} is not as it was written" for name in changed]
    known = [(i, p) for i, p in here if p.key in sums]
    intact = []
    damaged: dict[tuple[str, str], str] = {}  # the first piece of each leaf in each file
    for (_, p), crc in _crcs(path, known):
        if [crc, p.length] == sums[p.key]:
            intact.append(p)
        else:
            why = crc if isinstance(crc, str) else f"bytes {p.offset} to {p.offset + p.length} are not as written"
            damaged.setdefault((p.leaf, p.file), why)
    problems += [f"leaf {leaf!r} is damaged: file {path / file}: {why}" for (leaf, file), why in damaged.items()]
    return Checked(tuple(problems), len(intact), sum(p.length for p in intact), len(here) - len(known))


def _read(path: EPath) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The checksums of pieces and of texts that all processes wrote."""
    sums: dict[str, list[int]] = {}
    texts: dict[str, int] = {}
    for file in (path / FOLDER).glob("*.json") if (path / FOLDER).exists() else ():
        found = json.loads(file.read_text())
        if not isinstance(found, dict) or not all(isinstance(found.get(part), dict) for part in ("pieces", "texts")):
            raise ValueError(f"{file} has no checksums")
        sums |= found["pieces"]
        texts |= found["texts"]
    return sums, texts


def refusal(call: str, path: EPath, found: Checked, skip: str) -> str:
    """The error for a damaged step; empty for one that is whole."""
    if not found.problems:
        return ""
    more = f" (and {len(found.problems) - _NAMED} more)" if len(found.problems) > _NAMED else ""
    return (
        f"{call}: {path} is damaged: {'; '.join(found.problems[:_NAMED])}{more}. Expected its files as jaxzero.save "
        f"wrote them. Fix: another step{skip}."
    )
