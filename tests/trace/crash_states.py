"""The states that a disk may be in after a power failure, by what a program had asked of the file system until then.

`Disk` notes what the stores ask of the file system while a trace is written below one folder, and keeps a model of it:
files of pages, folders of names. What was not yet waited for (``fsync``) may be on the disk or not, in any combination:

- of a page of 4 KiB, any content that it had since the last ``fsync`` of its file, or zeros where it had none;
- of a file, any size that it had since then;
- of a folder, any of the changes to its names since the last ``fsync`` of it: a new name, a name that was removed, and
  a rename, which is one change.

HDF5's library writes by itself. Its files are compared with the model after each call of it that the store makes, and
before each call of the system: what a page was in between, within one such call, is not known and not among the states.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

PAGE = 4096


class File:
    """A file: what is in it, and what the disk may have of it."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.pages: dict[int, list[bytes]] = {}
        """Of each page that was written since the last ``fsync``: what it was then, and what it was since."""
        self.sizes = [0]

    def write(self, offset: int, data: bytes) -> None:
        """Note that bytes were written."""
        if not data:
            return
        end = offset + len(data)
        touched = range(offset // PAGE, -(-end // PAGE))
        before = {number: self.page(number) for number in touched}
        self.data.extend(bytes(max(0, end - len(self.data))))
        self.data[offset:end] = data
        for number, old in before.items():
            versions = self.pages.setdefault(number, [old])
            if (new := self.page(number)) not in versions:
                versions.append(new)
        self._resized()

    def truncate(self, size: int) -> None:
        """Note that the file was cut off, or made longer."""
        for number in range(size // PAGE, -(-len(self.data) // PAGE)):
            self.pages.setdefault(number, [self.page(number)])
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))
        for number, versions in self.pages.items():
            if (new := self.page(number)) not in versions:
                versions.append(new)
        self._resized()

    def become(self, data: bytes) -> None:
        """Note that the file holds this now, whoever wrote it."""
        if len(data) < len(self.data):
            self.truncate(len(data))
        for begin in range(0, len(data), PAGE):
            piece = data[begin : begin + PAGE]
            if self.data[begin : begin + PAGE] != piece:
                self.write(begin, piece)

    def page(self, number: int) -> bytes:
        """What a page holds, with zeros behind the end of the file."""
        return bytes(self.data[number * PAGE : (number + 1) * PAGE]).ljust(PAGE, b"\0")

    def sync(self) -> None:
        """Note that the disk has all of it."""
        self.pages.clear()
        self.sizes = [len(self.data)]

    def choices(self) -> list[int]:
        """In how many ways each part of it that the disk may not have can be."""
        return [len(self.sizes), *(len(versions) for versions in self.pages.values())]

    def state(self, chosen: Sequence[int]) -> bytes:
        """What the disk has of it, by a choice for each of `choices`."""
        size = self.sizes[chosen[0]]
        data = bytearray(self.data[:size]).ljust(size, b"\0")
        for (number, versions), one in zip(self.pages.items(), chosen[1:], strict=True):
            begin = number * PAGE
            if begin < size:
                data[begin : begin + PAGE] = versions[one][: size - begin]
        return bytes(data)

    def _resized(self) -> None:
        if len(self.data) not in self.sizes:
            self.sizes.append(len(self.data))


class Folder:
    """A folder: the names in it, and those that the disk may have."""

    def __init__(self) -> None:
        self.names: dict[str, File | Folder] = {}
        self.synced: dict[str, File | Folder] = {}
        self.changes: list[dict[str, File | Folder | None]] = []

    def change(self, changes: dict[str, File | Folder | None]) -> None:
        """Note that names were given or taken away, all of them at once."""
        self.changes.append(changes)
        _apply(self.names, changes)

    def sync(self) -> None:
        """Note that the disk has all names."""
        self.synced = dict(self.names)
        self.changes.clear()

    def choices(self) -> list[int]:
        """Each change is there or not."""
        return [2] * len(self.changes)

    def state(self, chosen: Sequence[int]) -> dict[str, File | Folder]:
        """The names that the disk has, by a choice for each of `choices`."""
        names = dict(self.synced)
        for changes, one in zip(self.changes, chosen, strict=True):
            if one:
                _apply(names, changes)
        return names


