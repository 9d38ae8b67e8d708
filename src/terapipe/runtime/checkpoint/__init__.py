"""Checkpoints: what is saved and left out, how it is written in the background, checked and read again.

    frozen.py    which weights need not be saved, as the model's files have them
    state.py     Checkpoint: a rank's tensors by their names in the whole model; save and load. Begin here.
    writer.py    copies them to the host, writes them in a thread, renames the folder when all of it is there
    manifest.py  sizes and checksums of the files
    reader.py    reads the index, which is a pickle, without running it

These names are for other rooms; ``Pipeline.save`` and ``Pipeline.load`` are for users.
"""

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
