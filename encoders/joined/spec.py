"""Two encoders of the same images, and the arithmetic derived from them."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from encoders.base import EncoderSpec, ImageTransform
from encoders.key_rules import FixedKeys
from encoders.native.vit.patch_spec import PatchSpec

PARTS = ("first", "second")
"""Keys of the encoders that are joined."""


@dataclass
class JoinedSpec(FixedKeys, EncoderSpec):
    """Two vision encoders that read the same image on the same ranks; the features of each patch are concatenated, the
    first encoder's first (Tong et al. 2024, arXiv 2401.06209, section 4; Karamcheti et al. 2024, arXiv 2402.07865).
    Both must resize images alike, to one size, and give equally many tokens."""

    name: str = "joined"
    """Free name, shown in tables."""
    family: str = "joined"
    """Family of encoders, whose code builds it."""
    first: Any = None
    """Keys of the first encoder, with its `family`: `vit`, `clip`, `siglip`, `dinov2` or `dinov3`."""
    second: Any = None
    """Keys of the second encoder."""
    first_pretrained: str = ""
    """Directory of the first encoder, for its keys and weights. See docs/pretrained.md."""
    second_pretrained: str = ""
    """Directory of the second encoder."""

    kind: ClassVar[str] = "image"
    medium: ClassVar[str] = "image"
    placeholder: ClassVar[str] = "<image>"
    token_unit_fields = ("encoder.first", "encoder.second")

    @property
    def parts(self) -> dict[str, Any]:
        """The encoders, by their keys."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def hidden_size(self) -> int:
        """Width of the joined features, and of messages between pipeline stages."""
        return sum(part.hidden_size for part in self.parts.values())

    @property
    def dropout(self) -> float:
        return max(part.dropout for part in self.parts.values())

    @property
    def transform(self) -> ImageTransform:
        """The preprocessing of an image. Pixels are rounded if those of either encoder are."""
        return replace(self.first.transform, rounded=any(part.transform.rounded for part in self.parts.values()))

    @property
    def leading_tokens(self) -> int:
        """Tokens of each image besides its patches, inside the encoder that has more of them."""
        return max(part.leading_tokens for part in self.parts.values())

    @property
    def kept_tokens(self) -> int:
        return self.first.kept_tokens

    def input_size(self, height: int, width: int, merge: int = 1) -> tuple[int, int]:
        return self.first.input_size(height, width, merge=merge)

    def inner_tokens(self, height: int, width: int, merge: int = 1) -> int:
        """Return the tokens of an image inside the encoder that has more of them."""
        return self.most_inner_tokens(merge)

    def num_tokens(self, height: int, width: int, merge: int = 1) -> int:
        return self.first.num_tokens(height, width, merge=merge)

    def joined(self, merge: int) -> int:
        return self.first.joined(merge)

    def most_tokens(self, merge: int = 1) -> int:
        return self.first.most_tokens(merge)

    def most_inner_tokens(self, merge: int = 1) -> int:
        return max(part.most_inner_tokens(merge) for part in self.parts.values())

    def patches_of(self, tokens: float, merge: int = 1) -> float:
        return self.first.patches_of(tokens, merge=merge)

    def describe_input(self, merge: int) -> tuple[str, str, str]:
        return self.first.describe_input(merge)

    def num_parameters(self) -> int:
        return sum(part.num_parameters() for part in self.parts.values())

    def faults(self) -> list[tuple[str, str]]:
        faults = []
        for name, part in self.parts.items():
            if not isinstance(part, PatchSpec):
                family = getattr(part, "family", None)
                have = "there is none" if part is None else f"family is {family!r}"
                text = f"must have the keys of a vision encoder of layers, such as family: clip; {have}"
                faults.append((f"{name}.family" if family else name, text))
            else:
                faults += [(f"{name}.{field}", text) for field, text in part.faults()]
                if part.sizes_vary:
                    text = f"is {part.resize}, and encoders can be joined where all images have one size: set it to "
                    faults.append((f"{name}.resize", f"{text}fixed or crop"))
        return faults

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        faults = [
            (f"encoder.{name}.{field.removeprefix('encoder.')}" if field.startswith("encoder.") else field, text)
            for name, part in self.parts.items()
            for field, text in part.joint_faults(merge)
        ]
        if faults:
            return faults
        first, second = self.parts.values()
        if first.image_size != second.image_size:
            text = f"is {second.image_size}, and that of the first is {first.image_size}: both read the same image"
            return [("encoder.second.image_size", f"{text}, make them equal")]
        if replace(first.transform, rounded=True) != replace(second.transform, rounded=True):
            how = [f"{spec.resize}, {spec.interpolation}, {spec.transform.shortest_edge}" for spec in (first, second)]
            text = f"resize, interpolation and shortest_edge are {how[1]}, and those of the first {how[0]}: both read"
            return [("encoder.second.resize", f"{text} the same image, make them equal")]
        counts = [part.most_tokens(merge) for part in (first, second)]
        if counts[0] != counts[1]:
            sizes = [f"image_size {spec.image_size}, patch_size {spec.patch_size}" for spec in (first, second)]
            text = f"an image makes {counts[1]} tokens ({sizes[1]}), and {counts[0]} of the first ({sizes[0]})"
            return [("encoder.second.patch_size", f"{text}: features are joined token by token, make them equal")]
        return []
