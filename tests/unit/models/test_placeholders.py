"""Placeholders that the embedding has no row for."""

from types import SimpleNamespace

import torch

from mimo_train.models.mimo import PlacedMimoModel


def test_ids_behind_the_table_are_never_looked_up():
    table = SimpleNamespace(num_embeddings=8)
    looked_up = []

    def embedding(input_ids, position_ids):
        looked_up.append(input_ids)

    embedding.word_embeddings = table
    model = SimpleNamespace(language_model=SimpleNamespace(embedding=embedding))
    ids = torch.tensor([[3, 8, 8, 7, 9, 5]])
    PlacedMimoModel.get_text_embeddings(model, ids, ids, {"images": 8, "audio": 9, "details": 5})
    assert looked_up[0].tolist() == [[3, 0, 0, 7, 0, 5]] and ids.tolist() == [[3, 8, 8, 7, 9, 5]]
