"""StructXLIP: see framework.py.

framework.py   its formulas, options, forward pass and terms
views.py       edge maps and filtered captions of a pair, made in the loader
edges.py       edge maps, by OpenCV
boxes.py       where local edge maps are taken
filters.py     a caption without its words of colour, material and texture
lexicons.py    those words
windows.py     runs of words of a caption, and their tokens
losses.py      InfoNCE over some of the pairs; windows of words against edge maps
"""

from __future__ import annotations

from pipeline.frameworks.structxlip.framework import StructXlip, StructXlipConfig

__all__ = ["StructXlip", "StructXlipConfig"]
