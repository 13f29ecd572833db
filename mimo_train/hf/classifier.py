"""A model with a value head as `transformers` has it: a class for sequence classification with one label."""

from typing import Any

from data.text.tokens import Tokenizer
from mimo_train.config.errors import UserError

ENDS = "ForSequenceClassification"
"""Ends the names of these classes."""


def classifier_config(model_type: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the keys of config.json of a model with a value head. `model_type` is "" for a model of several parts.
    Raises UserError if `transformers` has no class for it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

    if model_type not in CLASSES:
        raise UserError(
            f"train.task: transformers has no class for sequence classification of {model_type or 'several parts'}, so "
            "this reward model cannot be exported. Use its checkpoint"
        )
    # The class takes the last token that is not padding, so a token that ends answers cannot be padding.
    pads = tokenizer.pad_id not in tokenizer.template.stop_ids
    labels: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return labels | {"architectures": [CLASSES[model_type]], "pad_token_id": tokenizer.pad_id if pads else None}
