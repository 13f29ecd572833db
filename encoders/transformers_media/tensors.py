"""The tensors of a model of `transformers`: their names and rows in memory and in directories."""

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from math import prod
from typing import cast

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from encoders.errors import EncoderError
from encoders.transformers_media.directory import (
    float32_names,
    hf_config,
    is_of_others,
    output_of,
    saved_buffers,
    skeleton,
    without_language,
)
from encoders.weight_map import Rows, Rule


class Tensors:
    """The names of a model's tensors, in memory and in directories.

    Attributes:
        shapes: shape of each trained parameter, by its name in memory.
        num_parameters: those of all `shapes` together.
        float32: names of those that stay in float32 in half precision.
        others: names of parameters and buffers that are not trained, and that an export copies.
    """

    shapes: dict[str, tuple[int, ...]]
    others: Collection[str] = ()

    @property
    def num_parameters(self) -> int:
        return sum(map(prod, self.shapes.values()))

    def __init__(self, model: PreTrainedModel):
        self._prefix, self._state, self._config = model.base_model_prefix, model.state_dict(), model.config
        self.float32 = float32_names(model, torch.bfloat16)
        self._optional = "|".join((*model.all_tied_weights_keys, *(model._keys_to_ignore_on_load_missing or ())))
        conversions = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]

    def stored_names(self, files: Iterable[str]) -> dict[str, str]:
        """Return {name in memory: name in the directory} of tensors that a directory with the names `files` stores as
        they are in memory."""
        stored = {}
        for file in files:
            name, converter = self._renamed(file)
            if converter is None and name in self._state:
                stored[name] = file
        return stored

    def unlike(self, files: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return what a directory with tensors of these shapes lacks: missing tensors, and those with other shapes. Of
        tensors that transformers joins as it reads them only names are compared, and none if it splits any."""
        missing, wrong = set(self._state), []
        for file, shape in files.items():
            name, pattern = self._renamed(file)
            if name not in self._state and file in self._state:
                name, pattern = file, None  # saved as it is in memory
            if any(pattern in entry.source_patterns and len(entry.target_patterns) > 1 for entry in self._converters):
                return []
            missing.discard(name)
            if pattern is None and name in self._state and tuple(self._state[name].shape) != shape:
                wrong.append(f"{file} is {shape}, and {tuple(self._state[name].shape)} here")
        required = (name for name in sorted(missing) if not (self._optional and re.search(self._optional, name)))
        return [*(f"{name} is missing" for name in required), *wrong]

    def _renamed(self, file: str) -> tuple[str, str | None]:
        return cast(
            tuple[str, str | None],
            rename_source_key(file, self._renamings, self._converters, self._prefix, self._state),
        )

    def rules(self, files: Mapping[str, tuple[int, ...]]) -> list[Rule]:
        """Return the rules of the parameters `shapes` that a directory with tensors of these shapes has."""
        rules: list[Rule] = []
        converted: dict[str, list[tuple[str, str]]] = {}
        for file in files:
            name, conversion = self._renamed(file)
            if name in self.shapes and conversion is None:
                rules.append(self._rule(name, [Rows(file, self.shapes[name][0])]))
            elif name in self.shapes and conversion is not None:
                converted.setdefault(name, []).append((file, conversion))
        for name, sources in converted.items():
            rules += self._converted(name, sources, files)
        return rules

    def _converted(
        self, name: str, sources: Sequence[tuple[str, str]], files: Mapping[str, tuple[int, ...]]
    ) -> Iterator[Rule]:
        """Yield the rules of tensors that transformers converts: it converts row numbers in their place. None for
        conversions of columns."""
        converter = copy.deepcopy(next(entry for entry in self._converters if sources[0][1] in entry.source_patterns))
        origins: list[tuple[str, int]] = []
        for file, pattern in sources:
            numbers = torch.arange(len(origins), len(origins) + files[file][0])
            origins += [(file, row) for row in range(len(numbers))]
            columns = [1] * (len(files[file]) - 1)
            converter.add_tensor(name, file, pattern, numbers.view(-1, *columns).expand(files[file]))
        for target, value in converter.convert(name, config=self._config).items():
            numbers = value[0] if isinstance(value, list) else value
            shape = tuple(numbers.shape)
            if numbers.dim() == 3 and bool((numbers != numbers[:, :1]).any()):
                numbers = numbers.flatten(0, 1)  # matrices of experts, whose rows are numbered consecutively
            columns_of_rows = numbers.reshape(len(numbers), -1)
            first = columns_of_rows[:, :1]
            if shape == self.shapes.get(target) and bool((columns_of_rows == first).all()):
                numbered = enumerate(first.flatten().tolist())
                runs = groupby(numbered, lambda pair: (origins[pair[1]][0], pair[1] - pair[0]))
                rows = [(file, [origins[number][1] for _, number in run]) for (file, _), run in runs]
                yield self._rule(target, [Rows(file, len(run), run[0], files[file][1:]) for file, run in rows])

    def _rule(self, name: str, rows: Sequence[Rows]) -> Rule:
        return Rule(name, tuple(rows), fp32=name in self.float32)


class Structure(Tensors):
    """A model of several parts without its weights.

    Attributes:
        shapes: those of the media half.
        tied: True if the output layer is the embedding.
    """

    def __init__(self, config: PretrainedConfig):
        """Build the model on the meta device."""
        model = skeleton(config)
        super().__init__(model)
        names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
        language, head = model.get_decoder(), output_of(model)
        self._class = type(model).__name__
        self._table = f"{names[id(language)]}.embed_tokens.weight"
        self._head = f"{names.get(id(head), 'lm_head')}.weight"
        self.tied = head is None or head.weight is language.get_input_embeddings().weight
        self._config = config
        media = without_language(model)
        self.shapes = {name: tuple(value.shape) for name, value in media.named_parameters()}
        self._buffers = saved_buffers(media)

    def of_kind(self, kind: str) -> "Structure":
        """Return it with the shapes of the media half for a kind of media alone."""
        part = copy.copy(self)
        others = {name for name in self.shapes if is_of_others(self._config, name, kind)}
        part.others = others | self._buffers
        part.shapes = {name: shape for name, shape in self.shapes.items() if name not in others}
        return part

    def is_media(self, file: str) -> bool:
        """True if a tensor of the directory belongs to the media half."""
        name = self._renamed(file)[0]
        return name in {*self.shapes, *self._buffers} or name.endswith(".num_batches_tracked")

    def language_names(self, files: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Return the prefixes (of the language model alone, in a directory with the names `files`) of its layers, its
        other tensors and the output layer. Raise EncoderError if the directory lacks it."""
        stored = self.stored_names(files)
        if self._table not in stored:
            raise EncoderError(f"it has no tensor for {self._table} of {self._class}")
        table, head = stored[self._table], stored.get(self._head, "lm_head.weight")
        base = self._table.removesuffix("embed_tokens.weight")
        first = f"{base}layers.0."
        endings = ((file, name[len(first) :]) for name, file in stored.items() if name.startswith(first))
        prefix = table.removesuffix("embed_tokens.weight")
        layers = next((file.removesuffix(f"0.{end}") for file, end in endings if file.endswith(f".0.{end}")), None)
        renamed = (
            (f"model.{name.removeprefix(base)}", file)
            for name, file in stored.items()
            if name.startswith(base) and not file.endswith(name.rpartition(".layers.")[2].partition(".")[2])
        )
        return (
            *renamed,
            ("model.layers.", layers or f"{prefix}layers."),
            ("model.", prefix),
            ("lm_head.", head.removesuffix("weight")),
        )


@cache
def structure_of(path: str) -> Structure:
    """Return the structure of a directory's model. Raise EncoderError if transformers cannot build it."""
    return Structure(hf_config(path))
