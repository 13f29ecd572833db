"""Upload an exported directory to the Hugging Face hub, and name the models there that it comes from."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from data.text_format import shown
from mimo_train.config.errors import UserError
from mimo_train.config.pretrained.hub import named_in_hub

CARD = "README.md"
OPTION = "--push-to-hub"


def name_sources(to: Path, folders: Collection[Path]) -> None:
    """Write the hub's models that an export comes from into its README.md, which may be that of one of them."""
    sources = [name for name in map(named_in_hub, folders) if name[1]]
    if not sources:
        return
    from huggingface_hub import RepoCard

    file = to / CARD
    text = file.read_text(encoding="utf-8") if file.exists() else "---\nlibrary_name: transformers\n---\n"
    card = RepoCard(text, ignore_metadata_errors=True)
    card.data["base_model"] = [name for name, _ in sources]
    commits = " and ".join(f"{name} at commit {commit}" for name, commit in sources)
    about = ", whose description follows" if card.text.strip() else ""
    card.text = f"\n> Trained with mimo-train from {commits}{about}.\n\n{card.text.lstrip()}"
    card.save(file)


def make_repository(name: str, *, private: bool) -> None:
    """Make a repository for a model, or use the existing one.

    Raises:
        UserError: the hub does not allow it, or it exists, is public, and `private` is True.
    """
    from huggingface_hub import HfApi

    with _explained(name, "Log in with an account that may write there (`hf auth login`, or HF_TOKEN)"):
        # None: as the organisation's default is.
        HfApi().create_repo(name, private=private or None, exist_ok=True)
        is_public = private and not HfApi().model_info(name).private
    if is_public:
        raise UserError(f"--private: {name} exists on the hub and is public. Make it private there, or choose another")


def push(folder: Path, name: str) -> str:
    """Upload a folder as one commit, and return the address of the commit. Raises UserError if it fails."""
    from huggingface_hub import HfApi

    with _explained(name, f"The export is in {folder}. Upload it with `hf upload {name} {folder}`"):
        return HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="Export of mimo-train").commit_url


@contextmanager
def _explained(name: str, remedy: str) -> Iterator[None]:
    """Turn any error of huggingface_hub, and of the libraries below it, into a user error with a remedy."""
    from huggingface_hub import constants

    try:
        yield
    except Exception as error:
        cause = shown(str(error).strip().partition("\n")[0])
        raise UserError(
            f"{OPTION}: {constants.ENDPOINT} did not accept {name} ({type(error).__name__}: {cause}). {remedy}"
        ) from error
