"""The published traces and results, which are of others and not in this repository.

They are in `../shared/traces`, or in the folder that BAECHI_TRACES names; without it, tests marked
`published` are skipped.
"""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("BAECHI_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
published = pytest.mark.skipif(not FOLDER.is_dir(), reason="the published traces are not here")
