"""`python -m gerl.vote [experiment=NAME] [key=value ...]`."""

from gerl.commandline import signals
from gerl.commandline.command import start

signals.exit_with(start("gerl.vote.command"))