def _apply(names: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, what in changes.items():
        if what is None:
            names.pop(name, None)
        else:
            names[name] = what


State = dict[str, bytes | None]
"""The files by their paths, and folders with None."""


class Disk:
    """What the file system below a folder, which is there already, was asked for, and what a disk may have of it.

    Parameters
    ----------
    folder : path
    before_sync : callable
        Called before each ``fsync``: what may be on the disk then is most, and comprises what may be before that.
    hdf5 : bool
        Whether HDF5 files are written directly in the folder.
    """

    def __init__(self, folder: Path, before_sync: Callable[[], None], *, hdf5: bool) -> None:
        self.folder = folder
        self.before_sync = before_sync
        self.root = Folder()
        self.most = 0
        """The largest number of choices that there was."""
        self._of_hdf5 = hdf5
        self._opened: dict[int, tuple[File | Folder, int]] = {}
        self._elsewhere = False

    # -- the calls -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note what this process asks for in the meantime."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "close", "write", "pwrite", "pwritev", "fsync", "ftruncate", "truncate"):
                patch.setattr(os, name, self._wrapped(getattr(os, name), getattr(self, f"_{name}")))
            for name in ("replace", "rename", "link", "unlink", "remove", "mkdir", "rmdir"):
                noted = {"rename": "replace", "remove": "unlink", "rmdir": "unlink"}.get(name, name)
                patch.setattr(os, name, self._wrapped(getattr(os, name), getattr(self, f"_{noted}")))
            yield
            self._look()

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Note nothing in the meantime: what is asked for is of another folder."""
        self._elsewhere = True
        try:
            yield
        finally:
            self._elsewhere = False

    def _wrapped(self, original: Callable[..., Any], noted: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._elsewhere:
                return original(*args, **kwargs)
            self._look()
            if original.__name__ == "fsync" and self._behind(args[0]) is not None:
                self.before_sync()
            there = original.__name__ == "open" and os.path.lexists(args[0])
            found = original(*args, **kwargs)
            noted(found, there, *args)
            return found

        return call

    def _look(self) -> None:
        """Compare the HDF5 files with the model of them."""
        if not self._of_hdf5:
            return
        for entry in os.scandir(self.folder):
            if ".h5" in entry.name and entry.is_file():
                if entry.name not in self.root.names:
                    self.root.change({entry.name: File()})
                file = self.root.names[entry.name]
                assert isinstance(file, File)
                file.become(Path(entry.path).read_bytes())

    def _at(self, path: Any) -> tuple[Folder, str] | None:
        """The folder that a path is in, and its name there; None outside of what is looked at."""
        parts = Path(os.path.relpath(os.path.abspath(os.fspath(path)), self.folder)).parts
        if not parts or parts[0] == "..":
            return None
        where: Any = self.root
        for part in parts[:-1]:
            where = where.names[part]
        return where, parts[-1]

    def _open(self, found: int, there: bool, path: Any, flags: int, *rest: Any) -> None:
        if os.path.abspath(os.fspath(path)) == str(self.folder):
            self._opened[found] = (self.root, 0)
            return
        at = None if isinstance(path, int) or str(path).startswith("/proc") else self._at(path)
        if at is None:
            return
        folder, name = at
        if not there and flags & os.O_CREAT:
            folder.change({name: File()})
        what = folder.names[name]
        if flags & os.O_TRUNC and isinstance(what, File) and what.data:
            what.truncate(0)
        self._opened[found] = (what, 0)

    def _close(self, _: None, __: bool, file: int) -> None:
        self._opened.pop(file, None)

    def _write(self, found: int, _: bool, file: int, data: Any) -> None:
        if file in self._opened:
            what, place = self._opened[file]
            assert isinstance(what, File)
            what.write(place, bytes(data)[:found])
            self._opened[file] = (what, place + found)

    def _pwrite(self, found: int, _: bool, file: int, data: Any, offset: int) -> None:
        if file in self._opened:
            what, _place = self._opened[file]
            assert isinstance(what, File)
            what.write(offset, bytes(data)[:found])

    def _pwritev(self, found: int, there: bool, file: int, parts: Sequence[Any], offset: int) -> None:
        self._pwrite(found, there, file, b"".join(map(bytes, parts)), offset)

    def _ftruncate(self, _: None, __: bool, file: int, size: int) -> None:
        if file in self._opened:
            what, _place = self._opened[file]
            assert isinstance(what, File)
            what.truncate(size)

    def _truncate(self, *_: Any) -> None:
        raise NotImplementedError("no store calls os.truncate, so this disk does not know it")

    def _fsync(self, _: None, __: bool, file: int) -> None:
        what = self._behind(file)
        if what is not None:
            what.sync()

    def _behind(self, file: int) -> File | Folder | None:
        """What an open file is; HDF5's library opens its own."""
        if file in self._opened:
            return self._opened[file][0]
        at = self._at(os.readlink(f"/proc/self/fd/{file}"))
        return None if at is None else at[0].names.get(at[1])

    def _replace(self, _: None, __: bool, source: Any, target: Any) -> None:
        folder, name = self._at(source) or (None, "")
        other, new = self._at(target) or (None, "")
        if folder is None:
            return
        assert folder is other, "a rename within one folder is one change"
        folder.change({name: None, new: folder.names[name]})

    def _link(self, _: None, __: bool, source: Any, target: Any) -> None:
        folder, name = self._at(source) or (None, "")
        other, new = self._at(target) or (None, "")
        if folder is not None and other is not None:
            other.change({new: folder.names[name]})

    def _unlink(self, _: None, __: bool, path: Any) -> None:
        at = self._at(path)
        if at is not None:
            at[0].change({at[1]: None})

    def _mkdir(self, _: None, __: bool, path: Any, *rest: Any) -> None:
        at = self._at(path)
        if at is not None:
            at[0].change({at[1]: Folder()})

    # -- the states ----------------------------------------------------------------------------------------------------

    def _all(self) -> list[File | Folder]:
        """Whatever may be on the disk, by any name that it had."""
        found: dict[int, File | Folder] = {}
        waiting: list[File | Folder] = [self.root]
        while waiting:
            one = waiting.pop()
            if id(one) in found:
                continue
            found[id(one)] = one
            if isinstance(one, Folder):
                waiting += [*one.synced.values(), *one.names.values()]
                waiting += [what for changes in one.changes for what in changes.values() if what is not None]
        return list(found.values())

    def states(self, limit: int, seed: int) -> Iterator[State]:
        """The states that the disk may be in now; all of them, or so many, of which most are random."""
        items = self._all()
        sizes = [one.choices() for one in items]
        flat = [count for one in sizes for count in one]
        self.most = max(self.most, math.prod(flat))
        bounds = list(itertools.accumulate(map(len, sizes), initial=0))
        for chosen in _chosen(flat, limit, random.Random(seed)):
            parts = {
                id(one): one.state(chosen[begin:end])
                for one, begin, end in zip(items, bounds, bounds[1:], strict=False)
            }
            yield dict(_tree(self.root, parts, ""))


def _tree(folder: Folder, parts: dict[int, Any], prefix: str) -> Iterator[tuple[str, bytes | None]]:
    for name, one in parts[id(folder)].items():
        if isinstance(one, Folder):
            yield prefix + name, None
            yield from _tree(one, parts, f"{prefix}{name}/")
        else:
            yield prefix + name, parts[id(one)]


def _chosen(counts: list[int], limit: int, rng: random.Random) -> Iterator[Sequence[int]]:
    """All choices from so many each, if they are not more than `limit`; else those near the ends, and random ones."""
    free = [place for place, count in enumerate(counts) if count > 1]
    if math.prod(counts[place] for place in free) <= limit:
        chosen = [0] * len(counts)
        for some in itertools.product(*(range(counts[place]) for place in free)):
            for place, one in zip(free, some, strict=True):
                chosen[place] = one
            yield tuple(chosen)
        return
    newest = [count - 1 for count in counts]
    near = [[0] * len(counts), newest]
    for place in free:
        for base in ([0] * len(counts), newest):
            near += [[*base[:place], one, *base[place + 1 :]] for one in range(counts[place])]
    rng.shuffle(near)
    for done, one in enumerate(near):
        if done == limit // 2:
            break
        yield one
    for _ in range(limit - min(len(near), limit // 2)):
        likely = rng.random()
        # most of what a disk has is of one time, often
        yield [count - 1 if rng.random() < likely else rng.randrange(count) if count > 1 else 0 for count in counts]


class Stage:
    """A folder that is made to be one state after the other, by what differs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._state: State = {}

    def show(self, state: State) -> None:
        """Let the folder hold a state."""
        for path in sorted(self._state, reverse=True):
            if path not in state or (state[path] is None) != (self._state[path] is None):
                place = self.folder / path
                if self._state[path] is None:
                    shutil.rmtree(place, ignore_errors=True)
                else:
                    place.unlink(missing_ok=True)
        for path in sorted(state):
            data = state[path]
            if data is None:
                (self.folder / path).mkdir(exist_ok=True)
            elif self._state.get(path, None) != data or not (self.folder / path).exists():
                (self.folder / path).write_bytes(data)
        self._state = state
