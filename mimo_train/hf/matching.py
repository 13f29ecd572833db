"""Match directories' tensors with the parts of a model by names and rows; shared by `check` and training."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from data.text_format import listed, plural
from encoders.weight_map import Spelling, WeightMap, spelt, stored_stack
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.hf.parts import ENCODER, Part

SHOWN = 5
"""Most tensors named in a message."""


class Shaped(Protocol):
    """A tensor, or its entry in a header."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the dimensions."""


class MatchedPart:
    """A part of a model whose tensors are all in a directory.

    Attributes:
        tensors: all tensors of the directory by name.
        spelling: how the directory spells the names of the map.
        stored_names: name in the map -> name in the directory.
        copies: tensors of the directory that must equal another -> name of that.
        dropped: tensors of the directory that neither the model nor an export has.
        transposed: True if the directory has the matrices of stacks transposed.

    Raises:
        UserError: the directory lacks tensors, or has another number of rows.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Shaped], of: WeightMap, key: str):
        """Match the tensors.

        Args:
            key: config key of the part, for errors.
        """
        self.folder, self.tensors, self._key = folder, tensors, key
        self._counts = of.row_counts()
        self._written = of.prefixes[0]
        self.spelling = self._spelling(of)
        self.stored_names = {name: spelt(name, self.spelling) for name in self._counts}
        copies = {spelt(copy, self.spelling): self.stored_names[other] for copy, other in of.copies}
        self.copies = {copy: other for copy, other in copies.items() if copy in tensors}
        self.dropped = {spelt(name, self.spelling) for name in of.dropped}
        self._stacks = {self.stored_names[name]: stack for name, stack in of.stacks().items()}
        # A square matrix does not tell.
        self.transposed = of.transposed or any(
            name in tensors and tensors[name].shape == stored_stack(stack, transposed=True) != stack
            for name, stack in self._stacks.items()
        )
        self._carried = [*of.carried]
        if isinstance(self.spelling, str):
            self._carried += [spelt(pattern, self.spelling) for pattern in of.carried]
        self._require_tensors()

    @property
    def begins(self) -> tuple[str, ...]:
        """Return the prefixes in a directory of several parts that are unique to this part."""
        if self.spelling and isinstance(self.spelling, str):
            return (self.spelling,)
        return tuple({spelt(f"{name.partition('.')[0]}.", self.spelling): None for name in self._counts})

    @property
    def read_names(self) -> set[str]:
        """Return the names in the directory of tensors that become parameters."""
        return set(self.stored_names.values())

    def uses(self, name: str) -> bool:
        """True if a tensor of the directory belongs to this part: read, a copy, dropped, or carried along."""
        return (
            name in self.read_names
            or name in self.copies
            or name in self.dropped
            or any(fnmatchcase(name, pattern) for pattern in self._carried)
        )

    def written_name(self, name: str) -> str:
        """Return the export name of a carried tensor, in the spelling of the others."""
        spelling, written = self.spelling, self._written
        if not isinstance(spelling, str) or not isinstance(written, str):
            return name
        return written + name.removeprefix(spelling) if name.startswith(spelling) and self.uses(name) else name

    def _spelling(self, of: WeightMap) -> Spelling:
        first = next(iter(self._counts))
        for spelling in of.prefixes:
            if spelt(first, spelling) in self.tensors:
                return spelling
        tried = " or ".join(spelt(first, spelling) for spelling in of.prefixes)
        raise UserError(f"{self._key}: {self.folder} has no tensor {tried}; it has {listed(list(self.tensors), SHOWN)}")

    def _require_tensors(self) -> None:
        missing = [name for name in self.stored_names.values() if name not in self.tensors]
        shapes: dict[str, tuple[int, ...]] = {self.stored_names[name]: (rows,) for name, rows in self._counts.items()}
        shapes |= {copy: shapes[other] for copy, other in self.copies.items()}
        shapes |= {name: stored_stack(stack, self.transposed) for name, stack in self._stacks.items()}
        faults = [
            f"{name} has shape {self.tensors[name].shape} there, and "
            f"{plural(shape[0], 'row') if len(shape) == 1 else shape} here"
            for name, shape in shapes.items()
            if name in self.tensors and self.tensors[name].shape[: len(shape)] != shape
        ][:SHOWN]
        if missing:
            faults.insert(0, f"it lacks {listed(missing, SHOWN)}")
        if faults:
            raise UserError(f"{self._key}: {self.folder} does not fit the model: {'; '.join(faults)}")

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[self.stored_names[name]].shape


def require_no_others(matched: Sequence[tuple[Part, MatchedPart]]) -> None:
    """Require that a model uses all tensors of its directories, else it would not be the saved model.

    Args:
        matched: all parts that come from directories.

    Raises:
        UserError: a directory has tensors that no part uses.
    """
    for path in dict.fromkeys(part.folder for part, _ in matched):
        of_folder = [(part, names) for part, names in matched if part.folder == path]
        # A language model as it is has read its own.
        modules = {part.module for part, _ in of_folder}
        is_whole = all(part.is_whole for part, _ in of_folder) or (LANGUAGE in modules and len(modules) > 1)
        begins = ("",) if is_whole else tuple(name for part, names in of_folder for name in _begins(part, names))
        require_all_used([names for _, names in of_folder], of_folder[0][0].key, begins=begins)


def require_all_used(
    parts: Sequence[MatchedPart], key: str, carried: Iterable[str] = (), begins: tuple[str, ...] = ("",)
) -> None:
    """Require that the parts use all tensors of one directory.

    Args:
        parts: all parts of the directory.
        carried: shell patterns of tensors that no part reads.
        begins: prefixes of the tensors to check.

    Raises:
        UserError: the directory has tensors that no part uses.
    """
    carried = list(carried)
    unexpected = [
        name
        for name in parts[0].tensors
        if name.startswith(begins)
        and not any(part.uses(name) for part in parts)
        and not any(fnmatchcase(name, pattern) for pattern in carried)
    ]
    if unexpected:
        raise UserError(
            f"{key}: {parts[0].folder} has {listed(unexpected, SHOWN)}, for which the model has no place: it would not "
            "be the model that was saved"
        )


def _begins(part: Part, names: MatchedPart) -> tuple[str, ...]:
    if part.module == LANGUAGE:
        # It includes the output layer even if ours has none.
        return (*names.begins, spelt("lm_head.", names.spelling))
    if part.begins == ENCODER and "model." in names.begins:  # all parts are in it
        return tuple({".".join(name.split(".")[:2]) + ".": None for name in names.read_names})
    return names.begins if part.begins == ENCODER else ()
