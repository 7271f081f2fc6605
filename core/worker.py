"""``python -m nvdd.worker``: one rank of `nvdd.runtime.local_ranks.LocalRanks`; not started by hand."""

from __future__ import annotations

from nvdd.runtime.worker import main

if __name__ == "__main__":
    main()
