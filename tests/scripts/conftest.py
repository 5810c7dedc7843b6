"""Makes the modules of ``scripts/`` importable the way they import each other when a script is launched."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
