"""What each operation means for a ShardTensor: one module a family of operations.

To find where an operation is handled, run ``nvdd handlers`` or search these modules for its name. `load` imports
them in the order in which their handlers are tried.
"""


def load() -> None:
    """Imports all families, which registers their handlers."""
    from nvdd.handlers import (
        inspect,
        anchor,
        index,
        gather,
        scatter,
        system,
        count,
        script,
        elementwise,
        features,
        products,
    )  # noqa: F401, I001
