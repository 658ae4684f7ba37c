"""How each kind of model keeps its bytes."""

from shardsnap.layout.discover import LayoutCache, Select, assert_safe, layout_of, prepare_for_write
from shardsnap.layout.forward_guard import inside_backward, inside_forward
from shardsnap.layout.layout import Entry, Layout, Region
from shardsnap.layout.names import clean_name

__all__ = [
    "Entry",
    "Layout",
    "LayoutCache",
    "Region",
    "Select",
    "assert_safe",
    "clean_name",
    "inside_backward",
    "inside_forward",
    "layout_of",
    "prepare_for_write",
]
