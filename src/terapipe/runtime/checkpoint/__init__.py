"""Checkpoints: what is saved and left out, how it is written in the background, checked and read again."""

from terapipe.runtime.checkpoint.manifest import MANIFEST, Sum, damage, is_whole, read_manifest, write_manifest
from terapipe.runtime.checkpoint.reader import INDEX, NOTES, Reader, TensorsOnly, read_notes
from terapipe.runtime.checkpoint.state import verify_files, without_dist_warning
from terapipe.runtime.checkpoint.writer import Saving

__all__ = [
    "INDEX",
    "MANIFEST",
    "NOTES",
    "Reader",
    "Saving",
    "Sum",
    "TensorsOnly",
    "damage",
    "is_whole",
    "read_manifest",
    "read_notes",
    "verify_files",
    "without_dist_warning",
    "write_manifest",
]
