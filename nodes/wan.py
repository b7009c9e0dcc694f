"""The nodes of the Wan family: those of text to video, and those of image to video."""

from . import wan21, wan22_i2v

NODES = (*wan21.NODES, *wan22_i2v.NODES)
