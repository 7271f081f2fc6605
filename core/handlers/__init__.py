"""What each operation means for a ShardTensor: one module a family of operations.

To find where an operation is handled, run ``nvdd handlers`` or search these modules for its name.
"""

from importlib import import_module

# Handlers are tried in this order: what is declared before what is known of torch, stand-ins and indices before what they index, rows before their features.
FAMILIES = (
    "custom", "inspect", "anchor", "index", "distributed", "gather", "scatter", "system", "count", "derivative", "script",
    "elementwise", "features", "products",
)  # fmt: skip


def load() -> None:
    """Imports all families, which registers their handlers."""
    for family in FAMILIES:
        import_module(f"nvdd.handlers.{family}")
