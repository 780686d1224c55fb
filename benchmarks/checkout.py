"""Import this before gerl: it is then that of the checkout which this file lies in, installed or not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
