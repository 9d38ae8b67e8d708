"""Published measurements as data files, one table each with its source, and their simulation. No torch here.

- ``tables/*.toml``: the numbers, with what was run to get them.
- ``simulation.py``: from what was run to our number.
- ``programs.py``: what published programs do otherwise than ours, as costs and memory models.
- ``table.py``: both beside each other, with mean and worst error.
- ``studies.py``: what the TeraPipe paper leaves open.
"""
