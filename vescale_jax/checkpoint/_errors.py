"""DamagedError: a checkpoint whose files are not those that were written."""

from pathlib import Path


class DamagedError(ValueError):
    """A file of a checkpoint is missing, cut short, changed, or not of this checkpoint."""

    @classmethod
    def file(cls, path: Path, got: str, want: str) -> "DamagedError":
        """The error for one file: what is there, and what should be."""
        return cls(
            f"checkpoint: {path}: got {got}; want {want}; restore an older checkpoint, or copy this one "
            "again from where it is whole"
        )
