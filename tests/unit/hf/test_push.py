"""Uploads to the Hugging Face hub: who may write, what is public, and the card that names the source."""

import pytest

from mimo_train.config.errors import UserError
from mimo_train.hf.push import make_repository, name_sources, push
from tests.hub_server import TOKEN

COMMIT = "ab" * 20


def test_a_repository_is_made_once_and_gets_commits(hub, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for _ in range(2):
        make_repository("me/mine", private=True)
    assert hub.repositories["me/mine"].private
    (tmp_path / "parts" / "language").mkdir(parents=True)
    (tmp_path / "parts" / "language" / "config.json").write_text("{}")
    address = push(tmp_path / "parts", "me/mine")
    mine = hub.repositories["me/mine"]
    assert address == f"{hub.url}/me/mine/commit/{mine.refs['main']}"
    assert mine.commits[mine.refs["main"]]["language/config.json"] == b"{}"


def test_what_is_to_be_private_does_not_go_to_a_public_repository(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    make_repository("me/open", private=False)
    with pytest.raises(UserError, match="--private: me/open exists on the hub and is public. Make it private there"):
        make_repository("me/open", private=True)


def test_what_the_hub_does_not_accept_has_a_remedy(hub, tmp_path):
    with pytest.raises(UserError, match=r"--push-to-hub: http://.* did not accept me/mine \(.* Log in with an account"):
        make_repository("me/mine", private=False)
    with pytest.raises(UserError, match=f"The export is in {tmp_path}. Upload it with `hf upload me/mine {tmp_path}`"):
        push(tmp_path, "me/mine")


@pytest.mark.parametrize(
    ("source", "begins", "ends"),
    [
        (None, "---\nlibrary_name: transformers\nbase_model:\n- org/tiny\n---\n", f"at commit {COMMIT}.\n\n"),
        ("---\nlicense: mit\n---\n# Tiny\n", "---\nlicense: mit\nbase_model:\n- org/tiny\n---\n", "\n\n# Tiny\n"),
        ("# Tiny\n", "---\nbase_model:\n- org/tiny\n---\n", "whose description follows.\n\n# Tiny\n"),
        ("---\nbase_model: a/b\n---\n", "---\nbase_model:\n- org/tiny\n---\n", f"at commit {COMMIT}.\n\n"),
    ],
)
def test_the_card_names_the_source(source, begins, ends, tmp_path):
    if source is not None:
        (tmp_path / "README.md").write_text(source)
    name_sources(tmp_path, [tmp_path / "models--org--tiny" / "snapshots" / COMMIT, tmp_path])
    card = (tmp_path / "README.md").read_text()
    assert card.startswith(begins) and card.endswith(ends) and "Trained with mimo-train from org/tiny" in card


def test_an_export_of_no_model_of_the_hub_has_no_card(tmp_path):
    name_sources(tmp_path, [tmp_path])
    assert not any(tmp_path.iterdir())
