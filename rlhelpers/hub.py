"""Names on the Hugging Face hub.  The workbook's own model is one commit of its repository, whose hash is a checksum of
its files: whatever is uploaded later is not loaded."""

REVISIONS = {"allenai/OLMo-2-0425-1B": "a1847dff35000b4271fa70afc5db10fd29fedbdf"}


def revision(model: str) -> str:
    """What a name stands for: its commit in REVISIONS, and else what is newest."""
    return REVISIONS.get(model, "main")


def download_command(model: str) -> str:
    """What a shell is told to fetch it beforehand."""
    return f"hf download {model} --revision {revision(model)}"
