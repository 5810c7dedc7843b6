"""What figures come from. From the repository's root: ``python -m benchmarks.speed.step --help``."""

import sys
from pathlib import Path

# Models, data and the training loop of the scripts are measured too. A script that is launched has its folder on the
# path and imports its parts by bare names (``loop``, ``codebert``, ``mnli``); so they are found here as well.
_SCRIPTS = str(Path(__file__).resolve().parents[1] / "scripts")
if _SCRIPTS not in sys.path:
    sys.path.append(_SCRIPTS)
