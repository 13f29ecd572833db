"""Checkpoints on a web server, which lists nothing, and what messages call the place of checkpoints."""

import pytest
import torch

from data.storage.url import Url
from mimo_train.checkpoint import folders, inspection
from mimo_train.checkpoint.format.index import WEIGHT, Key
from mimo_train.checkpoint.format.read import Reader
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.format.write import Part, complete, write_rank
from mimo_train.config.errors import UserError
from tests.http_server import serving

KEY = Key("language", "weight", WEIGHT)


def test_a_checkpoint_is_read_from_a_web_server(tmp_path):
    final = tmp_path / "step_00000004"
    final.mkdir()
    write_rank(final, 0, [Part(KEY, Span.of_whole((8,)), torch.arange(8.0), True)])
    complete(final, 1, {folders.RECORD: folders.record_text({"step": 4, "layout": {}})})
    contents = {f"{final.name}/{path.name}": path.read_bytes() for path in final.iterdir()}
    with serving(contents) as server:
        url = Url.parse(server.url("right", final.name))
        assert folders.in_folder(url, "checkpoint.weights") == url
        assert Reader(url).whole(KEY).tolist() == [*range(8)]
        (found,) = inspection.look(url)
        assert (found.damage, found.kind, found.step) == ("", inspection.PERSISTENT, 4)
        assert (found.files, found.nbytes) == (1, len(contents[f"{final.name}/rank_00000.safetensors"]))
        assert found.saved_at
        assert inspection.verify(url, 1).damage == []
        with pytest.raises(UserError, match=r"^KEY: no complete checkpoint at http.*: give the URL of a"):
            folders.in_folder(url.parent, "KEY")
        with pytest.raises(UserError, match="^PATH: no checkpoint in http"):
            inspection.look(url.parent)

        del server.contents[f"{final.name}/rank_00000.safetensors"]
        assert inspection.verify(url, 1).damage == ["rank_00000.safetensors is missing"]
        (found,) = inspection.look(url)
        assert (found.damage, found.files) == ("rank_00000.safetensors is missing", 1)
