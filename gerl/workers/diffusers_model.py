"""Record and replay under the name that MM-GRPO's users import."""

from gerl.engine import *  # noqa: F403
